"""The router, in two launches: which experts each token goes to, and with which weights.

    l = W y,   p = softmax(l) over all experts,   chosen = the s largest,   w_j = p_j   or, normalized, p_j / sum over chosen

That is the router of Mixtral, OLMoE and Qwen3-MoE (and, normalized, of models that take the softmax of the chosen alone),
which torch computes in some eight launches. For few tokens, the first launch is our own and reads W before the previous one
has finished; for many it is cuBLAS. Logits are rounded to the type of activations, as a linear layer's are; of equal ones
the first expert is chosen.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch

VALUES = 8192  # of W, per CTA: 64 a thread
FEW_TOKENS = 16  # each of which reads W
MOST_EXPERTS = 512  # a warp holds the logits of a token


@triton.jit
def logits_kernel(
    y_ptr, weight_ptr, logits_ptr, experts, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    """ROWS experts of one token; grid (experts / ROWS, tokens)."""
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    token = tl.program_id(1).to(tl.int64)
    inside = (row < experts)[:, None] & (at < k)[None, :]
    weight = tl.load(weight_ptr + row[:, None] * k + at[None, :], mask=inside, other=0.0)
    wait_for_previous_launch(PDL, False)
    y = tl.load(y_ptr + token * k + at, mask=at < k, other=0.0)
    logits = tl.sum(weight.to(tl.float32) * y.to(tl.float32)[None, :], 1)
    tl.store(logits_ptr + token * experts + row, logits.to(logits_ptr.dtype.element_ty), mask=row < experts)


@triton.jit
def choose_kernel(
    logits_ptr, experts_ptr, weights_ptr, experts, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr, PADDED: tl.constexpr,
    PADDED_CHOSEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The CHOSEN experts of one token, likeliest first; grid (tokens)."""
    token, at, rank = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED), tl.arange(0, PADDED_CHOSEN)
    wait_for_previous_launch(PDL, False)
    logit = tl.load(logits_ptr + token * experts + at, mask=at < experts, other=float("-inf")).to(tl.float32)
    largest = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - largest), 0)
    found, chosen = tl.zeros([PADDED_CHOSEN], tl.int32), tl.zeros([PADDED_CHOSEN], tl.float32)
    for i in tl.static_range(CHOSEN):
        best = tl.max(logit, 0)
        expert = tl.min(tl.where(logit == best, at, PADDED), 0)
        expert = tl.minimum(expert, experts - 1)  # NaN equals nothing
        found = tl.where(rank == i, expert, found)
        chosen = tl.where(rank == i, tl.exp(best - largest), chosen)
        logit = tl.where(at == expert, float("-inf"), logit)
    if NORMALIZED:
        total = tl.sum(chosen, 0)
    tl.store(experts_ptr + token * CHOSEN + rank, found, mask=rank < CHOSEN)
    weights = (chosen / total).to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + token * CHOSEN + rank, weights, mask=rank < CHOSEN)


def supports(experts: int, k: int) -> bool:
    """Whether a warp holds a token's logits, and a CTA a row of W."""
    return experts <= MOST_EXPERTS and k <= VALUES


def choose_experts(y: Tensor, weight: Tensor, chosen: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Experts int32 [m, chosen] of the tokens y [m, k], and their weights in y's type; `weight` [experts, k], in that type.
    Both are contiguous."""
    (m, k), experts, pdl = y.shape, len(weight), supports_pdl(y.device)
    if m <= FEW_TOKENS:
        logits = torch.empty(m, experts, dtype=y.dtype, device=y.device)
        constants = _constants_of_logits(triton.next_power_of_2(k), pdl)
        rows: int = constants["ROWS"]  # pyright: ignore[reportAssignmentType]
        launch(logits_kernel, (-(-experts // rows), m, 1), (y, weight, logits, experts, k), constants)
    else:
        logits = torch.nn.functional.linear(y, weight)
    found = torch.empty(m, chosen, dtype=torch.int32, device=y.device)
    weights = torch.empty(m, chosen, dtype=y.dtype, device=y.device)
    launch(
        choose_kernel, (m, 1, 1), (logits, found, weights, experts),
        _constants_of_choice(chosen, normalized, triton.next_power_of_2(experts), pdl),
    )  # fmt: skip
    return found, weights


@cache
def _constants_of_logits(columns: int, pdl: bool) -> dict[str, object]:
    rows = max(1, min(16, VALUES // columns))
    return {"ROWS": rows, "COLUMNS": columns, "PDL": pdl, "num_warps": 4, **pdl_option(pdl)}


@cache
def _constants_of_choice(chosen: int, normalized: bool, padded: int, pdl: bool) -> dict[str, object]:
    return {
        "CHOSEN": chosen, "NORMALIZED": normalized, "PADDED": padded,
        "PADDED_CHOSEN": triton.next_power_of_2(chosen), "PDL": pdl, "num_warps": 1, **pdl_option(pdl),
    }  # fmt: skip
