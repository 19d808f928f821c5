"""Dequantize-and-multiply for 17 to 128 tokens in plain Triton: for GPUs other than Hopper, and codebooks above 4 bits.

    y = (x / column_scales) @ dense^T + x @ sparse^T + bias

A CTA has 16 rows per warp, all warps share a tile of tokens, and CTAs split the columns (split-K). There are three launches:
`permute_kernel` puts the activations into the column order of the packed codes and transposes them, `gemm_kernel` writes
float32 partial products, and `reduce_kernel` sums them in a fixed order with the bias; with residuals,
`common/sparse_spmm.py` does the last step. Weights go from registers into the tensor cores, the columns of one group (128 at
most) in one `tl.dot`: Triton waits for every wgmma, so fewer and larger ones are better.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_ptx
from requant_kernels.common.fragment_dequant import (
    dequant_operands,
    dequantize_half,
    load_k_tile,
    load_row_constants,
    row_offsets,
    scaled_activations,
    sparse_operands,
)
from requant_kernels.common.launch import unreported
from requant_kernels.common.packing import Layout
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch
from requant_kernels.common.sparse_spmm import spmm_reduce_kernel, transpose_kernel
from requant_kernels.scalar.gemm_launch import GemmConfig


@triton.jit
def permute_kernel(
    x_ptr, xp_ptr, M, K, stride_x, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """xp `[256 k_tiles, TOKENS]` = x transposed, columns in the order (mma_k32, j, kh, t, e), zero beyond the matrix."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, TOKENS)
    j, kh, t, e = at // 16 % 2, at // 8 % 2, at // 2 % 4, at % 2
    column = at // 32 * 32 + 8 * t + 4 * j + 2 * kh + e
    inside = (token < M)[None, :] & (column < K)[:, None]
    wait_for_previous_launch(PDL, True)
    x = tl.load(x_ptr + token[None, :].to(tl.int64) * stride_x + column[:, None], mask=inside, other=0.0)
    tl.store(xp_ptr + at[:, None] * TOKENS + token[None, :], x)


@triton.jit
def _weight_operand(steps, WARPS: tl.constexpr, PART: tl.constexpr, K32: tl.constexpr):
    """Weights `[16 WARPS, 32 K32]`: part PART, of K32 units of 32 columns, of a half, in the order of `permute_kernel`."""
    first: tl.constexpr = 2 * PART * K32
    if K32 == 1:
        weight = tl.reshape(tl.join(steps[first], steps[first + 1]), [8, 4, WARPS, 2, 2, 2, 2])
        weight = tl.permute(weight, (2, 4, 0, 6, 3, 1, 5))  # g t w kh rh e j -> w rh g (j kh t e)
    elif K32 == 2:
        low, high = tl.join(steps[first], steps[first + 1]), tl.join(steps[first + 2], steps[first + 3])
        weight = tl.reshape(tl.join(low, high), [8, 4, WARPS, 2, 2, 2, 2, 2])
        weight = tl.permute(weight, (2, 4, 0, 7, 6, 3, 1, 5))  # .. j k32 -> w rh g (k32 j kh t e)
    else:
        low = tl.join(tl.join(steps[0], steps[1]), tl.join(steps[2], steps[3]))
        high = tl.join(tl.join(steps[4], steps[5]), tl.join(steps[6], steps[7]))
        weight = tl.reshape(tl.join(low, high), [8, 4, WARPS, 2, 2, 2, 2, 2, 2])
        weight = tl.permute(weight, (2, 4, 0, 8, 7, 6, 3, 1, 5))
    return tl.reshape(weight, [16 * WARPS, 32 * K32])


@triton.jit
def _by_row(value, WARPS: tl.constexpr):
    """A value per row `[t, g, warp, tile, rh]`, the same for all t -> float32 `[16 WARPS]`."""
    rows = tl.reshape(tl.permute(value, (2, 3, 4, 1, 0)), [16 * WARPS, 4])
    return tl.sum(rows.to(tl.float32), 1) * 0.25


@triton.jit(do_not_specialize=["last_tile", "steps"])
def gemm_kernel(
    xp_ptr, codes_ptr, scales_ptr, zeros_ptr, levels_ptr, partial_ptr, K, last_tile, steps,
    FORMAT: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial `[splits, TOKENS, 16 tiles]`; grid: (tiles / WARPS, splits of `steps` k_tiles).

    The result stays in units of `grid_step` until the end.
    """
    BITS: tl.constexpr = FORMAT.bits
    GROUP: tl.constexpr = FORMAT.group_size
    GROUPS: tl.constexpr = FORMAT.groups
    K32: tl.constexpr = GROUP // 32 if GROUP > 0 and GROUP < 128 else 4  # units of 32 columns per tl.dot
    tiles = tl.minimum(tl.program_id(0) * WARPS + tl.arange(0, WARPS), last_tile).to(tl.int64)[:, None]
    row = tl.program_id(0) * WARPS * 16 + tl.arange(0, 16 * WARPS)
    split = tl.program_id(1)
    k_tiles = tl.cdiv(K, 256)
    row_constants = load_row_constants(scales_ptr, zeros_ptr, tiles, FORMAT, WARPS, 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([16 * WARPS, TOKENS], tl.float32)
    for step in range(steps):
        k_tile = split * steps + step
        loaded = load_k_tile(
            codes_ptr, scales_ptr, zeros_ptr, tiles, tiles * 0 + k_tile, k_tiles, FORMAT, False
        )
        part = acc
        for half in tl.static_range(2):
            weights = dequantize_half(loaded, row_constants, levels_ptr, tiles, xp_ptr, FORMAT, zeros_ptr is not None,
                                      WARPS, 1, half)  # fmt: skip
            for i in tl.static_range(4 // K32):
                if GROUP > 0 and (4 * half + i * K32) * GROUPS % 8 == 0:
                    part = tl.zeros([16 * WARPS, TOKENS], tl.float32)
                first = k_tile * 256 + (4 * half + i * K32) * 32
                at = (first + tl.arange(0, 32 * K32))[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
                x = tl.load(xp_ptr + at, mask=k_tile < k_tiles, other=0.0)
                part = tl.dot(_weight_operand(weights, WARPS, i, K32), x, part)
                if GROUP > 0 and (4 * half + (i + 1) * K32) * GROUPS % 8 == 0:
                    acc += part * _by_row(loaded[BITS + (4 * half + i * K32) * GROUPS // 8], WARPS)[:, None]
        if GROUP == 0:
            acc = part
    if not FORMAT.codebook:
        if GROUP == 0:
            acc *= _by_row(tl.load(scales_ptr + row_offsets(tiles)), WARPS)[:, None]
        acc *= 1.0 / FORMAT.grid_step
    n_rows = (last_tile + 1) * 16
    at = (split * TOKENS + tl.arange(0, TOKENS))[None, :].to(tl.int64) * n_rows + row[:, None]
    tl.store(partial_ptr + at, acc, mask=(row < n_rows)[:, None])


@triton.jit
def reduce_kernel(
    partial_ptr, bias_ptr, y_ptr, n, n_rows, stride_y, SPLIT_K: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y = the sum of the partial products in order, plus the bias; grid: (rows / BLOCK, tokens)."""
    row, token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    y = tl.zeros([BLOCK], tl.float32)
    wait_for_previous_launch(PDL, True)
    for i in tl.static_range(SPLIT_K):
        y += tl.load(partial_ptr + (i * TOKENS + token) * n_rows + row, mask=row < n, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * stride_y + row, y.to(y_ptr.dtype.element_ty), mask=row < n)


def supports(layout: Layout, num_tokens: int, device: torch.device) -> bool:
    """Up to 128 tokens of any layout."""
    return num_tokens <= 128


def gemm(
    x: Tensor, layout: Layout, bias: Tensor | None, config: GemmConfig, *, asm: bool | None = None
) -> Tensor:
    """y [m, n] of x [m, k], 17 <= m <= 128, rows contiguous. `asm` None: inline PTX if the device has it."""
    m, k = x.shape
    tokens = max(16, triton.next_power_of_2(m))
    tiles, k_tiles = layout.packed_codes.shape[0], triton.cdiv(k, 256)
    asm = supports_ptx(x.device) if asm is None else asm
    steps = triton.cdiv(k_tiles, min(k_tiles, config.split_k))
    splits = triton.cdiv(k_tiles, steps)
    pdl = supports_pdl(x.device)
    launch_pdl = pdl_option(pdl)
    permuted = torch.empty(k_tiles * 256, tokens, dtype=x.dtype, device=x.device)
    scaled = scaled_activations(x, layout)
    permute_kernel[(k_tiles * 4,)](
        scaled, permuted, m, k, scaled.stride(0), TOKENS=tokens, BLOCK=64, PDL=pdl, **launch_pdl
    )
    partial = torch.empty(splits, tokens, tiles * 16, dtype=torch.float32, device=x.device)
    tensors, format = dequant_operands(layout, x.dtype, asm)
    with unreported():
        gemm_kernel[(triton.cdiv(tiles, config.num_warps), splits)](
            permuted, *tensors, partial, k, tiles - 1, steps, FORMAT=format, WARPS=config.num_warps, TOKENS=tokens,
            PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages, **launch_pdl,
        )  # fmt: skip
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    if layout.sparse is None:
        reduce_kernel[(triton.cdiv(layout.n, 512), m)](
            partial, bias, y, layout.n, tiles * 16, y.stride(0), SPLIT_K=splits, TOKENS=tokens, BLOCK=512, PDL=pdl,
            num_warps=4, **launch_pdl,
        )  # fmt: skip
        return y
    transposed = torch.empty(k, tokens, dtype=x.dtype, device=x.device)
    transpose_kernel[(triton.cdiv(k, 64),)](
        x, transposed, m, k, x.stride(0), TOKENS=tokens, BLOCK=64, PDL=False
    )
    spmm_reduce_kernel[(tiles,)](
        partial, transposed, *sparse_operands(layout), bias, y, m, layout.n, tiles - 1, y.stride(0), SPLIT_K=splits,
        TOKENS=tokens, num_warps=4,
    )  # fmt: skip
    return y
