"""The transform of a tile for kernels that keep its values in registers, and compute on them before and after.

Tensors are [512], one element per thread of 16 warps, and eight of them hold a tile of 4096 values. (With two dimensions
Triton would be free to assign elements to lanes and warps differently.) The *order* of a tile says which index bit of a
value each bit of its position represents: 3 bits for the eight, 5 for the lane, 4 for the warp. The products of
`tile_builder.py` mix the bits of the position, and move them:

    position      eight           lane                  warp
    before        o0 o1 o2        o3 o4 o5 o6 o7        o8 o9 o10 o11
    after         o0 o1 o11       o2 o3 o8 o9 o10       o4 o5 o6  o7

A Hadamard transform may mix its bits in any order, so the next transform takes the values where the first one left them:
nothing moves between the two. Blocks of less than 4096 leave the upper bits of the index unmixed, wherever they are: these
bits are masked out of a product's matrix of signs.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

from dataclasses import dataclass
from functools import cache, partial

import triton
import triton.language as tl

from requant_kernels.common.ptx import Ptx
from requant_kernels.hadamard.tile_builder import TF32_FACTOR, VALUES_BYTES
from requant_kernels.hadamard.tile_kernel import sign_pair
from requant_kernels.hadamard.tile_ptx import (
    allocate_smem_ptx,
    exchange_ptx,
    register_transform_int8_ptx,
    register_transform_ptx,
    sum_of_warps_ptx,
    sum_warp_ptx,
)

Order = tuple[int, ...]  # 12 bits of the index
NATURAL: Order = tuple(range(12))
# position bits that the rows of each product represent: three within a quadrant of signs, and one between quadrants
PRODUCTS = (((0, 3, 4), 1), ((5, 6, 7), 2), ((8, 9, 10), 11))
# Two buffers: with one tile at a time, a transform need not wait until all warps have read the previous one's exchange.
# Behind them 48 words of `transform_to_int8`, and 16 for the sums of warps.
BUFFER = tl.constexpr(VALUES_BYTES)
SUMS = tl.constexpr(2 * VALUES_BYTES + 192)
SMEM_BYTES = 2 * VALUES_BYTES + 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TileTransform:
    """Transforms of tiles in one order, with one block size."""

    order: Order
    after: Order
    masks: tuple[int, int, int]  # the bits that each product mixes
    factor: float  # of all values, before or after: to preserve lengths
    ptx: tuple[
        tuple[Ptx, Ptx], ...
    ]  # for one tile and, unless int8, for two; the second of each waits at a barrier


@cache
def tile_transform(order: Order, block_size: int, *, int8: bool = False, pair: bool = False) -> TileTransform:
    """`block_size`: a power of two from 16 on; from 8192 on `butterfly` mixes the bits above the eleventh.
    `int8`: the values are quantized and stored. `pair`: bit 0 is not mixed, and all values are doubled."""
    mixed = [1 << bit < block_size and not (pair and bit == 0) for bit in order]
    masks = tuple(sum(mixed[bit] << i for i, bit in enumerate(quadrant)) for quadrant, _ in PRODUCTS)
    first, second, third = (mixed[between] for _, between in PRODUCTS)
    if not first:
        raise ValueError(
            f"blocks of {block_size} values leave bit {order[1]} alone, which the first product mixes"
        )
    after = tuple(order[bit] for bit in (0, 1, 11, 2, 3, 8, 9, 10, 4, 5, 6, 7))
    makers = (
        [partial(register_transform_int8_ptx, second, third, next_four=1 << after[2])]
        if int8
        else [partial(register_transform_ptx, second, third, tiles=tiles) for tiles in (1, 2)]
    )
    ptx = tuple((make(waits=False), make(waits=True)) for make in makers)
    factor = TF32_FACTOR * block_size**-0.5 * (2 if pair else 1)
    return TileTransform(order=order, after=after, masks=masks, factor=factor, ptx=ptx)


ALLOCATE = allocate_smem_ptx(SMEM_BYTES)
EXCHANGE = exchange_ptx()
SUM_WARP = sum_warp_ptx()
SUM_OF_WARPS = sum_of_warps_ptx(waits=False), sum_of_warps_ptx(waits=True)


@triton.jit
def lane_and_warp():
    """Lane and warp of each of the 512 threads."""
    thread = tl.arange(0, 512)
    return thread % 32, thread // 32


@triton.jit
def index_of(lane, warp, ORDER: tl.constexpr):
    """The index in its tile of a thread's first value of eight. The fourth after it is `1 << ORDER[2]` further."""
    index = lane * 0
    for bit in tl.static_range(5):
        index += (lane >> bit & 1) * (1 << ORDER[3 + bit])
    for bit in tl.static_range(4):
        index += (warp >> bit & 1) * (1 << ORDER[8 + bit])
    return index


@triton.jit
def load_eight(pointer, index, width, NEXT_FOUR: tl.constexpr):
    """A thread's eight values, two times four neighbours, in the type of the pointer; zeros from `width` on, a multiple of
    16."""
    found = ()
    for half in tl.static_range(2):
        first = index + half * NEXT_FOUR
        at = first[:, None] + tl.arange(0, 4)[None, :]
        if width % 4096 == 0:
            four = tl.load(pointer + at)
        else:
            four = tl.load(pointer + at, mask=(first < width)[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(four, [512, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        found = found + (a, b, c, d)
    return found


@triton.jit
def store_eight(pointer, index, values, first_inside, second_inside, NEXT_FOUR: tl.constexpr):
    """The reverse of `load_eight`; a flag says whether the first (the second) four are inside."""
    for half in tl.static_range(2):
        first, inside = index, first_inside
        if half:
            first, inside = index + NEXT_FOUR, second_inside
        at = first[:, None] + tl.arange(0, 4)[None, :]
        even = tl.join(values[4 * half], values[4 * half + 2])
        odd = tl.join(values[4 * half + 1], values[4 * half + 3])
        four = tl.reshape(tl.join(even, odd), [512, 4]).to(pointer.dtype.element_ty)
        tl.store(pointer + at, four, mask=inside[:, None])


@triton.jit
def allocate_smem(lane, ASM: tl.constexpr):
    """The address of the shared memory in which all transforms of a kernel exchange their values."""
    PTX: tl.constexpr = ASM.allocate
    return tl.inline_asm_elementwise(
        PTX.text, PTX.constraints, (lane,), dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def sum_warp(values, lane, warp, smem, ASM: tl.constexpr):
    """Add the values [512] of each warp, for `sum_of_warps`."""
    PTX: tl.constexpr = ASM.sum_warp
    tl.inline_asm_elementwise(
        PTX.text, PTX.constraints, (values, lane, warp, smem + SUMS), dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def sum_of_warps(lane, smem, WAITS: tl.constexpr, ASM: tl.constexpr):
    """The sum of all 512 values, in every thread. WAITS: at a barrier; without, a transform was between."""
    PTX: tl.constexpr = ASM.sum_of_warps[WAITS]
    return tl.inline_asm_elementwise(
        PTX.text, PTX.constraints, (lane, smem + SUMS), dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def exchange_in(smem, lane, warp, ASM: tl.constexpr):
    """The addresses at which a thread writes and reads in all transforms of a kernel."""
    PTX: tl.constexpr = ASM.exchange
    types: tl.constexpr = (tl.int32,) * 4
    return tl.inline_asm_elementwise(
        PTX.text, PTX.constraints, (smem + lane * 0, lane, warp), dtype=types, is_pure=True, pack=1
    )


@triton.jit
def signs_of(lane, TRANSFORM: tl.constexpr):
    """A thread's signs for the three products."""
    MASKS: tl.constexpr = TRANSFORM.masks
    g, t = lane // 4, lane % 4 * 2
    return sign_pair(g, t, MASKS[0]), sign_pair(g, t, MASKS[1]), sign_pair(g, t, MASKS[2])


@triton.jit
def _buffer(exchange, NUMBER: tl.constexpr):
    """The addresses in the first or the second buffer."""
    found = ()
    for i in tl.static_range(4):
        found = found + (exchange[i] + NUMBER * BUFFER,)
    return found


@triton.jit
def transform(values, signs, exchange, NUMBER: tl.constexpr, WAITS: tl.constexpr, TRANSFORM: tl.constexpr):
    """H times the values of a tile, or of two at once, without the factor. signs: of TRANSFORM.

    NUMBER: index of the transform in its kernel, so that consecutive ones use different buffers. Two tiles use both; then
    WAITS must be set for this transform and the next.
    """
    types: tl.constexpr = (tl.float32,) * len(values)
    TILES: tl.constexpr = len(values) // 8
    PTX: tl.constexpr = TRANSFORM.ptx[TILES - 1][WAITS]
    START: tl.constexpr = 0 if TILES == 2 else NUMBER % 2
    return tl.inline_asm_elementwise(
        PTX.text,
        PTX.constraints,
        values + signs + _buffer(exchange, START),
        dtype=types,
        is_pure=False,
        pack=1,
    )


@triton.jit
def transform_to_int8(
    values, signs, exchange, smem, high, low, NUMBER: tl.constexpr, WAITS: tl.constexpr, TRANSFORM: tl.constexpr
):  # fmt: skip
    """The same in 16-bit fixed point, stored at the addresses of the thread's first high and low bytes. Returns the tile's
    scale, the sum of its integers, that of their high bytes, and that of what `sum_warp` has added, if it has, in every
    thread."""
    PTX: tl.constexpr = TRANSFORM.ptx[0][WAITS]
    zero = signs[0] * 0
    return tl.inline_asm_elementwise(
        PTX.text, PTX.constraints,
        values + signs + _buffer(exchange, NUMBER % 2)
        + (smem + 2 * BUFFER, (high + zero).to(tl.int64), (low + zero).to(tl.int64)),
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def butterfly(first, second):
    """Sums and differences of two tiles: the bit above the eleventh."""
    sums, differences = (), ()
    for i in tl.static_range(8):
        sums = sums + (first[i] + second[i],)
        differences = differences + (first[i] - second[i],)
    return sums, differences
