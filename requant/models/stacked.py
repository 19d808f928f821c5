"""`torch.stack` that copies nothing where the tensors lie one behind the other in memory, as parts of a stack do.

A layer's experts are multiplied by one `grouped_mm`, which takes the weights of all as one tensor, while everything else
deals with the weights of one expert.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor


def stacked(tensors: Sequence[Tensor]) -> Shaped[Tensor, "e ..."]:
    """Tensors of one shape and dtype along a new first axis, differentiable. What is returned must not be changed."""
    if lie_in_a_row(tensors):
        return _OneView.apply(*tensors)
    return torch.stack(list(tensors))


def lie_in_a_row(tensors: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in one piece of memory."""
    first = tensors[0]
    start, length = first.data_ptr(), first.numel() * first.element_size()
    memory = first.untyped_storage()
    if not length or start + len(tensors) * length > memory.data_ptr() + memory.nbytes():
        return False
    return all(
        tensor.data_ptr() == start + index * length
        and tensor.is_contiguous()
        and tensor.shape == first.shape
        and tensor.dtype == first.dtype
        for index, tensor in enumerate(tensors)
    )


class _OneView(torch.autograd.Function):
    """The same memory, seen as one tensor."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        first = tensors[0].detach()
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0].unbind()
