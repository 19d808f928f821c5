"""A matrix whose rows are scaled, `W = s[:, None] * U`, written in one pass, and its gradient at the scales in another.

    W_ij = s_i U_ij          dL/ds_i = sum_j dL/dW_ij U_ij

All matrices may be of any floating-point dtype; scales and sums are float32. torch computes the product of a column and a
matrix at 2.1 TB/s (H200), and the sum is a second pass, over products that were written.
"""

# pyright: reportArgumentType=none

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 2048  # columns at a time


@triton.jit
def scale_rows_kernel(out_ptr, scales_ptr, unscaled_ptr, k, BLOCK_SIZE: tl.constexpr):
    """Grid: rows, and BLOCK_SIZE of the `k` columns, per CTA."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = column < k
    scaled = tl.load(scales_ptr + row) * tl.load(unscaled_ptr + row * k + column, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * k + column, scaled.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_products_kernel(sums_ptr, left_ptr, right_ptr, k, BLOCK_SIZE: tl.constexpr):
    """Grid: a row of `k` columns per CTA."""
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK_SIZE,), tl.float32)
    for start in range(0, k, BLOCK_SIZE):
        column = start + tl.arange(0, BLOCK_SIZE)
        inside = column < k
        left = tl.load(left_ptr + row * k + column, mask=inside, other=0.0).to(tl.float32)
        sums += left * tl.load(right_ptr + row * k + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums_ptr + row, tl.sum(sums, 0))


def scale_rows(out: Tensor, scales: Tensor, unscaled: Tensor) -> None:
    """`out [n, k] = scales [n] * unscaled [n, k]`, rounded to its dtype; all contiguous, the scales float32."""
    assert out.is_contiguous() and unscaled.is_contiguous() and scales.is_contiguous()
    assert out.shape == unscaled.shape == (len(scales), out.shape[1])
    n, k = out.shape
    if out.numel():
        scale_rows_kernel[(n, triton.cdiv(k, BLOCK_SIZE))](out, scales, unscaled, k, BLOCK_SIZE=BLOCK_SIZE)


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """The product [n] of every row of `left [n, k]` with that of `right`; both contiguous."""
    assert left.is_contiguous() and right.is_contiguous() and left.shape == right.shape
    n, k = left.shape
    sums = torch.empty(n, device=left.device, dtype=torch.float32)
    if n:
        row_products_kernel[(n,)](sums, left, right, k, BLOCK_SIZE=BLOCK_SIZE)
    return sums
