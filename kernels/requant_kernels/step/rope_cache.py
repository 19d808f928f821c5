"""RoPE of the queries and keys of tokens (arXiv 2104.09864), and keys and values into the cache, in one launch.

q, k  ->  x * cos + rotate_half(x) * sin        after the RMSNorm of each head if the model has one (Qwen3); only for the
                                                first values of a head if there are fewer angles (Phi-4-mini, GLM-4.5)
k, v  ->  row `position` of the cache, a number on the device, so that a captured step keeps counting, and the following
          rows if a sequence has several tokens (a prompt); nothing is written beyond the last row
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportAttributeAccessIssue=none

from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch

MANY_TOKENS = 64  # from which on a CTA takes several heads, since there are enough CTAs


@triton.jit
def _normalized(x, weight_ptr, at, inside, head_dim, eps):
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    y = (wide * tl.rsqrt(tl.sum(wide * wide, 1)[:, None] / head_dim + eps)).to(x.dtype)
    return (weight * y.to(tl.float32)).to(x.dtype)


@triton.jit
def _apply_rope(x_ptr, weight_ptr, cos_ptr, sin_ptr, head, at, inside, head_dim, rotary_dim, eps):
    """x of some heads [heads, D], and, loaded separately, the halves that the sine multiplies."""
    half, turned = rotary_dim // 2, at < rotary_dim
    partner = tl.where(at < half, at + half, at - half)
    x = tl.load(x_ptr + head * head_dim + at, mask=inside, other=0.0)
    other = tl.load(x_ptr + head * head_dim + partner, mask=inside, other=0.0)
    if weight_ptr is not None:
        x = _normalized(x, weight_ptr, at, inside, head_dim, eps)
        other = _normalized(other, weight_ptr, partner, inside, head_dim, eps)
    cos = tl.load(cos_ptr + at, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=turned, other=0.0).to(tl.float32)
    sin = tl.where(at < half, -sin, sin)
    return x.to(tl.float32) * cos + other.to(tl.float32) * sin


# `length` is compared and multiplied; keep `tokens` specialized to 1: a step divides by it
@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["tokens"])
def rope_cache_kernel(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, y_ptr, keys_ptr, values_ptr, length,
    tokens, q_heads, k_heads, head_dim, rotary_dim, q_row, k_row, v_row, trig_row, eps,
    HEADS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, a number that divides those of q and of k: first q, then k, then v. Both caches are
    `[b, k_heads, length, head_dim]`, and each of their sequences has `tokens` new tokens."""
    token, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * HEADS
    at = tl.arange(0, D)[None, :]
    heads = tl.arange(0, HEADS)[:, None]
    inside = at < head_dim
    wait_for_previous_launch(PDL, False)
    cos_ptr += token * trig_row
    sin_ptr += token * trig_row
    position = tl.load(position_ptr) + token % tokens
    fits = inside & (position < length)
    cache_head = length * head_dim
    cache_row = position * head_dim + token // tokens * k_heads * cache_head
    if first < q_heads:
        own = first + heads
        y = _apply_rope(
            q_ptr + token * q_row, q_norm_ptr, cos_ptr, sin_ptr, own, at, inside, head_dim, rotary_dim, eps
        )
        y_at = (token * q_heads + own) * head_dim + at
        tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=inside)
    elif first < q_heads + k_heads:
        own = first - q_heads + heads
        y = _apply_rope(
            k_ptr + token * k_row, k_norm_ptr, cos_ptr, sin_ptr, own, at, inside, head_dim, rotary_dim, eps
        )
        tl.store(keys_ptr + cache_row + own * cache_head + at, y.to(keys_ptr.dtype.element_ty), mask=fits)
    else:
        own = first - q_heads - k_heads + heads
        v = tl.load(v_ptr + token * v_row + own * head_dim + at, mask=inside, other=0.0)
        tl.store(values_ptr + cache_row + own * cache_head + at, v, mask=fits)


def rope_cache(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, position: Tensor, keys: Tensor, values: Tensor, *,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """The queries after RoPE, [m, q_heads, head_dim]; the keys after it, and the values, go into the caches.

    Args:
        q, k, v: [m, heads * head_dim], each row contiguous: m / b tokens of the first sequence, then of the next.
        cos, sin: [m, rotary_dim], expanded if all tokens share a row; values of a head beyond rotary_dim are not
            changed.
        position: int64, a single number on the device: the row of the caches for a sequence's first token.
        keys, values: [b, k_heads, length, head_dim], contiguous and alike.
        q_norm, k_norm: [head_dim], weights of the RMSNorm of every head, with `eps`.
    """
    m, (b, k_heads, length, head_dim) = q.shape[0], keys.shape
    q_heads = q.shape[1] // head_dim
    if cos.shape[1] > head_dim:
        raise ValueError(f"RoPE is applied to heads of {head_dim} values, not to {cos.shape[1]}")
    y = torch.empty(m, q_heads, head_dim, dtype=q.dtype, device=q.device)
    heads = 1 if m < MANY_TOKENS else gcd(q_heads, k_heads, 8)
    launch(
        rope_cache_kernel,
        ((q_heads + 2 * k_heads) // heads, m, 1),
        (
            q, k, v, q_norm, k_norm, cos, sin, position, y, keys, values, length, m // b, q_heads, k_heads, head_dim,
            cos.shape[1], q.stride(0), k.stride(0), v.stride(0), cos.stride(0), eps,
        ),
        _constants(heads, triton.next_power_of_2(head_dim), supports_pdl(q.device)),
    )  # fmt: skip
    return y


@cache
def _constants(heads: int, head_dim: int, pdl: bool) -> dict[str, object]:
    num_warps = max(1, min(4, heads * head_dim // 64))
    return {"HEADS": heads, "D": head_dim, "PDL": pdl, "num_warps": num_warps, **pdl_option(pdl)}
