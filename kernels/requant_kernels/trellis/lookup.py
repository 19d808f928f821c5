"""Row lookup in a trellis whose output is not rotated: an embedding, which may share its codes with a tied head.

    y_t = input_scales * H (output_scales[row] V[row]),  row = tokens[t]

The table is one matrix, or bands of rows, each with its own bit width. A CTA handles one token and some columns, and picks
the band of its token. It finds the window of a weight as in `portable.py`, from the words of two lanes, so no other row is
decoded, although one stream holds the codes of 16. Few bytes are read, so plain Triton is enough, also on AMD. One launch of
`hadamard/` rotates back; its output scales are the input scales of the matrix. At the start of a step the first norm does
that instead, so the rows are a product of the kind it finishes (`start_of_step`).
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportGeneralTypeIssues=none

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_ptx
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.trellis.codes import CODES, TrellisCode
from requant_kernels.trellis.layout import TILE, TrellisLayout, k64_per_unit
from requant_kernels.trellis.operands import Product
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
def _copy_angles(
    position_ptr, cos_table_ptr, sin_table_ptr, cos_ptr, sin_ptr, length, head_dim, D: tl.constexpr
):  # fmt: skip
    """The first CTA copies row `position` of both tables."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        d = tl.arange(0, D)
        angle = tl.minimum(tl.load(position_ptr), length - 1) * head_dim + d
        tl.store(cos_ptr + d, tl.load(cos_table_ptr + angle, mask=d < head_dim), mask=d < head_dim)
        tl.store(sin_ptr + d, tl.load(sin_table_ptr + angle, mask=d < head_dim), mask=d < head_dim)


@triton.jit(do_not_specialize=["length"])
def trellis_lookup_kernel(
    tokens_ptr, codes_ptrs, output_scales_ptrs, out_ptr, sizes, units, columns, position_ptr, cos_table_ptr, sin_table_ptr,
    cos_ptr, sin_ptr, length, head_dim, BANDS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out `[m, columns]` = rows `tokens` of output_scales V; grid: (m, blocks of columns). Per band: codes, scales, rows,
    and units per row. With a position, the first CTA also copies that row of both tables of angles."""
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous_launch(PDL, False)
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
    if position_ptr is not None:
        _copy_angles(position_ptr, cos_table_ptr, sin_table_ptr, cos_ptr, sin_ptr, length, head_dim, D)


def lookup(tokens: Tensor, bands: Sequence[TrellisLayout], dtype: torch.dtype) -> Tensor:
    """Rows [m, k] in `dtype` for contiguous tokens; one outside the matrix gets row 0. The bands, from top to bottom, have
    the same input scales."""
    first, device = bands[0], tokens.device
    rotates = first.input_scales is not None
    rows = _rows(tokens, bands, torch.float32 if rotates else dtype)
    if not rotates:
        return rows
    y = torch.empty(len(tokens), first.k, dtype=dtype, device=device)
    hadamard_transform(
        rows, y, in_width=rows.shape[1], columns=rows.shape[1], out_width=first.k, asm=supports_ptx(device),
        pdl=supports_pdl(device), output_scales=first.input_scales,
    )  # fmt: skip
    return y


def start_of_step(
    tokens: Tensor, bands: Sequence[TrellisLayout], cos_table: Tensor, sin_table: Tensor, position: Tensor
) -> tuple[Product, Tensor, Tensor]:
    """As `step/embed.py`: the rows of tokens [b, 1], still to be rotated, and cosines and sines [1, head_dim] of a position,
    a number on the device. The bands have input scales, and whole blocks of 16 columns."""
    scales, (length, head_dim) = bands[0].input_scales, cos_table.shape
    assert scales is not None
    cos, sin = (torch.empty(1, head_dim, dtype=cos_table.dtype, device=tokens.device) for _ in range(2))
    angles = position, cos_table, sin_table, cos, sin, length, head_dim
    rows = _rows(tokens.flatten(), bands, torch.float32, angles)
    return Product(values=rows, output_scales=scales, bias=None, is_all=True), cos, sin


def _rows(
    tokens: Tensor, bands: Sequence[TrellisLayout], dtype: torch.dtype, angles: tuple[Any, ...] = (None,) * 7
) -> Tensor:
    """output_scales V, rows that are not rotated back, [m, columns]."""
    m, columns = len(tokens), -(-bands[0].k // TILE) * TILE
    rows = torch.empty(m, columns, dtype=dtype, device=tokens.device)
    found = tuple(band(own.code, own.quad_bits, own.packed_codes.shape[-1]) for own in bands)
    width, pdl = angles[-1] or 1, supports_pdl(tokens.device)
    launch(
        trellis_lookup_kernel,
        (m, triton.cdiv(columns, BLOCK), 1),
        (
            tokens, tuple(own.packed_codes for own in bands), tuple(own.output_scales for own in bands), rows,
            tuple(own.n for own in bands), tuple(own.packed_codes.shape[1] for own in bands), columns, *angles,
        ),
        interned(
            BANDS=found, BLOCK=BLOCK, D=triton.next_power_of_2(width), PDL=pdl, num_warps=4, **pdl_option(pdl)
        ),
    )  # fmt: skip
    return rows
