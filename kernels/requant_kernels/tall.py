"""The tall kernel: 17 to 128 tokens. The same words, now multiplied by a tile of tokens that all warps share.

A program owns 128 rows, a warp 16 of them; the columns are split among programs. Three launches: the activations are
laid out in the order in which words are decoded (`arrange`), partial products are written in float32 (`multiply`), and
they are summed in a fixed order, with residuals and bias (`finish`).
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.blocks import (
    decode_block,
    dense_tokens,
    load_block,
    load_slots,
    load_tables,
    operands,
    row_offsets,
    sparse_operands,
)
from requant_kernels.decode import transpose_kernel
from requant_kernels.layouts import Layout
from requant_kernels.tuning import tall_stages

WARPS = 8


@triton.jit
def arrange_kernel(x_ptr, xa_ptr, M, K, stride_x, N: tl.constexpr, BLOCK: tl.constexpr):
    """xa `[blocks of 256, N]` = x transposed, columns in the order (slab, j, kh, t, e), zero beyond the matrix."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, N)
    j, kh, t, e = at // 16 % 2, at // 8 % 2, at // 2 % 4, at % 2
    column = at // 32 * 32 + 8 * t + 4 * j + 2 * kh + e
    inside = (token < M)[None, :] & (column < K)[:, None]
    x = tl.load(x_ptr + token[None, :].to(tl.int64) * stride_x + column[:, None], mask=inside, other=0.0)
    tl.store(xa_ptr + at[:, None] * N + token[None, :], x)


@triton.jit(do_not_specialize=["last_tile"])
def multiply_kernel(
    xa_ptr, w_ptr, s_ptr, z_ptr, levels_ptr, partial_ptr, K, last_tile,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr,
    TABLES: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr,
    W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """partial `[SPLIT, N, 16 tiles]`; grid: (tiles / W, SPLIT). Steps of the grid are in units of UNIT until the end."""
    GROUPS: tl.constexpr = 0 if GROUP == 0 else (256 // GROUP if GROUP < 256 else 1)
    tiles = tl.minimum(tl.program_id(0) * W + tl.arange(0, W), last_tile).to(tl.int64)[:, None]
    row = tl.program_id(0) * W * 16 + tl.arange(0, 16 * W)
    part_of = tl.program_id(1)
    blocks = tl.cdiv(K, 256)
    tables = load_tables(s_ptr, z_ptr, tiles, CODEBOOK, TABLES, GROUP, W, 1)
    acc = tl.zeros([16 * W, N], tl.float32)
    for step in range(STEPS):
        block = part_of * STEPS + step
        loaded = load_block(w_ptr, s_ptr, z_ptr, tiles, tiles * 0 + block, blocks, BITS, GROUP, False, W)
        planes = decode_block(loaded, tables, levels_ptr, tiles, xa_ptr, ASM, CONSTRAINTS, POSITIONS, CODEBOOK, BITS,
                              GROUP, z_ptr is not None, UNIT, W, 1)  # fmt: skip
        part = acc
        for slab in tl.static_range(8):
            if GROUP > 0 and slab * GROUPS % 8 == 0:
                part = tl.zeros([16 * W, N], tl.float32)
            weight = tl.reshape(tl.join(planes[2 * slab], planes[2 * slab + 1]), [8, 4, W, 2, 2, 2, 2])
            weight = tl.permute(weight, (2, 4, 0, 6, 3, 1, 5))  # g t w kh rh e j -> w rh g j kh t e
            at = (block * 256 + slab * 32 + tl.arange(0, 32))[:, None] * N + tl.arange(0, N)[None, :]
            x = tl.load(xa_ptr + at, mask=block < blocks, other=0.0)
            part = tl.dot(tl.reshape(weight, [16 * W, 32]), x, part)
            if GROUP > 0 and (slab + 1) * GROUPS % 8 == 0:
                scale = tl.reshape(
                    tl.permute(loaded[BITS + slab * GROUPS // 8], (2, 3, 4, 1, 0)), [16 * W, 4]
                )
                acc += part * (tl.sum(scale.to(tl.float32), 1) * 0.25)[:, None]
        if GROUP == 0:
            acc = part
    if not CODEBOOK:
        if GROUP == 0:
            own = tl.reshape(tl.permute(tl.load(s_ptr + row_offsets(tiles)), (2, 3, 4, 1, 0)), [16 * W, 4])
            acc *= (tl.sum(own.to(tl.float32), 1) * 0.25)[:, None]
        acc *= 1.0 / UNIT
    n_rows = (last_tile + 1) * 16
    at = (part_of * N + tl.arange(0, N))[None, :].to(tl.int64) * n_rows + row[:, None]
    tl.store(partial_ptr + at, acc, mask=(row < n_rows)[:, None])


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


def tall(x: Tensor, layout: Layout, bias: Tensor | None, *, asm: bool, split: int | None = None) -> Tensor:
    """y [m, n] of x [m, k], 17 <= m <= 128, rows contiguous."""
    m, k = x.shape
    n_tokens = max(16, triton.next_power_of_2(m))
    tiles, blocks = layout.words.shape[0], triton.cdiv(k, 256)
    programs = triton.cdiv(tiles, WARPS)
    if split is None:  # about two programs for each of some 132 multiprocessors
        split = max(1, min(8, blocks, 264 // programs))
    steps = triton.cdiv(blocks, split)
    split = triton.cdiv(blocks, steps)
    arranged = torch.empty(blocks * 256, n_tokens, dtype=x.dtype, device=x.device)
    dense = dense_tokens(x, layout)
    arrange_kernel[(blocks * 4,)](dense, arranged, m, k, dense.stride(0), N=n_tokens, BLOCK=64)
    partial = torch.empty(split, n_tokens, tiles * 16, dtype=torch.float32, device=x.device)
    tensors, constants = operands(layout, x.dtype, asm)
    multiply_kernel[(programs, split)](
        arranged, *tensors, partial, k, tiles - 1, **constants, SPLIT=split, STEPS=steps, W=WARPS, N=n_tokens,
        num_warps=WARPS, num_stages=tall_stages(n_tokens, x.device),
    )  # fmt: skip
    transposed = None
    if layout.sparse is not None:
        transposed = torch.empty(k, n_tokens, dtype=x.dtype, device=x.device)
        transpose_kernel[(triton.cdiv(k, 64),)](
            x, transposed, m, k, x.stride(0), MS=n_tokens, BLOCK=64, PDL=False
        )
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    finish_kernel[(tiles,)](
        partial, transposed, *sparse_operands(layout), bias, y, m, layout.n, tiles - 1, y.stride(0), SPLIT=split,
        N=n_tokens, num_warps=4,
    )  # fmt: skip
    return y
