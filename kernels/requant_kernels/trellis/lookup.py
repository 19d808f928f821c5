"""Rows of a trellis whose output is not rotated: an embedding, whose codes a tied head may share.

    y_t = input_scales * H (output_scales[row] V[row]),  row = tokens[t]

A program takes one token and some columns. The window of a weight is found as in `portable.py`, from the words of two lanes,
so no other row is decoded, though the codes of 16 are in one stream. Few bytes are read, so plain Triton is enough, also on
AMD. The rotation back is one launch of `hadamard/`, whose output scales are the input scales of the matrix.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_ptx
from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.trellis.layout import TILE, TrellisLayout
from requant_kernels.trellis.portable import constants, decode

BLOCK = 256  # columns of a program


@triton.jit
def trellis_lookup_kernel(
    tokens_ptr, codes_ptr, output_scales_ptr, out_ptr, n, units, columns, CODE: tl.constexpr, QUAD_BITS: tl.constexpr,
    J: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out `[m, columns]` = output_scales V, rows `tokens` of it; grid: (m, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(tokens_ptr + token).to(tl.int64)
    # a captured graph cannot raise; no memory beyond the matrix is read
    row = tl.where((row >= 0) & (row < n), row, 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.minimum(at, columns - 1)  # a block may end behind the last unit
    value = decode(
        codes_ptr, row // 16, (row % 16).to(tl.int32), column // 64, column % 64, units, CODE, QUAD_BITS, J, V
    )
    value *= tl.load(output_scales_ptr + row).to(tl.float32) * CODE.scale
    tl.store(out_ptr + token * columns + at, value.to(out_ptr.dtype.element_ty), mask=at < columns)


def lookup(tokens: Tensor, layout: TrellisLayout, dtype: torch.dtype) -> Tensor:
    """Rows [m, k] in `dtype`, of contiguous tokens; one outside of the matrix gets row 0."""
    m, columns, device = len(tokens), -(-layout.k // TILE) * TILE, tokens.device
    rotates = layout.input_scales is not None
    rows = torch.empty(m, columns, dtype=torch.float32 if rotates else dtype, device=device)
    launch(
        trellis_lookup_kernel,
        (m, triton.cdiv(columns, BLOCK), 1),
        (tokens, layout.packed_codes, layout.output_scales, rows, layout.n, layout.packed_codes.shape[1], columns),
        interned(**constants(layout), BLOCK=BLOCK, num_warps=4),
    )  # fmt: skip
    if not rotates:
        return rows
    y = torch.empty(m, layout.k, dtype=dtype, device=device)
    hadamard_transform(
        rows, y, in_width=columns, columns=columns, out_width=layout.k, asm=supports_ptx(device), pdl=supports_pdl(device),
        output_scales=layout.input_scales,
    )  # fmt: skip
    return y
