"""Row lookup in a trellis whose output is not rotated: an embedding, which may share its codes with a tied head.

    y_t = input_scales * H (output_scales[row] V[row]),  row = tokens[t]

The table is one matrix, or bands of rows, each with its own bit width. A CTA handles one token and some columns, and picks
the band of its token. It finds the window of a weight as in `portable.py`, from the words of two lanes, so no other row is
decoded, although one stream holds the codes of 16. Few bytes are read, so plain Triton is enough, also on AMD. One launch of
`hadamard/` rotates back; its output scales are the input scales of the matrix.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportGeneralTypeIssues=none

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_ptx
from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.trellis.codes import CODES, TrellisCode
from requant_kernels.trellis.layout import TILE, TrellisLayout, k64_per_unit
from requant_kernels.trellis.portable import decode

BLOCK = 256  # columns per CTA


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """What the kernel is compiled for, per band."""

    code: TrellisCode
    quad_bits: int
    k64_per_unit: int
    vector: int  # words per load


@cache
def band(code: str, quad_bits: int, vector: int) -> Band:
    """The band of a layout."""
    return Band(code=CODES[code], quad_bits=quad_bits, k64_per_unit=k64_per_unit(quad_bits), vector=vector)


@triton.jit
def _store_row(
    row,
    token,
    at,
    codes_ptr,
    output_scales_ptr,
    out_ptr,
    units,
    columns,
    INDEX: tl.constexpr,
    BANDS: tl.constexpr,
):
    """Store `row` of a band."""
    CODE: tl.constexpr = BANDS[INDEX].code
    QUAD_BITS: tl.constexpr = BANDS[INDEX].quad_bits
    J: tl.constexpr = BANDS[INDEX].k64_per_unit
    V: tl.constexpr = BANDS[INDEX].vector
    column = tl.minimum(at, columns - 1)  # a block may extend past the last unit
    value = decode(
        codes_ptr, row // 16, (row % 16).to(tl.int32), column // 64, column % 64, units, CODE, QUAD_BITS, J, V
    )
    value *= tl.load(output_scales_ptr + row).to(tl.float32) * CODE.scale
    tl.store(out_ptr + token * columns + at, value.to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def trellis_lookup_kernel(
    tokens_ptr,
    codes_ptrs,
    output_scales_ptrs,
    out_ptr,
    sizes,
    units,
    columns,
    BANDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out `[m, columns]` = rows `tokens` of output_scales V; grid: (m, blocks of columns). Per band: codes, scales, rows,
    and units per row."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(tokens_ptr + token).to(tl.int64)
    n = 0
    for i in tl.static_range(len(BANDS)):
        n += sizes[i]
    # a captured graph cannot raise; never read outside the matrix
    row = tl.where((row >= 0) & (row < n), row, 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(len(BANDS)):
        if (row >= 0) & (row < sizes[i]):
            _store_row(
                row, token, at, codes_ptrs[i], output_scales_ptrs[i], out_ptr, units[i], columns, i, BANDS
            )
        row -= sizes[i]


def lookup(tokens: Tensor, bands: Sequence[TrellisLayout], dtype: torch.dtype) -> Tensor:
    """Rows [m, k] in `dtype` for contiguous tokens; one outside the matrix gets row 0. The bands, from top to bottom, have
    the same input scales."""
    first, m, device = bands[0], len(tokens), tokens.device
    columns, rotates = -(-first.k // TILE) * TILE, first.input_scales is not None
    rows = torch.empty(m, columns, dtype=torch.float32 if rotates else dtype, device=device)
    found = tuple(band(own.code, own.quad_bits, own.packed_codes.shape[-1]) for own in bands)
    launch(
        trellis_lookup_kernel,
        (m, triton.cdiv(columns, BLOCK), 1),
        (
            tokens, tuple(own.packed_codes for own in bands), tuple(own.output_scales for own in bands), rows,
            tuple(own.n for own in bands), tuple(own.packed_codes.shape[1] for own in bands), columns,
        ),
        interned(BANDS=found, BLOCK=BLOCK, num_warps=4),
    )  # fmt: skip
    if not rotates:
        return rows
    y = torch.empty(m, first.k, dtype=dtype, device=device)
    hadamard_transform(
        rows, y, in_width=columns, columns=columns, out_width=first.k, asm=supports_ptx(device), pdl=supports_pdl(device),
        output_scales=first.input_scales,
    )  # fmt: skip
    return y
