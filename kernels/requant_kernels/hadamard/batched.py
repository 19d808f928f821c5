"""Hadamard transform on tensor cores for many tokens: tiles of 4096 values as in `tile_kernel.py`, several per CTA.

With few tokens a launch waits for its longest CTA; with many, for memory and the number of CTAs. So here a CTA that has read
a block computes all of its tiles, adds split-K partial sums while loading them, and can write values in the order in
which `trellis/gemm_sm90.py` reads them. Bits 8 to 11 go through `tl.dot`.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import apart_smem_bytes
from requant_kernels.common.pdl import pdl_option
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE, hadamard_entry, sign_pair, tile_factors
from requant_kernels.hadamard.tile_ptx import warp_transform_ptx

# number of tiles in a launch from which on a CTA computes all tiles of its block, to read the block only once
MANY_TILES = 512


@triton.jit
def hadamard_batched_kernel(
    x_ptr, input_scales_ptr, output_scales_ptr, bias_ptr, addend_ptr, y_ptr, in_width, out_width, stride_x, stride_y,
    PTX: tl.constexpr, TILES: tl.constexpr, VECTOR: tl.constexpr, WARP_MASK: tl.constexpr, FACTOR: tl.constexpr,
    PAIR: tl.constexpr, PDL: tl.constexpr, SPLITS: tl.constexpr, PERMUTE: tl.constexpr, TILES_PER_CTA: tl.constexpr,
):  # fmt: skip
    """TILES_PER_CTA tiles, 1 or TILES, of one token; grid (tokens, tiles / TILES_PER_CTA), 16 warps.

    TILES: per block; VECTOR: values per load; WARP_MASK: the mixed bits from bit 8 on; PAIR: bit 0 is not mixed. x is the
    sum of SPLITS consecutive matrices. PERMUTE: y in the order of `trellis/gemm_sm90.py`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILES_PER_CTA
    first_tile, own = tile // TILES * TILES, tile % TILES
    lane, warp = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 16)[None, :, None, None]
    eight = (
        tl.arange(0, 8 // VECTOR)[None, None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, None, :]
    )
    position = warp * 256 + lane * 8 + eight
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    g, t = lane // 4 + eight * 0 + warp * 0, lane % 4 * 2
    warp_signs = sign_pair(g, t, 7)
    first_signs = warp_signs
    if PAIR:  # bit 0 is the lowest one of a lane's registers
        first_signs = sign_pair(g, t, 6)
    signs = hadamard_entry(row, column, WARP_MASK).to(tl.int16).to(tl.bfloat16, bitcast=True)
    factors = tile_factors(input_scales_ptr, first_tile, own, position, in_width, TILES, FACTOR)
    output_scales, bias = (), ()
    for o in tl.static_range(TILES_PER_CTA):
        at = (tile + o) * 4096 + row * 256 + tl.arange(0, 256)[None, :]
        if output_scales_ptr is not None:
            scale = tl.load(output_scales_ptr + at, mask=at < out_width, other=0.0).to(tl.float32)
            output_scales = output_scales + (scale,)
        if bias_ptr is not None:
            bias = bias + (tl.load(bias_ptr + at, mask=at < out_width, other=0.0).to(tl.float32),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = ()
    for p in tl.static_range(TILES):
        source = (first_tile + p) * 4096 + position
        for split in tl.static_range(SPLITS):
            matrix = x_ptr + (token + split * tl.num_programs(0)) * stride_x
            x = x + (tl.load(matrix + source, mask=source < in_width, other=0.0),)
    mixed = ()
    for o in tl.static_range(TILES_PER_CTA):
        z = tl.zeros([32, 16, 8 // VECTOR, VECTOR], tl.float32)
        # always true; the branch keeps the loads together, which otherwise wait for one another's registers
        if in_width > 0:
            for p in tl.static_range(TILES):
                total = x[p * SPLITS].to(tl.float32)
                for split in tl.static_range(1, SPLITS):
                    total += x[p * SPLITS + split].to(tl.float32)
                odd = (0x6996 >> (o & p)) & 1  # the signs of a CTA's first tile are in the factors
                z += total * (-factors[p] if odd else factors[p])
        mixed = mixed + (z,)
    for o in tl.static_range(TILES_PER_CTA):
        z = tl.inline_asm_elementwise(
            PTX.text,
            PTX.constraints,
            (mixed[o], first_signs, warp_signs),
            dtype=tl.float32,
            is_pure=False,
            pack=8,
        )
        z = tl.reshape(tl.permute(z, (1, 0, 2, 3)), [16, 256])
        high = z.to(tl.bfloat16)
        low = (z - high.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(signs, high, tl.dot(signs, low))
        at = (tile + o) * 4096 + row * 256 + tl.arange(0, 256)[None, :]
        inside = at < out_width
        if output_scales_ptr is not None:
            y *= output_scales[o]
        if bias_ptr is not None:
            y += bias[o]
        if addend_ptr is not None:
            y += tl.load(addend_ptr + token * out_width + at, mask=inside, other=0.0)
        if PERMUTE:
            y = tl.reshape(tl.permute(tl.reshape(y, [16, 4, 4, 8, 2]), (0, 1, 3, 2, 4)), [16, 256])
        tl.store(y_ptr + token * stride_y + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def transform_batched(
    x: Tensor, y: Tensor, *, block_size: int, tiles: int, in_width: int, out_width: int, pdl: bool,
    input_scales: Tensor | None = None, output_scales: Tensor | None = None, bias: Tensor | None = None,
    addend: Tensor | None = None, pair: bool = False, permute: bool = False, factor: float = 1.0,
) -> None:  # fmt: skip
    """Write y, `tiles` tiles of every token of x [m, in_width] or [splits, m, in_width]. See `hadamard_transform`."""
    block_tiles = max(1, block_size // HADAMARD_TILE)
    many = x.shape[-2] * tiles >= MANY_TILES and tiles % block_tiles == 0 and block_tiles <= 4
    tiles_per_cta = block_tiles if many else 1
    launch(
        hadamard_batched_kernel,
        (x.shape[-2], tiles // tiles_per_cta, 1),
        (x, input_scales, output_scales, bias, addend, y, in_width, out_width, x.stride(-2), y.stride(0)),
        interned(
            PTX=warp_transform_ptx(), TILES=block_tiles, VECTOR=16 // x.element_size() if x.element_size() > 2 else 8,
            WARP_MASK=min(block_size, HADAMARD_TILE) - 1 >> 8, FACTOR=factor * block_size**-0.5 * (2 if pair else 1),
            PAIR=pair, PDL=pdl, SPLITS=x.shape[0] if x.dim() == 3 else 1, PERMUTE=permute, TILES_PER_CTA=tiles_per_cta,
            num_warps=16, num_stages=1, **pdl_option(pdl),
        ),
        smem_bytes=apart_smem_bytes(x.shape[-2] * tiles // tiles_per_cta, x.device),
    )  # fmt: skip
