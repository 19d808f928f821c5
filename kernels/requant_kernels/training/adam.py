"""Fused Adam: moments of any floating-point dtype, weights and gradients in float32, tensors of one size in one launch.

    m += (1 - b1) (g - m),   v = b2 v + (1 - b2) g^2,   w -= lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

(Kingma and Ba 2015, arXiv 1412.6980.) With moments in bfloat16 a weight costs 20 bytes of traffic. torch's fused Adam
wants moments of the weight's dtype: casting them to float32 and back around it costs 24 bytes more than its own 28. Tensors
are found by a table of addresses, since those that learn with codes are thousands of vectors.
"""

# pyright: reportArgumentType=none, reportAttributeAccessIssue=none

from collections.abc import Sequence
from math import sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 1024  # weights per CTA
ALIGNMENT = 16  # bytes: of addresses from which a thread may load as many at once
MAX_TENSORS = 65535  # of a launch: CTAs along the second axis of a grid


@triton.jit
def adam_kernel(
    addresses_ptr, rates_ptr, numel, beta1, beta2, eps,
    MOMENTS: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid: BLOCK_SIZE of the `numel` weights per CTA, and tensors.

    Of a tensor, `addresses` are those of weight, gradient, and both moments, multiples of ALIGNMENT, which are of dtype
    MOMENTS; `rates` are lr / (1 - b1^t) and 1 / sqrt(1 - b2^t).
    """
    tensor = tl.program_id(1)
    addresses_ptr += 4 * tensor
    weight_ptr = tl.multiple_of(tl.load(addresses_ptr).to(tl.pointer_type(tl.float32)), ALIGNMENT)
    gradient_ptr = tl.multiple_of(tl.load(addresses_ptr + 1).to(tl.pointer_type(tl.float32)), ALIGNMENT)
    exp_avg_ptr = tl.multiple_of(tl.load(addresses_ptr + 2).to(tl.pointer_type(MOMENTS)), ALIGNMENT)
    exp_avg_sq_ptr = tl.multiple_of(tl.load(addresses_ptr + 3).to(tl.pointer_type(MOMENTS)), ALIGNMENT)
    step_size = tl.load(rates_ptr + 2 * tensor)
    inv_sqrt_correction2 = tl.load(rates_ptr + 2 * tensor + 1)
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
    tl.store(exp_avg_ptr + at, exp_avg.to(MOMENTS), mask=inside)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq.to(MOMENTS), mask=inside)


def adam_step(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lrs: Sequence[float],
    steps: Sequence[int],
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Overwrite `weights` and their moments with their update; `steps` count from 1.

    All are contiguous, of one size and on one device, the moments of one dtype.
    """
    for first in range(0, len(weights), MAX_TENSORS):
        part = slice(first, first + MAX_TENSORS)
        tensors = list(zip(weights[part], gradients[part], exp_avgs[part], exp_avg_sqs[part], strict=True))
        (weight, _, exp_avg, _), numel = tensors[0], tensors[0][0].numel()
        for each in tensors:
            assert all(tensor.is_contiguous() and tensor.numel() == numel for tensor in each)
            assert each[0].dtype == each[1].dtype == torch.float32
            assert each[2].dtype == each[3].dtype == exp_avg.dtype
        addresses = [tensor.data_ptr() for each in tensors for tensor in each]
        rates = [
            (lr / (1 - betas[0] ** step), 1 / sqrt(1 - betas[1] ** step))
            for lr, step in zip(lrs[part], steps[part], strict=True)
        ]
        if not numel:
            continue
        adam_kernel[(triton.cdiv(numel, BLOCK_SIZE), len(tensors))](
            _on(weight.device, torch.tensor(addresses, dtype=torch.int64)),
            _on(weight.device, torch.tensor(rates, dtype=torch.float32)),
            numel,
            betas[0],
            betas[1],
            eps,
            MOMENTS=getattr(tl, str(exp_avg.dtype).removeprefix("torch.")),
            ALIGNMENT=ALIGNMENT if all(address % ALIGNMENT == 0 for address in addresses) else 1,
            BLOCK_SIZE=BLOCK_SIZE,
        )


def _on(device: torch.device, table: Tensor) -> Tensor:
    """A table on a device, without waiting for what a GPU still has to do."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
