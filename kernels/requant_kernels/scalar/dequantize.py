"""Dequantize a layout to a plain matrix `[n, k]`: for many tokens the way to cuBLAS, and the reference of `generate`.

A program owns 16 rows and takes their blocks through the same decoder as `decode.py`; it writes 16 bytes a lane, then
adds the residuals of its rows in place. The dense value is rounded to the matrix's type before the residual is added.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.fragment_dequant import (
    decode_half,
    load_block,
    load_slots,
    load_tables,
    operands,
    sparse_operands,
)
from requant_kernels.common.packing import CodebookLayout, Layout


@triton.jit(do_not_specialize=["last_tile", "steps"])
def dequantize_kernel(
    w_ptr, s_ptr, z_ptr, levels_ptr, rows_ptr, sp_ptr, si_ptr, sv_ptr, sr_ptr, cs_ptr, out_ptr,
    K, n, last_tile, steps,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr,
    TABLES: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, SLOTS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """out `[n, K]`; grid: tiles of 16 rows."""
    dtype = out_ptr.dtype.element_ty
    tile = tl.program_id(0)
    tiles = tl.minimum(tile + tl.arange(0, 1), last_tile).to(tl.int64)[None, :]
    ZEROS: tl.constexpr = z_ptr is not None
    GROUPS: tl.constexpr = 256 // GROUP if GROUP > 0 and GROUP < 256 else 1
    blocks = tl.cdiv(K, 256)
    tables = load_tables(s_ptr, z_ptr, tiles, CODEBOOK, TABLES, GROUP, W, 1)
    t, g, rh, eight = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 2), tl.arange(0, 8)
    position = tile.to(tl.int64) * 16 + rh[None, None, None, :, None] * 8 + g[None, :, None, None, None]
    row = position if rows_ptr is None else tl.load(rows_ptr + position).to(tl.int64)
    for step in range(steps):
        block = step * W + tl.arange(0, W)
        loaded = load_block(w_ptr, s_ptr, z_ptr, tiles, block[:, None], blocks, BITS, GROUP, False, W)
        planes = ()
        for half in tl.static_range(2):
            planes = planes + decode_half(loaded, tables, levels_ptr, tiles, out_ptr, ASM, CONSTRAINTS, POSITIONS,
                                          CODEBOOK, BITS, GROUP, ZEROS, UNIT, W, 1, half)  # fmt: skip
        for slab in tl.static_range(8):
            value = tl.reshape(tl.join(planes[2 * slab], planes[2 * slab + 1]), [8, 4, W, 2, 2, 2, 2])
            value = tl.permute(value, (1, 0, 2, 4, 6, 3, 5))  # g t w kh rh e j -> t g w rh (j kh e)
            value = tl.reshape(value, [4, 8, W, 2, 8]).to(tl.float32)
            column = block[None, None, :, None, None] * 256 + slab * 32
            column += t[:, None, None, None, None] * 8 + eight[None, None, None, None, :]
            if not CODEBOOK:
                if GROUP > 0:
                    scale = tl.reshape(loaded[BITS + slab * GROUPS // 8], [4, 8, W, 2, 1])
                else:
                    at = (
                        tile.to(tl.int64) * 16
                        + g[None, :, None, None, None] * 2
                        + rh[None, None, None, :, None]
                    )
                    scale = tl.load(s_ptr + at)
                value *= scale.to(tl.float32) * (1.0 / UNIT)
                if cs_ptr is not None:
                    value /= tl.load(cs_ptr + column, mask=column < K, other=1.0).to(tl.float32)
            tl.store(out_ptr + row * K + column, value.to(dtype), mask=(row < n) & (column < K))
    if sp_ptr is not None:
        tl.debug_barrier()  # this program's own stores come first
        at = tile.to(tl.int64) * 16 + tl.arange(0, 16)
        own = tl.load(rows_ptr + at).to(tl.int64)[:, None, None]
        chunk = tl.load(sp_ptr + tile + tl.arange(0, 16) * 0)
        last = tl.load(sp_ptr + tile + 1)
        while tl.max(last - chunk, 0) > 0:
            column, value = load_slots(si_ptr, sv_ptr, chunk, chunk * 0 + last, SLOTS)
            residual = value.to(tl.float32)
            if sr_ptr is not None:
                residual *= tl.load(sr_ptr + at).to(tl.float32)[:, None, None]
            held = out_ptr + own * K + column
            filled = (value != 0) & (own < n)  # an empty slot points at column 0, which may be someone's
            tl.store(
                held, (tl.load(held, mask=filled, other=0.0).to(tl.float32) + residual).to(dtype), mask=filled
            )
            chunk += SLOTS


def dequantize(layout: Layout, dtype: torch.dtype, *, asm: bool) -> Tensor:
    """The matrix [n, k] in `dtype` (float16 or bfloat16)."""
    out = torch.empty(layout.n, layout.k, dtype=dtype, device=layout.packed_codes.device)
    tensors, constants = operands(layout, dtype, asm)
    column_scales = None if isinstance(layout, CodebookLayout) else layout.column_scales
    tiles, warps = layout.packed_codes.shape[0], 8 if layout.k > 1024 else 4
    dequantize_kernel[(tiles,)](
        *tensors, *sparse_operands(layout), column_scales, out, layout.k, layout.n, tiles - 1,
        triton.cdiv(triton.cdiv(layout.k, 256), warps), **constants, SLOTS=16, W=warps, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out
