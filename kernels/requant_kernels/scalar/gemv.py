"""The decode kernel: `y = x @ (dense + sparse)^T` for 1 to 16 tokens, one launch, no shared memory in the loop.

A program owns 16 rows; its warps share the columns among them, 256 at a time (`words.py` has the bit diagram). Weights
are the left operand of the tensor cores, tokens the right one. The batch dimension of a three-dimensional `tl.dot` is
the warp: every warp multiplies its own blocks and nothing is exchanged before the end, where one `tl.sum` over the warps,
in a fixed order, makes the result the same in every run.

- Words and activations of the next blocks are requested before the present ones are multiplied. A branch that is always
  taken separates the two: without it, ptxas moves the loads behind the arithmetic to save registers, and a warp waits
  for memory in every block (measured: 14.1 -> 10.6 us at 8192 x 8192, 2 bits). The words under way form a ring of
  `unroll` places, and the loop's body has as many blocks, so that nothing moves from register to register.
- Sparse residuals: rows are sorted by their number (`layouts.py`), so 16 rows have about equal lengths and share one
  rectangle of slots. Every block a thread takes a slot or a few: slots two blocks ahead, their activations one, so
  neither wait is seen (22.4 -> 20.0 us for 8 tokens at 8192 x 8192, 3 bits; 15.1 -> 8.6 at 4096 x 4096). The activations
  of one token may be staged in shared memory, where a gather does not take a line of the cache for every residual; those
  of several are gathered by a kernel of their own (`gathered.py`), where the table says so.
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
    left_operand,
    load_block,
    load_tables,
    operands,
    right_operand,
    rows_like_products,
    sparse_operands,
)
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import shared_room
from requant_kernels.common.packing import Layout
from requant_kernels.common.sparse_spmm import transpose_kernel
from requant_kernels.heuristics import decode_config
from requant_kernels.launch_config import DecodeConfig
from requant_kernels.scalar.gemm_sm90_ptx import reserve_asm

COPY = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.ca.shared.global [$1], [$2], 16; mov.b32 $0, 0; }"
)
MOST_STAGED = 18432  # columns that fit beside the sums in shared memory which a program need not ask for


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
        weight = left_operand(planes[2 * slab], planes[2 * slab + 1], W, R)
        part = tl.dot(weight, right_operand(tokens[slab], like_ptr.dtype.element_ty, W, N), part)
        if GROUP > 0 and (slab + 1) * GROUPS % 8 == 0:
            scale = loaded[BITS + slab * GROUPS // 8].to(tl.float32)
            acc += part * rows_like_products(scale, W, R, N)
    return acc if GROUP > 0 else part


@triton.jit
def _slots(si_ptr, sv_ptr, slot, end):
    """Columns and residuals at `slot` `[WIDE, rows]`, 0 from `end` `[1, rows]` on.

    A slot a thread, and slots before rows: that is the layout which Triton gives to the gathers, so nothing is exchanged.
    """
    inside = slot < end
    column = tl.load(si_ptr + slot, mask=inside, other=0, eviction_policy="evict_first").to(tl.int32) & 0xFFFF
    return column, tl.load(sv_ptr + slot, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _stage(xs_ptr, K, RESERVE: tl.constexpr, COPY: tl.constexpr, W: tl.constexpr):
    """All activations of one token to shared memory, 16 bytes a thread at a time; where they are."""
    base = tl.inline_asm_elementwise(RESERVE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    for i in range(tl.cdiv(K, 256 * W)):
        column = (i * 32 * W + tl.arange(0, 32 * W)) * 8
        tl.inline_asm_elementwise(
            COPY, "=r,r,l,r", [base + column * 2, (xs_ptr + column).to(tl.int64), (column < K).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return base


@triton.jit
def _gather(xs_ptr, column, base, STAGED: tl.constexpr, MS: tl.constexpr):
    """Activations at `column` of one token, `[WIDE, rows]`, or of MS, transposed: `[WIDE, rows, MS]`."""
    if STAGED:
        x = tl.inline_asm_elementwise(
            "ld.shared.u16 $0, [$1];", "=r,r", [base + column * 2], dtype=tl.int32, is_pure=False, pack=1
        )
        x = x.to(tl.int16).to(xs_ptr.dtype.element_ty, bitcast=True)
    elif MS == 1:
        x = tl.load(xs_ptr + column)
    else:
        x = tl.load(xs_ptr + (column[:, :, None] * MS + tl.arange(0, MS)[None, None, :]))
    return x


@triton.jit
def _sparse_products(sums, value, x, MS: tl.constexpr):
    """sums += residuals times activations, slot by slot."""
    value = value.to(tl.float32)
    return sums + (value if MS == 1 else value[:, :, None]) * x.to(tl.float32)


@triton.jit(do_not_specialize=["last_tile", "chunks"])
def decode_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, z_ptr, levels_ptr, rows_ptr, sp_ptr, si_ptr, sv_ptr, sr_ptr, bias_ptr, y_ptr,
    M, K, n, last_tile, chunks, stride_x, stride_y,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr,
    TABLES: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, MS: tl.constexpr,
    SLOTS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr,
    N: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, RESERVE: tl.constexpr = None,
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
        WIDE: tl.constexpr = max(2 * W // R, 8)  # slots of a row, one a thread
        STEP: tl.constexpr = WIDE * 16
        slot, end = tl.load(sp_ptr + position)[None, :] * 128, tl.load(sp_ptr + position + 1)[None, :] * 128
        left = tl.max(tl.max(end - slot, 1), 0) - SLOTS * STEP * (chunks * UNROLL + 1)  # after the blocks
        slot += (tl.arange(0, 16 * R) % 16)[None, :] * 8 + (
            tl.arange(0, WIDE) % 8 + tl.arange(0, WIDE) // 8 * 128
        )[:, None]
        now_slots, next_slots = (), ()
        for i in tl.static_range(SLOTS):
            now_slots = now_slots + (_slots(si_ptr, sv_ptr, slot + i * STEP, end),)
        slot += SLOTS * STEP
        for i in tl.static_range(SLOTS):
            next_slots = next_slots + (_slots(si_ptr, sv_ptr, slot + i * STEP, end),)
    DEPTH: tl.constexpr = UNROLL - 1 if UNROLL > 1 else 1
    ring = ()  # the words of the next blocks of every warp
    for u in tl.static_range(DEPTH):
        first = (u * W + warp)[:, None]
        ring = ring + (
            load_block(w_ptr, s_ptr, z_ptr, tiles, first, blocks, BITS, GROUP, EVEN and u == 0, W),
        )
    out = row  # what the end needs of the weights is requested here too
    if rows_ptr is not None:
        out = tl.load(rows_ptr + row).to(tl.int64)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + out, mask=out < n, other=0.0)
    if sr_ptr is not None:
        row_scale = tl.load(sr_ptr + row)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    STAGED: tl.constexpr = RESERVE is not None
    base = 0
    if STAGED:
        base = _stage(xs_ptr, K, RESERVE, COPY, W)
        tl.inline_asm_elementwise(
            "cp.async.wait_all; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
    if SPARSE:
        gathered = ()
        for i in tl.static_range(SLOTS):
            gathered = gathered + (_gather(xs_ptr, now_slots[i][0], base, STAGED, MS),)
        sums = tl.zeros([WIDE, 16 * R] if MS == 1 else [WIDE, 16 * R, MS], tl.float32)
    token = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, N // 8)[None, :]
    token = tl.minimum(token, M - 1)  # the surplus columns are computed and never stored
    acc = tl.zeros([W, 16 * R, N], tl.float32)
    if AHEAD:
        tokens = load_tokens(x_ptr, token, stride_x, warp, blocks, K, EVEN)
    for c in range(chunks):
        for u in tl.static_range(UNROLL):  # as many as the ring has places: no register moves to another
            block = (c * UNROLL + u) * W + warp
            ahead = (block + DEPTH * W)[:, None]  # masked: reading anything more would prolong the end
            ring = ring + (load_block(w_ptr, s_ptr, z_ptr, tiles, ahead, blocks, BITS, GROUP, False, W),)
            # slots are under way two blocks, activations one: what was gathered last is at hand
            if SPARSE:
                slot += SLOTS * STEP
                soon, arrived = (), gathered
                gathered = ()
                for i in tl.static_range(SLOTS):
                    sums = _sparse_products(sums, now_slots[i][1], arrived[i], MS)
                    gathered = gathered + (_gather(xs_ptr, next_slots[i][0], base, STAGED, MS),)
                    soon = soon + (_slots(si_ptr, sv_ptr, slot + i * STEP, end),)
                now_slots, next_slots = next_slots, soon
            if AHEAD:
                at_hand = tokens
                tokens = load_tokens(x_ptr, token, stride_x, block + W, blocks, K, EVEN)
            else:
                at_hand = load_tokens(x_ptr, token, stride_x, block, blocks, K, EVEN)
            if (c * UNROLL + u) * W < blocks:  # always; without the branch the compiler sinks the loads below
                acc = _multiply_block(acc, ring[0], tables, at_hand, y_ptr, levels_ptr, tiles, ASM, CONSTRAINTS,
                                      POSITIONS, CODEBOOK, BITS, GROUP, ZEROS, UNIT, W, R, N)  # fmt: skip
            ring = ring[1:]
    y = tl.sum(acc, 0)
    if not CODEBOOK:
        if GROUP == 0:
            y *= tl.load(s_ptr + position * 16 + row % 8 * 2 + row % 16 // 8).to(tl.float32)[:, None]
        y *= 1.0 / UNIT
    if SPARSE:
        for i in tl.static_range(SLOTS):
            sums = _sparse_products(sums, now_slots[i][1], gathered[i], MS)
        if left > 0:  # rows with more than the blocks had time for
            for i in tl.static_range(SLOTS):
                x = _gather(xs_ptr, next_slots[i][0], base, STAGED, MS)
                sums = _sparse_products(sums, next_slots[i][1], x, MS)
            left -= SLOTS * STEP
            slot += SLOTS * STEP
            while left > 0:
                column, value = _slots(si_ptr, sv_ptr, slot, end)
                sums = _sparse_products(sums, value, _gather(xs_ptr, column, base, STAGED, MS), MS)
                slot += STEP
                left -= STEP
        sums = tl.sum(sums, 0)
        if MS == 1:
            sums = sums[:, None]
    if SPARSE:
        if sr_ptr is not None:
            sums *= row_scale.to(tl.float32)[:, None]
        if MS < N:
            sums = tl.broadcast_to(sums, [16 * R, N])  # one token: the other columns are never stored
        y += sums
    if bias_ptr is not None:
        y += bias.to(tl.float32)[:, None]
    m = tl.arange(0, N)
    tl.store(
        y_ptr + m[None, :].to(tl.int64) * stride_y + out[:, None],
        y.to(y_ptr.dtype.element_ty),
        mask=(m < M)[None, :] & (out < n)[:, None],
    )


def slots_a_block(layout: Layout, config: DecodeConfig) -> int:
    """How often a program takes a slot a thread beside one block a warp, so that most tiles end with the blocks."""
    assert layout.sparse is not None
    chunks = layout.sparse.columns.shape[0] / layout.packed_codes.shape[0]
    steps = -(-layout.k // (256 * config.warps)) + 1
    return min(3, max(1, round(chunks / (steps * max(config.warps // (4 * config.tiles), 1)))))


def decode(x: Tensor, layout: Layout, bias: Tensor | None, config: DecodeConfig, *, asm: bool) -> Tensor:
    """y [m, n] of x [m, k], 1 <= m <= 16, rows contiguous."""
    if config.gathered and asm and x.shape[0] <= 8:
        from requant_kernels.scalar.gemv_sparse_mma import gathered  # in Gluon, part of Triton from 3.6 on

        return gathered(x, layout, bias, config)
    m, k = x.shape
    if config.bytes or config.halves:
        from requant_kernels.scalar import (
            gemv_fp16_mma,  # in Gluon too
            gemv_int8_mma,  # in Gluon too
        )

        if asm and config.bytes and gemv_int8_mma.supports(x, layout, config):
            return gemv_int8_mma.gemv_int8_mma(x, layout, bias, config)
        if asm and config.halves and gemv_fp16_mma.supports(x, layout, config):
            return gemv_fp16_mma.gemv_fp16_mma(x, layout, bias, config)
        config = decode_config(layout, m, x.device, masked=False)
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    tensors, constants = operands(layout, x.dtype, asm)
    early = {"launch_pdl": True} if config.pdl else {}
    n_tokens = 8 if m <= 8 else 16
    width = 1 if m == 1 or layout.sparse is None else n_tokens
    gathered = x
    if width > 1:
        gathered = torch.empty(k, width, dtype=x.dtype, device=x.device)
        transposing = interned(MS=width, BLOCK=256, PDL=config.pdl, **early)
        launch(transpose_kernel, (triton.cdiv(k, 256), 1, 1), (x, gathered, m, k, x.stride(0)), transposing)
    staged = config.staged and asm and width == 1 and layout.sparse is not None
    staged = staged and k % 8 == 0 and k <= MOST_STAGED and x.data_ptr() % 16 == 0
    dense = dense_tokens(x, layout)
    if k % 2 or dense.stride(0) % 2 or dense.data_ptr() % 4:  # the kernel reads activations in pairs
        dense = torch.nn.functional.pad(dense, (0, k % 2)).clone(memory_format=torch.contiguous_format)
    pairs = dense.view(torch.int32)
    tiles, blocks = layout.packed_codes.shape[:2]
    steps = triton.cdiv(blocks, config.warps)
    if config.max_registers:
        early["maxnreg"] = config.max_registers
    programs = triton.cdiv(tiles, config.tiles)
    launch(
        decode_kernel,
        (programs, 1, 1),
        (
            pairs, gathered, *tensors, *sparse_operands(layout), bias, y, m, k, layout.n, tiles - 1,
            triton.cdiv(steps, config.unroll), pairs.stride(0), y.stride(0),
        ),
        interned(
            **constants, EVEN=k % (256 * config.warps) == 0, MS=width,
            SLOTS=0 if layout.sparse is None else slots_a_block(layout, config), W=config.warps, R=config.tiles,
            UNROLL=config.unroll, N=n_tokens, AHEAD=config.ahead and n_tokens == 8, PDL=config.pdl, num_warps=config.warps,
            num_stages=1, RESERVE=reserve_asm(-(-k // 1024)) if staged else None, **early,
        ),
        room=shared_room(programs, config, x.device),
    )  # fmt: skip
    return y
