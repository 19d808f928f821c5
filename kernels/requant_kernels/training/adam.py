"""Fused Adam for one tensor: moments of any floating-point dtype, the weight and its gradient in float32.

    m += (1 - b1) (g - m),   v = b2 v + (1 - b2) g^2,   w -= lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

(Kingma and Ba 2015, arXiv 1412.6980.) With moments in bfloat16 a weight costs 20 bytes of traffic. torch's fused Adam
wants moments of the weight's dtype: casting them to float32 and back around it costs 24 bytes more than its own 28.
"""

# pyright: reportArgumentType=none

from math import sqrt

import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 1024  # weights per CTA


@triton.jit
def adam_kernel(
    weight_ptr, gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr, numel, step_size, beta1, beta2, inv_sqrt_correction2, eps,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: BLOCK_SIZE weights per CTA. `step_size` = lr / (1 - b1^t), `inv_sqrt_correction2` = 1 / sqrt(1 - b2^t)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = at < numel
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg += (1 - beta1) * (gradient - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    weight -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) * inv_sqrt_correction2 + eps)
    tl.store(weight_ptr + at, weight, mask=inside)
    tl.store(exp_avg_ptr + at, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=inside)


def adam_step(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    step: int,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Overwrite `weight` and its moments with their update; `step` counts from 1. All are contiguous, of one shape."""
    for tensor in (weight, gradient, exp_avg, exp_avg_sq):
        assert tensor.is_contiguous() and tensor.shape == weight.shape
    if not weight.numel():
        return
    adam_kernel[(triton.cdiv(weight.numel(), BLOCK_SIZE),)](
        weight,
        gradient,
        exp_avg,
        exp_avg_sq,
        weight.numel(),
        lr / (1 - betas[0] ** step),
        betas[0],
        betas[1],
        1 / sqrt(1 - betas[1] ** step),
        eps,
        BLOCK_SIZE=BLOCK_SIZE,
    )
