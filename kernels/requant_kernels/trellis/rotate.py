"""The two rotations of a trellis layer, before and after the multiplication by V.

    y = output_scales * H (V (H (input_scales * x))) + residuals + bias

Each is a launch of `hadamard/`; the residuals take one more, whose result the last rotation adds. Without its H, the first
launch only converts x, and the last only adds, scales and converts the product; up to 16 tokens `gemv.py` does the latter.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.sparse_spmm import spmm
from requant_kernels.hadamard import warp
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.trellis.layout import TILE, TrellisLayout
from requant_kernels.trellis.operands import sums_scale

MANY_TOKENS = 512  # above, an SM has enough CTAs without splitting a tile among 16 warps


def rotate_input(x: Tensor, layout: TrellisLayout, columns: int, *, asm: bool) -> Tensor:
    """H (input_scales * x) in float16 [m, columns], zero beyond the padded width of the layout. Returns x itself if there is
    nothing to do."""
    rotates = layout.input_scales is not None
    if not rotates and x.dtype == torch.float16 and x.shape[1] == columns and x.is_contiguous():
        return x
    rotated = torch.empty(x.shape[0], columns, dtype=torch.float16, device=x.device)
    if many_tokens(x, layout, columns) and asm:
        assert layout.input_scales is not None
        warp.rotate(x, layout.input_scales, rotated)
        return rotated
    hadamard_transform(
        x, rotated, in_width=layout.k, columns=-(-layout.k // TILE) * TILE, out_width=columns,
        input_scales=layout.input_scales, asm=asm, pdl=supports_pdl(x.device), rotate=rotates,
    )  # fmt: skip
    return rotated


def many_tokens(x: Tensor, layout: TrellisLayout, columns: int) -> bool:
    """Whether `hadamard/warp.py` rotates x."""
    return (
        x.shape[0] > MANY_TOKENS
        and layout.input_scales is not None
        and x.shape[1] == columns
        and warp.supports(columns & -columns)
        and warp.readable(x)
    )


def rotate_output(
    product: Tensor, x: Tensor, layout: TrellisLayout, bias: Tensor | None, *, asm: bool
) -> Tensor:
    """y [m, n] of V H (input_scales * x), or of its split-K partial sums, plus the residuals and the bias."""
    m, rows = x.shape[0], layout.packed_codes.shape[0] * TILE
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    addend, pdl, scale = residual_product(x, layout), supports_pdl(x.device), sums_scale(product)
    if not (layout.rotates_output and layout.parts):
        hadamard_transform(
            product, y, in_width=rows, columns=rows, out_width=layout.n, output_scales=layout.output_scales, bias=bias,
            addend=addend, asm=asm, pdl=pdl, rotate=layout.rotates_output, factor=scale,
        )  # fmt: skip
        return y
    for own, size in runs_of_equal_parts(layout.parts):
        width = own.stop - own.start
        hadamard_transform(
            product[..., own], y[:, own], in_width=width, columns=width, out_width=width, asm=asm, pdl=pdl, factor=scale,
            output_scales=layout.output_scales[own], bias=None if bias is None else bias[own],
            addend=None if addend is None else addend[:, own].contiguous(), block_size=size & -size,
        )  # fmt: skip
    return y


def runs_of_equal_parts(parts: Sequence[int]) -> list[tuple[slice, int]]:
    """Runs of adjacent parts of equal size, which one launch transforms, with that size: q alone, k and v, gate and up."""
    runs: list[tuple[slice, int]] = []
    stop = 0
    for size, group in itertools.groupby(parts):
        start, stop = stop, stop + sum(group)
        runs.append((slice(start, stop), size))
    return runs


def residual_product(x: Tensor, layout: TrellisLayout) -> Tensor | None:
    """The contribution of the residuals, float32 [m, n]."""
    return None if layout.sparse is None else spmm(x, layout)
