"""Residual sum and RMSNorm in one launch: x += delta; y = weight * x / sqrt(mean(x^2) + eps).

Values are rounded where transformers rounds (the sum, the normalized value, the product), so that a step reproduces its
logits; only the summation order of the squares differs.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportAttributeAccessIssue=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch


@triton.jit
def add_rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, y_ptr, k, delta_row, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One token; x and y are contiguous, and x is overwritten if there is a delta."""
    at = tl.arange(0, BLOCK)
    inside = at < k
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    token = tl.program_id(0).to(tl.int64)
    wait_for_previous_launch(PDL, True)
    x = tl.load(x_ptr + token * k + at, mask=inside, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + token * delta_row + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + token * k + at, x, mask=inside)
    wide = x.to(tl.float32)
    normalized = wide * tl.rsqrt(tl.sum(wide * wide, 0) / k + eps)
    y = weight.to(tl.float32) * normalized.to(x.dtype).to(tl.float32)
    tl.store(y_ptr + token * k + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [m, k] plus delta [m, k], in x's dtype; x, contiguous, becomes the sum."""
    m, k = x.shape
    y = torch.empty_like(x)
    launch(
        add_rms_norm_kernel,
        (m, 1, 1),
        (x, delta, weight, y, k, 0 if delta is None else delta.stride(0), eps),
        _constants(triton.next_power_of_2(k), supports_pdl(x.device)),
    )
    return y


@cache
def _constants(block: int, pdl: bool) -> dict[str, object]:
    return {"BLOCK": block, "PDL": pdl, "num_warps": max(1, min(16, block // 512)), **pdl_option(pdl)}
