"""Weights as the left operand of wgmma, in registers: what the sm_90 GEMMs share, in Gluon.

wgmma can read its left operand from registers, so weights decoded there need no shared memory; the right one, the
activations, must be in shared memory, swizzled. Thread `[row tile of its warp, warp, lane]` holds its part of every row
tile.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def codes_layout(W, R):
    """`[R, W, lane, (kh rh)]`: a lane has the 16 bytes of packed codes that it will multiply."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *[[1 << i, 0, 0, 0] for i in range(R.bit_length() - 1)]],
        lane_bases=[[0, 0, 1 << i, 0] for i in range(5)],
        warp_bases=[[0, 1 << i, 0, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[R, W, 32, 4],
    )


@gluon.constexpr_function
def rows_layout(W, R):
    """`[R, W, lane]`: what a lane has once per row tile."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << i, 0, 0] for i in range(R.bit_length() - 1)],
        lane_bases=[[0, 0, 1 << i] for i in range(5)],
        warp_bases=[[0, 1 << i, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[R, W, 32],
    )


@cache
def x_layout(bits: int = 16) -> gl.NVMMASharedLayout:
    """The layout of a stage of activations of 8 or 16 bits: lines of 64 columns, swizzled."""
    return gl.NVMMASharedLayout(swizzle_byte_width=8 * bits, element_bitwidth=bits, rank=2)


@gluon.jit
def lane_and_tiles(first_tile, last_tile, W: gl.constexpr, R: gl.constexpr):
    """`[R, W, lane]`: the lane, the tile's index in its CTA, and its index in the matrix.

    Tiles past `last_tile` repeat `last_tile`, and are not written.
    """
    L: gl.constexpr = rows_layout(W, R)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    r = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    w = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    lane = lane + (r + w) * 0
    tiles = gl.minimum(first_tile + r * W + w + lane * 0, last_tile).to(gl.int64)
    return lane, r * W + w, tiles


@gluon.jit
def unpack_pair(pair, dtype):
    """int32 -> the two 16-bit floats that it holds, in a new last dimension."""
    low, high = pair.to(gl.int16), (pair >> 16).to(gl.int16)
    return gl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))


@gluon.jit
def unpack_four(four):
    """int32 -> the four int8 that it holds, lowest first, in two new last dimensions: byte of a half, and half."""
    low = gl.join(four.to(gl.int8), (four >> 8).to(gl.int8))
    high = gl.join((four >> 16).to(gl.int8), (four >> 24).to(gl.int8))
    return gl.join(low, high)
