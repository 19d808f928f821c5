"""Decoded weights as the left operand of wgmma, in the registers in which they are decoded; in Gluon.

Lane `4 g + t` decodes rows 2 g and 2 g + 1 of 16 columns of a k64: 16 registers of pairs (`decode_ptx`), or 8 of four int8
(`integers_ptx`). wgmma's left operand has rows g and g + 8 in this lane, with two registers for each row and k step (16
columns of float16, 32 of int8). Which rows and columns of the matrix these are is free, and chosen so that the decoded
registers are the operand as they are:

    row and column of wgmma        of the k64
    row    h g                     2 g + h                      undone when the sums are stored
    column s i t e                 16 t + 4 s + 2 i + e         the order in which activations are written
           s i t e of int8         16 t + 8 s + 4 i + e         the same, by `gemm_int8.py`

So lanes exchange only the 32 bits before a segment, and weights never go through shared memory. At the store, one lane holds
rows 2 g and 2 g + 1 of a token.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.wgmma import unpack_four, unpack_pair

INT32_X8 = gl.constexpr((gl.int32,) * 8)
INT32_X16 = gl.constexpr((gl.int32,) * 16)


@gluon.jit
def decode(words, previous_lane, DECODE: gl.constexpr, Q: gl.constexpr, COUNT: gl.constexpr, J: gl.constexpr,
            A: gl.constexpr, W: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """k64 number Q of a k_tile, for all row tiles -> weights `[16 W R, 64]` in the layout of wgmma's A operand."""
    first: gl.constexpr = Q // J * COUNT
    p = gl.inline_asm_elementwise(
        DECODE[Q % J].text, DECODE[Q % J].constraints, words[first : first + COUNT] + (previous_lane,),
        dtype=INT32_X16, is_pure=False, pack=1,
    )  # fmt: skip
    rows = ()
    for h in gl.static_range(2):
        steps = ()
        for s in gl.static_range(4):
            steps = steps + (
                gl.join(
                    unpack_pair(p[8 * h + 2 * s], gl.float16), unpack_pair(p[8 * h + 2 * s + 1], gl.float16)
                ),
            )  # e i
        rows = rows + (gl.join(gl.join(steps[0], steps[1]), gl.join(steps[2], steps[3])),)  # e i s0 s1
    weight = gl.reshape(gl.join(rows[0], rows[1]), [R, W, 8, 4, 2, 2, 2, 2, 2])  # r w g t e i s0 s1 h
    weight = gl.permute(weight, (0, 1, 8, 2, 7, 6, 5, 3, 4))  # r w h g s1 s0 i t e
    return gl.convert_layout(gl.reshape(weight, [16 * W * R, 64]), A, assert_trivial=True)


@gluon.jit
def decode_int8(words, previous_lane, DECODE: gl.constexpr, Q: gl.constexpr, COUNT: gl.constexpr, J: gl.constexpr,
                 A: gl.constexpr, W: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """The same in int8: 8 registers of four columns."""
    first: gl.constexpr = Q // J * COUNT
    p = gl.inline_asm_elementwise(
        DECODE[Q % J].text, DECODE[Q % J].constraints, words[first : first + COUNT] + (previous_lane,),
        dtype=INT32_X8, is_pure=False, pack=1,
    )  # fmt: skip
    rows = ()
    for h in gl.static_range(2):
        steps = ()
        for s in gl.static_range(2):
            steps = steps + (
                gl.join(unpack_four(p[4 * h + 2 * s]), unpack_four(p[4 * h + 2 * s + 1])),
            )  # e0 e1 i
        rows = rows + (gl.join(steps[0], steps[1]),)  # e0 e1 i s
    weight = gl.reshape(gl.join(rows[0], rows[1]), [R, W, 8, 4, 2, 2, 2, 2, 2])  # r w g t e0 e1 i s h
    weight = gl.permute(weight, (0, 1, 8, 2, 7, 6, 3, 5, 4))  # r w h g s i t e1 e0
    return gl.convert_layout(gl.reshape(weight, [16 * W * R, 64]), A, assert_trivial=True)


@gluon.constexpr_function
def sums_layout(N, W, R):
    """`[16 W R, N]`, rows in matrix order: wgmma's accumulator with two adjacent rows of a token fastest."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            [1, 0], [0, 1], *[[0, 1 << i] for i in range(3, N.bit_length() - 1)],
            *[[16 * W << i, 0] for i in range(R.bit_length() - 1)],
        ],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16 << i, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[16 * W * R, N],
    )  # fmt: skip
