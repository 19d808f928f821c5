"""Attention of one new token: softmax(q k^T scale) v, with grouped-query heads, over a static cache.

torch's fused kernels support either a mask or grouped-query attention, not both, so keys and values would be copied once per
query head, and a single CTA per head would read the whole cache. Here, as in Flash-Decoding (Dao et al. 2023), CTAs divide
the positions of a key head, each with all query heads that share it, and a second launch combines

    y = sum_i 2^(z_i) o_i / sum_i 2^(z_i)        z_i: the logarithm of a part's sum of exponentials, o_i: its output

The second launch is omitted if batch and heads alone fill the GPU, and where the next product combines the parts itself
(`attend_split`, for one sequence). A captured graph fixes the number of parts; their length follows from `position`, the
number of earlier tokens, which is on the device. So a short context in a long cache is divided as evenly as a full one, in
parts of BLOCK positions at least.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

from dataclasses import dataclass
from functools import cache
from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import num_sms, supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.occupancy import apart_smem_bytes
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch
from requant_kernels.trellis.operands import SplitAttention

BLOCK, WARPS = 32, 4  # positions that are multiplied at a time, warps of a CTA
SPLIT_BLOCKS, SPLIT_WARPS = (64, 128), 8  # of parts that the next product combines, which should be few
SPLITS = (1, 2, 4, 6, 8, 12, 16)  # numbers of such parts: the product is compiled for each
STAGES = 3  # blocks in flight, if a part has several
CTAS_PER_SM = 2
MOST_PARTS = 128  # more do not fit the registers of the CTA that combines them
LOG2_E = log2(2.718281828459045)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartShape:
    """What `part_kernel` is compiled for."""

    group: int  # query heads of a key head
    head_dim: int
    block: int  # positions that are multiplied at a time
    stages: int  # blocks in flight; 0: the part is one block
    fill: bool  # of parts without positions o is 0 and z negative infinity; otherwise neither is written


@triton.constexpr_function
def padded(size):
    """A dimension of a block: the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit
def part_length(length, parts, BLOCK: tl.constexpr):
    """Positions per part: whole blocks, so that only the very last block is partial."""
    return tl.cdiv(tl.cdiv(length, parts), BLOCK) * BLOCK


@triton.jit
def _load_rows(pointer, at, keep, row, D: tl.constexpr, DP: tl.constexpr):
    """Rows `at` of keys or values, zeros unless `keep`."""
    d = tl.arange(0, DP)
    inside = keep[:, None] & (d < D)[None, :]
    return tl.load(pointer + at[:, None].to(tl.int64) * row + d[None, :], mask=inside, other=0.0)


@triton.jit
def _attend_block(q, k, v, mask_ptr, at, last, scale, o, top, total):
    """Positions `at`: one step of the online softmax (Milakov & Gimelshein 2018), to base 2."""
    keep = at < last
    if mask_ptr is not None:
        keep &= tl.load(mask_ptr + at, mask=keep, other=0) != 0
    score = tl.where(keep[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    shrunk = tl.exp2(top - base)
    o = tl.dot(weight.to(v.dtype), v, o * shrunk[:, None])
    return o, higher, total * shrunk + tl.sum(weight, 1)


# keep `parts` specialized to 1, with y_ptr, and `length` where masks are loaded by it: 4 % of the instructions
@triton.jit(do_not_specialize_on_alignment=["parts"])
def part_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, position_ptr, o_ptr, z_ptr, y_ptr, length, scale, parts,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch,
    SHAPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of the positions of one key head; grid (heads, parts, batch).

    o `[b, heads GROUP, parts, D]` and z `[b, heads GROUP, parts]`, or y `[b, heads GROUP, D]` if there is one part.
    """
    GROUP: tl.constexpr = SHAPE.group
    D: tl.constexpr = SHAPE.head_dim
    BLOCK: tl.constexpr = SHAPE.block
    STAGES: tl.constexpr = SHAPE.stages
    ROWS: tl.constexpr = padded(GROUP)
    DP: tl.constexpr = padded(D)
    head, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, d, n = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, BLOCK)
    if position_ptr is not None:
        length = tl.minimum(length, tl.load(position_ptr).to(tl.int32) + 1)
    size = part_length(length, parts, BLOCK)
    first = part * size
    if first >= length:
        if SHAPE.fill:
            wait_for_previous_launch(PDL, True)
            row = (batch * tl.num_programs(0) + head) * GROUP + i
            own = (i < GROUP)[:, None] & (d < D)[None, :]
            tl.store(o_ptr + (row * parts + part)[:, None] * D + d[None, :], 0.0, mask=own)
            tl.store(z_ptr + row * parts + part, float("-inf"), mask=i < GROUP)
        return
    last = tl.minimum(first + size, length)
    k_ptr += batch * k_batch + head.to(tl.int64) * k_head
    v_ptr += batch * v_batch + head.to(tl.int64) * v_head
    at = first + n
    if position_ptr is not None:  # all but the newest row, which the previous launch writes
        newest = length - 1
        k = _load_rows(k_ptr, at, at < tl.minimum(newest, last), k_row, D, DP)
        v = _load_rows(v_ptr, at, at < tl.minimum(newest, last), v_row, D, DP)
    wait_for_previous_launch(PDL, True)
    row = head * GROUP + i
    own = (i < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + batch * q_batch + row[:, None] * q_head + d[None, :], mask=own, other=0.0)
    if position_ptr is None:
        k, v = _load_rows(k_ptr, at, at < last, k_row, D, DP), _load_rows(v_ptr, at, at < last, v_row, D, DP)
    else:
        is_new = (at == newest)[:, None]
        k = tl.where(
            is_new, tl.load(k_ptr + newest.to(tl.int64) * k_row + d, mask=d < D, other=0.0)[None, :], k
        )
        v = tl.where(
            is_new, tl.load(v_ptr + newest.to(tl.int64) * v_row + d, mask=d < D, other=0.0)[None, :], v
        )
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch
    o, total = tl.zeros([ROWS, DP], tl.float32), tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    o, top, total = _attend_block(q, k, v, mask_ptr, at, last, scale, o, top, total)
    if STAGES > 0:
        for start in tl.range(first + BLOCK, last, BLOCK, num_stages=STAGES):
            at = start + n
            k = _load_rows(k_ptr, at, at < last, k_row, D, DP)
            v = _load_rows(v_ptr, at, at < last, v_row, D, DP)
            o, top, total = _attend_block(q, k, v, mask_ptr, at, last, scale, o, top, total)
    row = batch * tl.num_programs(0) * GROUP + row
    if y_ptr is not None:
        y = o / total[:, None]
        tl.store(y_ptr + row[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=own)
    else:
        o /= tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            o_ptr + (row * parts + part)[:, None] * D + d[None, :], o.to(o_ptr.dtype.element_ty), mask=own
        )
        tl.store(z_ptr + row * parts + part, top + tl.log2(total), mask=i < GROUP)


@triton.jit(do_not_specialize=["length", "parts"])
def combine_kernel(
    o_ptr, z_ptr, position_ptr, y_ptr, length, parts,
    D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one query head into y `[b, h, D]`, in order; grid (b h)."""
    DP: tl.constexpr = padded(D)
    row = tl.program_id(0).to(tl.int64)
    p, d = tl.arange(0, PARTS), tl.arange(0, DP)
    if position_ptr is not None:
        length = tl.minimum(length, tl.load(position_ptr).to(tl.int32) + 1)
    there = p < tl.cdiv(length, part_length(length, parts, BLOCK))
    wait_for_previous_launch(PDL, True)
    z = tl.load(z_ptr + row * parts + p, mask=there, other=float("-inf"))
    o = tl.load(
        o_ptr + (row * parts + p)[:, None] * D + d[None, :],
        mask=there[:, None] & (d < D)[None, :],
        other=0.0,
    )
    weight = tl.exp2(z - tl.max(z, 0))
    y = tl.sum(o * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(y_ptr + row * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, position: Tensor | None = None
) -> Tensor:
    """y [b, 1, h, d] of q [b, h, 1, d], k and v [b, heads, length, d].

    mask: bool [b, length], rows contiguous. position: int64, a single number: in all sequences only that many rows and the
    next one count. It is read before the previous launch has finished, and so are rows before it: no launch that may still
    be running may write them.
    """
    b, h, _, head_dim = q.shape
    heads, length = k.shape[1:3]
    parts = num_parts(b * heads, length, num_sms(q.device))
    y = torch.empty(b, 1, h, head_dim, dtype=q.dtype, device=q.device)
    if parts == 1:
        _attend_parts(q, k, v, mask, scale, position, None, None, y, parts)
        return y
    o = torch.empty(b, h, parts, head_dim, dtype=torch.float32, device=q.device)
    z = torch.empty(b, h, parts, dtype=torch.float32, device=q.device)
    _attend_parts(q, k, v, mask, scale, position, o, z, None, parts)
    launch(
        combine_kernel,
        (b * h, 1, 1),
        (o, z, position, y, length, parts),
        _combine_constants(head_dim, triton.next_power_of_2(parts), supports_pdl(q.device)),
    )
    return y


def attend_split(q: Tensor, k: Tensor, v: Tensor, scale: float, *, position: Tensor) -> SplitAttention:
    """`attend` of one sequence, q [1, h, 1, d], in one of SPLITS parts that are still to be combined."""
    _, h, _, head_dim = q.shape
    blocks = -(-k.shape[2] // split_block(head_dim))
    parts = next((count for count in SPLITS if count >= blocks), SPLITS[-1])
    found = SplitAttention(
        values=torch.empty(h, parts, head_dim, dtype=q.dtype, device=q.device),
        logarithms=torch.empty(h, parts, dtype=torch.float32, device=q.device),
    )
    _attend_parts(q, k, v, None, scale, position, found.values, found.logarithms, None, parts, splits=True)
    return found


def _attend_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, position: Tensor | None, o: Tensor | None,
    z: Tensor | None, y: Tensor | None, parts: int, *, splits: bool = False,
) -> None:  # fmt: skip
    b, h, _, head_dim = q.shape
    heads, length = k.shape[1:3]
    block, warps = (split_block(head_dim), SPLIT_WARPS) if splits else (BLOCK, WARPS)
    mask_bytes = None if mask is None else mask.view(torch.uint8)
    launch(
        part_kernel,
        (heads, parts, b),
        (
            q, k, v, mask_bytes, position, o, z, y, length, scale * LOG2_E, parts, q.stride(0), q.stride(1), k.stride(0),
            k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
            0 if mask_bytes is None else mask_bytes.stride(0),
        ),
        _part_constants(h // heads, head_dim, block, warps, parts * block >= length, splits, supports_pdl(q.device)),
        smem_bytes=apart_smem_bytes(b * heads * parts, q.device),
    )  # fmt: skip


def split_block(head_dim: int) -> int:
    """Positions that a CTA multiplies at a time, if the next product combines its part with others: of small heads fewer.
    Beyond 128 values more than 64 positions do not fit in registers."""
    small, large = SPLIT_BLOCKS
    return large if 64 < head_dim <= 128 else small


def num_parts(rows: int, length: int, sms: int) -> int:
    """Parts per (sequence, key head), `rows` in number: enough to fill the GPU, with at least a block per part."""
    return max(1, min(-(-length // BLOCK), CTAS_PER_SM * sms // rows, MOST_PARTS))


@cache
def _part_constants(
    group: int, head_dim: int, block: int, warps: int, one_block: bool, fill: bool, pdl: bool
) -> dict[str, object]:
    shape = PartShape(
        group=group, head_dim=head_dim, block=block, stages=0 if one_block else STAGES, fill=fill
    )
    return {"SHAPE": shape, "PDL": pdl, "num_warps": warps, **pdl_option(pdl)}


@cache
def _combine_constants(head_dim: int, parts: int, pdl: bool) -> dict[str, object]:
    shape = {"D": head_dim, "PARTS": parts, "BLOCK": BLOCK}
    return {**shape, "PDL": pdl, "num_warps": max(1, parts // 16), **pdl_option(pdl)}
