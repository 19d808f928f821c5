"""What the kernels share: loading a block of words, turning it into weights, and the arguments for both.

The shapes of the loads look odd on purpose. Triton gives lanes to the contiguous dimension first and then to dimension
0, 1, ..: `[lane, warp, tile, 4]` makes a lane load the 16 bytes that it will multiply, so that every reshape and permute
is a renaming of registers. Another compiler may move data instead; it will be slower, and right.

`ASM` is the PTX of `words.py`, or None: then the same bits are taken apart by plain Triton (interpreter, AMD).
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.bit_layout import (
    GRID_STEP,
    asm_constraints,
    codebook_dequant_ptx,
    flat_bit_positions,
    grid_dequant_ptx,
)
from requant_kernels.common.packing import CodebookLayout, Layout


@triton.jit
def load_block(w_ptr, s_ptr, z_ptr, tiles, block, blocks, BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
               W: tl.constexpr):  # fmt: skip
    """The words of one block a warp and tile (`tiles`, `block`: `[warp, tile]`), its scales, its zero points."""
    lane, four = tl.arange(0, 32), tl.arange(0, 4)
    at = (tiles * blocks + block)[None, :, :, None] * (BITS * 128)
    at += lane[:, None, None, None] * 4 + four[None, None, None, :]
    loaded = ()
    for i in tl.static_range(BITS):
        if EVEN:
            word = tl.load(w_ptr + at + i * 128, eviction_policy="evict_first")
        else:
            inside = (block < blocks)[None, :, :, None]
            word = tl.load(w_ptr + at + i * 128, mask=inside, other=0, eviction_policy="evict_first")
        loaded = loaded + (word,)
    if GROUP > 0:
        loaded = loaded + load_scales(s_ptr, z_ptr, tiles, block, blocks, GROUP, EVEN, W)
    return loaded


@triton.jit
def load_scales(s_ptr, z_ptr, tiles, block, blocks, GROUP: tl.constexpr, EVEN: tl.constexpr, W: tl.constexpr):
    """The scales of one block a warp and tile, and its zero points."""
    loaded = _load_groups(s_ptr, tiles, block, blocks, GROUP, EVEN, W)
    if z_ptr is not None:
        loaded = loaded + _load_groups(z_ptr, tiles, block, blocks, GROUP, EVEN, W)
    return loaded


@triton.jit
def _load_groups(pointer, tiles, block, blocks, GROUP: tl.constexpr, EVEN: tl.constexpr, W: tl.constexpr):
    """A scale (or zero point) a row and group of one block a warp, each `[t, g, warp, tile, rh]`."""
    a_block: tl.constexpr = 256 // GROUP if GROUP < 256 else 1
    a_group: tl.constexpr = GROUP // 256 if GROUP > 256 else 1
    loaded = ()
    for i in tl.static_range(a_block):
        groups = tl.cdiv(blocks, a_group) * a_block
        at = row_offsets(tiles * groups + block // a_group * a_block + i)
        if EVEN:
            loaded = loaded + (tl.load(pointer + at),)
        else:
            loaded = loaded + (
                tl.load(pointer + at, mask=(block < blocks)[None, None, :, :, None], other=0.0),
            )
    return loaded


@triton.jit
def row_offsets(base):
    """`[t, g, warp, tile, rh]`: where a lane finds what belongs to its rows g and g + 8 (the four t read the same)."""
    t, g, rh = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 2)
    same = t[:, None, None, None, None] * 0 + g[None, :, None, None, None] * 2 + rh[None, None, None, None, :]
    return same + base[None, None, :, :, None] * 16


@triton.jit
def _like_words(rows, W: tl.constexpr, R: tl.constexpr):
    """A value a row `[t, g, warp, tile, rh]` -> `[lane, warp, tile, 4]`, the shape of words."""
    rows = tl.reshape(tl.permute(rows, (1, 0, 2, 3, 4)), [32, W, R, 1, 2])
    return tl.reshape(tl.broadcast_to(rows, [32, W, R, 2, 2]), [32, W, R, 4])


@triton.jit
def _code(words, POSITIONS: tl.constexpr, e: tl.constexpr, plane: tl.constexpr, BITS: tl.constexpr):
    """Plain Triton: one code of every 32-bit word, by the table of bit positions."""
    code = tl.zeros_like(words[0])
    for c in tl.static_range(BITS):
        code += (
            (
                words[POSITIONS[(e * 16 + plane) * BITS + c] // 32]
                >> (POSITIONS[(e * 16 + plane) * BITS + c] % 32)
            )
            & 1
        ) << c
    return code


@triton.jit
def _decode_plain(words, zeros, levels_ptr, tiles, dtype, POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr,
                  BITS: tl.constexpr, GROUPS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, H: tl.constexpr):  # fmt: skip
    """`decode_half` without assembly; one step of a grid is worth 1."""
    row = tl.arange(0, 32)[:, None, None, None] // 4 + 8 * (tl.arange(0, 4)[None, None, None, :] % 2)
    row = tiles[None, :, :, None] * 16 + row
    planes = ()
    for i in tl.static_range(8):
        low = _code(words, POSITIONS, 0, 8 * H + i, BITS)
        high = _code(words, POSITIONS, 1, 8 * H + i, BITS)
        if CODEBOOK:
            at = levels_ptr + row * (1 << BITS)
            low, high = tl.load(at + low), tl.load(at + high)
        else:
            zero = (
                _like_words(zeros[i * GROUPS // 16], W, R).to(tl.float32)
                if len(zeros) > 0
                else 1 << (BITS - 1)
            )
            low, high = low - zero, high - zero
        planes = planes + (tl.join(low.to(dtype), high.to(dtype)),)
    return planes


@triton.jit
def _zero_pairs(zero, BIAS: tl.constexpr, UNIT: tl.constexpr, dtype, W: tl.constexpr, R: tl.constexpr):
    """Zero points `[t, g, warp, tile, rh]` -> the pair -(zero + BIAS) * UNIT in 32 bits, in the shape of words."""
    half = ((zero.to(tl.float32) + BIAS) * (-UNIT)).to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return _like_words(half * 0x10001, W, R)


@triton.jit
def halves(pair, dtype):
    """int32 -> the two 16-bit floats that it holds, in a new last dimension."""
    low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
    return tl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))


@triton.jit
def left_operand(even, odd, W: tl.constexpr, R: tl.constexpr):
    """Both planes of a slab `[lane, warp, tile, (kh rh), e]` -> `[warp, rows, 32]`."""
    weight = tl.reshape(tl.join(even, odd), [8, 4, W, R, 2, 2, 2, 2])
    # g t w tile kh rh e j -> w (tile rh g) (kh t j e)
    return tl.reshape(tl.permute(weight, (2, 3, 5, 0, 4, 1, 7, 6)), [W, 16 * R, 32])


@triton.jit
def right_operand(tokens, dtype, W: tl.constexpr, N: tl.constexpr):
    """Pairs of activations of a slab `[t, g, warp, token / 8, (j kh)]` -> `[warp, 32, N]`."""
    x = tl.reshape(halves(tokens, dtype), [4, 8, W, N // 8, 2, 2, 2])
    x = tl.permute(x, (2, 5, 0, 4, 6, 3, 1))  # t g w nt j kh e -> w (kh t j e) (nt g)
    return tl.reshape(x, [W, 32, N])


@triton.jit
def rows_like_products(rows, W: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """A value a row `[t, g, warp, tile, rh]` -> `[warp, rows, N]`, the shape of products."""
    rows = tl.reshape(tl.permute(rows, (2, 3, 4, 1, 0)), [W, R, 2, 8, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(rows, [W, R, 2, 8, N // 8, 4, 2]), [W, 16 * R, N])


@triton.jit
def decode_half(loaded, tables, levels_ptr, tiles, like_ptr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
                POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                ZEROS: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, R: tl.constexpr, H: tl.constexpr):  # fmt: skip
    """Planes 8 H .. 8 H + 7 of a block, `[lane, warp, tile, (kh rh), e]`: levels, or steps of the grid times UNIT."""
    dtype = like_ptr.dtype.element_ty
    GROUPS: tl.constexpr = 256 // GROUP if GROUP > 0 and GROUP < 256 else 1
    OWN: tl.constexpr = GROUPS // 2 if GROUPS > 1 else 1  # groups of a half
    BIAS: tl.constexpr = 1024 if BITS == 8 and dtype == tl.float16 else 0  # `zero_bias` of words.py
    zeros = ()
    if ZEROS and GROUP == 0:
        zeros = tables  # a zero point a row rides there
    elif ZEROS:
        FIRST: tl.constexpr = BITS + GROUPS + (H * OWN if GROUPS > 1 else 0)
        zeros = loaded[FIRST : FIRST + OWN]
    if ASM is None:
        planes = _decode_plain(
            loaded, zeros, levels_ptr, tiles, dtype, POSITIONS, CODEBOOK, BITS, GROUPS, W, R, H
        )
    else:
        operands = ()
        if CODEBOOK:
            operands = tables
        elif ZEROS:
            for i in tl.static_range(OWN):
                operands = operands + (_zero_pairs(zeros[i], BIAS, UNIT, dtype, W, R),)
        pairs = tl.inline_asm_elementwise(
            ASM[H], CONSTRAINTS, loaded[:BITS] + operands, dtype=(tl.int32,) * 8, is_pure=True, pack=1
        )
        planes = ()
        for i in tl.static_range(8):
            planes = planes + (halves(pairs[i], dtype),)
    return planes


@triton.jit
def load_tables(s_ptr, z_ptr, tiles, CODEBOOK: tl.constexpr, TABLES: tl.constexpr, GROUP: tl.constexpr,
                W: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """What belongs to the rows for the whole launch: byte tables of a codebook, or one zero point a row."""
    tables = ()
    same = tl.arange(0, W)[:, None] * 0 + tiles
    if CODEBOOK:
        for i in tl.static_range(TABLES):
            tables = tables + (_like_words(tl.load(s_ptr + row_offsets(same * TABLES + i)), W, R),)
    elif z_ptr is not None and GROUP == 0:
        tables = (tl.load(z_ptr + row_offsets(same)),)
    return tables


@triton.jit
def load_slots(si_ptr, sv_ptr, first, last, SLOTS: tl.constexpr):
    """Columns and residuals of `SLOTS` chunks of 8 from chunk `first` of every row on: `[rows, SLOTS, 8]`."""
    row, chunk, eight = tl.arange(0, first.shape[0]), tl.arange(0, SLOTS), tl.arange(0, 8)
    chunks = first[:, None] + chunk[None, :]
    at = chunks[:, :, None].to(tl.int64) * 128 + (row % 16)[:, None, None] * 8 + eight[None, None, :]
    inside = (chunks < last[:, None])[:, :, None]
    column = tl.load(si_ptr + at, mask=inside, other=0, eviction_policy="evict_first").to(tl.int32) & 0xFFFF
    return column, tl.load(sv_ptr + at, mask=inside, other=0, eviction_policy="evict_first")


def operands(
    layout: Layout, dtype: torch.dtype, asm: bool
) -> tuple[tuple[Tensor | None, ...], dict[str, object]]:
    """The weight's arguments of a kernel (words, scales or tables, zero points, levels) and its decoding constants."""
    name = "fp16" if dtype == torch.float16 else "bf16"
    codebook = isinstance(layout, CodebookLayout)
    use_asm = asm and not (codebook and layout.bits > 4)
    if codebook:
        tables = 1 << (layout.bits - 1) if use_asm else 0
        group, inputs = 0, tables
        scales = layout.levels if layout.tables is None else layout.tables[int(name == "bf16")]
        tensors = (layout.packed_codes, scales, None, layout.levels)
        texts = [codebook_dequant_ptx(layout.bits, half) for half in range(2)] if use_asm else None
    else:
        tables, group = 0, layout.kernel_group
        groups = 0 if layout.zero_points is None else max(1, 256 // group) if group else 1
        inputs = groups // 2 if groups > 1 else groups
        tensors = (layout.packed_codes, layout.scales, layout.zero_points, None)
        texts = [grid_dequant_ptx(layout.bits, name, groups, half) for half in range(2)] if use_asm else None
    return tensors, {
        "ASM": None if texts is None else tuple(texts),
        "CONSTRAINTS": asm_constraints(layout.bits + inputs) if use_asm else None,
        "POSITIONS": None if use_asm else flat_bit_positions("codebook" if codebook else "grid", layout.bits),
        "CODEBOOK": codebook,
        "BITS": layout.bits,
        "TABLES": tables,
        "GROUP": group,
        "UNIT": GRID_STEP[name] if use_asm else 1.0,
    }


def sparse_operands(layout: Any) -> tuple[Tensor | None, ...]:
    """rows, starts, columns, values and row scales; None where the layout has no sparse part."""
    sparse = layout.sparse
    if sparse is None:
        return layout.row_perm, None, None, None, None
    return layout.row_perm, sparse.slice_ptr, sparse.columns, sparse.values, sparse.row_scales


def dense_tokens(x: Tensor, layout: Layout) -> Tensor:
    """The activations that meet the dense part: divided by `column_scales` where there are any."""
    if isinstance(layout, CodebookLayout) or layout.column_scales is None:
        return x
    return x / layout.column_scales.to(x.dtype)
