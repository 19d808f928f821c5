"""Random Hadamard rotations: every weight becomes a sum of many, so all are nearly Gaussian and there are no outliers.

    rotate(x) = H (signs * x),   H = S_b / sqrt(b) on each block of b neighbours,   S_1 = 1,  S_2b = S_2 (x) S_b

Incoherence by signed Hadamard matrices is from Tseng et al. 2024 (QuIP#, arXiv 2402.04396). H is symmetric and its
own inverse. The width is padded with zeros to a multiple of 16, and b is the largest power of two that divides it: 2048 is
one block, 1408 eleven of 128, 172 (padded to 176) eleven of 16. We use blocks rather than Hadamard matrices of other orders
because a kernel then needs only additions, and the weights of trained models vary little from block to block.

The transform adds and subtracts in a fixed order and multiplies once, so its floats are the same on every device.
"""

import torch
from jaxtyping import Float
from torch import Tensor

TILE = 16  # the side of a trellis tile: both widths of a rotated matrix are multiples of it


def padded(width: int) -> int:
    """The next multiple of TILE."""
    return -(-width // TILE) * TILE


def block_size(width: int) -> int:
    """The largest power of two that divides `width`."""
    return width & -width


def hadamard(x: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows k"]:
    """H x along the last axis, in blocks of `block_size(k)`."""
    size = block_size(x.shape[-1])
    blocks = x.reshape(-1, size)
    half = 1
    while half < size:
        left, right = blocks.view(-1, size // (2 * half), 2, half).unbind(2)
        blocks = torch.stack([left + right, left - right], dim=2).view(-1, size)
        half *= 2
    return (blocks * size**-0.5).view(x.shape)


def random_signs(width: int, *, seed: int) -> Float[Tensor, " w"]:
    """`width` signs, +1 or -1, the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1


def pad_columns(x: Float[Tensor, "*rows k"], width: int) -> Float[Tensor, "*rows w"]:
    """Zeros to the right, up to `width` columns."""
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def rotate_columns(
    x: Float[Tensor, "*rows k"], scales: Float[Tensor, " k"] | None
) -> Float[Tensor, "*rows w"]:
    """H (scales * x) of every row, padded to a multiple of TILE; None: x, padded."""
    if scales is None:
        return pad_columns(x, padded(x.shape[-1]))
    return hadamard(pad_columns(x * scales, padded(x.shape[-1])))


def incoherence_process(
    x: Float[Tensor, "n k"], *, rows: Float[Tensor, " n"] | None, columns: Float[Tensor, " k"] | None
) -> Float[Tensor, "r c"]:
    """H (rows * x * columns) H, padded to multiples of TILE; a side whose signs are None is not rotated."""
    return rotate_columns(rotate_columns(x, columns).mT, rows).mT.contiguous()
