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

from requant_kernels.hadamard.registers import (
    TileTransform,
    butterfly,
    load_eight,
    signs_of,
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
def load_product(pointer, token, index, width, SOURCE: tl.constexpr, TRANSFORM: tl.constexpr):
    """A thread's eight values of a tile, split-K partial sums added, times their scale and the transform's factor. `index`:
    position in the product."""
    NEXT: tl.constexpr = 1 << TRANSFORM.order[2]
    FACTOR: tl.constexpr = TRANSFORM.factor * SOURCE.scale
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
    scaled = ()
    for i in tl.static_range(8):
        scaled = scaled + (found[i].to(tl.float32) * FACTOR,)
    return scaled


@triton.jit
def rotate(
    values, lane, smem, NUMBER: tl.constexpr, WAITS: tl.constexpr, TRANSFORM: tl.constexpr, CROSSES: tl.constexpr
):  # fmt: skip
    """H times the values of one tile, or of two, which CROSSES mixes. NUMBER, WAITS: see `transform`."""
    if CROSSES:
        sums, differences = butterfly(values[0:8], values[8:16])
        values = sums + differences
    signs = signs_of(lane, TRANSFORM.masks[0], TRANSFORM.masks[1], TRANSFORM.masks[2])
    return transform(values, signs, smem, NUMBER, WAITS, TRANSFORM)


@triton.jit
def finished(value, output_scale, bias, DTYPE: tl.constexpr):
    """One output of a linear layer, rounded."""
    value = value * output_scale.to(tl.float32)
    if bias is not None:
        value += bias.to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def rotate_and_store(
    values, input_scales, lane, held, smem, token, tile, y_ptr, scales_ptr,
    NUMBER: tl.constexpr, WAITS: tl.constexpr, TARGET: tl.constexpr, CROSSES: tl.constexpr,
):  # fmt: skip
    """Store the activations H (input_scales * values) of the tiles from `tile` on. held: the index, in a tile, of a thread's
    first value after the transform. NUMBER, WAITS: see `transform`."""
    T: tl.constexpr = TARGET.transform
    FACTOR: tl.constexpr = T.factor
    COUNT: tl.constexpr = len(values) // 8
    z = ()
    for i in tl.static_range(8 * COUNT):
        z = z + (values[i].to(tl.float32) * (input_scales[i].to(tl.float32) * FACTOR),)
    if scales_ptr is None:
        z = rotate(z, lane, smem, NUMBER, WAITS, T, CROSSES)
        for t in tl.static_range(COUNT):
            _store_float16(
                y_ptr + token * TARGET.columns, (tile + t) * 4096 + held, z[8 * t : 8 * t + 8], TARGET
            )
    else:
        if CROSSES:
            sums, differences = butterfly(z[0:8], z[8:16])
            z = sums + differences
        signs = signs_of(lane, T.masks[0], T.masks[1], T.masks[2])
        for t in tl.static_range(COUNT):
            high = y_ptr + 2 * token * TARGET.columns + (tile + t) * 4096 + held
            scale = scales_ptr + (token * TARGET.num_tiles + tile + t) * 4
            transform_to_int8(
                z[8 * t : 8 * t + 8], signs, smem, high, high + TARGET.columns, scale, NUMBER + t, WAITS and t == 0, T
            )  # fmt: skip


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
