"""One token of a grid of 2 to 4 bits, on integer tensor cores: `byte_texts.py` has the idea and the PTX.

A program owns 16 R rows; its warps share the columns, 256 at a time. Words and scales travel by `cp.async` into a ring of
`DEPTH` places in shared memory, every lane's own bytes, and are requested before the kernel before has ended.
Then every warp turns activations into fixed point, up to four blocks at a time, and after one barrier each multiplies its
blocks. Zero points travel beside the scales; residuals, behind the last words (`byte_slots.py`).
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none, reportAssignmentType=none, reportPossiblyUnboundVariable=none

from dataclasses import dataclass

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
from requant_kernels.common.fragment_dequant import sparse_operands
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import MULTIPROCESSOR, shared_room
from requant_kernels.common.packing import GridLayout, Layout
from requant_kernels.heuristics import is_plain, multiprocessors, shared_memory
from requant_kernels.launch_config import DecodeConfig
from requant_kernels.scalar import gemv_sparse_mma_ptx
from requant_kernels.scalar.gemv_int8_mma_ptx import (
    AGAIN_ASM,
    BLOCK_BYTES,
    FACTORS,
    FETCH_ASM,
    LOAD_ASM,
    ZERO_ASM,
    block_asm,
    block_constraints,
    fix_asm,
)
from requant_kernels.scalar.gemv_int8_mma_sparse import (
    bounds_of,
    fetch_sums,
    first_of,
    give_sums,
    join_lanes,
    passes_of,
    prefetch_bounds,
    products_asm,
    request_slots,
    take_slots,
)

BLOCK = gl.constexpr(BLOCK_BYTES)
BASE, ZERO, LOAD = gl.constexpr(gemv_sparse_mma_ptx.BASE), gl.constexpr(ZERO_ASM), gl.constexpr(LOAD_ASM)
FOUR = gl.constexpr((gl.int32,) * 4)
REGISTERS = 65536  # of a multiprocessor
LEAST_REGISTERS, MOST_REGISTERS = 80, 255  # of a thread: what two tiles need; what there may be
MOST_FIXES = 4  # blocks of activations that a warp turns at once
FETCH, AGAIN = gl.constexpr(FETCH_ASM), gl.constexpr(AGAIN_ASM)
ARRIVED = gl.constexpr("cp.async.wait_all; mov.b32 $0, 0;")


@gluon.jit(do_not_specialize=["last_tile"])
def byte_grid_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, rows_ptr, sp_ptr, si_ptr, sv_ptr, bias_ptr, y_ptr, K, n, last_tile,
    REQUEST: gl.constexpr, REQUEST_CONSTRAINTS: gl.constexpr, FIX: gl.constexpr, FIXES: gl.constexpr, MULTIPLY: gl.constexpr,
    MULTIPLY_CONSTRAINTS: gl.constexpr, WAIT: gl.constexpr, PAGES: gl.constexpr, X_AT: gl.constexpr, FACTOR: gl.constexpr,
    BITS: gl.constexpr, GROUP: gl.constexpr, W: gl.constexpr, R: gl.constexpr, DEPTH: gl.constexpr,
    PASSES: gl.constexpr, GIVEN_AT: gl.constexpr, PRODUCTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y `[n]` = weight @ x `[K]`; grid: R tiles of 16 rows each. K: whole blocks. GROUP 0: one scale a row."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    SCALES: gl.constexpr = 0 if GROUP == 0 else (2 if GROUP == 128 else 1)
    A_GROUP: gl.constexpr = GROUP // 256 if GROUP > 256 else 1
    BESIDE: gl.constexpr = SCALES * (128 if z_ptr is None else 256)
    OWN: gl.constexpr = R * (BITS * 512 + BESIDE)  # bytes of a warp in a place of the ring
    OUT: gl.constexpr = (16 * R + 32 * W - 1) // (32 * W)  # results of a thread, at most
    blocks = K // 256
    warp = gl.arange(0, W, gl.SliceLayout(1, L))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, L))[None, :]
    region = gl.allocate_shared_memory(gl.int8, [PAGES, 1, PAGE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    base = gl.inline_asm_elementwise(BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    # where the number of tiles is odd, the last one is computed, and written, twice alike
    words, scales = sources_of(
        w_ptr, s_ptr, z_ptr, gl.program_id(0) * R, last_tile, lane, blocks, BITS, SCALES, A_GROUP, R
    )
    place = base + warp * OWN
    for u in gl.static_range(DEPTH - 1):
        request_block(words, scales, place + u * (W * OWN) + lane * 16, place + u * (W * OWN) + R * BITS * 512 + lane * 4,
                 warp + u * W, blocks, REQUEST, REQUEST_CONSTRAINTS, BITS, SCALES, A_GROUP)  # fmt: skip
    if sp_ptr is not None:
        prefetch_bounds(sp_ptr, lane, last_tile, R)
    START: gl.constexpr = X_AT + BLOCK  # zeros lie before the activations
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # zeros, for lanes whose columns are of another class
    gl.inline_asm_elementwise(
        ZERO, "=r,r", [base + X_AT + lane * 16 + warp * 0], dtype=gl.int32, is_pure=False, pack=1
    )
    zero = base + START + K * 2  # what is taken off for the zero point, 16 bytes of 128 columns
    of_x = zero + K // 8  # scales of the activations
    TWICE: gl.constexpr = GIVEN_AT == START
    given = base + GIVEN_AT  # the activations as they came, for residuals; TWICE: over those in fixed point
    for i in range(gl.cdiv(blocks, W * FIXES)):
        raw = ()
        for f in gl.static_range(FIXES):
            block = (i * FIXES + f) * W + warp
            raw = raw + gl.inline_asm_elementwise(
                LOAD, "=&r,=&r,=&r,=&r,l,r",
                [(x_ptr + block * 256 + lane * 8).to(gl.int64), (block < blocks).to(gl.int32)], dtype=FOUR,
                is_pure=False, pack=1,
            )  # fmt: skip
        for f in gl.static_range(FIXES):
            block = (i * FIXES + f) * W + warp
            group = block * 2 + lane // 16
            bytes_at = base + START + block * BLOCK + lane // 4 * 64 + lane % 4 * 8
            zero_at = zero + group * 16 + lane % 4 * 4
            places = ((block < blocks).to(gl.int32), bytes_at, zero_at, of_x + group * 4)
            if sp_ptr is not None and not TWICE:
                places = places + (given + block * 512 + lane * 16,)
            gl.inline_asm_elementwise(
                FIX, "=r" + ",r" * (4 + len(places)), raw[4 * f : 4 * f + 4] + places, dtype=gl.int32, is_pure=False,
                pack=1,
            )  # fmt: skip
    gl.thread_barrier()
    # what the end needs is asked for now: the rows, in no cache, would be waited for when nothing else is left
    outs = ()
    for i in gl.static_range(OUT):
        o = (i * W + warp) * 32 + lane
        out = gl.minimum(gl.program_id(0) * R + gl.minimum(o // 16, R - 1), last_tile) * 16 + o % 16
        outs = outs + (out if rows_ptr is None else gl.load(rows_ptr + out),)
    if sp_ptr is not None:
        bounds, first = bounds_of(sp_ptr, warp, lane, last_tile, R), first_of(warp, lane, W, R)
    # activations of every class: zeros, but for two columns g
    mine, nothing = (
        base + START + warp * BLOCK + lane // 4 % 2 * 32 + lane % 4 * 8,
        base + X_AT + lane % 4 * 8,
    )
    x, steps = (), ()
    for c in gl.static_range(4):
        own = lane // 8 == c
        x = x + (gl.where(own, mine, nothing),)
        steps = steps + (gl.where(own, W * BLOCK, 0) + warp * 0,)
    acc = ()
    for _ in gl.static_range(2 * R):
        acc = acc + (gl.zeros([W, 32], gl.float32, layout=L),)
    free = (DEPTH - 1) * (W * OWN)  # the place that was read last
    turns = gl.cdiv(blocks, W)
    for i in range(turns):
        block = i * W + warp
        if sp_ptr is not None and i + (DEPTH - 1) >= turns:
            request_slots(
                si_ptr, sv_ptr, bounds, first, place + free, lane, i + (DEPTH - 1) - turns, PASSES, W, R
            )
        else:
            request_block(words, scales, place + free + lane * 16, place + free + R * BITS * 512 + lane * 4,
                     block + (DEPTH - 1) * W, blocks, REQUEST, REQUEST_CONSTRAINTS, BITS, SCALES, A_GROUP)  # fmt: skip
        free += W * OWN
        free = gl.where(free == DEPTH * (W * OWN), 0, free)
        gl.inline_asm_elementwise(WAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        acc = gl.inline_asm_elementwise(
            MULTIPLY, MULTIPLY_CONSTRAINTS,
            acc + ((block < blocks).to(gl.int32), place + free + lane * 16, place + free + R * BITS * 512 + lane * 4)
            + x + (zero + block * 32 + lane % 4 * 4, of_x + block * 8),
            dtype=(gl.float32,) * (2 * R), is_pure=False, pack=1,
        )  # fmt: skip
        if sp_ptr is not None and TWICE:
            gl.inline_asm_elementwise(
                AGAIN, "=r,r,l,r",
                [given + block * BLOCK + lane * 16, (x_ptr + block * 256 + lane * 8).to(gl.int64),
                 (block < blocks).to(gl.int32)],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        moved = ()
        for c in gl.static_range(4):
            moved = moved + (x[c] + steps[c],)
        x = moved
    if sp_ptr is not None:
        sums = gl.zeros([W, 32], gl.float32, layout=L)
        if TWICE:
            gl.inline_asm_elementwise(ARRIVED, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            gl.thread_barrier()
        for i in range(gl.cdiv(bounds[3] - bounds[2], PASSES * (2 * W // R))):
            request_slots(si_ptr, sv_ptr, bounds, first, place + free, lane, i + (DEPTH - 1), PASSES, W, R)
            free += W * OWN
            free = gl.where(free == DEPTH * (W * OWN), 0, free)
            gl.inline_asm_elementwise(WAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            sums = take_slots(sums, bounds, first, place + free, given, lane, i, PRODUCTS, PASSES, W, R)
        join_lanes()
        give_sums(sums, place + 256 * R, lane)
    factor = gl.where(lane % 4 == 0, FACTOR[0], 0.0)
    for c in gl.static_range(1, 4):
        factor += gl.where(lane % 4 == c, FACTOR[c], 0.0)
    # the sum over lanes and warps, through the place where this warp's words were
    for i in gl.static_range(2 * R):
        give_sums(acc[i] * factor, place + i * 128, lane)
    gl.thread_barrier()
    for i in gl.static_range(OUT):
        o = (i * W + warp) * 32 + lane
        r, g, rh = gl.minimum(o // 16, R - 1), o % 8, o // 8 % 2
        tile = gl.minimum(gl.program_id(0) * R + r, last_tile)
        y = gl.zeros([W, 32], gl.float32, layout=L)
        for w in gl.static_range(W):
            y += gl.inline_asm_elementwise(
                FETCH,
                "=f,r",
                [base + w * OWN + (2 * r + rh) * 128 + g * 16],
                dtype=gl.float32,
                is_pure=False,
                pack=1,
            )
        if GROUP == 0:
            y *= gl.load(s_ptr + tile * 16 + g * 2 + rh).to(gl.float32)
        if sp_ptr is not None:
            y = fetch_sums(y, base + 256 * R, r, o % 16, OWN, W, R)
        out = outs[i]
        if bias_ptr is not None:
            y += gl.load(bias_ptr + out, mask=out < n, other=0.0).to(gl.float32)
        gl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=(o < 16 * R) & (out < n))
    if K < 0:  # never: the compiler declares, and keeps, shared memory that it sees used
        region.index(0).store(
            gl.zeros([1, PAGE], gl.int8, layout=gl.BlockedLayout([1, 8], [1, 32], [1, W], [1, 0]))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesRoom:
    """Places of the ring, where it ends, and all bytes of a program. With residuals: where activations lie as they came, how
    many passes a place holds and, where activations come twice to make room for a program more, the registers of each."""

    depth: int
    ring: int
    size: int
    given_at: int = 0
    passes: int = 0
    registers: int | None = None


def room_of(layout: GridLayout, config: DecodeConfig, processors: int) -> BytesRoom:
    """Places of the ring that nothing comes to are none. Residuals gather activations as they came: those have a room of
    their own or, where a multiprocessor then takes fewer programs, come a second time, over the bytes that they were
    turned into, after these have been multiplied."""
    warps, tiles, turns = config.warps, config.tiles, -(-layout.k // (256 * config.warps))
    depth, sparse = min(config.unroll, turns + 1), layout.sparse is not None
    beside = scales_of(layout) * 128 * (1 if layout.zero_points is None else 2)
    own = tiles * (layout.bits * 512 + beside)
    ring = (depth if sparse else min(depth, turns)) * warps * own
    least = ring + BLOCK_BYTES + 2 * layout.k + layout.k // 8 + -(-layout.k // 512) * 16
    if not sparse:
        return BytesRoom(depth=depth, ring=ring, size=least)
    share = -(-layout.packed_codes.shape[0] // (tiles * processors))  # programs of a multiprocessor
    more = least + 2 * layout.k
    many, few = (min(share, MULTIPROCESSOR // (pages(size) * PAGE.value + 1024)) for size in (least, more))
    registers = min(MOST_REGISTERS, REGISTERS // (32 * warps * max(1, many)) // 8 * 8)
    twice = many > few and registers >= LEAST_REGISTERS
    return BytesRoom(
        depth=depth, ring=ring, size=least if twice else more, given_at=ring + BLOCK_BYTES if twice else least,
        passes=passes_of(layout, config, own), registers=registers if twice else None,
    )  # fmt: skip


def takes(x: Tensor, layout: Layout, config: DecodeConfig) -> bool:
    """Whether this kernel can multiply: a layout that it knows, addresses that lanes can copy from, enough room."""
    if x.shape[0] != 1 or not is_plain(layout, 1) or config.unroll < 2:
        return False
    assert isinstance(layout, GridLayout)
    if layout.sparse is not None and 2 * config.warps < config.tiles:
        return False
    aligned = x.data_ptr() % 16 == 0 and layout.packed_codes.data_ptr() % 16 == 0
    room = room_of(layout, config, multiprocessors(x.device))
    return aligned and pages(room.size) * PAGE.value <= shared_memory(x.device) - 1024


def constants(layout: GridLayout, dtype: torch.dtype, config: DecodeConfig) -> dict[str, object]:
    """What the kernel is told of a layout and a launch."""
    bits, tiles, scales, zeros = layout.bits, config.tiles, scales_of(layout), layout.zero_points is not None
    room = room_of(layout, config, multiprocessors(layout.packed_codes.device))
    turns = -(-layout.k // (256 * config.warps))
    name, sparse = "fp16" if dtype == torch.float16 else "bf16", layout.sparse is not None
    return {
        "REQUEST": request_asm(bits, scales, tiles, zeros=zeros),
        "REQUEST_CONSTRAINTS": request_constraints(tiles, zeros=zeros),
        "FIX": fix_asm(bits, name, given=sparse and room.registers is None, zeros=zeros),
        "FIXES": min(MOST_FIXES, 1 << (turns - 1).bit_length()),
        "MULTIPLY": block_asm(bits, scales, tiles, zeros=zeros), "MULTIPLY_CONSTRAINTS": block_constraints(tiles),
        "WAIT": f"cp.async.wait_group {room.depth - 1}; mov.b32 $0, 0;", "PAGES": pages(room.size),
        "X_AT": room.ring, "FACTOR": tuple(1 / factor if factor else 0.0 for factor in FACTORS[bits]), "BITS": bits,
        "GROUP": layout.kernel_group, "W": config.warps, "R": tiles, "DEPTH": room.depth, "PASSES": room.passes,
        "GIVEN_AT": room.given_at, "PRODUCTS": products_asm(name) if sparse else None, "PDL": config.pdl,
    }  # fmt: skip


def byte_grid(x: Tensor, layout: Layout, bias: Tensor | None, config: DecodeConfig) -> Tensor:
    """y [1, n] of x [1, k]; `takes` says for what."""
    assert isinstance(layout, GridLayout)
    y = torch.empty(1, layout.n, dtype=x.dtype, device=x.device)
    early: dict[str, object] = {"launch_pdl": True} if config.pdl else {}
    registers = config.max_registers or room_of(layout, config, multiprocessors(x.device)).registers
    if registers:
        early["maxnreg"] = registers
    tiles = layout.packed_codes.shape[0]
    programs = triton.cdiv(tiles, config.tiles)
    launch(
        byte_grid_kernel,
        (programs, 1, 1),
        (
            x, layout.packed_codes, layout.scales, layout.zero_points, *sparse_operands(layout)[:4], bias, y, layout.k,
            layout.n, tiles - 1,
        ),
        interned(**constants(layout, x.dtype, config), num_warps=config.warps, num_stages=1, **early),
        room=shared_room(programs, config, x.device),
    )  # fmt: skip
    return y
