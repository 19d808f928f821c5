"""Rows of a packed grid, dequantized: an embedding that shares its codes with the head, one copy in memory.

A program takes one token and one block of 256 columns and picks every code's bits from the words by the table of
positions (`words.py`): few bytes, so plain Triton is enough, also on AMD.
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
    tokens_ptr, w_ptr, positions_ptr, s_ptr, z_ptr, cs_ptr, out_ptr, n, K, blocks, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out `[m, K]`: rows `tokens` of the matrix; grid: (m, blocks)."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(tokens_ptr + token)
    row = tl.where(
        (row >= 0) & (row < n), row, 0
    )  # a captured graph cannot raise; no memory beyond the matrix is read
    tile, g, rh = row // 16, row % 8, row % 16 // 8
    at = tl.arange(0, 256)
    pair, t, j, kh, e = at // 32, at % 32 // 8, at % 8 // 4, at % 4 // 2, at % 2
    code = tl.zeros([256], tl.int32)
    for bit in tl.static_range(BITS):
        position = tl.load(positions_ptr + (e * 16 + 2 * pair + j) * BITS + bit)
        word = tl.load(
            w_ptr + ((tile * blocks + block) * BITS + position // 32) * 128 + (4 * g + t) * 4 + 2 * kh + rh
        )
        code |= ((word >> (position % 32)) & 1) << bit
    column = block * 256 + at
    group = tile * groups + (column // GROUP if GROUP > 0 else column * 0)
    inside = column < K
    zero = (
        1 << (BITS - 1)
        if z_ptr is None
        else tl.load(z_ptr + group * 16 + g * 2 + rh, mask=inside, other=0.0).to(tl.float32)
    )
    value = (code.to(tl.float32) - zero) * tl.load(
        s_ptr + group * 16 + g * 2 + rh, mask=inside, other=0.0
    ).to(tl.float32)
    if cs_ptr is not None:
        value /= tl.load(cs_ptr + column, mask=inside, other=1.0).to(tl.float32)
    tl.store(out_ptr + token * K + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def _positions(bits: int, device: torch.device) -> Tensor:
    return torch.tensor(flat_bit_positions("grid", bits), dtype=torch.int32, device=device)


def lookup(tokens: Tensor, layout: GridLayout, dtype: torch.dtype) -> Tensor:
    """Rows [m, k] in `dtype`; a token outside of the matrix gets row 0."""
    out = torch.empty(len(tokens), layout.k, dtype=dtype, device=tokens.device)
    blocks = layout.packed_codes.shape[1]
    lookup_kernel[(len(tokens), blocks)](
        tokens, layout.packed_codes, _positions(layout.bits, tokens.device), layout.scales, layout.zero_points,
        layout.column_scales, out, layout.n, layout.k, blocks, layout.scales.shape[1], BITS=layout.bits,
        GROUP=layout.kernel_group, num_warps=4,
    )  # fmt: skip
    return out
