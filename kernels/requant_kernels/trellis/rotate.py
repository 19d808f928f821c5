"""The two rotations of a trellis layer, before and after the multiplication by V.

    y = output_scales * H (V (H (input_scales * x))) + residuals + bias

Each is a launch of `hadamard/`; the residuals take one more, whose result the last rotation adds.
"""

import torch
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.sparse_spmm import spmm
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.trellis.layout import TILE, TrellisLayout


def rotate_input(x: Tensor, layout: TrellisLayout, columns: int, *, asm: bool) -> Tensor:
    """H (input_scales * x) in float16 [m, columns], zero beyond the padded width of the layout."""
    rotated = torch.empty(x.shape[0], columns, dtype=torch.float16, device=x.device)
    hadamard_transform(
        x, rotated, in_width=layout.k, columns=-(-layout.k // TILE) * TILE, out_width=columns,
        input_scales=layout.input_scales, asm=asm, pdl=supports_pdl(x.device),
    )  # fmt: skip
    return rotated


def rotate_output(
    product: Tensor, x: Tensor, layout: TrellisLayout, bias: Tensor | None, *, asm: bool
) -> Tensor:
    """y [m, n] of V H (input_scales * x), or of its split-K partial sums, with the residuals and the bias."""
    m, rows = x.shape[0], layout.packed_codes.shape[0] * TILE
    residuals = None if layout.sparse is None else spmm(x, layout)
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    hadamard_transform(
        product, y, in_width=rows, columns=rows, out_width=layout.n, output_scales=layout.output_scales, bias=bias,
        addend=residuals, asm=asm, pdl=supports_pdl(x.device),
    )  # fmt: skip
    return y
