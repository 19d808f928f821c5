"""A step of Adam over one tensor, in one pass: moments in any float type, the parameter and its gradient in float32.

    m += (1 - b1) (g - m),   s = b2 s + (1 - b2) g^2,   w -= lr / (1 - b1^t) m / (sqrt(s / (1 - b2^t)) + eps)

(Kingma and Ba 2015, arXiv 1412.6980.) With moments in bfloat16 a weight costs 20 bytes of traffic. torch's fused Adam
wants moments in the parameter's type: casting them to float32 and back around it costs 24 bytes more than its own 28.
"""

# pyright: reportArgumentType=none

from math import sqrt

import triton
import triton.language as tl
from torch import Tensor

LANES = 1024  # weights per CTA


@triton.jit
def adam_kernel(
    weight_ptr, gradient_ptr, mean_ptr, square_ptr, numel, step_size, keep_mean, keep_square, root, eps,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: SIZE weights per CTA. `step_size` = lr / (1 - b1^t), `root` = 1 / sqrt(1 - b2^t)."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < numel
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(square_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mean += (1 - keep_mean) * (gradient - mean)
    square = keep_square * square + (1 - keep_square) * gradient * gradient
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    weight -= step_size * mean / (tl.sqrt(square) * root + eps)
    tl.store(weight_ptr + at, weight, mask=inside)
    tl.store(mean_ptr + at, mean.to(mean_ptr.dtype.element_ty), mask=inside)
    tl.store(square_ptr + at, square.to(square_ptr.dtype.element_ty), mask=inside)


def adam_step(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    lr: float,
    step: int,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update `weight` and its moments in place; `step` counts from 1. All are contiguous, of one shape."""
    for tensor in (weight, gradient, mean, square):
        assert tensor.is_contiguous() and tensor.shape == weight.shape
    if not weight.numel():
        return
    adam_kernel[(triton.cdiv(weight.numel(), LANES),)](
        weight,
        gradient,
        mean,
        square,
        weight.numel(),
        lr / (1 - betas[0] ** step),
        betas[0],
        betas[1],
        1 / sqrt(1 - betas[1] ** step),
        eps,
        SIZE=LANES,
    )
