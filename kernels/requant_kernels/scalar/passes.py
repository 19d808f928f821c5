"""Residuals of one token in passes: eight of a row a lane, on their way through shared memory while blocks are multiplied.

A pass takes as many chunks (`layouts.py`) of a tile as its warps have lanes for: a lane has 8 slots of one row, 16 bytes of
columns and 16 of values, which it copies for itself (`copies.py`) before the first block and reads after the last one. The
activations lie in shared memory, where 32 gathers of two bytes meet in a bank three or four times, and not, as in the cache,
at a line each. A tile with more chunks than the passes have room for takes the rest in a loop.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none

import triton
import triton.language as tl

from requant_kernels.scalar import copies

PASS_BYTES = 1024  # of a warp
MOST_PASSES = 4

# $0 = $4 + two residuals times the activations of their columns; $1: columns, $2: values, $3: where activations lie
_PRODUCTS = """{ .reg .b32 l, h; .reg .b16 a, b, c, d; .reg .f32 x, y, v, w;
and.b32 l, $1, 0xFFFF; shr.u32 h, $1, 16;
mad.lo.u32 l, l, 2, $3; mad.lo.u32 h, h, 2, $3;
ld.shared.b16 a, [l]; ld.shared.b16 b, [h];
mov.b32 {c, d}, $2; cvt.f32.f16 v, c; cvt.f32.f16 w, d; WIDEN
fma.rn.f32 x, x, v, $4; fma.rn.f32 $0, y, w, x; }"""
PRODUCTS = {
    "fp16": _PRODUCTS.replace("WIDEN", "cvt.f32.f16 x, a; cvt.f32.f16 y, b;"),
    "bf16": _PRODUCTS.replace("WIDEN", "mov.b16 c, 0; mov.b32 x, {c, a}; mov.b32 y, {c, b};"),
}


@triton.jit
def slots_of(first, W: tl.constexpr, R: tl.constexpr):
    """Of every lane, `[2 W / R, rows, 4]`: its chunk, and its first slots' place in pairs; `first` `[rows]`, chunks."""
    chunk = first[None, :] + tl.arange(0, 2 * W // R)[:, None]
    at = chunk.to(tl.int64) * 64 + (tl.arange(0, 16 * R) % 16)[None, :] * 4
    return chunk[:, :, None], at[:, :, None] + tl.arange(0, 4)[None, None, :]


@triton.jit
def request_slots(si_ptr, sv_ptr, first, end, place, never, PASSES: tl.constexpr, W: tl.constexpr,
                  R: tl.constexpr):  # fmt: skip
    """Begin to copy what the passes take of chunks `first` to `end` `[rows]`; where a lane's first 16 bytes go."""
    columns, values = si_ptr.to(tl.pointer_type(tl.int32)), sv_ptr.to(tl.pointer_type(tl.int32))
    chunk, at = slots_of(first, W, R)
    WIDE: tl.constexpr = 2 * W // R
    lane = tl.arange(0, WIDE)[:, None, None] + tl.arange(0, 16 * R)[None, :, None] * WIDE
    mine = copies.anchor(columns, at, never) + place + lane * 16
    for i in tl.static_range(PASSES):
        inside = (chunk + i * WIDE < end[None, :, None]).to(tl.int32)
        copies.request(mine + i * (1024 * W), columns + at + i * (64 * WIDE), inside)
        copies.request(mine + i * (1024 * W) + 512 * W, values + at + i * (64 * WIDE), inside)
    return mine


@triton.jit
def most_chunks(sp_ptr, last_tile, R: tl.constexpr):
    """The most chunks of a tile of this program."""
    most = 0
    for r in tl.static_range(R):
        tile = tl.minimum(tl.program_id(0) * R + r, last_tile)
        most = tl.maximum(most, tl.load(sp_ptr + tile + 1) - tl.load(sp_ptr + tile))
    return most


@triton.jit
def _products(sums, columns, values, base, ASM: tl.constexpr):
    """sums `[2 W / R, rows, 4]` += two residuals each."""
    return tl.inline_asm_elementwise(
        ASM, "=f,r,r,r,f", [columns, values, base, sums], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def take_slots(si_ptr, sv_ptr, first, end, longest, mine, base, ASM: tl.constexpr, PASSES: tl.constexpr,
               W: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """The sums of all residuals, `[rows]`; activations from shared address `base` on; `longest`: most chunks of a tile."""
    WIDE: tl.constexpr = 2 * W // R
    columns, values = si_ptr.to(tl.pointer_type(tl.int32)), sv_ptr.to(tl.pointer_type(tl.int32))
    chunk, at = slots_of(first, W, R)
    sums = tl.zeros([WIDE, 16 * R, 4], tl.float32)
    copies.wait(0)
    for i in tl.static_range(PASSES):
        inside = chunk + i * WIDE < end[None, :, None]
        column = tl.where(inside, copies.read(mine + i * (1024 * W)), 0)
        value = tl.where(inside, copies.read(mine + i * (1024 * W) + 512 * W), 0)
        sums = _products(sums, column, value, base, ASM)
    for i in range(PASSES, tl.cdiv(longest, WIDE)):
        inside = chunk + i * WIDE < end[None, :, None]
        column = tl.load(columns + at + i * (64 * WIDE), mask=inside, other=0)
        value = tl.load(values + at + i * (64 * WIDE), mask=inside, other=0)
        sums = _products(sums, column, value, base, ASM)
    return tl.sum(tl.sum(sums, 2), 0)
