"""Hadamard transform on tensor cores for few tokens: one CTA of 16 warps per token and tile of 4096 values.

A block of S = 2^s values mixes the s bits of the index one by one, in any order. A CTA computes one tile of a block:

    bits 12 and up   the S / 4096 tiles of the block are added with signs while they are loaded
    bits 0 to 11     by PTX (`tile_ptx.py`): three products with 16 x 16 matrices of signs, the last across the warps. Blocks
                     of less than 4096 do not mix the bits from s on, which makes signs zeros and ones

With few tokens a launch waits for its longest CTA, so the unit of work is a tile even if a block has several. In int8 the
largest value of a tile gives its scale.

The PTX requires 8 of a warp's 256 adjacent values in every lane, no matter which (a transform over all bits is independent
of their numbering): 16-byte loads give that, and a test checks the compiled layout.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch
from requant_kernels.hadamard.tile_builder import HADAMARD_TILE
from requant_kernels.hadamard.tile_ptx import tile_transform_ptx


@triton.jit
def hadamard_entry(i, j, MASK: tl.constexpr):
    """bfloat16 bits of entry (i, j), i and j below 16: signs over the bits of MASK, the identity over the others."""
    odd = (0x6996 >> (i & j & MASK)) & 1  # parity of four bits
    return tl.where(((i ^ j) & (15 & ~MASK)) == 0, 0x3F80 | (odd << 15), 0)


@triton.jit
def sign_pair(g, t, MASK: tl.constexpr):
    """Entries (g, t) and (g, t + 1), as a lane holds them in the left MMA operand."""
    return hadamard_entry(g, t, MASK) | (hadamard_entry(g, t + 1, MASK) << 16)


@triton.jit
def tile_factors(
    input_scales_ptr, first_tile, own, position, in_width, TILES: tl.constexpr, FACTOR: tl.constexpr
):
    """The factors of a block's TILES tiles when they are added to its tile `own`: signs times scales."""
    factors = ()
    for p in tl.static_range(TILES):
        bits = own & p
        bits ^= bits >> 4
        factor = (1 - 2 * ((0x6996 >> (bits & 15)) & 1)).to(tl.float32) * FACTOR
        if input_scales_ptr is not None:
            source = (first_tile + p) * 4096 + position
            factor *= tl.load(input_scales_ptr + source, mask=source < in_width, other=0.0).to(tl.float32)
        factors = factors + (factor,)
    return factors


@triton.jit
def hadamard_tile_kernel(
    x_ptr, input_scales_ptr, output_scales_ptr, bias_ptr, addend_ptr, y_ptr, scales_ptr, in_width, out_width, stride_x,
    stride_y, PTX: tl.constexpr, TILES: tl.constexpr, VECTOR: tl.constexpr, WARP_MASK: tl.constexpr,
    FACTOR: tl.constexpr, PAIR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of one token; grid (tokens, tiles), 16 warps.

    TILES: per block; VECTOR: values per load; WARP_MASK: the mixed bits from bit 8 on; PAIR: bit 0 is not mixed.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_tile, own = tile // TILES * TILES, tile % TILES
    lane, warp = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 16)[None, :, None, None]
    eight = (
        tl.arange(0, 8 // VECTOR)[None, None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, None, :]
    )
    position = warp * 256 + lane * 8 + eight
    g, t = lane // 4 + eight * 0 + warp * 0, lane % 4 * 2
    second = sign_pair(g, t, 7)
    first = second
    if PAIR:  # bit 0 is the lowest one of a lane's registers
        first = sign_pair(g, t, 6)
    third = sign_pair(g, t, WARP_MASK)
    at = tile * 4096 + (g + 8 * (eight // 4)) * 256 + warp * 16 + t * 2 + eight % 4
    inside = at < out_width
    factors = tile_factors(input_scales_ptr, first_tile, own, position, in_width, TILES, FACTOR)
    if output_scales_ptr is not None:
        output_scales = tl.load(output_scales_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous_launch(PDL, False)
    x = ()
    for p in tl.static_range(TILES):
        source = (first_tile + p) * 4096 + position
        x = x + (tl.load(x_ptr + token * stride_x + source, mask=source < in_width, other=0.0),)
    z = tl.zeros([32, 16, 8 // VECTOR, VECTOR], tl.float32)
    if (
        in_width > 0
    ):  # always true; the branch keeps the loads together, which otherwise wait for one another's registers
        for p in tl.static_range(TILES):
            z += x[p].to(tl.float32) * factors[p]
    if scales_ptr is not None:
        high = y_ptr + 2 * token * stride_y + at - eight % 4 - eight // 4 * 2048
        low = high + stride_y
        scale = scales_ptr + (token * tl.num_programs(1) + tile) * 4 + position * 0
        tl.inline_asm_elementwise(
            PTX.text, PTX.constraints,
            (z, first, second, third, high.to(tl.int64), low.to(tl.int64), scale.to(tl.int64)),
            dtype=tl.float32, is_pure=False, pack=8,
        )  # fmt: skip
    else:
        y = tl.inline_asm_elementwise(
            PTX.text, PTX.constraints, (z, first, second, third), dtype=tl.float32, is_pure=False, pack=8
        )
        if output_scales_ptr is not None:
            y *= output_scales
        if bias_ptr is not None:
            y += bias
        if addend_ptr is not None:
            y += tl.load(addend_ptr + token * out_width + at, mask=inside, other=0.0)
        tl.store(y_ptr + token * stride_y + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def transform_tiles(
    x: Tensor, y: Tensor, scales: Tensor | None, *, block_size: int, tiles: int, in_width: int, out_width: int, pdl: bool,
    input_scales: Tensor | None = None, output_scales: Tensor | None = None, bias: Tensor | None = None,
    addend: Tensor | None = None, pair: bool = False, factor: float = 1.0,
) -> None:  # fmt: skip
    """Write y, `tiles` tiles of every token of x [m, in_width]; with `scales` in int8. See `hadamard_transform`."""
    warp_mask = min(block_size, HADAMARD_TILE) - 1 >> 8
    launch(
        hadamard_tile_kernel,
        (x.shape[0], tiles, 1),
        (
            x, input_scales, output_scales, bias, addend, y, scales, in_width, out_width, x.stride(0), y.stride(0),
        ),
        interned(
            PTX=tile_transform_ptx(mix_bit_11=warp_mask >= 8, int8=scales is not None),
            TILES=max(1, block_size // HADAMARD_TILE), VECTOR=16 // x.element_size() if x.element_size() > 2 else 8,
            WARP_MASK=warp_mask, FACTOR=factor * block_size**-0.5 * (2 if pair else 1), PAIR=pair, PDL=pdl, num_warps=16,
            num_stages=1, **pdl_option(pdl),
        ),
    )  # fmt: skip
