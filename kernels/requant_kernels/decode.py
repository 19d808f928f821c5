"""The decode kernel: `y = x @ (dense + sparse)^T` for 1 to 16 tokens, one launch, no shared memory in the loop.

A program owns 16 rows; its warps share the columns among them, 256 at a time (`words.py` has the bit diagram). Weights
are the left operand of the tensor cores, tokens the right one. The batch dimension of a three-dimensional `tl.dot` is
the warp: every warp multiplies its own blocks and nothing is exchanged before the end, where one `tl.sum` over the warps,
in a fixed order, makes the result the same in every run.

- Words and activations of the next blocks are requested before the present ones are multiplied. A branch that is always
  taken separates the two: without it, ptxas moves the loads behind the arithmetic to save registers, and a warp waits
  for memory in every block (measured: 14.1 -> 10.6 us at 8192 x 8192, 2 bits).
- Sparse residuals: rows are sorted by their number (`layouts.py`), so 16 rows have about equal lengths and share one
  rectangle of slots. Slots are fetched first, the activations are gathered while the dense part runs, sums come last.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.blocks import (
    decode_half,
    dense_tokens,
    halves,
    load_block,
    load_slots,
    load_tables,
    operands,
    sparse_operands,
)
from requant_kernels.layouts import Layout
from requant_kernels.residuals import transpose_kernel
from requant_kernels.tuning import DecodeConfig


@triton.jit
def _like_products(rows, W: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """A value a row `[t, g, warp, tile, rh]` -> `[warp, rows, N]`, the shape of products."""
    rows = tl.reshape(tl.permute(rows, (2, 3, 4, 1, 0)), [W, R, 2, 8, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(rows, [W, R, 2, 8, N // 8, 4, 2]), [W, 16 * R, N])


@triton.jit
def load_tokens(x_ptr, token, stride_x, block, blocks, K, EVEN: tl.constexpr):
    """Activations of one block a warp, in pairs: eight int32 `[t, g, warp, token / 8, (j kh)]`, two planes each."""
    t, four = tl.arange(0, 4), tl.arange(0, 4)
    pair = (tl.minimum(block, blocks - 1) if EVEN else block)[None, None, :, None, None] * 128
    pair += t[:, None, None, None, None] * 4 + four[None, None, None, None, :]
    pointer = x_ptr + token[None, :, None, :, None].to(tl.int64) * stride_x + pair
    tokens = ()
    for slab in tl.static_range(8):
        if EVEN:
            tokens = tokens + (tl.load(pointer + slab * 16),)
        else:
            tokens = tokens + (tl.load(pointer + slab * 16, mask=(pair + slab * 16) * 2 < K, other=0),)
    return tokens


@triton.jit
def _multiply_block(acc, loaded, tables, tokens, like_ptr, levels_ptr, tiles, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
                    POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                    ZEROS: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
                    N: tl.constexpr):  # fmt: skip
    """acc `[warp, rows, N]` += block @ tokens."""
    GROUPS: tl.constexpr = 0 if GROUP == 0 else (256 // GROUP if GROUP < 256 else 1)
    planes = ()
    for half in tl.static_range(2):
        planes = planes + decode_half(loaded, tables, levels_ptr, tiles, like_ptr, ASM, CONSTRAINTS, POSITIONS,
                                      CODEBOOK, BITS, GROUP, ZEROS, UNIT, W, R, half)  # fmt: skip
    part = acc
    for slab in tl.static_range(8):
        if GROUP > 0 and slab * GROUPS % 8 == 0:
            part = tl.zeros([W, 16 * R, N], tl.float32)
        weight = tl.reshape(tl.join(planes[2 * slab], planes[2 * slab + 1]), [8, 4, W, R, 2, 2, 2, 2])
        weight = tl.permute(
            weight, (2, 3, 5, 0, 7, 1, 4, 6)
        )  # g t w tile kh rh e j -> w (tile rh g) (j t kh e)
        x = tl.reshape(halves(tokens[slab], like_ptr.dtype.element_ty), [4, 8, W, N // 8, 2, 4])
        x = tl.permute(x, (2, 4, 0, 5, 3, 1))  # t g w nt j (kh e) -> w (j t kh e) (nt g)
        part = tl.dot(tl.reshape(weight, [W, 16 * R, 32]), tl.reshape(x, [W, 32, N]), part)
        if GROUP > 0 and (slab + 1) * GROUPS % 8 == 0:
            scale = loaded[BITS + slab * GROUPS // 8].to(tl.float32)
            acc += part * _like_products(scale, W, R, N)
    return acc if GROUP > 0 else part


@triton.jit
def _gather(xs_ptr, column, MS: tl.constexpr):
    """Activations at `column`: `[rows, chunks, 8, MS]`, MS neighbouring tokens of the transposed activations."""
    return tl.load(xs_ptr + column[:, :, :, None] * MS + tl.arange(0, MS)[None, None, None, :])


@triton.jit
def _sparse_sums(value, x):
    """Sums over the slots of a row: `[rows, MS]`."""
    return tl.sum(tl.sum(value.to(tl.float32)[:, :, :, None] * x.to(tl.float32), 2), 1)


@triton.jit(do_not_specialize=["last_tile", "chunks"])
def decode_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, z_ptr, levels_ptr, rows_ptr, sp_ptr, si_ptr, sv_ptr, sr_ptr, bias_ptr, y_ptr,
    M, K, n, last_tile, chunks, stride_x, stride_y,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr,
    TABLES: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, MS: tl.constexpr,
    SLOTS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr,
    N: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ weight^T; grid: R tiles of 16 rows each. GROUP 0: one scale a row."""
    # where the number of tiles is odd, the last tile is computed, and written, twice alike
    tiles = tl.minimum(tl.program_id(0) * R + tl.arange(0, R), last_tile).to(tl.int64)
    tiles = tiles[None, :]
    position = tl.minimum(tl.program_id(0) * R + tl.arange(0, 16 * R) // 16, last_tile).to(tl.int64)
    row = position * 16 + tl.arange(0, 16 * R) % 16
    ZEROS: tl.constexpr = z_ptr is not None
    SPARSE: tl.constexpr = sp_ptr is not None
    blocks = tl.cdiv(K, 256)
    warp = tl.arange(0, W)
    tables = load_tables(s_ptr, z_ptr, tiles, CODEBOOK, TABLES, GROUP, W, R)
    if SPARSE:
        chunk, last = tl.load(sp_ptr + position), tl.load(sp_ptr + position + 1)
        column, value = load_slots(si_ptr, sv_ptr, chunk, last, SLOTS)
    ahead = ()
    for u in tl.static_range(UNROLL):
        ahead = ahead + (
            load_block(w_ptr, s_ptr, z_ptr, tiles, (u * W + warp)[:, None], blocks, BITS, GROUP, EVEN, W),
        )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if SPARSE and MS == 1:
        gathered = _gather(xs_ptr, column, MS)  # arrives while the dense part runs
    token = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, N // 8)[None, :]
    token = tl.minimum(token, M - 1)  # the surplus columns are computed and never stored
    acc = tl.zeros([W, 16 * R, N], tl.float32)
    if AHEAD:
        tokens = load_tokens(x_ptr, token, stride_x, warp, blocks, K, EVEN)
    for c in range(chunks):
        now = ahead
        ahead = ()
        for u in tl.static_range(UNROLL):
            block = ((c + 1) * UNROLL + u) * W + warp
            ahead = ahead + (
                load_block(w_ptr, s_ptr, z_ptr, tiles, block[:, None], blocks, BITS, GROUP, False, W),
            )
        for u in tl.static_range(UNROLL):
            block = (c * UNROLL + u) * W + warp
            if AHEAD:
                at_hand = tokens
                tokens = load_tokens(x_ptr, token, stride_x, block + W, blocks, K, EVEN)
            else:
                at_hand = load_tokens(x_ptr, token, stride_x, block, blocks, K, EVEN)
            if (c * UNROLL + u) * W < blocks:  # always; without the branch the compiler sinks the loads below
                acc = _multiply_block(acc, now[u], tables, at_hand, y_ptr, levels_ptr, tiles, ASM, CONSTRAINTS,
                                      POSITIONS, CODEBOOK, BITS, GROUP, ZEROS, UNIT, W, R, N)  # fmt: skip
    y = tl.sum(acc, 0)
    if not CODEBOOK:
        if GROUP == 0:
            y *= tl.load(s_ptr + position * 16 + row % 8 * 2 + row % 16 // 8).to(tl.float32)[:, None]
        y *= 1.0 / UNIT
    if SPARSE:
        if MS > 1:
            gathered = _gather(xs_ptr, column, MS)  # too many registers to hold any longer
        sums = _sparse_sums(value, gathered)
        chunk += SLOTS
        while tl.max(last - chunk, 0) > 0:
            column, value = load_slots(si_ptr, sv_ptr, chunk, last, SLOTS)
            sums += _sparse_sums(value, _gather(xs_ptr, column, MS))
            chunk += SLOTS
        if sr_ptr is not None:
            sums *= tl.load(sr_ptr + row).to(tl.float32)[:, None]
        if MS < N:
            sums = tl.broadcast_to(sums, [16 * R, N])  # one token: the other columns are never stored
        y += sums
    out = row
    if rows_ptr is not None:
        out = tl.load(rows_ptr + row).to(tl.int64)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out, mask=out < n, other=0.0).to(tl.float32)[:, None]
    m = tl.arange(0, N)
    tl.store(
        y_ptr + m[None, :].to(tl.int64) * stride_y + out[:, None],
        y.to(y_ptr.dtype.element_ty),
        mask=(m < M)[None, :] & (out < n)[:, None],
    )


def decode(x: Tensor, layout: Layout, bias: Tensor | None, config: DecodeConfig, *, asm: bool) -> Tensor:
    """y [m, n] of x [m, k], 1 <= m <= 16, rows contiguous."""
    m, k = x.shape
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    tensors, constants = operands(layout, x.dtype, asm)
    launch = {"launch_pdl": True} if config.pdl else {}
    n_tokens = 8 if m <= 8 else 16
    width = 1 if m == 1 or layout.sparse is None else n_tokens
    gathered = x
    if width > 1:
        gathered = torch.empty(k, width, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(k, 256),)
        transpose_kernel[grid](x, gathered, m, k, x.stride(0), MS=width, BLOCK=256, PDL=config.pdl, **launch)
    dense = dense_tokens(x, layout)
    if k % 2 or dense.stride(0) % 2 or dense.data_ptr() % 4:  # the kernel reads activations in pairs
        dense = torch.nn.functional.pad(dense, (0, k % 2)).clone(memory_format=torch.contiguous_format)
    pairs = dense.view(torch.int32)
    tiles, span = layout.words.shape[0], config.warps * config.unroll
    slots = config.slots if width == 1 else max(2, min(config.slots, 64 // width))
    if config.max_registers:
        launch["maxnreg"] = config.max_registers
    decode_kernel[(triton.cdiv(tiles, config.tiles),)](
        pairs, gathered, *tensors, *sparse_operands(layout), bias, y, m, k, layout.n, tiles - 1,
        triton.cdiv(triton.cdiv(k, 256), span), pairs.stride(0), y.stride(0), **constants, EVEN=k % (256 * span) == 0,
        MS=width, SLOTS=slots, W=config.warps, R=config.tiles, UNROLL=config.unroll, N=n_tokens,
        AHEAD=config.ahead and n_tokens == 8, PDL=config.pdl, num_warps=config.warps, num_stages=1, **launch,
    )  # fmt: skip
    return y
