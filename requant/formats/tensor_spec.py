"""Dtype and shape of a stored tensor: what is known of it before any of its bytes are read."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor as the file has it; `bytes` without its entry in the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def int32_spec(*shape: int) -> TensorSpec:
    """Packed codes or signs."""
    return TensorSpec(dtype=torch.int32, shape=shape)


def int8_spec(*shape: int) -> TensorSpec:
    """Levels of a codebook, or scales on a grid of 8 bits."""
    return TensorSpec(dtype=torch.int8, shape=shape)


def float16_spec(*shape: int) -> TensorSpec:
    """Scales, magnitudes, or levels."""
    return TensorSpec(dtype=torch.float16, shape=shape)
