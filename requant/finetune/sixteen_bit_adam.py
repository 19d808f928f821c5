"""Adam whose moments are bfloat16 between steps: 4 bytes per weight instead of 8.

A moment moves by 5 or 10 % of its distance per step, which the 8 bits of bfloat16 resolve; a weight moves by less than
bfloat16 could resolve, so weights stay float32. The arithmetic of a step is in float32: on a GPU a kernel's, which reads and
writes moments as they are, for all tensors of one size in one launch (`requant_kernels/training/adam.py`); elsewhere
torch's, between two casts.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from requant.finetune.step import BETAS
from requant.kernel_choice import usable_kernel

EPS = 1e-8
TOLERANCE = 1e-5  # of weights after two steps, relative to the distance that they went


class SixteenBitAdam:
    """An optimizer (0.9, 0.95) of parameter groups of one tensor each; steps are counted on the CPU."""

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.tensors = [group["params"][0] for group in param_groups]
        self.each = [torch.optim.Adam([group], betas=BETAS, eps=EPS) for group in param_groups]

    def step(self) -> None:
        of_one_launch: dict[tuple[torch.device, int], list[torch.optim.Optimizer]] = {}
        for optimizer, tensor in zip(self.each, self.tensors, strict=True):
            if tensor.grad is None:
                continue
            plain = tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous()
            if plain and _kernel(tensor.device) is not None:
                of_one_launch.setdefault((tensor.device, tensor.numel()), []).append(optimizer)
            else:
                _cast_moments(optimizer, torch.float32)
                optimizer.step()
                _cast_moments(optimizer, torch.bfloat16)
        for (device, _), optimizers in of_one_launch.items():
            kernel = _kernel(device)
            assert kernel is not None
            _step(kernel, optimizers)

    def zero_grad(self) -> None:
        for tensor in self.tensors:
            tensor.grad = None


def _cast_moments(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(dtype)


@torch.no_grad()
def _step(kernel: Callable[..., None], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Update the tensors of these, of one size, by the kernel, with the states that torch's Adam would have."""
    groups = [optimizer.param_groups[0] for optimizer in optimizers]
    tensors = [group["params"][0] for group in groups]
    states = [optimizer.state[tensor] for optimizer, tensor in zip(optimizers, tensors, strict=True)]
    for tensor, state in zip(tensors, states, strict=True):
        if not state:
            state["step"] = torch.zeros(())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(tensor, dtype=torch.bfloat16)
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    kernel(
        tensors,
        [tensor.grad.contiguous() for tensor in tensors],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        lrs=[group["lr"] for group in groups],
        steps=torch.stack(steps).int().tolist(),
        betas=BETAS,
        eps=EPS,
    )


@cache
def _kernel(device: torch.device) -> Callable[..., None] | None:
    """The kernel, if two of its steps agree with torch's on this device."""
    start = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(device)
    gradients = [start.roll(shift) for shift in (1, 2)]

    def load() -> Callable[..., None]:
        from requant_kernels.training.adam import adam_step

        return adam_step

    def agrees(kernel: Callable[..., None]) -> bool:
        own, torchs = start.clone(), start.clone().requires_grad_()
        optimizer = torch.optim.Adam([torchs], lr=0.01, betas=BETAS, eps=EPS)
        moments = [torch.zeros_like(start)], [torch.zeros_like(start)]
        for step, gradient in enumerate(gradients, start=1):
            torchs.grad = gradient.clone()
            optimizer.step()
            kernel([own], [gradient], *moments, lrs=[0.01], steps=[step], betas=BETAS, eps=EPS)
        went = (torchs - start).detach().abs().max()
        return bool((own - torchs).detach().abs().max() <= TOLERANCE * went)

    return usable_kernel("adam", device, load, agrees)
