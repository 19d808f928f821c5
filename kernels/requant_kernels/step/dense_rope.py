"""`rotated_rope.py` for many tokens, after products in float16, split-K or not: transforms by `hadamard/warp.py`, in whose
order the bit that tells the halves of a head apart is in a lane's pairs after a transform. Partial sums are added in
float16."""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportGeneralTypeIssues=none

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard import warp
from requant_kernels.hadamard.warp import (
    NUM_WARPS,
    after,
    before,
    block_pairs,
    lane_and_warp,
    load_floats,
    load_sums,
    mixed_groups,
    packed_vector,
    signs_of,
    store_vector,
    sum_of_lanes,
    two_vectors,
)
from requant_kernels.hadamard.warp_ptx import ASM
from requant_kernels.step.rotated import output_of
from requant_kernels.trellis.operands import Product, Source

# with fewer, tiles of a token are split among warps (`rotated_rope.py`)
MIN_TOKENS, MIN_BLOCK = 128, 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Where a warp holds heads of `dim` values."""

    dim: int
    order: tuple[int, int, int]  # of g0 g1 g2, which of the bits 5 6 7 (`hadamard/warp.py`)
    lane_bits: tuple[int, ...]  # of the number of a lane with values of the same head


HEADS = {
    own.dim: own
    for own in (
        Heads(dim=64, order=(0, 1, 2), lane_bits=(3, 4)),
        Heads(dim=128, order=(1, 0, 2), lane_bits=(0, 3, 4)),
        Heads(dim=256, order=(2, 0, 1), lane_bits=(0, 1, 3, 4)),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DensePart:
    """q, k or v."""

    blocks: int
    vectors: int  # of a lane's part of a block
    factor: float
    row: int  # of the product, in vectors
    splits: int  # matrices of partial sums
    turns: bool  # by RoPE
    cached: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRopeShape:
    """What `dense_rope_kernel` is compiled for."""

    q: DensePart
    k: DensePart
    v: DensePart
    heads: Heads
    num_warps: int


@triton.jit
def _with_rope(
    x, norm_ptr, cos_ptr, sin_ptr, row, in_head, eps, HEADS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The norm of heads, if any, and RoPE of two vectors, half a head apart, in float32. `row`, `in_head`: in vectors."""
    HALF: tl.constexpr = HEADS.dim // 16
    LANE_BITS: tl.constexpr = HEADS.lane_bits
    if norm_ptr is not None:
        squares, y = x[0] * x[0], ()
        for i in tl.static_range(1, 16):
            squares += x[i] * x[i]
        scale = tl.rsqrt(sum_of_lanes(squares, LANE_BITS, ASM) / HEADS.dim + eps)
        for half in tl.static_range(2):
            weight = load_floats(norm_ptr, in_head + half * HALF, ASM)
            for i in tl.static_range(8):
                y = y + (x[8 * half + i] * scale * weight[i],)
        x = y
    turned = ()
    for half in tl.static_range(2):
        cos = load_floats(cos_ptr, row + in_head + half * HALF, ASM)
        sin = load_floats(sin_ptr, row + in_head + half * HALF, ASM)
        for i in tl.static_range(8):
            other = x[8 * (1 - half) + i] * sin[i]
            turned = turned + (x[8 * half + i] * cos[i] + (other if half == 1 else -other),)
    return turned


@triton.jit
def _finish_part(
    product_ptr, output_scales_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, position_ptr, y_ptr, block, length, per_text,
    trig_row, cache_head, eps, tokens, PART: tl.constexpr, SHAPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A block of a token a warp."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    VECTORS: tl.constexpr = PART.vectors
    HEADS: tl.constexpr = SHAPE.heads
    WARPS: tl.constexpr = SHAPE.num_warps
    G: tl.constexpr = HEADS.order
    HEAD: tl.constexpr = HEADS.dim // 8  # vectors
    COUNT: tl.constexpr = PART.blocks * 32 * VECTORS // HEAD
    lane, own_warp = lane_and_warp(WARPS)
    token = tl.program_id(1).to(tl.int64) * WARPS + own_warp
    read, start = tl.minimum(token, tokens - 1), block * (32 * VECTORS)
    held = after(lane, 32, G)
    signs = signs_of(lane, False)
    SPLITS: tl.constexpr = PART.splits
    words = load_sums(
        product_ptr, read * PART.row + start + before(lane, G), 32, tokens.to(tl.int64) * PART.row, SPLITS, VECTORS, ASM
    )  # fmt: skip
    pairs = mixed_groups(block_pairs(words, ASM), ASM)
    inside = token < tokens
    if PART.cached:
        position = tl.load(position_ptr) + token % per_text
        inside = inside & (position < length)
        row = token // per_text * (COUNT * cache_head) + position * HEAD
        head_row = cache_head
    else:
        row = token * (COUNT * HEAD)
        head_row = HEAD
    for v in tl.static_range(VECTORS // 2):
        z, x = two_vectors(pairs, signs, v, ASM), ()
        for half in tl.static_range(2):
            at = start + held + (64 * v + (4 << G[0]) * half)
            scales = load_floats(output_scales_ptr, at, ASM)
            if bias_ptr is not None:
                bias = load_floats(bias_ptr, at, ASM)
            for i in tl.static_range(8):
                x = x + (
                    output_of(
                        z[8 * half + i], scales[i] * PART.factor, bias[i] if bias_ptr is not None else None
                    ),
                )
        at = start + held + 64 * v
        in_head = at % (HEAD // 2)
        if PART.turns:
            x = _with_rope(
                x, norm_ptr, cos_ptr, sin_ptr, read * trig_row, in_head, eps, HEADS, ASM,
            )  # fmt: skip
        for half in tl.static_range(2):
            words = packed_vector(x[8 * half : 8 * half + 8], DTYPE, ASM)
            store_vector(
                y_ptr, row + at // HEAD * head_row + in_head + half * (HEAD // 2), words, inside, ASM
            )


@triton.jit(do_not_specialize=["length"])
def dense_rope_kernel(
    q_ptr, k_ptr, v_ptr, q_scales_ptr, k_scales_ptr, v_scales_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr,
    k_norm_ptr, cos_ptr, sin_ptr, position_ptr, y_ptr, keys_ptr, values_ptr, length, per_text, trig_row, cache_head, eps,
    tokens, SHAPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A block of a token a warp: first those of q, then k, then v; grid (blocks, tokens / warps). Strides in vectors."""
    Q: tl.constexpr = SHAPE.q
    K: tl.constexpr = SHAPE.k
    V: tl.constexpr = SHAPE.v
    block = tl.program_id(0)
    if block < Q.blocks:
        _finish_part(
            q_ptr, q_scales_ptr, q_bias_ptr, q_norm_ptr, cos_ptr, sin_ptr, position_ptr, y_ptr, block, length, per_text,
            trig_row, cache_head, eps, tokens, Q, SHAPE, ASM,
        )  # fmt: skip
    elif block < Q.blocks + K.blocks:
        _finish_part(
            k_ptr, k_scales_ptr, k_bias_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, keys_ptr, block - Q.blocks, length,
            per_text, trig_row, cache_head, eps, tokens, K, SHAPE, ASM,
        )  # fmt: skip
    else:
        _finish_part(
            v_ptr, v_scales_ptr, v_bias_ptr, None, cos_ptr, sin_ptr, position_ptr, values_ptr, block - Q.blocks - K.blocks,
            length, per_text, trig_row, cache_head, eps, tokens, V, SHAPE, ASM,
        )  # fmt: skip


def supports(parts: Sequence[Product], norms: Sequence[Tensor | None], keys: Tensor, cos: Tensor) -> bool:
    """Whether the products are for many tokens, with blocks and heads of supported sizes."""
    head_dim = keys.shape[-1]
    return (
        head_dim in HEADS
        and warp.readable(cos, keys, *norms)
        and all(
            part.values.dtype == torch.float16
            and part.values.shape[-2] >= MIN_TOKENS
            and MIN_BLOCK <= part.values.shape[-1] & -part.values.shape[-1] <= warp.BLOCKS[1]
            and warp.readable(part.values, part.output_scales, part.bias)
            for part in parts
        )
    )


def dense_rope(
    parts: Sequence[Product], norms: Sequence[Tensor | None], where: Sequence[object], strides: tuple[int, int], eps: float,
    head_dim: int,
) -> None:  # fmt: skip
    """As `rotated_rope`, on q, k and v; `norms` of q and k; `where`: the kernel's arguments from `cos_ptr` to `per_text`;
    `strides`: of angles and of a head in the cache."""
    m = parts[0].values.shape[-2]
    shape = shape_of(head_dim, tuple((part.values.shape[-1], part.source) for part in parts))
    launch(
        dense_rope_kernel,
        (shape.q.blocks + shape.k.blocks + shape.v.blocks, -(-m // NUM_WARPS), 1),
        (
            *(part.values for part in parts), *(part.output_scales for part in parts), *(part.bias for part in parts),
            *norms, *where, *(stride // 8 for stride in strides), eps, m,
        ),
        interned(SHAPE=shape, ASM=ASM, num_warps=NUM_WARPS, num_stages=1),
    )  # fmt: skip


@cache
def shape_of(head_dim: int, sources: tuple[tuple[int, Source], ...]) -> DenseRopeShape:
    """For widths of q, k and v, and their products."""
    q, k, v = (
        DensePart(
            blocks=width // (width & -width), vectors=(width & -width) // 256, row=source.row_stride // 8,
            splits=source.splits, factor=warp.factor_of(width & -width) * source.scale, turns=index < 2, cached=index > 0,
        )
        for index, (width, source) in enumerate(sources)
    )  # fmt: skip
    return DenseRopeShape(q=q, k=k, v=v, heads=HEADS[head_dim], num_warps=NUM_WARPS)
