"""Sliced ELL times the activations of several tokens (SpMM), with the split-K reduction of `scalar/gemm.py` fused in.

    y = sum of the partial products + row_scales * (ELL @ x^T) + bias

A gather should find the tokens of a column side by side, so the activations are first transposed to `[K, tokens]`. Without
partial products the result is the residuals' part alone, which a trellis adds at its end. (One token's residuals need no
separate launch: `scalar/gemv.py` gathers them inside its main loop.)
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.fragment_dequant import load_slices, sparse_operands
from requant_kernels.common.pdl import wait_for_previous_launch

MOST_TOKENS = 128  # per launch: a row's sums stay in registers


@triton.jit
def transpose_kernel(
    x_ptr, xt_ptr, M, K, stride_x, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """xt `[K, TOKENS]` = x `[M, K]` transposed, zero beyond M."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, TOKENS)
    wait_for_previous_launch(PDL, True)
    inside = (token < M)[None, :] & (column < K)[:, None]
    x = tl.load(x_ptr + token[None, :].to(tl.int64) * stride_x + column[:, None], mask=inside, other=0.0)
    tl.store(xt_ptr + column[:, None] * TOKENS + token[None, :], x, mask=(column < K)[:, None])


@triton.jit(do_not_specialize=["last_tile"])
def spmm_reduce_kernel(
    partial_ptr, xt_ptr, row_perm_ptr, slice_ptr, ell_columns_ptr, ell_values_ptr, ell_row_scales_ptr, bias_ptr, y_ptr,
    M, n, last_tile, stride_y, SPLIT_K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """y `[M, n]` = partial `[SPLIT_K, TOKENS, 16 tiles]` in order, plus residuals and bias; grid: row tiles."""
    tile = tl.program_id(0)
    row, token = tile * 16 + tl.arange(0, 16), tl.arange(0, TOKENS)
    y = tl.zeros([16, TOKENS], tl.float32)
    for i in tl.static_range(SPLIT_K):
        at = (i * TOKENS + token)[None, :].to(tl.int64) * (last_tile + 1) * 16 + row[:, None]
        y += tl.load(partial_ptr + at)
    if slice_ptr is not None:
        sums = tl.zeros([16, TOKENS], tl.float32)
        first, last = tl.load(slice_ptr + tile + tl.arange(0, 16) * 0), tl.load(slice_ptr + tile + 1)
        while tl.max(last - first, 0) > 0:
            column, value = load_slices(ell_columns_ptr, ell_values_ptr, first, first * 0 + last, 1)
            column, value = tl.reshape(column, [16, 8]), tl.reshape(value, [16, 8])
            x = tl.load(xt_ptr + column[:, :, None] * TOKENS + token[None, None, :])
            sums += tl.sum(value.to(tl.float32)[:, :, None] * x.to(tl.float32), 1)
            first += 1
        if ell_row_scales_ptr is not None:
            sums *= tl.load(ell_row_scales_ptr + row).to(tl.float32)[:, None]
        y += sums
    out = row.to(tl.int64) if row_perm_ptr is None else tl.load(row_perm_ptr + row).to(tl.int64)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out, mask=out < n, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + token[None, :].to(tl.int64) * stride_y + out[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(token < M)[None, :] & (out < n)[:, None])


def spmm(x: Tensor, layout: Any) -> Tensor:
    """float32 [m, n]: the residuals of a layout times x [m, k]."""
    m, k = x.shape
    y = torch.empty(m, layout.n, dtype=torch.float32, device=x.device)
    tiles = layout.row_perm.shape[0] // 16
    for i in range(0, m, MOST_TOKENS):
        part = x[i : i + MOST_TOKENS]
        tokens = triton.next_power_of_2(part.shape[0])
        transposed = part
        if tokens > 1:
            transposed = torch.empty(k, tokens, dtype=x.dtype, device=x.device)
            grid = (triton.cdiv(k, 64),)
            transpose_kernel[grid](
                part, transposed, part.shape[0], k, x.stride(0), TOKENS=tokens, BLOCK=64, PDL=False
            )
        spmm_reduce_kernel[(tiles,)](
            None, transposed, *sparse_operands(layout), None, y[i:], part.shape[0], layout.n, tiles - 1, y.stride(0),
            SPLIT_K=0, TOKENS=tokens, num_warps=4,
        )  # fmt: skip
    return y
