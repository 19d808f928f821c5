"""Dequantize a layout to its weight `[n, k]`, for cuBLAS to multiply: above 512 tokens (128 without Hopper).

A CTA has 16 rows and processes their k_tiles with the same device functions as `gemv.py`. It stores 16 bytes per lane, then
adds the residuals of its rows to what it stored. The dense value is rounded to the output type before the residual is added.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_ptx
from requant_kernels.common.fragment_dequant import (
    dequant_operands,
    dequantize_half,
    load_k_tile,
    load_row_constants,
    load_slices,
    sparse_operands,
)
from requant_kernels.common.launch import unreported
from requant_kernels.common.packing import Layout


@triton.jit(do_not_specialize=["last_tile", "steps"])
def dequantize_kernel(
    codes_ptr, scales_ptr, zeros_ptr, levels_ptr, row_perm_ptr, slice_ptr, ell_columns_ptr, ell_values_ptr,
    ell_row_scales_ptr, column_scales_ptr, out_ptr, K, n, last_tile, steps,
    FORMAT: tl.constexpr, SLICES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """out `[n, K]`; grid: row tiles. Each warp takes one k_tile per step."""
    BITS: tl.constexpr = FORMAT.bits
    GROUP: tl.constexpr = FORMAT.group_size
    GROUPS: tl.constexpr = 256 // GROUP if GROUP > 0 and GROUP < 256 else 1
    ZEROS: tl.constexpr = zeros_ptr is not None
    dtype = out_ptr.dtype.element_ty
    tile = tl.program_id(0)
    tiles = tl.minimum(tile + tl.arange(0, 1), last_tile).to(tl.int64)[None, :]
    k_tiles = tl.cdiv(K, 256)
    row_constants = load_row_constants(scales_ptr, zeros_ptr, tiles, FORMAT, WARPS, 1)
    t, g, rh, eight = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 2), tl.arange(0, 8)
    position = tile.to(tl.int64) * 16 + rh[None, None, None, :, None] * 8 + g[None, :, None, None, None]
    row = position if row_perm_ptr is None else tl.load(row_perm_ptr + position).to(tl.int64)
    for step in range(steps):
        k_tile = step * WARPS + tl.arange(0, WARPS)
        loaded = load_k_tile(codes_ptr, scales_ptr, zeros_ptr, tiles, k_tile[:, None], k_tiles, FORMAT, False)
        weights = ()
        for half in tl.static_range(2):
            weights = weights + dequantize_half(
                loaded, row_constants, levels_ptr, tiles, out_ptr, FORMAT, ZEROS, WARPS, 1, half
            )
        for k32 in tl.static_range(8):
            value = tl.reshape(tl.join(weights[2 * k32], weights[2 * k32 + 1]), [8, 4, WARPS, 2, 2, 2, 2])
            value = tl.permute(value, (1, 0, 2, 4, 6, 3, 5))  # g t w kh rh e j -> t g w rh (j kh e)
            value = tl.reshape(value, [4, 8, WARPS, 2, 8]).to(tl.float32)
            column = k_tile[None, None, :, None, None] * 256 + k32 * 32
            column += t[:, None, None, None, None] * 8 + eight[None, None, None, None, :]
            if not FORMAT.codebook:
                if GROUP > 0:
                    scale = tl.reshape(loaded[BITS + k32 * GROUPS // 8], [4, 8, WARPS, 2, 1])
                else:
                    at = (
                        tile.to(tl.int64) * 16
                        + g[None, :, None, None, None] * 2
                        + rh[None, None, None, :, None]
                    )
                    scale = tl.load(scales_ptr + at)
                value *= scale.to(tl.float32) * (1.0 / FORMAT.grid_step)
                if column_scales_ptr is not None:
                    value /= tl.load(column_scales_ptr + column, mask=column < K, other=1.0).to(tl.float32)
            tl.store(out_ptr + row * K + column, value.to(dtype), mask=(row < n) & (column < K))
    if slice_ptr is not None:
        tl.debug_barrier()  # this CTA's own stores come first
        at = tile.to(tl.int64) * 16 + tl.arange(0, 16)
        own = tl.load(row_perm_ptr + at).to(tl.int64)[:, None, None]
        first = tl.load(slice_ptr + tile + tl.arange(0, 16) * 0)
        last = tl.load(slice_ptr + tile + 1)
        while tl.max(last - first, 0) > 0:
            column, value = load_slices(ell_columns_ptr, ell_values_ptr, first, first * 0 + last, SLICES)
            residual = value.to(tl.float32)
            if ell_row_scales_ptr is not None:
                residual *= tl.load(ell_row_scales_ptr + at).to(tl.float32)[:, None, None]
            out = out_ptr + own * K + column
            filled = (value != 0) & (
                own < n
            )  # an empty slot has column 0, whose weight another slot may hold
            dense = tl.load(out, mask=filled, other=0.0).to(tl.float32)
            tl.store(out, (dense + residual).to(dtype), mask=filled)
            first += SLICES


def supports(layout: Layout, num_tokens: int, device: torch.device) -> bool:
    """Any number of tokens of any layout."""
    return True


def matmul(x: Tensor, layout: Layout, bias: Tensor | None, config: None = None) -> Tensor:
    """y [m, n] of x [m, k]: the dequantized weight, multiplied by cuBLAS."""
    return torch.nn.functional.linear(x, dequantize(layout, x.dtype), bias)


def dequantize(layout: Layout, dtype: torch.dtype, *, asm: bool | None = None) -> Tensor:
    """The weight [n, k] in `dtype` (float16 or bfloat16). `asm` None: inline PTX if the device has it."""
    asm = supports_ptx(layout.packed_codes.device) if asm is None else asm
    out = torch.empty(layout.n, layout.k, dtype=dtype, device=layout.packed_codes.device)
    tensors, format = dequant_operands(layout, dtype, asm)
    tiles, warps = layout.packed_codes.shape[0], 8 if layout.k > 1024 else 4
    with unreported():
        dequantize_kernel[(tiles,)](
            *tensors, *sparse_operands(layout), layout.column_scales, out, layout.k, layout.n, tiles - 1,
            triton.cdiv(triton.cdiv(layout.k, 256), warps), FORMAT=format, SLICES=16, WARPS=warps, num_warps=warps,
            num_stages=1,
        )  # fmt: skip
    return out
