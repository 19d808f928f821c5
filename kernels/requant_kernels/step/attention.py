"""Attention of one new token: softmax(q k^T scale) v, with grouped-query heads, over a static cache with a mask.

torch's fused kernels support either a mask or grouped-query attention, not both, so keys and values would be copied once for
every query head, and a single CTA per head would read the whole cache. Here, as in Flash-Decoding (Dao et al. 2023), the
cache is split among CTAs: each takes one key head, all query heads that share it, and BLOCK positions; a second launch
combines the partial results.

Which positions there are, a mask says, or the number of tokens before this one, `position`, which is on the device: then the
CTAs behind it read nothing.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl

BLOCK = 64


@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, position_ptr, o_ptr, top_ptr, sum_ptr, length, scale,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Unnormalized output, maximum score and sum of exponentials over BLOCK positions; grid (heads, splits, batch)."""
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64)
    i, d, at = tl.arange(0, ROWS), tl.arange(0, DP), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if position_ptr is not None:
        length = tl.minimum(length, tl.load(position_ptr).to(tl.int32) + 1)
    inside = (at < length)[:, None] & (d < D)[None, :]
    keep = at < length
    if mask_ptr is not None:
        keep &= tl.load(mask_ptr + batch * mask_batch + at, mask=at < length, other=0) != 0
    own = (i < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(
        q_ptr + batch * q_batch + (head * GROUP + i)[:, None] * q_head + d[None, :], mask=own, other=0.0
    )
    k = tl.load(
        k_ptr + batch * k_batch + head * k_head + at[:, None].to(tl.int64) * k_row + d[None, :],
        mask=inside,
        other=0.0,
    )
    v = tl.load(
        v_ptr + batch * v_batch + head * v_head + at[:, None].to(tl.int64) * v_row + d[None, :],
        mask=inside,
        other=0.0,
    )
    score = tl.where(keep[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    top = tl.max(score, 1)
    weight = tl.exp(score - tl.where(top == float("-inf"), 0.0, top)[:, None])
    split = ((batch * tl.num_programs(0) + head) * tl.num_programs(1) + tl.program_id(1)) * ROWS + i
    tl.store(o_ptr + split[:, None] * DP + d[None, :], tl.dot(weight.to(v.dtype), v))
    tl.store(top_ptr + split, top)
    tl.store(sum_ptr + split, tl.sum(weight, 1))


@triton.jit
def combine_kernel(
    o_ptr, top_ptr, sum_ptr, y_ptr, splits, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the splits into y `[batch, heads GROUP, D]`; grid (batch heads, GROUP)."""
    p, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = (tl.program_id(0).to(tl.int64) * splits + p) * ROWS + tl.program_id(1)
    top = tl.load(top_ptr + split, mask=p < splits, other=float("-inf"))
    scale = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(sum_ptr + split, mask=p < splits, other=0.0) * scale, 0)
    o = tl.load(o_ptr + split[:, None] * DP + d[None, :], mask=(p < splits)[:, None], other=0.0)
    y = tl.sum(o * scale[:, None], 0) / total
    offset = (tl.program_id(0).to(tl.int64) * GROUP + tl.program_id(1)) * D + d
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=d < D)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, position: Tensor | None = None
) -> Tensor:
    """y [b, 1, h, d] of q [b, h, 1, d], k and v [b, heads, length, d].

    mask: bool [b, length]. position: int64, one number: of all sequences, only so many rows and the next one count.
    """
    b, h, _, head_dim = q.shape
    heads, length = k.shape[1:3]
    group, splits = h // heads, triton.cdiv(length, BLOCK)
    rows, padded = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))
    o = torch.empty(b * heads, splits, rows, padded, dtype=torch.float32, device=q.device)
    top, total = (
        torch.empty(b * heads, splits, rows, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    y = torch.empty(b, 1, h, head_dim, dtype=q.dtype, device=q.device)
    pdl = supports_pdl(q.device)
    launch_options = {"launch_pdl": True} if pdl else {}
    shape = {"GROUP": group, "ROWS": rows, "D": head_dim, "DP": padded, "PDL": pdl}
    mask_bytes = None if mask is None else mask.view(torch.uint8)
    split_kernel[(heads, splits, b)](
        q, k, v, mask_bytes, position, o, top, total, length, scale, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        k.stride(2), v.stride(0), v.stride(1), v.stride(2), 0 if mask_bytes is None else mask_bytes.stride(0), **shape,
        BLOCK=BLOCK, num_warps=4, **launch_options,
    )  # fmt: skip
    combine_kernel[(b * heads, group)](
        o,
        top,
        total,
        y,
        splits,
        **shape,
        SPLITS=triton.next_power_of_2(splits),
        num_warps=4,
        **launch_options,
    )
    return y
