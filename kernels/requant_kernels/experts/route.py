"""Sorts tokens by expert, without asking the device for the result.

    slots of each expert, of a CTA               -> counts
    slots of all tokens, sorted by expert        -> rows; a slot keeps its order among those of its expert
    rows of an expert, N at a time               -> groups [expert, first row, end]

An expert's last group may have fewer rows. Only the device knows the number of groups, so a launch has the largest possible
number (`most_groups`); surplus groups have expert -1.

Torch's sort, search and copy would take five launches. Its copy would also abort the process if rows have not been
computed, as happens while kernels are compiled ahead (`common/compile_ahead.py`).
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none
# pyright: reportIndexIssue=none

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch
from requant_kernels.experts.stack import ExpertStack

GROUPS_PER_CTA, COLUMNS = 32, 2048
ONE_HOT = 1 << 14  # entries of a block's matrix [slots, experts]
MOST_CTAS, COUNTS = 128, 32  # each CTA reads the counts of all, so many at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The mapping between the slots of m tokens, s each, and rows."""

    experts: Tensor  # int16 [m s]: per row, ascending
    tokens: Tensor  # int32 [m s]: per row
    rows: Tensor  # int32 [m s]: per slot
    groups: Tensor  # int32 [g, 3]


def most_groups(slots: int, experts: int, per_group: int) -> int:
    """The largest number of groups over all ways to divide this many slots among the experts."""
    return slots // per_group + min(slots, experts)


def route(experts: Tensor, stack: ExpertStack, *, per_group: int) -> Route:
    """The route for the experts int [m, s] of each token."""
    slots, (count, per_token), device = experts.numel(), (stack.experts, experts.shape[1]), experts.device
    padded = triton.next_power_of_2(count)
    block, own = max(16, ONE_HOT // padded), experts.contiguous()
    blocks = triton.cdiv(triton.cdiv(slots, block), MOST_CTAS)  # of a CTA
    ctas = triton.cdiv(slots, block * blocks)
    counts = torch.empty(ctas, padded, dtype=torch.int32, device=device)
    launch(
        count_kernel, (ctas, 1, 1), (own, counts, slots, blocks), interned(PADDED=padded, BLOCK=block, num_warps=8)
    )  # fmt: skip
    tokens, rows = (torch.empty(slots, dtype=torch.int32, device=device) for _ in range(2))
    by_row = torch.empty(slots, dtype=torch.int16, device=device)
    groups = torch.empty(most_groups(slots, count, per_group), 3, dtype=torch.int32, device=device)
    launch(
        route_kernel, (max(ctas, triton.cdiv(len(groups), GROUPS_PER_CTA)), 1, 1),
        (own, counts, by_row, tokens, rows, groups, slots, blocks, ctas, len(groups)),
        interned(
            PER_TOKEN=per_token, PADDED=padded, N=per_group, BLOCK=block, GROUPS=GROUPS_PER_CTA, COUNTS=COUNTS,
            num_warps=8,
        ),
    )  # fmt: skip
    return Route(experts=by_row, tokens=tokens, rows=rows, groups=groups)


@triton.jit
def _chosen(experts_ptr, block, slots, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """The slots of a block, the expert of each, and that as a row of zeros and a one."""
    slot, expert = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    own = tl.load(experts_ptr + slot, mask=slot < slots, other=-1).to(tl.int32)
    return slot, own, (own[:, None] == expert[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["slots", "blocks"])
def count_kernel(experts_ptr, counts_ptr, slots, blocks, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """How many of a CTA's slots, `blocks` times BLOCK, each expert has, to counts [CTAs, PADDED]."""
    counts = tl.zeros([PADDED], tl.int32)
    for block in range(tl.program_id(0) * blocks, (tl.program_id(0) + 1) * blocks):
        _, _, mine = _chosen(experts_ptr, block, slots, PADDED, BLOCK)
        counts += tl.sum(mine, 0)
    tl.store(counts_ptr + tl.program_id(0) * PADDED + tl.arange(0, PADDED), counts)


@triton.jit(do_not_specialize=["slots", "blocks", "ctas", "groups"])
def route_kernel(
    experts_ptr, counts_ptr, by_row_ptr, tokens_ptr, rows_ptr, groups_ptr, slots, blocks, ctas, groups,
    PER_TOKEN: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    """The slots of `count_kernel`, and GROUPS groups, per CTA. A slot's row: after those of all experts before, and of its
    own in earlier CTAs and blocks and in this block."""
    expert, cta = tl.arange(0, PADDED), tl.program_id(0)
    totals, earlier = tl.zeros([PADDED], tl.int32), tl.zeros([PADDED], tl.int32)
    for first in range(0, ctas, COUNTS):
        at = first + tl.arange(0, COUNTS)
        counts = tl.load(
            counts_ptr + at[:, None] * PADDED + expert[None, :], mask=at[:, None] < ctas, other=0
        )
        totals += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(at[:, None] < cta, counts, 0), 0)
    end = tl.cumsum(totals, 0)
    start = end - totals

    earlier += start
    for block in range(cta * blocks, (cta + 1) * blocks):
        slot, own, mine = _chosen(experts_ptr, block, slots, PADDED, BLOCK)
        row = tl.sum(mine * (tl.cumsum(mine, 0) - 1 + earlier[None, :]), 1)
        tl.store(rows_ptr + slot, row, mask=slot < slots)
        tl.store(tokens_ptr + row, slot // PER_TOKEN, mask=slot < slots)
        tl.store(by_row_ptr + row, own.to(tl.int16), mask=slot < slots)
        earlier += tl.sum(mine, 0)

    own_groups = (totals + N - 1) // N
    last = tl.cumsum(own_groups, 0)  # the end of the expert's groups
    group = cta * GROUPS + tl.arange(0, GROUPS)
    has = (group[:, None] < last[None, :]) & (group[:, None] >= (last - own_groups)[None, :])
    inside = group < groups
    begin = tl.sum(tl.where(has, start[None, :] + (group[:, None] - (last - own_groups)[None, :]) * N, 0), 1)
    stop = tl.minimum(begin + N, tl.sum(tl.where(has, end[None, :], 0), 1))
    found = tl.sum(tl.where(has, expert[None, :] + 1, 0), 1) - 1
    tl.store(groups_ptr + 3 * group, found, mask=inside)
    tl.store(groups_ptr + 3 * group + 1, begin, mask=inside)
    tl.store(groups_ptr + 3 * group + 2, stop, mask=inside)


def gathered(x: Tensor, rows: Tensor, *, pdl: bool) -> Tensor:
    """x[rows], for x [m, k], contiguous."""
    k = x.shape[1]
    y = torch.empty(len(rows), k, dtype=x.dtype, device=x.device)
    launch(
        gather_kernel, (len(rows), triton.cdiv(k, COLUMNS), 1), (x, rows, y, k),
        interned(COLUMNS=COLUMNS, PDL=pdl, num_warps=4, **pdl_option(pdl)),
    )  # fmt: skip
    return y


@triton.jit
def gather_kernel(x_ptr, rows_ptr, y_ptr, k, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """COLUMNS values of a row; grid (rows, columns / COLUMNS)."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_previous_launch(PDL, False)
    source = tl.load(rows_ptr + row).to(tl.int64)
    tl.store(y_ptr + row * k + at, tl.load(x_ptr + source * k + at, mask=at < k), mask=at < k)
