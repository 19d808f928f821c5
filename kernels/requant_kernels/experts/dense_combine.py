"""From the products of a prompt's downs to the outputs in one launch: rotate, scale, and add a token's experts.

    y_t = sum_j w_j (s_j * H z_j + b_j)

Every expert has its own output scales s, so each row is rotated on its own. But a warp holds a block of a token's outputs in
registers (`hadamard/warp.py`) and adds to them, so nothing is written between rotation and sum. The words of a token's next
row are loaded while those of this one are rotated.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportGeneralTypeIssues=none

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.experts.stack import ExpertStack
from requant_kernels.hadamard import warp
from requant_kernels.hadamard.warp import (
    after,
    apart_of,
    before,
    block_pairs,
    lane_and_warp,
    load_floats,
    load_vector,
    load_words,
    mixed_groups,
    packed_vector,
    signs_of,
    store_vector,
    two_vectors,
    unpacked,
)
from requant_kernels.trellis.operands import PARTIAL_SUM_SCALE

LARGEST_BLOCK = 2048


@triton.jit
def dense_combine_kernel(
    z_ptr, scales_ptr, biases_ptr, experts_ptr, weights_ptr, rows_ptr, y_ptr, tokens, columns, per_token,
    ADDS: tl.constexpr, SCALE: tl.constexpr, VECTORS: tl.constexpr, PAIRED: tl.constexpr, FACTOR: tl.constexpr,
    WARPS: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A block of a token a warp; grid (tokens / WARPS, blocks). `columns`: in vectors. `rows`: of z, per slot.

    ADDS: to what y holds.
    """
    lane, own_warp = lane_and_warp(WARPS)
    token, block = tl.program_id(0).to(tl.int64) * WARPS + own_warp, tl.program_id(1)
    read = tl.minimum(token, tokens - 1)
    slot = read * per_token
    apart = apart_of(block, columns, PAIRED)
    start, first, held = block * (32 * VECTORS), before(lane, G), after(lane, apart, G)
    signs, sums = signs_of(lane, PAIRED), ()
    for _ in tl.static_range(8 * VECTORS):
        sums = sums + (lane * 0.0,)
    row = tl.load(rows_ptr + slot).to(tl.int64)
    next_words = load_words(z_ptr, row * columns + start + first, apart, VECTORS, ASM)
    for j in range(per_token):
        words, own = next_words, tl.load(experts_ptr + row).to(tl.int32) * columns
        weight = tl.load(weights_ptr + slot + j).to(tl.float32)
        row = tl.load(rows_ptr + slot + tl.minimum(j + 1, per_token - 1)).to(tl.int64)
        next_words = load_words(z_ptr, row * columns + start + first, apart, VECTORS, ASM)
        pairs, added = mixed_groups(block_pairs(words, ASM), ASM), ()
        for v in tl.static_range(VECTORS // 2):
            z = two_vectors(pairs, signs, v, ASM)
            for half in tl.static_range(2):
                at = own + start + held + (64 * v + (4 << G[0]) * half)
                scales = load_floats(scales_ptr, at, ASM)
                if biases_ptr is not None:
                    biases = load_floats(biases_ptr, at, ASM)
                for i in tl.static_range(8):
                    y = z[8 * half + i] * (scales[i] * (FACTOR * SCALE))
                    if biases_ptr is not None:
                        y += biases[i]
                    added = added + (sums[16 * v + 8 * half + i] + weight * y,)
        sums = added
    for v in tl.static_range(VECTORS // 2):
        for half in tl.static_range(2):
            at = start + held + (64 * v + (4 << G[0]) * half)
            own_sums = sums[16 * v + 8 * half : 16 * v + 8 * half + 8]
            words = packed_vector(own_sums, y_ptr.dtype.element_ty, ASM)
            if ADDS:  # rounded before, as where the sum is an operation of its own
                y = unpacked(words, y_ptr.dtype.element_ty)
                x = unpacked(load_vector(y_ptr, read * columns + at, False, ASM), y_ptr.dtype.element_ty)
                both = ()
                for i in tl.static_range(8):
                    both = both + (x[i] + y[i],)
                words = packed_vector(both, y_ptr.dtype.element_ty, ASM)
            store_vector(y_ptr, token * columns + at, words, token < tokens, ASM)


def supports(z: Tensor, stack: ExpertStack, y: Tensor) -> bool:
    """Blocks of a size that leaves registers for the sums, and outputs of 16 bits."""
    n, block_size = stack.n, stack.n & -stack.n
    return (
        z.shape[-1] == n and warp.supports(block_size) and block_size <= LARGEST_BLOCK
        and warp.readable(z, stack.output_scales, stack.biases, y)
    )  # fmt: skip


def dense_combine(
    z: Tensor, stack: ExpertStack, experts: Tensor, weights: Tensor, y: Tensor, *, rows: Tensor, adds: bool
) -> None:
    """Write y [m, n] of products z float16 [m s, n] over PARTIAL_SUM_SCALE, not rotated yet, and weights [m, s]. `rows` and
    `adds`: see `scale.combine`."""
    (m, per_token), n = weights.shape, stack.n
    blocks, warps, _ = warp.grid_of(m, n)
    launch(
        dense_combine_kernel,
        (warps, blocks, 1),
        (z, stack.output_scales, stack.biases, experts, weights, rows, y, m, n // 8, per_token),
        interned(ADDS=adds, SCALE=PARTIAL_SUM_SCALE, **warp.constants_of(n)),
    )
