"""Up to eight tokens of a grid of 2 to 4 bits, by masks alone: `half_texts.py` has the idea and the PTX.

The warps of a program are TEAMS teams of C. A team owns 16 R rows, and its warps share the columns, 256 at a time; warp c of
every team has the same columns. Words and scales travel as in `byte_grid.py`. The activations of eight tokens are as many
bytes as 4 bits of 32 rows: so the warps of one block copy them together, a share of the tokens each, into a ring beside the
words, and meet at a barrier of their own before they multiply. The sum over the warps of a team goes through the place where
their first words were.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none, reportAssignmentType=none, reportPossiblyUnboundVariable=none

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.cp_async import (
    PAGE,
    pages,
    request_asm,
    request_block,
    request_constraints,
    scales_of,
    sources_of,
)
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import shared_room
from requant_kernels.common.packing import GridLayout, Layout
from requant_kernels.heuristics import is_plain, shared_memory
from requant_kernels.launch_config import DecodeConfig
from requant_kernels.scalar import gemv_sparse_mma_ptx
from requant_kernels.scalar.gemv_fp16_mma_ptx import (
    GIVE_ASM,
    GIVE_CONSTRAINTS,
    TOKENS,
    TOKENS_BYTES,
    TOKENS_CONSTRAINTS,
    arrived_asm,
    block_asm,
    block_constraints,
    tokens_asm,
    unit_of,
)

BASE, FETCH = gl.constexpr(gemv_sparse_mma_ptx.BASE), gl.constexpr(gemv_sparse_mma_ptx.FETCH)
GIVE, GIVEN = gl.constexpr(GIVE_ASM), gl.constexpr(GIVE_CONSTRAINTS)
COPIED, XBYTES = gl.constexpr(TOKENS_CONSTRAINTS), gl.constexpr(TOKENS_BYTES)


@gluon.jit
def _request_tokens(x, stride, even, odd, block, blocks, M, COPY: gl.constexpr):
    """Begin to copy this warp's tokens of block `block` `[warp, 1]`; `x`: this lane's bytes of the first one in block 0."""
    at, inside = x + block.to(gl.int64) * 512, (block < blocks).to(gl.int32)
    gl.inline_asm_elementwise(
        COPY, COPIED, (even, odd, inside, M, at, stride), dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["last_tile", "M"])
def half_grid_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, y_ptr, M, K, n, last_tile, stride_x, stride_y,
    REQUEST: gl.constexpr, REQUEST_CONSTRAINTS: gl.constexpr, MULTIPLY: gl.constexpr, MULTIPLY_CONSTRAINTS: gl.constexpr,
    COPY: gl.constexpr, COPY_ALONE: gl.constexpr, ARRIVED: gl.constexpr, PAGES: gl.constexpr, UNIT: gl.constexpr,
    BITS: gl.constexpr, GROUP: gl.constexpr, W: gl.constexpr, R: gl.constexpr, TEAMS: gl.constexpr, DEPTH: gl.constexpr,
    AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ weight^T; grid: TEAMS R tiles of 16 rows each. K: whole blocks. GROUP 0: one scale a row."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    SCALES: gl.constexpr = 0 if GROUP == 0 else (2 if GROUP == 128 else 1)
    A_GROUP: gl.constexpr = GROUP // 256 if GROUP > 256 else 1
    OWN: gl.constexpr = R * (
        BITS * 512 + SCALES * (128 if z_ptr is None else 256)
    )  # bytes of a warp in a place of the ring
    C: gl.constexpr = W // TEAMS  # warps that share the columns
    T: gl.constexpr = TEAMS * R  # tiles of a program
    OUT: gl.constexpr = (4 * T + W - 1) // W  # results of a thread, at most
    blocks = K // 256
    warp = gl.arange(0, W, gl.SliceLayout(1, L))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, L))[None, :]
    team, column = warp // C, warp % C
    region = gl.allocate_shared_memory(gl.int8, [PAGES, 1, PAGE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    base = gl.inline_asm_elementwise(BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    own_first = (
        gl.program_id(0) * T + team * R
    )  # where tiles run out, the last one is computed, and written, again
    words, scales = sources_of(
        w_ptr, s_ptr, z_ptr, own_first, last_tile, lane, blocks, BITS, SCALES, A_GROUP, R
    )
    place = base + warp * OWN
    to_words, to_scales = place + lane * 16, place + R * BITS * 512 + lane * 4
    for u in gl.static_range(DEPTH - 1):
        request_block(words, scales, to_words + u * (W * OWN), to_scales + u * (W * OWN), column + u * C, blocks, REQUEST,
                 REQUEST_CONSTRAINTS, BITS, SCALES, A_GROUP)  # fmt: skip
    # of its columns' tokens a warp copies 8 / TEAMS
    first = team * (8 // TEAMS)
    theirs = base + DEPTH * (W * OWN) + column * XBYTES
    even, odd = theirs + first * 512 + lane * 16, theirs + first * 512 + (lane ^ 4) * 16
    stride = (warp * 0 + lane * 0 + stride_x).to(gl.int64) * 2
    x = (x_ptr + first.to(gl.int64) * stride_x + lane * 8).to(gl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for u in gl.static_range(DEPTH - 1):
        _request_tokens(x, stride, even + u * (C * XBYTES), odd + u * (C * XBYTES), column + u * C, blocks, M - first,
                        COPY_ALONE)  # fmt: skip
    # what a lane reads of them: token g, its part t of slabs in pairs, which odd tokens have the other way round
    mine = theirs + lane // 4 * 512 + lane % 4 * 16
    turn = lane // 4 % 2 * 64
    acc = ()
    for _ in gl.static_range(4 * R):
        acc = acc + (gl.zeros([W, 32], gl.float32, layout=L),)
    free, now = (DEPTH - 1), 0  # the places that were read last, and that are read now
    for i in range(gl.cdiv(blocks, C)):
        block = i * C + column
        later = block + (DEPTH - 1) * C
        if AHEAD:
            request_block(words, scales, to_words + free * (W * OWN), to_scales + free * (W * OWN), later, blocks, REQUEST,
                          REQUEST_CONSTRAINTS, BITS, SCALES, A_GROUP)  # fmt: skip
        gl.inline_asm_elementwise(ARRIVED, "=r,r", [column + lane * 0], dtype=gl.int32, is_pure=False, pack=1)
        # all warps of these columns are done with the place that was read last
        _request_tokens(
            x, stride, even + free * (C * XBYTES), odd + free * (C * XBYTES), later, blocks, M - first, COPY
        )
        if not AHEAD:
            request_block(words, scales, to_words + free * (W * OWN), to_scales + free * (W * OWN), later, blocks, REQUEST,
                          REQUEST_CONSTRAINTS, BITS, SCALES, A_GROUP)  # fmt: skip
        acc = gl.inline_asm_elementwise(
            MULTIPLY, MULTIPLY_CONSTRAINTS,
            acc + ((block < blocks).to(gl.int32), to_words + now * (W * OWN), to_scales + now * (W * OWN),
                   mine + now * (C * XBYTES) + turn, mine + now * (C * XBYTES) - turn),
            dtype=(gl.float32,) * (4 * R), is_pure=False, pack=1,
        )  # fmt: skip
        free = now
        now = gl.where(now == DEPTH - 1, 0, now + 1)
    for r in gl.static_range(R):  # through the place where this warp's first words were
        gl.inline_asm_elementwise(
            GIVE,
            GIVEN,
            (place + r * 512 + lane * 16,) + acc[4 * r : 4 * r + 4],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    gl.thread_barrier()
    for i in gl.static_range(OUT):
        o = (i * W + warp) * 32 + lane  # tile, token, row
        t, m, row = gl.minimum(o // 128, T - 1), o // 16 % 8, o % 16
        at = (
            base + t // R * (C * OWN) + t % R * 512 + (row % 8 * 4 + m // 2) * 16 + (row // 8 * 2 + m % 2) * 4
        )
        y = gl.zeros([W, 32], gl.float32, layout=L)
        for c in gl.static_range(C):
            y += gl.inline_asm_elementwise(
                FETCH, "=f,r", [at + c * OWN], dtype=gl.float32, is_pure=False, pack=1
            )
        y *= UNIT
        tile = gl.minimum(gl.program_id(0) * T + t, last_tile)
        if GROUP == 0:
            y *= gl.load(s_ptr + tile * 16 + row % 8 * 2 + row // 8).to(gl.float32)
        out = tile * 16 + row
        if bias_ptr is not None:
            y += gl.load(bias_ptr + out, mask=out < n, other=0.0).to(gl.float32)
        inside = (o < 128 * T) & (m < M) & (out < n)
        gl.store(y_ptr + m.to(gl.int64) * stride_y + out, y.to(y_ptr.dtype.element_ty), mask=inside)
    if K < 0:  # never: the compiler declares, and keeps, shared memory that it sees used
        region.index(0).store(
            gl.zeros([1, PAGE], gl.int8, layout=gl.BlockedLayout([1, 8], [1, 32], [1, W], [1, 0]))
        )


def ring_bytes(layout: GridLayout, config: DecodeConfig) -> int:
    """Of shared memory: words and scales of every warp, activations of every column of warps."""
    beside = scales_of(layout) * 128 * (1 if layout.zero_points is None else 2)
    words = config.warps * config.tiles * (layout.bits * 512 + beside)
    return config.unroll * (words + config.warps // config.teams * TOKENS_BYTES)


def takes(x: Tensor, layout: Layout, config: DecodeConfig) -> bool:
    """Whether this kernel can multiply: a layout that it knows, addresses that lanes can copy from, enough room."""
    if (
        not is_plain(layout, x.shape[0]) or layout.sparse is not None
    ):  # one token's residuals are those of `byte_grid.py`
        return False
    if config.unroll < 2 or config.teams not in (1, 2, 4) or config.warps % config.teams:
        return False
    assert isinstance(layout, GridLayout)
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and layout.packed_codes.data_ptr() % 16 == 0
    return aligned and pages(ring_bytes(layout, config)) * PAGE.value <= shared_memory(x.device) - 1024


def constants(layout: GridLayout, dtype: torch.dtype, config: DecodeConfig) -> dict[str, object]:
    """What the kernel is told of a layout and a launch."""
    bits, tiles, scales, zeros = layout.bits, config.tiles, scales_of(layout), layout.zero_points is not None
    name, own = "fp16" if dtype == torch.float16 else "bf16", TOKENS // config.teams
    return {
        "REQUEST": request_asm(bits, scales, tiles, zeros=zeros),
        "REQUEST_CONSTRAINTS": request_constraints(tiles, zeros=zeros),
        "MULTIPLY": block_asm(bits, name, scales, tiles, zeros=zeros), "MULTIPLY_CONSTRAINTS": block_constraints(tiles),
        "COPY": tokens_asm(own, commit=config.ahead), "COPY_ALONE": tokens_asm(own, commit=True),
        "ARRIVED": arrived_asm(config.unroll - (1 if config.ahead else 2), config.teams),
        "PAGES": pages(ring_bytes(layout, config)), "UNIT": 1 / unit_of(bits, name), "BITS": bits,
        "GROUP": layout.kernel_group, "W": config.warps, "R": tiles,
        "TEAMS": config.teams, "DEPTH": config.unroll, "AHEAD": config.ahead, "PDL": config.pdl,
    }  # fmt: skip


def half_grid(x: Tensor, layout: Layout, bias: Tensor | None, config: DecodeConfig) -> Tensor:
    """y [m, n] of x [m, k]; `takes` says for what."""
    assert isinstance(layout, GridLayout)
    m = x.shape[0]
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    early: dict[str, object] = {"launch_pdl": True} if config.pdl else {}
    if config.max_registers:
        early["maxnreg"] = config.max_registers
    tiles = layout.packed_codes.shape[0]
    programs = triton.cdiv(tiles, config.tiles * config.teams)
    launch(
        half_grid_kernel,
        (programs, 1, 1),
        (
            x, layout.packed_codes, layout.scales, layout.zero_points, bias, y, m, layout.k, layout.n, tiles - 1,
            x.stride(0), y.stride(0),
        ),
        interned(**constants(layout, x.dtype, config), num_warps=config.warps, num_stages=1, **early),
        room=shared_room(programs, config, x.device),
    )  # fmt: skip
    return y
