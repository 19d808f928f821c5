"""Hadamard transforms of many tokens as two products: a block of S = A B values is a matrix X, and H X is H_A X H_B.

    [L, A, B]  times H_B, its last axis            rounded to float16, then transposed
    [L, B, A]  times H_A, its last axis            float32

Both are `tl.dot` of L A (L B) rows on tensor cores. For few tokens, `tile_kernel.py` and `registers.py` use 16 warps per
tile and keep more bits; here L tokens share a CTA, and a tile takes a third of the instructions.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch

BLOCKS = (256, 4096)  # supported sizes
VALUES, NUM_WARPS = 16384, 8  # per CTA


def sides(block_size: int) -> tuple[int, int]:
    """A and B."""
    b = 1 << block_size.bit_length() // 2
    return block_size // b, b


@triton.jit
def signs(SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """H of a size up to 128, unscaled."""
    odd = tl.arange(0, SIZE)[:, None] & tl.arange(0, SIZE)[None, :]
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    return (1 - 2 * (odd & 1)).to(DTYPE)


@triton.jit
def transformed(x, L: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FACTOR: tl.constexpr):
    """FACTOR H x of 16-bit values [L, A, B], as float32 [L, B, A]; FACTOR makes it preserve lengths."""
    z = tl.dot(tl.reshape(x, [L * A, B]), signs(B, x.dtype)) * FACTOR
    z = tl.permute(tl.reshape(z.to(tl.float16), [L, A, B]), (0, 2, 1))
    return tl.reshape(tl.dot(tl.reshape(z, [L * B, A]), signs(A, tl.float16)), [L, B, A])


@triton.jit
def rotate_kernel(
    x_ptr, input_scales_ptr, y_ptr, tokens, x_row, y_row, A: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """A block of L tokens; grid (blocks, tokens / L)."""
    a, b = tl.arange(0, A), tl.arange(0, B)
    token = tl.program_id(1).to(tl.int64) * L + tl.arange(0, L)[:, None, None]
    index = tl.program_id(0) * (A * B) + a[None, :, None] * B + b[None, None, :]
    x = tl.load(x_ptr + token * x_row + index, mask=token < tokens, other=0.0)
    scales = tl.load(input_scales_ptr + index).to(tl.float32)
    y = transformed((x.to(tl.float32) * scales).to(x.dtype), L, A, B, FACTOR)
    index = tl.program_id(0) * (A * B) + a[None, None, :] * B + b[None, :, None]
    tl.store(y_ptr + token * y_row + index, y.to(y_ptr.dtype.element_ty), mask=token < tokens)


def supports(block_size: int) -> bool:
    """Whether a CTA supports a block size."""
    return BLOCKS[0] <= block_size <= BLOCKS[1]


def rotate(x: Tensor, input_scales: Tensor, y: Tensor) -> None:
    """y [m, k] = H (input_scales * x) of x [m, k], 16-bit, each row contiguous."""
    m, k = x.shape
    block_size = k & -k
    a, b = sides(block_size)
    own = VALUES // block_size
    launch(
        rotate_kernel,
        (k // block_size, -(-m // own), 1),
        (x, input_scales, y, m, x.stride(0), y.stride(0)),
        interned(A=a, B=b, L=own, FACTOR=block_size**-0.5, num_warps=NUM_WARPS, num_stages=1),
    )
