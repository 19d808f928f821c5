"""Projections whose gradient is that of the identity (straight-through; Bengio et al. 2013, arXiv 1308.3432).

The weight that is trained keeps its gradient where the projection is zero, so a pruned weight can grow back.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class _PassGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, projected: Tensor) -> Tensor:
        return projected.view_as(projected)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def straight_through(weight: Float[Tensor, "..."], projected: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`projected`, with the gradient of `weight`, from which it was computed."""
    return _PassGradient.apply(weight, projected.detach())  # type: ignore[no-any-return]
