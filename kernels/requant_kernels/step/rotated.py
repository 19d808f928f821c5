"""What the kernels between trellis matrices share: finishing products and rotating activations, in registers.

    y = output_scales * H product + bias            as in `trellis/rotate.py`, rounded to the type of activations
    activations = H (input_scales * y)              in the form that the next product reads (`trellis/operands.py`)

Both rotations of a tile of 4096 values are those of `hadamard/registers.py`, so the operations between them cost no launch,
and no memory traffic except for what persists: the residual stream, keys and values.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

from dataclasses import dataclass

import triton
import triton.language as tl

from requant_kernels.common.ptx import Ptx, inline_ptx, ptx_float
from requant_kernels.hadamard.registers import (
    ALLOCATE,
    EXCHANGE,
    SUM_OF_WARPS,
    SUM_WARP,
    TileTransform,
    butterfly,
    load_eight,
    sum_of_warps,
    tile_transform,
    transform,
    transform_to_int8,
)
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.trellis.operands import ActivationForm

NUM_WARPS = 16
MAX_TILES = 2  # per CTA, so that a thread's values fit in registers


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The form in which a kernel writes rotated activations."""

    transform: TileTransform
    columns: int
    num_tiles: int
    permute: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """The PTX of these kernels beside that of the transforms."""

    allocate: Ptx = ALLOCATE
    exchange: Ptx = EXCHANGE
    sum_warp: Ptx = SUM_WARP
    sum_of_warps: tuple[Ptx, Ptx] = SUM_OF_WARPS  # after a transform; after a barrier of its own
    round_fp16: Ptx
    round_bf16: Ptx
    sigmoid: Ptx


def _rounding(conversion: list[str], registers: dict[str, str]) -> Ptx:
    """Two float32 in a type of 16 bits, and back."""
    outputs, inputs = {"low": "=f", "high": "=f"}, {"first": "f", "second": "f"}
    return inline_ptx(conversion, outputs=outputs, inputs=inputs, registers=registers)


ASSEMBLY = Assembly(
    round_fp16=_rounding(
        [
            "cvt.rn.f16x2.f32 pair, $second, $first; mov.b32 {l, h}, pair;",
            "cvt.f32.f16 $low, l; cvt.f32.f16 $high, h;",
        ],
        {"b32": "pair", "b16": "l, h"},
    ),
    round_bf16=_rounding(
        [
            "cvt.rn.bf16x2.f32 pair, $second, $first;",
            "shl.b32 $low, pair, 16; and.b32 $high, pair, 0xffff0000;",
        ],
        {"b32": "pair"},
    ),
    # both approximations are accurate to 2^-22, but make 0 of what is below 2^-126
    sigmoid=inline_ptx(
        [
            f"mul.f32 e, $z, {ptx_float(-1.4426950408889634)}; ex2.approx.ftz.f32 e, e;",
            f"add.f32 e, e, {ptx_float(1.0)}; rcp.approx.ftz.f32 $y, e;",
        ],
        outputs={"y": "=f"},
        inputs={"z": "f"},
        registers={"f32": "e"},
    ),
)


def target_of(form: ActivationForm, order: tuple[int, ...], width: int) -> Target:
    """The target for activations of `width` values stored in `order`."""
    return Target(
        transform=tile_transform(order, width & -width, int8=form.int8, pair=form.pair), columns=form.columns,
        num_tiles=-(-width // HADAMARD_TILE), permute=form.permute,
    )  # fmt: skip


def tiles_of_block(width: int) -> int:
    """Tiles per Hadamard block of a width: 1 if a tile holds several blocks."""
    return max(1, (width & -width) // HADAMARD_TILE)


@triton.jit
def output_factors(scales, SOURCE: tl.constexpr, TRANSFORM: tl.constexpr):
    """What outputs are multiplied by after the transform: their scales, that of the product, the transform's factor."""
    FACTOR: tl.constexpr = TRANSFORM.factor * SOURCE.scale
    found = ()
    for i in tl.static_range(len(scales)):
        found = found + (scales[i].to(tl.float32) * FACTOR,)
    return found


@triton.jit
def load_product(pointer, token, index, width, SOURCE: tl.constexpr, TRANSFORM: tl.constexpr):
    """A thread's eight values of a tile, split-K partial sums added, without their factors. `index`: position in the
    product."""
    NEXT: tl.constexpr = 1 << TRANSFORM.order[2]
    SPLITS: tl.constexpr = SOURCE.splits
    row = pointer + token * SOURCE.row_stride
    found = load_eight(row, index, width, NEXT)
    for split in tl.static_range(1, SPLITS):
        more = load_eight(
            row + split * tl.num_programs(1).to(tl.int64) * SOURCE.row_stride, index, width, NEXT
        )
        total = ()
        for i in tl.static_range(8):
            total = total + (found[i].to(tl.float32) + more[i].to(tl.float32),)
        found = total
    values = ()
    for i in tl.static_range(8):
        values = values + (found[i].to(tl.float32),)
    return values


@triton.jit
def rotate(
    values, signs, exchange, NUMBER: tl.constexpr, WAITS: tl.constexpr, TRANSFORM: tl.constexpr, CROSSES: tl.constexpr
):  # fmt: skip
    """H times the values of one tile, or of two, which CROSSES mixes. NUMBER, WAITS: see `transform`."""
    if CROSSES:
        sums, differences = butterfly(values[0:8], values[8:16])
        values = sums + differences
    return transform(values, signs, exchange, NUMBER, WAITS, TRANSFORM)


@triton.jit
def rounded(values, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The values as DTYPE holds them, in float32. Two at a time, which is one conversion."""
    PTX: tl.constexpr = ASM.round_fp16 if tl.float16 == DTYPE else ASM.round_bf16
    found = ()
    for i in tl.static_range(len(values) // 2):
        found = found + tl.inline_asm_elementwise(
            PTX.text,
            PTX.constraints,
            values[2 * i : 2 * i + 2],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return found


@triton.jit
def output_of(value, factor, bias):
    """One output of a linear layer."""
    value = value * factor
    if bias is not None:
        value += bias.to(tl.float32)
    return value


@triton.jit
def outputs_of(values, factors, bias):
    """A thread's; `bias`: empty if there is none."""
    found = ()
    for i in tl.static_range(len(values)):
        found = found + (output_of(values[i], factors[i], bias[i] if len(bias) > 0 else None),)
    return found


@triton.jit
def sigmoid(z, ASM: tl.constexpr):
    """1 / (1 + e^-z)."""
    PTX: tl.constexpr = ASM.sigmoid
    return tl.inline_asm_elementwise(PTX.text, PTX.constraints, (z,), dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def input_factors(scales, TARGET: tl.constexpr):
    """What activations are multiplied by before the transform: their scales, and its factor."""
    FACTOR: tl.constexpr = TARGET.transform.factor
    found = ()
    for i in tl.static_range(len(scales)):
        found = found + (scales[i].to(tl.float32) * FACTOR,)
    return found


@triton.jit
def rotate_and_store(
    values, signs, exchange, lane, warp, held, smem, token, tile, y_ptr, scales_ptr, eps,
    NUMBER: tl.constexpr, WAITS: tl.constexpr, TARGET: tl.constexpr, CROSSES: tl.constexpr, WIDTH: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Store the activations H values of the tiles from `tile` on; `values`: float32, times their `input_factors`.

    held: the index, in a tile, of a thread's first value after the transform. signs, exchange, NUMBER, WAITS: see
    `transform`.

    With `eps` all are divided, after their transform, by the root of the mean of the WIDTH squares that `sum_warp` has
    added: so no thread waits for that sum.
    """
    T: tl.constexpr = TARGET.transform
    COUNT: tl.constexpr = len(values) // 8
    if scales_ptr is None:
        z = rotate(values, signs, exchange, NUMBER, WAITS, T, CROSSES)
        if eps is not None:
            scale = tl.rsqrt(sum_of_warps(lane, smem, False, ASM) / WIDTH + eps)
            scaled = ()
            for i in tl.static_range(8 * COUNT):
                scaled = scaled + (z[i] * scale,)
            z = scaled
        for t in tl.static_range(COUNT):
            _store_float16(
                y_ptr + token * TARGET.columns, (tile + t) * 4096 + held, z[8 * t : 8 * t + 8], TARGET
            )
    else:
        z = values
        if CROSSES:
            sums, differences = butterfly(z[0:8], z[8:16])
            z = sums + differences
        for t in tl.static_range(COUNT):
            high = y_ptr + 2 * token * TARGET.columns + (tile + t) * 4096 + held
            scale, total, high_total, squares = transform_to_int8(
                z[8 * t : 8 * t + 8], signs, exchange, smem, high, high + TARGET.columns, NUMBER + t, WAITS and t == 0, T
            )  # fmt: skip
            if eps is not None:
                scale *= tl.rsqrt(squares / WIDTH + eps)
            four = tl.join(tl.join(scale, scale * 256.0), tl.join(total, high_total))
            at = (token * TARGET.num_tiles + tile + t) * 4 + tl.arange(0, 4)[None, :] + lane[:, None] * 0
            first = (lane == 0) & (warp == 0)
            tl.store(scales_ptr + at, tl.reshape(four, [512, 4]), mask=first[:, None])


@triton.jit
def _store_float16(pointer, index, values, TARGET: tl.constexpr):
    """Two neighbours at a time, in the order of `trellis/gemm_sm90.py` if TARGET permutes."""
    NEXT: tl.constexpr = 1 << TARGET.transform.after[2]
    for pair in tl.static_range(4):
        at = index + (pair // 2) * NEXT + (pair % 2) * 2
        inside = at < TARGET.columns
        if TARGET.permute:
            at = at // 64 * 64 + at // 2 % 8 * 8 + at // 16 % 4 * 2
        both = tl.join(values[2 * pair], values[2 * pair + 1]).to(pointer.dtype.element_ty)
        tl.store(pointer + at[:, None] + tl.arange(0, 2)[None, :], both, mask=inside[:, None])
