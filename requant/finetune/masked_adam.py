"""Adam with decay of the weights that a mask prunes, as AST trains (Huang et al. 2024, arXiv 2407.20584).

    d = lambda (1 - mask) w           m <- b1 m + (1 - b1) g
    v <- b2 v + (1 - b2) (g + d)^2    w <- w - lr (m + d) / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

The decay enters after the first moment, so it follows the mask at once; without decay this is Adam. We deviate in the unit:
lambda is `strength * rms(m) / rms(w)` of each tensor, so that one strength fits models whose gradients differ (AST's 6e-5 is
GPT-2's).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from requant.finetune.step import BETAS

EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class MaskedDecay:
    """`mask [n, k]`: True is not decayed. Both tensors may change between steps, in place."""

    mask: Tensor
    strength: Tensor  # a float32 scalar


class MaskedDecayAdam:
    """An optimizer of parameter groups of one tensor each, as `TrainingStep` makes them; a CUDA graph can capture it."""

    def __init__(self, param_groups: list[dict[str, Any]], decays: Mapping[Tensor, MaskedDecay]) -> None:
        self.param_groups = param_groups
        self.decays = decays
        self.steps = torch.zeros((), device=param_groups[0]["params"][0].device)
        self.state: dict[Tensor, dict[str, Tensor]] = {  # as torch's optimizers hold theirs
            tensor: {
                "step": self.steps,
                "exp_avg": torch.zeros_like(tensor, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(tensor, requires_grad=False),
            }
            for group in param_groups
            for tensor in group["params"]
        }

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        first_bias, second_bias = (1 - beta**self.steps for beta in BETAS)
        for group in self.param_groups:
            (tensor,) = group["params"]
            if tensor.grad is None:
                continue
            first, second = self.state[tensor]["exp_avg"], self.state[tensor]["exp_avg_sq"]
            first.lerp_(tensor.grad, 1 - BETAS[0])
            direction, squared = first, tensor.grad
            decay = self.decays.get(tensor)
            if decay is not None:
                unit = _rms(first) / _rms(tensor).clamp(min=EPSILON)
                pull = decay.strength * unit * torch.where(decay.mask, 0.0, tensor)
                direction, squared = first + pull, tensor.grad + pull
            second.mul_(BETAS[1]).addcmul_(squared, squared, value=1 - BETAS[1])
            tensor -= group["lr"] / first_bias * direction / ((second / second_bias).sqrt() + EPSILON)


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()
