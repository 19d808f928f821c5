"""Dequantize rows of a packed grid: an embedding tied to the head shares its codes, so memory holds them once.

A CTA handles one token and one k_tile, and picks every bit of a code from the table of bit positions
(`common/bit_layout.py`). Few bytes are read, so plain Triton is enough, also on AMD.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.bit_layout import flat_bit_positions
from requant_kernels.common.packing import GridLayout


@triton.jit
def lookup_kernel(
    tokens_ptr, codes_ptr, positions_ptr, scales_ptr, zeros_ptr, column_scales_ptr, out_ptr, n, K, k_tiles, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out `[m, K]`: rows `tokens` of the matrix; grid: (m, k_tiles)."""
    token, k_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(tokens_ptr + token)
    # a captured graph cannot raise; never read outside the matrix
    row = tl.where((row >= 0) & (row < n), row, 0)
    tile, g, rh = row // 16, row % 8, row % 16 // 8
    at = tl.arange(0, 256)
    k32, t, j, kh, e = at // 32, at % 32 // 8, at % 8 // 4, at % 4 // 2, at % 2
    code = tl.zeros([256], tl.int32)
    for bit in tl.static_range(BITS):
        position = tl.load(positions_ptr + (e * 16 + 2 * k32 + j) * BITS + bit)
        word_index = (tile * k_tiles + k_tile) * BITS + position // 32
        word = tl.load(codes_ptr + word_index * 128 + (4 * g + t) * 4 + 2 * kh + rh)
        code |= ((word >> (position % 32)) & 1) << bit
    column = k_tile * 256 + at
    group = tile * groups + (column // GROUP if GROUP > 0 else column * 0)
    inside = column < K
    zero = (
        1 << (BITS - 1)
        if zeros_ptr is None
        else tl.load(zeros_ptr + group * 16 + g * 2 + rh, mask=inside, other=0.0).to(tl.float32)
    )
    value = code.to(tl.float32) - zero
    value *= tl.load(scales_ptr + group * 16 + g * 2 + rh, mask=inside, other=0.0).to(tl.float32)
    if column_scales_ptr is not None:
        value /= tl.load(column_scales_ptr + column, mask=inside, other=1.0).to(tl.float32)
    tl.store(out_ptr + token * K + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def _positions(bits: int, device: torch.device) -> Tensor:
    return torch.tensor(flat_bit_positions("grid", bits), dtype=torch.int32, device=device)


def lookup(tokens: Tensor, layout: GridLayout, dtype: torch.dtype) -> Tensor:
    """Rows [m, k] in `dtype`; a token outside the matrix gets row 0."""
    out = torch.empty(len(tokens), layout.k, dtype=dtype, device=tokens.device)
    k_tiles = layout.packed_codes.shape[1]
    lookup_kernel[(len(tokens), k_tiles)](
        tokens, layout.packed_codes, _positions(layout.bits, tokens.device), layout.scales, layout.zero_points,
        layout.column_scales, out, layout.n, layout.k, k_tiles, layout.scales.shape[1], BITS=layout.bits,
        GROUP=layout.kernel_group, num_warps=4,
    )  # fmt: skip
    return out
