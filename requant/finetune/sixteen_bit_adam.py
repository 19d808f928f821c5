"""Adam whose moments are bfloat16 between steps: 4 bytes per weight instead of 8.

A moment moves by 5 or 10 % of its distance per step, which the 8 bits of bfloat16 resolve; a weight moves by less than
bfloat16 could resolve, so weights stay float32. The arithmetic of a step is torch's, in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch


class SixteenBitAdam:
    """An optimizer (0.9, 0.95) of parameter groups of one tensor each."""

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.tensors = [group["params"][0] for group in param_groups]
        self.each = [
            torch.optim.Adam([group], betas=(0.9, 0.95), fused=tensor.is_cuda or None)
            for group, tensor in zip(param_groups, self.tensors, strict=True)
        ]

    def step(self) -> None:
        for optimizer in self.each:
            _cast_moments(optimizer, torch.float32)
            optimizer.step()
            _cast_moments(optimizer, torch.bfloat16)

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none=True)


def _cast_moments(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(dtype)
