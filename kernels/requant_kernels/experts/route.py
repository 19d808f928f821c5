"""Sorts tokens by expert, without asking the device for the result.

    slots of all tokens, sorted by expert        -> rows; row r is slot order[r], of token order[r] / s
    rows of an expert, N at a time               -> groups [expert, first row, end]

An expert's last group may have fewer rows. Only the device knows the number of groups, so a launch has the largest possible
number (`most_groups`); surplus groups have expert -1.

Our own kernel copies activations into this order: torch's would abort the process if rows have not been computed,
as happens while kernels are compiled ahead (`common/compile_ahead.py`).
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

BLOCK, GROUPS_PER_CTA, COLUMNS = 1024, 32, 2048


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
    """The route for the experts int64 [m, s] of each token."""
    slots, (count, per_token), device = experts.numel(), (stack.experts, experts.shape[1]), experts.device
    own, order = experts.flatten().to(torch.int16).sort(stable=True)
    ends = torch.searchsorted(own, stack.numbers, right=True, out_int32=True)
    tokens, rows = (torch.empty(slots, dtype=torch.int32, device=device) for _ in range(2))
    groups = torch.empty(most_groups(slots, count, per_group), 3, dtype=torch.int32, device=device)
    grid = max(triton.cdiv(slots, BLOCK), triton.cdiv(len(groups), GROUPS_PER_CTA))
    launch(
        route_kernel, (grid, 1, 1), (order, ends, tokens, rows, groups, slots, len(groups)),
        interned(
            PER_TOKEN=per_token, EXPERTS=count, PADDED=triton.next_power_of_2(count), N=per_group, BLOCK=BLOCK,
            GROUPS=GROUPS_PER_CTA, num_warps=4,
        ),
    )  # fmt: skip
    return Route(experts=own, tokens=tokens, rows=rows, groups=groups)


@triton.jit
def route_kernel(
    order_ptr, ends_ptr, tokens_ptr, rows_ptr, groups_ptr, slots, groups, PER_TOKEN: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK rows and GROUPS groups per CTA; `ends` int32 [EXPERTS]: the end of every expert's rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(order_ptr + row, mask=row < slots, other=0).to(tl.int32)
    tl.store(tokens_ptr + row, slot // PER_TOKEN, mask=row < slots)
    tl.store(rows_ptr + slot, row, mask=row < slots)

    expert = tl.arange(0, PADDED)
    end = tl.load(ends_ptr + expert, mask=expert < EXPERTS, other=0)
    start = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)
    own_groups = (end - start + N - 1) // N
    last = tl.cumsum(own_groups, 0)  # the end of the expert's groups
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    mine = (group[:, None] < last[None, :]) & (group[:, None] >= (last - own_groups)[None, :])
    inside = group < groups
    first = tl.sum(tl.where(mine, start[None, :] + (group[:, None] - (last - own_groups)[None, :]) * N, 0), 1)
    stop = tl.minimum(first + N, tl.sum(tl.where(mine, end[None, :], 0), 1))
    found = tl.sum(tl.where(mine, expert[None, :] + 1, 0), 1) - 1
    tl.store(groups_ptr + 3 * group, found, mask=inside)
    tl.store(groups_ptr + 3 * group + 1, first, mask=inside)
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
