"""Device functions that the Triton kernels share: load the packed codes of a k_tile, dequantize them to MMA fragments.

The shapes of the loads look odd on purpose. Triton assigns lanes to the contiguous dimension first, then to dimensions 0,
1, ...: with `[lane, warp, tile, 4]` a lane loads the 16 bytes that it will multiply, so every reshape and permute below only
renames registers. With another compiler the same code may move data between lanes, which is slower but still correct.

Axes are named by meaning: lane 4 g + t, `warp`, `tile` (row tiles of a CTA), and `kh rh e` as in `bit_layout.py`.
`FORMAT` (a `DequantFormat`) is everything the compiler needs to know about a packed format, in one constexpr argument.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.bit_layout import flat_bit_positions
from requant_kernels.common.dequant_ptx import (
    GRID_STEP,
    codebook_dequant_ptx,
    dequant_constraints,
    grid_dequant_ptx,
)
from requant_kernels.common.packing import CodebookLayout, Layout, k_tiles_per_scale, scales_per_k_tile
from requant_kernels.common.ptx import ptx_dtype


@dataclass(frozen=True, kw_only=True)
class DequantFormat:
    """Compile-time description of a packed format.

    `ptx` dequantizes the two halves of a k_tile; it is None for the plain Triton path (interpreter, AMD, codebooks of more
    than 4 bits), which extracts codes by `bit_positions`. `group_size` is the kernels': 0 is one scale per row.
    `table_registers` hold a row's byte tables of a codebook. `grid_step` is the value of one step in the output.
    """

    ptx: tuple[str, str] | None
    constraints: str | None
    bit_positions: tuple[int, ...] | None
    codebook: bool
    bits: int
    group_size: int
    table_registers: int
    grid_step: float

    @property
    def groups(self) -> int:
        """Scales per row and k_tile; 0: one per row."""
        return scales_per_k_tile(self.group_size)

    @property
    def k_tiles_per_group(self) -> int:
        return k_tiles_per_scale(self.group_size)


def has_ptx_decoder(format: str, bits: int) -> bool:
    """Whether PTX decodes a format: all but codebooks of more than 4 bits, whose levels are read from memory."""
    return format != "codebook" or bits <= 4


@cache
def dequant_format(
    format: str, bits: int, group_size: int, zeros: bool, dtype: torch.dtype, asm: bool
) -> DequantFormat:
    """The `DequantFormat` of a layout; `group_size` is its kernel_group, `dtype` the activations' type."""
    name, codebook = ptx_dtype(dtype), format == "codebook"
    use_ptx = asm and has_ptx_decoder(format, bits)
    if codebook:
        tables = 1 << (bits - 1) if use_ptx else 0
        inputs = tables
        halves = [codebook_dequant_ptx(bits, half) for half in range(2)] if use_ptx else []
    else:
        tables = 0
        groups = max(1, scales_per_k_tile(group_size)) if zeros else 0
        inputs = groups // 2 if groups > 1 else groups
        halves = [grid_dequant_ptx(bits, name, groups, half) for half in range(2)] if use_ptx else []
    built = [half.build(dequant_constraints(bits + inputs)) for half in halves]
    return DequantFormat(
        ptx=(built[0].text, built[1].text) if use_ptx else None,
        constraints=built[0].constraints if use_ptx else None,
        bit_positions=None if use_ptx else flat_bit_positions(format, bits),
        codebook=codebook,
        bits=bits,
        group_size=group_size,
        table_registers=tables,
        grid_step=GRID_STEP[name] if use_ptx else 1.0,
    )


def weight_tensors(layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Packed codes, scales or byte tables, zero points, levels; the tables are those for activations of type `dtype`."""
    if not isinstance(layout, CodebookLayout):
        return layout.packed_codes, layout.scales, layout.zero_points, None
    tables = layout.levels if layout.tables is None else layout.tables[int(dtype != torch.float16)]
    return layout.packed_codes, tables, None, layout.levels


def dequant_operands(
    layout: Layout, dtype: torch.dtype, asm: bool
) -> tuple[tuple[Tensor | None, ...], DequantFormat]:
    """The weight's tensors and its `DequantFormat`."""
    zeros = layout.zero_points is not None
    format = dequant_format(layout.format, layout.bits, layout.kernel_group, zeros, dtype, asm)
    return weight_tensors(layout, dtype), format


def sparse_operands(layout: Any) -> tuple[Tensor | None, ...]:
    """row_perm, and slice_ptr, columns, values, row scales of the sliced ELL; None if there is no sparse part."""
    ell = layout.sparse
    if ell is None:
        return layout.row_perm, None, None, None, None
    return layout.row_perm, ell.slice_ptr, ell.columns, ell.values, ell.row_scales


def scaled_activations(x: Tensor, layout: Layout) -> Tensor:
    """The activations of the dense part: divided by `column_scales` if there are any."""
    return x if layout.column_scales is None else x / layout.column_scales.to(x.dtype)


def activation_pairs(x: Tensor, layout: Layout) -> Tensor:
    """`scaled_activations` of x [m, k], rows contiguous, two neighbours per int32: [m, ceil(k / 2)]."""
    x, k = scaled_activations(x, layout), x.shape[1]
    if k % 2 or x.stride(0) % 2 or x.data_ptr() % 4:
        x = torch.nn.functional.pad(x, (0, k % 2)).clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


@triton.jit
def load_k_tile(
    codes_ptr, scales_ptr, zeros_ptr, tiles, k_tile, k_tiles, FORMAT: tl.constexpr, EVEN_K: tl.constexpr
):
    """The packed codes, scales and zero points of one k_tile for each warp and tile (`tiles`, `k_tile`: `[warp, tile]`).

    A tuple: `bits` words `[lane, warp, tile, 4]`, then the scales and the zero points of its groups, as returned by
    `load_groups`. EVEN_K: every k_tile lies in the matrix, so nothing is masked.
    """
    BITS: tl.constexpr = FORMAT.bits
    GROUP: tl.constexpr = FORMAT.group_size
    lane, four = tl.arange(0, 32), tl.arange(0, 4)
    at = (tiles * k_tiles + k_tile)[None, :, :, None] * (BITS * 128)
    at += lane[:, None, None, None] * 4 + four[None, None, None, :]
    loaded = ()
    for i in tl.static_range(BITS):
        if EVEN_K:
            word = tl.load(codes_ptr + at + i * 128, eviction_policy="evict_first")
        else:
            inside = (k_tile < k_tiles)[None, :, :, None]
            word = tl.load(codes_ptr + at + i * 128, mask=inside, other=0, eviction_policy="evict_first")
        loaded = loaded + (word,)
    if GROUP > 0:
        loaded = loaded + load_groups(scales_ptr, tiles, k_tile, k_tiles, GROUP, EVEN_K)
        if zeros_ptr is not None:
            loaded = loaded + load_groups(zeros_ptr, tiles, k_tile, k_tiles, GROUP, EVEN_K)
    return loaded


@triton.jit
def load_groups(pointer, tiles, k_tile, k_tiles, GROUP: tl.constexpr, EVEN_K: tl.constexpr):
    """A scale (or zero point) for each row and group of a k_tile: a tuple over groups of `[t, g, warp, tile, rh]`."""
    GROUPS_PER_TILE: tl.constexpr = 256 // GROUP if GROUP < 256 else 1
    TILES_PER_GROUP: tl.constexpr = GROUP // 256 if GROUP > 256 else 1
    loaded = ()
    for i in tl.static_range(GROUPS_PER_TILE):
        groups = tl.cdiv(k_tiles, TILES_PER_GROUP) * GROUPS_PER_TILE
        at = row_offsets(tiles * groups + k_tile // TILES_PER_GROUP * GROUPS_PER_TILE + i)
        if EVEN_K:
            loaded = loaded + (tl.load(pointer + at),)
        else:
            inside = (k_tile < k_tiles)[None, None, :, :, None]
            loaded = loaded + (tl.load(pointer + at, mask=inside, other=0.0),)
    return loaded


@triton.jit
def row_offsets(base):
    """`[t, g, warp, tile, rh]`: offsets of a lane's rows g and g + 8 in units of 16 values (the four t read the same)."""
    t, g, rh = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 2)
    same = t[:, None, None, None, None] * 0 + g[None, :, None, None, None] * 2 + rh[None, None, None, None, :]
    return same + base[None, None, :, :, None] * 16


@triton.jit
def load_row_constants(
    scales_ptr, zeros_ptr, tiles, FORMAT: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr
):
    """Row operands for the whole launch: a codebook's byte tables, or one zero point per row."""
    TABLES: tl.constexpr = FORMAT.table_registers
    loaded = ()
    same = tl.arange(0, WARPS)[:, None] * 0 + tiles
    if FORMAT.codebook:
        for i in tl.static_range(TABLES):
            table = tl.load(scales_ptr + row_offsets(same * TABLES + i))
            loaded = loaded + (rows_to_codes(table, WARPS, TILES),)
    elif zeros_ptr is not None and FORMAT.group_size == 0:
        loaded = (tl.load(zeros_ptr + row_offsets(same)),)
    return loaded


@triton.jit
def rows_to_codes(rows, WARPS: tl.constexpr, TILES: tl.constexpr):
    """Replicate a value per row `[t, g, warp, tile, rh]` to the shape of packed codes, `[lane, warp, tile, 4]`."""
    rows = tl.reshape(tl.permute(rows, (1, 0, 2, 3, 4)), [32, WARPS, TILES, 1, 2])
    return tl.reshape(tl.broadcast_to(rows, [32, WARPS, TILES, 2, 2]), [32, WARPS, TILES, 4])


@triton.jit
def rows_to_accumulator(rows, WARPS: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr):
    """Replicate a value per row `[t, g, warp, tile, rh]` to the shape of the accumulator, `[warp, rows, TOKENS]`."""
    rows = tl.reshape(tl.permute(rows, (2, 3, 4, 1, 0)), [WARPS, TILES, 2, 8, 1, 4, 1])
    rows = tl.broadcast_to(rows, [WARPS, TILES, 2, 8, TOKENS // 8, 4, 2])
    return tl.reshape(rows, [WARPS, 16 * TILES, TOKENS])


@triton.jit
def unpack_pair(pair, dtype):
    """int32 -> the two 16-bit floats that it holds, in a new last dimension."""
    low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
    return tl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))


@triton.jit
def weight_operand(even, odd, WARPS: tl.constexpr, TILES: tl.constexpr):
    """Left MMA operand of 32 columns: two steps `[lane, warp, tile, (kh rh), e]` -> `[warp, rows, 32]`."""
    weight = tl.reshape(tl.join(even, odd), [8, 4, WARPS, TILES, 2, 2, 2, 2])
    # g t w tile kh rh e j -> w (tile rh g) (kh t j e)
    return tl.reshape(tl.permute(weight, (2, 3, 5, 0, 4, 1, 7, 6)), [WARPS, 16 * TILES, 32])


@triton.jit
def activation_operand(pairs, dtype, WARPS: tl.constexpr, TOKENS: tl.constexpr):
    """Right MMA operand: pairs of activations of 32 columns `[t, g, warp, token / 8, (j kh)]` -> `[warp, 32, TOKENS]`."""
    x = tl.reshape(unpack_pair(pairs, dtype), [4, 8, WARPS, TOKENS // 8, 2, 2, 2])
    x = tl.permute(x, (2, 5, 0, 4, 6, 3, 1))  # t g w nt j kh e -> w (kh t j e) (nt g)
    return tl.reshape(x, [WARPS, 32, TOKENS])


@triton.jit
def dequantize_half(loaded, row_constants, levels_ptr, tiles, like_ptr, FORMAT: tl.constexpr, ZEROS: tl.constexpr,
                    WARPS: tl.constexpr, TILES: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """MMA steps 8 HALF .. 8 HALF + 7 of a k_tile, a tuple of `[lane, warp, tile, (kh rh), e]` in the type of `like_ptr`.

    Values are a codebook's levels, or grid steps `(code - zero) * grid_step`, which the caller must scale.
    """
    BITS: tl.constexpr = FORMAT.bits
    GROUP: tl.constexpr = FORMAT.group_size
    dtype = like_ptr.dtype.element_ty
    GROUPS: tl.constexpr = 256 // GROUP if GROUP > 0 and GROUP < 256 else 1
    OWN: tl.constexpr = GROUPS // 2 if GROUPS > 1 else 1  # groups per half
    STEP: tl.constexpr = FORMAT.grid_step
    BIAS: tl.constexpr = 1024 if BITS == 8 and dtype == tl.float16 else 0  # `zero_bias` of dequant_ptx.py
    zeros = ()
    if ZEROS and GROUP == 0:
        zeros = row_constants
    elif ZEROS:
        FIRST: tl.constexpr = BITS + GROUPS + (HALF * OWN if GROUPS > 1 else 0)
        zeros = loaded[FIRST : FIRST + OWN]
    if FORMAT.ptx is None:
        steps = _dequantize_plain(loaded, zeros, levels_ptr, tiles, dtype, FORMAT, GROUPS, WARPS, TILES, HALF)
    else:
        operands = ()
        if FORMAT.codebook:
            operands = row_constants
        elif ZEROS:
            for i in tl.static_range(OWN):
                operands = operands + (_zero_pairs(zeros[i], BIAS, STEP, dtype, WARPS, TILES),)
        pairs = tl.inline_asm_elementwise(
            FORMAT.ptx[HALF], FORMAT.constraints, loaded[:BITS] + operands, dtype=(tl.int32,) * 8, is_pure=True, pack=1
        )  # fmt: skip
        steps = ()
        for i in tl.static_range(8):
            steps = steps + (unpack_pair(pairs[i], dtype),)
    return steps


@triton.jit
def _zero_pairs(
    zero, BIAS: tl.constexpr, STEP: tl.constexpr, dtype, WARPS: tl.constexpr, TILES: tl.constexpr
):
    """Zero points `[t, g, warp, tile, rh]` -> the pair -(zero + BIAS) * STEP in 32 bits, in the shape of packed codes."""
    half = ((zero.to(tl.float32) + BIAS) * (-STEP)).to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return rows_to_codes(half * 0x10001, WARPS, TILES)


@triton.jit
def _dequantize_plain(words, zeros, levels_ptr, tiles, dtype, FORMAT: tl.constexpr, GROUPS: tl.constexpr,
                      WARPS: tl.constexpr, TILES: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """`dequantize_half` without PTX; a grid step is 1."""
    BITS: tl.constexpr = FORMAT.bits
    POSITIONS: tl.constexpr = FORMAT.bit_positions
    row = tl.arange(0, 32)[:, None, None, None] // 4 + 8 * (tl.arange(0, 4)[None, None, None, :] % 2)
    row = tiles[None, :, :, None] * 16 + row
    steps = ()
    for i in tl.static_range(8):
        low = _code(words, POSITIONS, 0, 8 * HALF + i, BITS)
        high = _code(words, POSITIONS, 1, 8 * HALF + i, BITS)
        if FORMAT.codebook:
            at = levels_ptr + row * (1 << BITS)
            low, high = tl.load(at + low), tl.load(at + high)
        else:
            zero = (
                rows_to_codes(zeros[i * GROUPS // 16], WARPS, TILES).to(tl.float32)
                if len(zeros) > 0
                else 1 << (BITS - 1)
            )
            low, high = low - zero, high - zero
        steps = steps + (tl.join(low.to(dtype), high.to(dtype)),)
    return steps


@triton.jit
def _code(words, POSITIONS: tl.constexpr, e: tl.constexpr, step: tl.constexpr, BITS: tl.constexpr):
    """One code of every 32-bit word, bit by bit, from the table of bit positions."""
    code = tl.zeros_like(words[0])
    for c in tl.static_range(BITS):
        word = words[POSITIONS[(e * 16 + step) * BITS + c] // 32]
        code += ((word >> (POSITIONS[(e * 16 + step) * BITS + c] % 32)) & 1) << c
    return code


@triton.jit
def load_slices(columns_ptr, values_ptr, first, last, SLICES: tl.constexpr):
    """Columns and values of `SLICES` slices of every row, from slice `first` on: `[rows, SLICES, 8]`; 0 from `last` on."""
    row, i, slot = tl.arange(0, first.shape[0]), tl.arange(0, SLICES), tl.arange(0, 8)
    slices = first[:, None] + i[None, :]
    at = slices[:, :, None].to(tl.int64) * 128 + (row % 16)[:, None, None] * 8 + slot[None, None, :]
    inside = (slices < last[:, None])[:, :, None]
    column = (
        tl.load(columns_ptr + at, mask=inside, other=0, eviction_policy="evict_first").to(tl.int32) & 0xFFFF
    )
    return column, tl.load(values_ptr + at, mask=inside, other=0, eviction_policy="evict_first")
