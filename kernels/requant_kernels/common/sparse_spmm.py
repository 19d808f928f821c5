"""Residuals of several tokens: the transposed activations, and the launch that adds them to what others computed.

One token's residuals ride in the decode kernel, whatever the format. For more tokens a gather should find the tokens of a
column side by side, so activations are transposed first. `finish_kernel` sums the partial products of `tall.py`, adds
residuals and bias; with no partial products it makes the residuals' part alone, which a trellis adds at its end.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.fragment_dequant import load_slots, sparse_operands


@triton.jit
def transpose_kernel(x_ptr, xt_ptr, M, K, stride_x, MS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """xt `[K, MS]` = x `[M, K]` transposed, zero beyond M."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, MS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = (token < M)[None, :] & (column < K)[:, None]
    x = tl.load(x_ptr + token[None, :].to(tl.int64) * stride_x + column[:, None], mask=inside, other=0.0)
    tl.store(xt_ptr + column[:, None] * MS + token[None, :], x, mask=(column < K)[:, None])


@triton.jit(do_not_specialize=["last_tile"])
def finish_kernel(
    partial_ptr, xt_ptr, rows_ptr, sp_ptr, si_ptr, sv_ptr, sr_ptr, bias_ptr, y_ptr, M, n, last_tile, stride_y,
    SPLIT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """y `[M, n]` = the partial products in order, residuals, bias; grid: tiles of 16 rows."""
    tile = tl.program_id(0)
    row, token = tile * 16 + tl.arange(0, 16), tl.arange(0, N)
    y = tl.zeros([16, N], tl.float32)
    for i in tl.static_range(SPLIT):
        at = (i * N + token)[None, :].to(tl.int64) * (last_tile + 1) * 16 + row[:, None]
        y += tl.load(partial_ptr + at)
    if sp_ptr is not None:
        sums = tl.zeros([16, N], tl.float32)
        first, last = tl.load(sp_ptr + tile + tl.arange(0, 16) * 0), tl.load(sp_ptr + tile + 1)
        while tl.max(last - first, 0) > 0:
            column, value = load_slots(si_ptr, sv_ptr, first, first * 0 + last, 1)
            column, value = tl.reshape(column, [16, 8]), tl.reshape(value, [16, 8])
            x = tl.load(xt_ptr + column[:, :, None] * N + token[None, None, :])
            sums += tl.sum(value.to(tl.float32)[:, :, None] * x.to(tl.float32), 1)
            first += 1
        if sr_ptr is not None:
            sums *= tl.load(sr_ptr + row).to(tl.float32)[:, None]
        y += sums
    out = row.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + row).to(tl.int64)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out, mask=out < n, other=0.0).to(tl.float32)[:, None]
    place = y_ptr + token[None, :].to(tl.int64) * stride_y + out[:, None]
    tl.store(place, y.to(y_ptr.dtype.element_ty), mask=(token < M)[None, :] & (out < n)[:, None])


def residual_sums(x: Tensor, layout: Any) -> Tensor:
    """float32 [m, n]: the residuals of a layout times x, by themselves (the trellis adds them at its end)."""
    m, k = x.shape
    y = torch.empty(m, layout.n, dtype=torch.float32, device=x.device)
    tiles = layout.row_perm.shape[0] // 16
    for i in range(0, m, 128):
        part = x[i : i + 128]
        width = triton.next_power_of_2(part.shape[0])
        transposed = part
        if width > 1:
            transposed = torch.empty(k, width, dtype=x.dtype, device=x.device)
            grid = (triton.cdiv(k, 64),)
            transpose_kernel[grid](
                part, transposed, part.shape[0], k, x.stride(0), MS=width, BLOCK=64, PDL=False
            )
        finish_kernel[(tiles,)](
            None, transposed, *sparse_operands(layout), None, y[i:], part.shape[0], layout.n, tiles - 1, y.stride(0),
            SPLIT=0, N=width, num_warps=4,
        )  # fmt: skip
    return y
