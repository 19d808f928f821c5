"""From q, k and v to attention in one launch: finish the products, norms of heads, RoPE, keys and values into the cache.

    q, k  ->  rope(norm(output_scales * H product + bias))        k, v  ->  the cache, from row `position` on

`rotated_rope_apart` leaves keys and values to an engine with its own cache, and takes RoPE's angles from its table. A CTA
has a tile of one of the three, each with its own rotation. The tile's order (`hadamard/registers.py`) is chosen so that
after the transform a thread holds values and their partners, half a head apart, and adjacent lanes the rest of the head.
Rounding as in `rope_cache.py`.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.occupancy import apart_smem_bytes
from requant_kernels.common.pdl import pdl_option, wait_with
from requant_kernels.hadamard.registers import (
    Order,
    TileTransform,
    allocate_smem,
    exchange_in,
    index_of,
    lane_and_warp,
    load_eight,
    signs_of,
    store_eight,
    tile_transform,
)
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.step import dense_rope
from requant_kernels.step.rotated import (
    ASSEMBLY,
    NUM_WARPS,
    load_product,
    output_factors,
    outputs_of,
    rotate,
    rounded,
    tiles_of_block,
)
from requant_kernels.trellis.operands import Product, Source

HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """q, k or v: its rows, as tiles of a token."""

    width: int
    num_tiles: int
    source: Source
    finish: TileTransform


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeShape:
    """What `rotated_rope_kernel` is compiled for."""

    q: Part
    k: Part
    v: Part
    head_dim: int


@cache
def head_order(head_dim: int) -> Order:
    """The order that the transform must produce for a tile: half a head between a thread's two fours, the rest of the head
    in the fours and the lowest bits of the lane."""
    half = head_dim.bit_length() - 2
    order = [0] * 12
    order[11] = half
    others = [bit for bit in range(12) if bit != half]
    for position, bit in zip((0, 1, 2, 3, 8, 9, 10, 4, 5, 6, 7), others, strict=True):
        order[position] = bit
    return tuple(order)


@triton.jit
def _finished_tile(
    product_ptr, output_scales_ptr, bias_ptr, tile, token, lane, warp, smem, PART: tl.constexpr, DTYPE: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A thread's eight outputs of a tile, as DTYPE holds them, in float32."""
    FINISH: tl.constexpr = PART.finish
    SOURCE: tl.constexpr = PART.source
    BEFORE: tl.constexpr = FINISH.order
    AFTER: tl.constexpr = FINISH.after
    NEXT: tl.constexpr = 1 << FINISH.after[2]
    index = tile * 4096 + index_of(lane, warp, AFTER)
    output_scales = load_eight(output_scales_ptr, index, PART.width, NEXT)
    bias = ()
    if bias_ptr is not None:
        bias = load_eight(bias_ptr, index, PART.width, NEXT)
    first = tile * 4096 + index_of(lane, warp, BEFORE)
    # divided, so that the compiler knows what the product is a multiple of: it loads several values at once
    factors, integers = wait_with(
        output_factors(output_scales, SOURCE, FINISH),
        signs_of(lane, FINISH) + exchange_in(smem, lane, warp, ASM) + (first // 8,), PDL, False,
    )  # fmt: skip
    signs, exchange, first = integers[0:3], integers[3:7], 8 * integers[7]
    z = load_product(product_ptr, token, first, PART.width, SOURCE, FINISH)
    z = rotate(z, signs, exchange, 0, False, FINISH, False)
    return rounded(outputs_of(z, factors, bias), DTYPE, ASM)


@triton.jit
def _with_rope(
    x, in_head, norm_ptr, cos_ptr, sin_ptr, angles, eps, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The norm of heads, if any, and RoPE, in float32; `in_head`: the index of a thread's first value in its head.
    `angles`: its four cosines and sines, if `sin_ptr` is None."""
    HALF: tl.constexpr = HEAD_DIM // 2
    LANES: tl.constexpr = HEAD_DIM // 8
    if sin_ptr is None:
        cos = angles[0:4] + angles[0:4]
        sin = angles[4:8] + angles[4:8]
    else:
        cos = load_eight(cos_ptr, in_head, HEAD_DIM, HALF)
        sin = load_eight(sin_ptr, in_head, HEAD_DIM, HALF)
    if norm_ptr is not None:
        weight = load_eight(norm_ptr, in_head, HEAD_DIM, HALF)
        squares = tl.zeros([512], tl.float32)
        for i in tl.static_range(8):
            squares += x[i] * x[i]
        total = tl.sum(tl.reshape(squares, [512 // LANES, LANES]), 1)
        total = tl.broadcast_to(total[:, None], [512 // LANES, LANES])
        scale = tl.rsqrt(tl.reshape(total, [512]) / HEAD_DIM + eps)
        normalized = ()
        for i in tl.static_range(8):
            normalized = normalized + (x[i] * scale,)
        normalized, y = rounded(normalized, DTYPE, ASM), ()
        for i in tl.static_range(8):
            y = y + (weight[i].to(tl.float32) * normalized[i],)
        x = rounded(y, DTYPE, ASM)
    turned = ()
    for i in tl.static_range(8):
        other = x[(i + 4) % 8]
        sine = sin[i].to(tl.float32)
        if i < 4:
            sine = -sine
        turned = turned + (x[i] * cos[i].to(tl.float32) + other * sine,)
    return turned


@triton.jit
def _row_of(position_ptr, sin_ptr, token, tokens):
    """The destination of a token's key and value: a row of the cache, or, without sines, the token's own row."""
    row = token * 0
    if sin_ptr is not None:
        row = tl.load(position_ptr) + token % tokens
    return row


# `length` is only compared; keep `tokens` specialized to 1: a step divides by it
@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["tokens"])
def rotated_rope_kernel(
    q_ptr, k_ptr, v_ptr, q_scales_ptr, k_scales_ptr, v_scales_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr,
    k_norm_ptr, cos_ptr, sin_ptr, position_ptr, y_ptr, keys_ptr, values_ptr, length, tokens, trig_row, cache_head,
    eps, SHAPE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of one token: first those of q, then k, then v; grid (tiles, tokens). Without sines `cos_ptr` is a table with
    cosines followed by sines, `position_ptr` every token's row of it, and keys and values have one row per token."""
    Q: tl.constexpr = SHAPE.q
    K: tl.constexpr = SHAPE.k
    V: tl.constexpr = SHAPE.v
    AFTER: tl.constexpr = Q.finish.after
    D: tl.constexpr = SHAPE.head_dim
    HALF: tl.constexpr = D // 2
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    tile, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, warp = lane_and_warp()
    smem = allocate_smem(lane, ASM)
    index = index_of(lane, warp, AFTER)
    in_head = index % D
    angles = ()
    if sin_ptr is None:  # a table: the previous launch has written neither it nor the positions of tokens
        angles = load_eight(cos_ptr + tl.load(position_ptr + token) * trig_row, in_head, D, HALF)
    else:
        cos_ptr += token * trig_row
        sin_ptr += token * trig_row
    cache_row = token // tokens * (K.width // D) * cache_head
    if tile < Q.num_tiles:
        x = _finished_tile(q_ptr, q_scales_ptr, q_bias_ptr, tile, token, lane, warp, smem, Q, DTYPE, PDL, ASM)
        at = tile * 4096 + index
        y = _with_rope(x, in_head, q_norm_ptr, cos_ptr, sin_ptr, angles, eps, D, DTYPE, ASM)
        store_eight(y_ptr + token * Q.width, at, y, at < Q.width, at < Q.width, HALF)
    elif tile < Q.num_tiles + K.num_tiles:
        own = tile - Q.num_tiles
        x = _finished_tile(k_ptr, k_scales_ptr, k_bias_ptr, own, token, lane, warp, smem, K, DTYPE, PDL, ASM)
        at = own * 4096 + index
        y = _with_rope(x, in_head, k_norm_ptr, cos_ptr, sin_ptr, angles, eps, D, DTYPE, ASM)
        position = _row_of(position_ptr, sin_ptr, token, tokens)
        inside = (at < K.width) & (position < length)
        row = keys_ptr + cache_row + position * D
        store_eight(row, at // D * cache_head + in_head, y, inside, inside, HALF)
    else:
        own = tile - Q.num_tiles - K.num_tiles
        x = _finished_tile(v_ptr, v_scales_ptr, v_bias_ptr, own, token, lane, warp, smem, V, DTYPE, PDL, ASM)
        at = own * 4096 + index
        position = _row_of(position_ptr, sin_ptr, token, tokens)
        inside = (at < V.width) & (position < length)
        row = values_ptr + cache_row + position * D
        store_eight(row, at // D * cache_head + in_head, x, inside, inside, HALF)


def supports(head_dim: int, widths: tuple[int, ...]) -> bool:
    """Whether a tile holds whole heads and whole Hadamard blocks of q, k and v of these widths."""
    return head_dim in HEAD_DIMS and all(
        width % head_dim == 0 and tiles_of_block(width) == 1 for width in widths
    )


def rotated_rope(
    q: Product, k: Product, v: Product, cos: Tensor, sin: Tensor, position: Tensor, keys: Tensor, values: Tensor, *,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """The queries after RoPE, [m, q_heads, head_dim]; the keys after it, and the values, go into the caches. The other
    arguments are those of `rope_cache`, except that RoPE is applied to whole heads."""
    b, _, length, head_dim = keys.shape
    if cos.shape[1] != head_dim:
        raise ValueError(
            f"RoPE of rotated products is applied to whole heads of {head_dim}, not {cos.shape[1]} values"
        )
    m, q_width = q.values.shape[-2:]
    y = torch.empty(m, q_width // head_dim, head_dim, dtype=keys.dtype, device=keys.device)
    where = cos, sin, position, y, keys, values, length, m // b
    strides = cos.stride(0), keys.stride(1)
    if dense_rope.supports((q, k, v), (q_norm, k_norm), keys, cos):
        dense_rope.dense_rope((q, k, v), (q_norm, k_norm), where, strides, eps, head_dim)
    else:
        _launch((q, k, v), head_dim, keys.device, (q_norm, k_norm), (*where, *strides), eps)
    return y


def rotated_rope_apart(
    q: Product, k: Product, v: Product, angles: Tensor, rows: Tensor, dtype: torch.dtype, *,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries and keys after RoPE, and values, each [m, heads * head_dim]. angles [positions, head_dim], rows contiguous:
    half of it cosines, half sines; rows int [m]: the position of each token."""
    m, head_dim, device = len(rows), angles.shape[1], rows.device
    found = [torch.empty(m, part.values.shape[-1], dtype=dtype, device=device) for part in (q, k, v)]
    where = angles, None, rows, *found, 1, 1, angles.stride(0), head_dim
    _launch((q, k, v), head_dim, device, (q_norm, k_norm), where, eps)
    return found[0], found[1], found[2]


def _launch(
    parts: tuple[Product, Product, Product], head_dim: int, device: torch.device, norms: tuple[Tensor | None, ...],
    where: tuple[object, ...], eps: float,
) -> None:  # fmt: skip
    """The kernel on q, k and v; `where`: its arguments from `cos_ptr` to `cache_head`."""
    m, widths = parts[0].values.shape[-2], tuple(part.values.shape[-1] for part in parts)
    ctas = sum(-(-width // HADAMARD_TILE) for width in widths)
    launch(
        rotated_rope_kernel,
        (ctas, m, 1),
        (
            *(part.values for part in parts), *(part.output_scales for part in parts), *(part.bias for part in parts),
            *norms, *where, eps,
        ),
        _constants(head_dim, widths, tuple(part.source for part in parts), supports_pdl(device)),
        smem_bytes=apart_smem_bytes(ctas * m, device),
    )  # fmt: skip


@cache
def _constants(
    head_dim: int, widths: tuple[int, ...], sources: tuple[Source, ...], pdl: bool
) -> dict[str, object]:
    order = head_order(head_dim)
    q, k, v = (
        Part(
            width=width, num_tiles=-(-width // HADAMARD_TILE), source=source,
            finish=tile_transform(order, width & -width),
        )
        for width, source in zip(widths, sources, strict=True)
    )  # fmt: skip
    shape = RopeShape(q=q, k=k, v=v, head_dim=head_dim)
    return {
        "SHAPE": shape,
        "ASM": ASSEMBLY,
        "PDL": pdl,
        "num_warps": NUM_WARPS,
        "num_stages": 1,
        **pdl_option(pdl),
    }
