"""The tall kernel: 17 to 128 tokens. The same words, now multiplied by a tile of tokens that all warps share.

A program owns 16 rows a warp; the columns are split among programs. Three launches: the activations are laid out in the
order in which words are decoded (`arrange`), partial products are written in float32 (`multiply`), and they are summed in
a fixed order with the bias (`sum`), or with residuals too (`finish`, in `residuals.py`). Weights go from registers into
wgmma, the columns of a group, 128 at most, in one piece: every piece has to wait for the tensor cores.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.fragment_dequant import (
    decode_half,
    dense_tokens,
    load_block,
    load_tables,
    operands,
    row_offsets,
    sparse_operands,
)
from requant_kernels.common.packing import Layout
from requant_kernels.common.sparse_spmm import finish_kernel, transpose_kernel
from requant_kernels.heuristics import kind_of, launches_early, tall_config
from requant_kernels.launch_config import TallConfig


@triton.jit
def arrange_kernel(x_ptr, xa_ptr, M, K, stride_x, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """xa `[blocks of 256, N]` = x transposed, columns in the order (slab, j, kh, t, e), zero beyond the matrix."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, N)
    j, kh, t, e = at // 16 % 2, at // 8 % 2, at // 2 % 4, at % 2
    column = at // 32 * 32 + 8 * t + 4 * j + 2 * kh + e
    inside = (token < M)[None, :] & (column < K)[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token[None, :].to(tl.int64) * stride_x + column[:, None], mask=inside, other=0.0)
    tl.store(xa_ptr + at[:, None] * N + token[None, :], x)


@triton.jit
def _piece(planes, W: tl.constexpr, D: tl.constexpr, SLABS: tl.constexpr):
    """Weights `[16 W, 32 SLABS]` of slabs D SLABS .. of a half, columns in the order of `arrange_kernel`."""
    first: tl.constexpr = 2 * D * SLABS
    if SLABS == 1:
        weight = tl.reshape(tl.join(planes[first], planes[first + 1]), [8, 4, W, 2, 2, 2, 2])
        weight = tl.permute(weight, (2, 4, 0, 6, 3, 1, 5))  # g t w kh rh e j -> w rh g (j kh t e)
    elif SLABS == 2:
        low, high = tl.join(planes[first], planes[first + 1]), tl.join(planes[first + 2], planes[first + 3])
        weight = tl.reshape(tl.join(low, high), [8, 4, W, 2, 2, 2, 2, 2])
        weight = tl.permute(weight, (2, 4, 0, 7, 6, 3, 1, 5))  # .. j slab -> w rh g (slab j kh t e)
    else:
        low = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
        high = tl.join(tl.join(planes[4], planes[5]), tl.join(planes[6], planes[7]))
        weight = tl.reshape(tl.join(low, high), [8, 4, W, 2, 2, 2, 2, 2, 2])
        weight = tl.permute(weight, (2, 4, 0, 8, 7, 6, 3, 1, 5))
    return tl.reshape(weight, [16 * W, 32 * SLABS])


@triton.jit
def _by_row(value, W: tl.constexpr):
    """A value a row `[t, g, warp, tile, rh]`, equal for all t -> float32 `[16 W]`."""
    rows = tl.reshape(tl.permute(value, (2, 3, 4, 1, 0)), [16 * W, 4])
    return tl.sum(rows.to(tl.float32), 1) * 0.25


@triton.jit(do_not_specialize=["last_tile", "steps"])
def multiply_kernel(
    xa_ptr, w_ptr, s_ptr, z_ptr, levels_ptr, partial_ptr, K, last_tile, steps,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr,
    TABLES: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial `[splits, N, 16 tiles]`; grid: (tiles / W, splits of `steps` blocks).

    Steps of the quantization grid are in units of UNIT until the end.
    """
    GROUPS: tl.constexpr = 0 if GROUP == 0 else (256 // GROUP if GROUP < 256 else 1)
    SLABS: tl.constexpr = GROUP // 32 if GROUP > 0 and GROUP < 128 else 4
    tiles = tl.minimum(tl.program_id(0) * W + tl.arange(0, W), last_tile).to(tl.int64)[:, None]
    row = tl.program_id(0) * W * 16 + tl.arange(0, 16 * W)
    part_of = tl.program_id(1)
    blocks = tl.cdiv(K, 256)
    tables = load_tables(s_ptr, z_ptr, tiles, CODEBOOK, TABLES, GROUP, W, 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([16 * W, N], tl.float32)
    for step in range(steps):
        block = part_of * steps + step
        loaded = load_block(w_ptr, s_ptr, z_ptr, tiles, tiles * 0 + block, blocks, BITS, GROUP, False, W)
        part = acc
        for half in tl.static_range(2):
            planes = decode_half(loaded, tables, levels_ptr, tiles, xa_ptr, ASM, CONSTRAINTS, POSITIONS, CODEBOOK,
                                 BITS, GROUP, z_ptr is not None, UNIT, W, 1, half)  # fmt: skip
            for piece in tl.static_range(4 // SLABS):  # from slab 4 half + piece SLABS on
                if GROUP > 0 and (4 * half + piece * SLABS) * GROUPS % 8 == 0:
                    part = tl.zeros([16 * W, N], tl.float32)
                first = block * 256 + (4 * half + piece * SLABS) * 32
                at = (first + tl.arange(0, 32 * SLABS))[:, None] * N + tl.arange(0, N)[None, :]
                x = tl.load(xa_ptr + at, mask=block < blocks, other=0.0)
                part = tl.dot(_piece(planes, W, piece, SLABS), x, part)
                if GROUP > 0 and (4 * half + (piece + 1) * SLABS) * GROUPS % 8 == 0:
                    acc += part * _by_row(loaded[BITS + (4 * half + piece * SLABS) * GROUPS // 8], W)[:, None]
        if GROUP == 0:
            acc = part
    if not CODEBOOK:
        if GROUP == 0:
            acc *= _by_row(tl.load(s_ptr + row_offsets(tiles)), W)[:, None]
        acc *= 1.0 / UNIT
    n_rows = (last_tile + 1) * 16
    at = (part_of * N + tl.arange(0, N))[None, :].to(tl.int64) * n_rows + row[:, None]
    tl.store(partial_ptr + at, acc, mask=(row < n_rows)[:, None])


@triton.jit
def sum_kernel(
    partial_ptr, bias_ptr, y_ptr, n, n_rows, stride_y, SPLIT: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y = the partial products in order, and the bias; grid: (rows / BLOCK, tokens)."""
    row, token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    y = tl.zeros([BLOCK], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for i in tl.static_range(SPLIT):
        y += tl.load(partial_ptr + (i * N + token) * n_rows + row, mask=row < n, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * stride_y + row, y.to(y_ptr.dtype.element_ty), mask=row < n)


def tall(
    x: Tensor, layout: Layout, bias: Tensor | None, *, asm: bool, config: TallConfig | None = None
) -> Tensor:
    """y [m, n] of x [m, k], 17 <= m <= 128, rows contiguous."""
    m, k = x.shape
    n_tokens = max(16, triton.next_power_of_2(m))
    tiles, blocks = layout.packed_codes.shape[0], triton.cdiv(k, 256)
    if config is None:
        config = tall_config(kind_of(layout), layout.bits, layout.n, k, n_tokens, x.device)
    steps = triton.cdiv(blocks, min(blocks, config.split))
    split = triton.cdiv(blocks, steps)
    pdl = launches_early(x.device)
    early = {"launch_pdl": True} if pdl else {}
    arranged = torch.empty(blocks * 256, n_tokens, dtype=x.dtype, device=x.device)
    dense = dense_tokens(x, layout)
    arrange_kernel[(blocks * 4,)](
        dense, arranged, m, k, dense.stride(0), N=n_tokens, BLOCK=64, PDL=pdl, **early
    )
    partial = torch.empty(split, n_tokens, tiles * 16, dtype=torch.float32, device=x.device)
    tensors, constants = operands(layout, x.dtype, asm)
    multiply_kernel[(triton.cdiv(tiles, config.warps), split)](
        arranged, *tensors, partial, k, tiles - 1, steps, **constants, W=config.warps, N=n_tokens, PDL=pdl,
        num_warps=config.warps, num_stages=config.stages, **early,
    )  # fmt: skip
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    if layout.sparse is None:
        sum_kernel[(triton.cdiv(layout.n, 512), m)](
            partial, bias, y, layout.n, tiles * 16, y.stride(0), SPLIT=split, N=n_tokens, BLOCK=512, PDL=pdl,
            num_warps=4, **early,
        )  # fmt: skip
        return y
    transposed = torch.empty(k, n_tokens, dtype=x.dtype, device=x.device)
    transpose_kernel[(triton.cdiv(k, 64),)](
        x, transposed, m, k, x.stride(0), MS=n_tokens, BLOCK=64, PDL=False
    )
    finish_kernel[(tiles,)](
        partial, transposed, *sparse_operands(layout), bias, y, m, layout.n, tiles - 1, y.stride(0), SPLIT=split,
        N=n_tokens, num_warps=4,
    )  # fmt: skip
    return y
