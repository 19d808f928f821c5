"""From the parts of attention to o's product in one launch: combine the parts of every head (`attention.py`), rotate.

    y = sum_i 2^(z_i) o_i / sum_i 2^(z_i);   activations = H (input_scales * y)

A CTA has a tile of a token, or a block of two tiles, all heads of which it combines, with up to MOST_PARTS parts each: more
would take longer than `combine_kernel`, which has a CTA for every head, and a launch for the rotation. y is not rounded.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.occupancy import apart_smem_bytes
from requant_kernels.common.pdl import wait_with
from requant_kernels.hadamard.registers import (
    NATURAL,
    allocate_smem,
    exchange_in,
    index_of,
    lane_and_warp,
    load_eight,
    signs_of,
)
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.step.attention import BLOCK, AttentionParts, part_length
from requant_kernels.step.rotated import (
    ASSEMBLY,
    MAX_TILES,
    NUM_WARPS,
    Target,
    input_factors,
    rotate_and_store,
    target_of,
    tiles_of_block,
)
from requant_kernels.trellis.operands import ActivationForm, RotatedActivations

MOST_PARTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """What `rotated_attention_kernel` is compiled for."""

    width: int
    num_tiles: int  # per CTA
    crosses: bool  # a Hadamard block is two tiles
    head_dim: int
    parts: int
    block: int  # positions that a part has a multiple of
    target: Target


@triton.jit
def _combined_eight(o_ptr, z_ptr, token, at, parts, count, SHAPE: tl.constexpr):
    """A thread's eight neighbours of a token from `at` on, of `count` parts."""
    D: tl.constexpr = SHAPE.head_dim
    PARTS: tl.constexpr = SHAPE.parts
    WIDTH: tl.constexpr = SHAPE.width
    inside = at < WIDTH
    head = token * (WIDTH // D) + tl.where(inside, at, 0) // D
    z, o = (), ()
    for p in tl.static_range(PARTS):  # all at once, so that none waits for another
        there = inside & (p < count)
        z = z + (tl.load(z_ptr + head * parts + p, mask=there, other=float("-inf")),)
    for p in tl.static_range(PARTS):
        there = inside & (p < count)
        first = (head * parts + p) * D + at % D
        for half in tl.static_range(2):
            four = tl.load(
                o_ptr + first[:, None] + 4 * half + tl.arange(0, 4)[None, :], mask=there[:, None], other=0.0
            )
            even, odd = tl.split(tl.reshape(four, [512, 2, 2]))
            a, c = tl.split(even)
            b, d = tl.split(odd)
            o = o + (a, b, c, d)
    top = z[0]
    for p in tl.static_range(1, PARTS):
        top = tl.maximum(top, z[p])
    top = tl.where(inside, top, 0.0)
    weight, total = (), top * 0.0
    for p in tl.static_range(PARTS):
        weight = weight + (tl.exp2(z[p] - top),)
        total += weight[p]
    found = ()
    for i in tl.static_range(8):
        y = top * 0.0
        for p in tl.static_range(PARTS):
            y += weight[p] * o[8 * p + i]
        found = found + (tl.where(inside, y / total, 0.0),)
    return found


# keep `parts` specialized to 1
@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["parts"])
def rotated_attention_kernel(
    o_ptr, z_ptr, position_ptr, input_scales_ptr, y_ptr, scales_ptr, length, parts,
    SHAPE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`num_tiles` tiles of one token; grid (tiles / num_tiles, tokens). Without z, o is the output of the attention."""
    COUNT: tl.constexpr = SHAPE.num_tiles
    WIDTH: tl.constexpr = SHAPE.width
    TARGET: tl.constexpr = SHAPE.target
    TRANSFORM: tl.constexpr = TARGET.transform
    BEFORE: tl.constexpr = TRANSFORM.order
    HELD: tl.constexpr = TRANSFORM.after
    NEXT: tl.constexpr = 1 << TRANSFORM.order[2]
    token, tile = tl.program_id(1).to(tl.int64), tl.program_id(0) * COUNT
    lane, warp = lane_and_warp()
    first = tile * 4096 + index_of(lane, warp, BEFORE)
    held = index_of(lane, warp, HELD)
    smem = allocate_smem(lane, ASM)
    factors = ()
    for t in tl.static_range(COUNT):  # what no previous launch has written
        factors = factors + load_eight(input_scales_ptr, t * 4096 + first, WIDTH, NEXT)
    if position_ptr is not None:
        length = tl.minimum(length, tl.load(position_ptr).to(tl.int32) + 1)
    count = tl.cdiv(length, part_length(length, parts, SHAPE.block))
    factors, integers = wait_with(
        input_factors(factors, TARGET),
        signs_of(lane, TRANSFORM) + exchange_in(smem, lane, warp, ASM) + (first // 8, held // 4), PDL, False,
    )  # fmt: skip
    signs, exchange, first, held = integers[0:3], integers[3:7], 8 * integers[7], 4 * integers[8]
    values = ()
    for t in tl.static_range(COUNT):
        at = t * 4096 + first
        if z_ptr is None:
            y = load_eight(o_ptr + token * WIDTH, at, WIDTH, NEXT)
        else:
            y = _combined_eight(o_ptr, z_ptr, token, at, parts, count, SHAPE)
        for i in tl.static_range(8):
            values = values + (y[i].to(tl.float32) * factors[8 * t + i],)
    rotate_and_store(
        values, signs, exchange, lane, warp, held, smem, token, tile, y_ptr, scales_ptr, None, 0, False, TARGET,
        SHAPE.crosses, WIDTH, ASM,
    )  # fmt: skip


def supports(width: int, head_dim: int, parts: int) -> bool:
    """Whether a CTA holds a Hadamard block of this many values, of heads in so many parts."""
    return (
        width % 16 == 0 and tiles_of_block(width) <= MAX_TILES and head_dim % 8 == 0 and parts <= MOST_PARTS
    )


def rotated_attention(
    found: AttentionParts, *, input_scales: Tensor, form: ActivationForm
) -> RotatedActivations:
    """The output of an attention, rotated for the matrix that reads it. Its position is read before the previous launch has
    finished, as by `attend`."""
    m, heads, head_dim = found.values.shape[0], found.values.shape[1], found.values.shape[-1]
    width, device = heads * head_dim, found.values.device
    rotated = form.empty(m, device)
    ctas = -(-width // (tiles_of_block(width) * HADAMARD_TILE))
    launch(
        rotated_attention_kernel,
        (ctas, m, 1),
        (
            found.values, found.logs, found.position, input_scales, rotated.values, rotated.scales, found.length,
            found.count,
        ),
        _constants(width, head_dim, found.count, form, supports_pdl(device)),
        smem_bytes=apart_smem_bytes(ctas * m, device),
    )  # fmt: skip
    return rotated


@cache
def _constants(width: int, head_dim: int, parts: int, form: ActivationForm, pdl: bool) -> dict[str, object]:
    options: dict[str, object] = {"launch_pdl": True} if pdl else {}
    tiles = tiles_of_block(width)
    shape = AttentionShape(
        width=width, num_tiles=tiles, crosses=tiles > 1, head_dim=head_dim, parts=parts, block=BLOCK,
        target=target_of(form, NATURAL, width),
    )  # fmt: skip
    return {
        "SHAPE": shape, "ASM": ASSEMBLY, "PDL": pdl, "num_warps": NUM_WARPS, "num_stages": 1, **options,
    }  # fmt: skip
