"""RoPE of the queries and keys of one token (arXiv 2104.09864), keys and values into the cache: one launch.

q, k  ->  x * cos + rotate_half(x) * sin        after the RMSNorm of each head where the model has one (Qwen3)
k, v  ->  row `position` of the cache, a number on the device, so that a captured step goes on counting; beyond the last
                  row nothing is written
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportAttributeAccessIssue=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.pdl import wait_for_previous_launch


@triton.jit
def _normalized(x, weight_ptr, at, inside, head_dim, eps):
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    y = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / head_dim + eps)).to(x.dtype)
    return (weight * y.to(tl.float32)).to(x.dtype)


@triton.jit
def _apply_rope(x_ptr, weight_ptr, cos_ptr, sin_ptr, at, inside, head_dim, eps):
    """x of one head, and the half of it that the sine takes, loaded apart."""
    half = head_dim // 2
    partner = tl.where(at < half, at + half, at - half)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    other = tl.load(x_ptr + partner, mask=inside, other=0.0)
    if weight_ptr is not None:
        x = _normalized(x, weight_ptr, at, inside, head_dim, eps)
        other = _normalized(other, weight_ptr, partner, inside, head_dim, eps)
    cos = tl.load(cos_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.where(at < half, -sin, sin)
    return x.to(tl.float32) * cos + other.to(tl.float32) * sin


@triton.jit
def rope_cache_kernel(
    q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, y_ptr, keys_ptr, values_ptr, length,
    q_heads, k_heads, head_dim, q_row, k_row, v_row, trig_row, cache_batch, cache_head, eps,
    D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token: first those of q, then of k, then of v. Both caches are `[b, k_heads, length, head_dim]`."""
    token, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    at = tl.arange(0, D)
    inside = at < head_dim
    wait_for_previous_launch(PDL, False)
    cos_ptr += token * trig_row
    sin_ptr += token * trig_row
    position = tl.load(position_ptr)
    fits = inside & (position < length)
    cache_row = position.to(tl.int64) * head_dim + token * cache_batch
    if head < q_heads:
        y = _apply_rope(
            q_ptr + token * q_row + head * head_dim, q_norm_ptr, cos_ptr, sin_ptr, at, inside, head_dim, eps
        )
        y_at = (token * q_heads + head) * head_dim + at
        tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=inside)
    elif head < q_heads + k_heads:
        own = head - q_heads
        y = _apply_rope(
            k_ptr + token * k_row + own * head_dim, k_norm_ptr, cos_ptr, sin_ptr, at, inside, head_dim, eps
        )
        tl.store(keys_ptr + cache_row + own * cache_head + at, y.to(keys_ptr.dtype.element_ty), mask=fits)
    else:
        own = head - q_heads - k_heads
        v = tl.load(v_ptr + token * v_row + own * head_dim + at, mask=inside, other=0.0)
        tl.store(values_ptr + cache_row + own * cache_head + at, v, mask=fits)


def rope_cache(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, position: Tensor, keys: Tensor, values: Tensor, *,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """The queries after RoPE, [b, q_heads, head_dim]; the keys after it, and the values, go into the caches.

    Args:
        q, k, v: [b, heads * head_dim], rows contiguous in themselves.
        cos, sin: [b, head_dim], with the same rows where b differs from theirs (expanded).
        position: int64, a single number on the device: the row of the caches that is written.
        keys, values: [b, k_heads, length, head_dim], contiguous and alike.
        q_norm, k_norm: [head_dim], weights of the RMSNorm of every head, with `eps`.
    """
    b, (k_heads, length, head_dim) = q.shape[0], keys.shape[1:]
    q_heads = q.shape[1] // head_dim
    if cos.shape[1] != head_dim:
        raise ValueError(
            f"RoPE is applied to whole heads of {head_dim} values, not to {cos.shape[1]} of them"
        )
    y = torch.empty(b, q_heads, head_dim, dtype=q.dtype, device=q.device)
    launch(
        rope_cache_kernel,
        (q_heads + 2 * k_heads, b, 1),
        (
            q, k, v, q_norm, k_norm, cos, sin, position, y, keys, values, length, q_heads, k_heads, head_dim, q.stride(0),
            k.stride(0), v.stride(0), cos.stride(0), keys.stride(0), keys.stride(1), eps,
        ),
        _constants(triton.next_power_of_2(head_dim), supports_pdl(q.device)),
    )  # fmt: skip
    return y


@cache
def _constants(head_dim: int, pdl: bool) -> dict[str, object]:
    options: dict[str, object] = {"launch_pdl": True} if pdl else {}
    return {"D": head_dim, "PDL": pdl, "num_warps": max(1, min(4, head_dim // 64)), **options}
