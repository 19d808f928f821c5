"""One token of the byte-sum codes, words and activations through shared memory: `spread_texts.py` has the idea and the PTX.

The product and its sums are those of `byte_sums.py`. Here a warp copies what it multiplies in a step, U neighbouring units
of R tiles and their activations, by `cp.async` into its own ring of `DEPTH` places, so that no register holds what is under
way, and nothing is copied from one register to another. No warp waits for another before the last sum.

    wait for the place of this step, and for the lanes of the warp, all of which have read the place of the step before
    request step + DEPTH - 1 into that place
    multiply the place of this step
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportGeneralTypeIssues=none, reportAssignmentType=none
# pyright: reportPossiblyUnboundVariable=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import shared_room
from requant_kernels.hadamard.rotate import SMALLEST, rotate_spread
from requant_kernels.hadamard.sections import SECTION
from requant_kernels.heuristics import shared_memory
from requant_kernels.launch_config import TrellisConfig
from requant_kernels.scalar import gemv_sparse_mma_ptx
from requant_kernels.trellis.gemv_cp_async_ptx import (
    COPY,
    group_bytes,
    request_asm,
    step_asm,
    wait_asm,
    word_bytes,
)
from requant_kernels.trellis.hashes import (
    OFFSET,
    SCALES_ASM,
    SCALES_CONSTRAINTS,
    STORE_ASM,
    STORE_CONSTRAINTS,
    WEIGHTS,
    groups_of,
    reduce_asm,
)
from requant_kernels.trellis.layout import TrellisLayout

PAGE = gl.constexpr(1024)  # bytes that shared memory is asked for by
BASE = gl.constexpr(gemv_sparse_mma_ptx.BASE)
SLOAD, SLOAD_CONSTRAINTS = gl.constexpr(SCALES_ASM), gl.constexpr(SCALES_CONSTRAINTS)
STORE, STORE_NAMES = gl.constexpr(STORE_ASM), gl.constexpr(STORE_CONSTRAINTS)


@gluon.jit
def _request(place, inside, lane, sources, ASM: gl.constexpr):
    """Begin to copy from `sources` to a place of the ring."""
    gl.inline_asm_elementwise(
        ASM[0], ASM[1], (place, inside, lane) + sources, dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["last_tile", "steps"])
def spread_sum_kernel(
    x_ptr, scales_ptr, words_ptr, y_ptr, units, last_tile, steps, sections,
    STEP: gl.constexpr, WORDS: gl.constexpr, SPREAD: gl.constexpr, BOTH: gl.constexpr, WAIT: gl.constexpr,
    REDUCE: gl.constexpr, UNIT: gl.constexpr, GROUPS: gl.constexpr, V: gl.constexpr, OFFSET: gl.constexpr, W: gl.constexpr,
    R: gl.constexpr, U: gl.constexpr, DEPTH: gl.constexpr, PER: gl.constexpr, PAGES: gl.constexpr, SUMS_AT: gl.constexpr,
    SUMS: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """y float32 `[rows]`; x int8, spread; scales `[sections, 2]`: scale, sum. Grid: R tiles of 16 rows each.

    UNIT: bytes of a unit's words; GROUPS: of its activations.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    OWN: gl.constexpr = U * (R * UNIT + GROUPS)  # bytes of a warp in a place of the ring
    OUT: gl.constexpr = SUMS // W if SUMS > W else 1
    warp = gl.arange(0, W, gl.SliceLayout(1, L))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, L))[None, :]
    region = gl.allocate_shared_memory(gl.int8, [PAGES, 1, PAGE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    base = gl.inline_asm_elementwise(BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    warp = warp + lane * 0
    lane = lane + warp * 0
    words = ()
    for r in gl.static_range(R):  # where tiles run out, the last one is computed, and written, twice alike
        tile = gl.minimum(gl.program_id(0) * R + r, last_tile).to(gl.int64)
        words = words + ((words_ptr + (tile * units + warp * U) * (UNIT // 4) + lane * 4).to(gl.int64),)
    x = (x_ptr + warp * (U * GROUPS) + lane * 16).to(gl.int64)
    place = base + warp * OWN
    for i in gl.static_range(DEPTH - 1):
        ahead = ()
        for r in gl.static_range(R):
            ahead = ahead + (words[r] + i * (W * U * UNIT),)
        _request(place + i * (W * OWN) + lane * 16, lane, lane, ahead, WORDS)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    for i in gl.static_range(DEPTH - 1):
        _request(
            place + i * (W * OWN) + U * R * UNIT + lane * 16, lane, lane, (x + i * (W * U * GROUPS),), SPREAD
        )
    sources = ()
    for r in gl.static_range(R):
        sources = sources + (words[r] + (DEPTH - 1) * (W * U * UNIT),)
    sources = sources + (x + (DEPTH - 1) * (W * U * GROUPS),)
    before = (lane + 28) % 32
    # of the right operand's eight columns two count: every lane beyond the first eight reads with those of the second
    own_words = place + lane * (4 * V)
    own_x = place + U * R * UNIT + gl.minimum(lane // 4, 1) * 64 + lane % 4 * 16
    scales = (scales_ptr + lane * 0).to(gl.int64)
    y = ()
    for _ in gl.static_range(2 * R):
        y = y + (gl.zeros([W, 32], gl.float32, layout=L),)
    free = (DEPTH - 1) * (W * OWN)  # the place that was read last
    for section in range(sections):
        sums = ()
        for _ in gl.static_range(4 * R):
            sums = sums + (gl.zeros([W, 32], gl.int32, layout=L),)
        scale, total = gl.inline_asm_elementwise(
            SLOAD, SLOAD_CONSTRAINTS, (scales + section * 8,), dtype=(gl.float32, gl.float32), is_pure=False, pack=1
        )  # fmt: skip
        total = gl.where(warp == 0, total * -OFFSET, 0.0)
        for step in range(section * PER, gl.minimum(section * PER + PER, steps)):
            gl.inline_asm_elementwise(WAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            inside = (lane * 0 + step + (DEPTH - 1) < steps).to(gl.int32)
            _request(place + free + lane * 16, inside, lane, sources, BOTH)
            moved = ()
            for r in gl.static_range(R):
                moved = moved + (sources[r] + W * U * UNIT,)
            sources = moved + (sources[R] + W * U * GROUPS,)
            free += W * OWN
            free = gl.where(free == DEPTH * (W * OWN), 0, free)
            sums = gl.inline_asm_elementwise(
                STEP[0], STEP[1], sums + (own_words + free, own_x + free, before), dtype=(gl.int32,) * (4 * R),
                is_pure=False, pack=1,
            )  # fmt: skip
        added = ()
        for i in gl.static_range(2 * R):
            both = sums[2 * i].to(gl.float32) * 256.0 + sums[2 * i + 1].to(gl.float32)
            added = added + (y[i] + (both + total) * scale,)
        y = added
    for _ in gl.static_range(SUMS - 2 * R):  # a power of two; nobody reads these
        y = y + (y[0],)
    y = gl.inline_asm_elementwise(
        REDUCE[0], REDUCE[1], y + (warp, lane, base + SUMS_AT + lane * 0), dtype=(gl.float32,) * OUT, is_pure=False,
        pack=1,
    )  # fmt: skip
    for i in gl.static_range(OUT):
        index = warp % SUMS + i * W
        tile = gl.minimum(gl.program_id(0) * R + gl.minimum(index // 2, R - 1), last_tile)
        address = (y_ptr + tile * 16 + lane // 4 * 2 + index % 2).to(gl.int64)
        inside = ((lane % 4 == 0) & (warp + i * W < 2 * R)).to(gl.int32)
        gl.inline_asm_elementwise(
            STORE, STORE_NAMES, (address, y[i] * (1 / 128), inside), dtype=gl.int32, is_pure=False, pack=1
        )
    if units < 0:  # never: the compiler declares, and keeps, shared memory that it sees used
        region.index(0).store(
            gl.zeros([1, PAGE], gl.int8, layout=gl.BlockedLayout([1, 8], [1, 32], [1, W], [1, 0]))
        )


def room_of(code: str, four: int, config: TrellisConfig) -> tuple[int, int]:
    """Bytes of the ring, and of it with the sums over the warps."""
    own = config.unroll * (config.tiles * word_bytes(four) + groups_of(four) * group_bytes(code))
    ring = config.places * config.warps * own
    return ring, ring + 128 * config.warps * sums_of(config.tiles)


def sums_of(tiles: int) -> int:
    """Of a lane: two rows of every tile, and as many as a power of two."""
    return 1 << (2 * tiles - 1).bit_length()


def takes(x: Tensor, layout: TrellisLayout, config: TrellisConfig) -> bool:
    """Whether this kernel can multiply: one token, whole steps within sections, blocks that the tensor cores rotate."""
    if config.places < 2 or config.warps < 2 or x.shape[0] != 1 or layout.code not in OFFSET:
        return False
    units, span = layout.packed_codes.shape[1], config.warps * config.unroll
    padded, groups = -(-layout.k // 16) * 16, groups_of(layout.four)
    return (
        units % span == 0
        and units // span >= config.places - 1
        and SECTION % (64 * groups * span) == 0
        and padded & -padded >= SMALLEST
        and (config.unroll * word_bytes(layout.four)) % 16 == 0
        and sizes_fit(layout.code, layout.four, config)
        and room_of(layout.code, layout.four, config)[1] <= shared_memory(x.device) - 2048
    )


def sizes_fit(code: str, four: int, config: TrellisConfig) -> bool:
    """Whether what a warp copies ends, if not at a whole copy, at one place of it."""
    sizes = (config.unroll * word_bytes(four), config.unroll * groups_of(four) * group_bytes(code))
    return len({size % COPY for size in sizes} - {0}) <= 1


@cache
def constants(code: str, four: int, vector: int, config: TrellisConfig) -> dict[str, object]:
    """Everything that the kernel is compiled for but the launch."""
    unit, groups = word_bytes(four), groups_of(four)
    words, spread = (config.unroll * unit,) * config.tiles, config.unroll * groups * group_bytes(code)
    ring, size = room_of(code, four, config)
    return {
        "STEP": step_asm(code, four, vector, config.tiles, config.unroll), "WORDS": request_asm(words, 0, always=True),
        "SPREAD": request_asm((), spread, always=True), "BOTH": request_asm(words, spread, always=False),
        "WAIT": wait_asm(config.places - 2), "REDUCE": reduce_asm(config.warps, sums_of(config.tiles), given=True),
        "UNIT": unit, "GROUPS": groups * group_bytes(code), "V": vector, "OFFSET": OFFSET[code], "W": config.warps,
        "R": config.tiles, "U": config.unroll, "DEPTH": config.places,
        "PER": SECTION // (64 * groups * config.warps * config.unroll), "PAGES": -(-size // PAGE.value), "SUMS_AT": ring,
        "SUMS": sums_of(config.tiles),
        "EARLY": config.early,
    }  # fmt: skip


def spread_sums(x: Tensor, layout: TrellisLayout, config: TrellisConfig, *, pdl: bool) -> Tensor:
    """V H (input_scales * x), float32 [1, rows], of the only token."""
    spread, scales = rotate_spread(
        x, layout.input_scales, width=layout.k, weights=WEIGHTS[layout.code], pdl=pdl
    )
    tiles, units = layout.packed_codes.shape[:2]
    y = torch.empty(1, tiles * 16, dtype=torch.float32, device=x.device)
    early: dict[str, object] = {"launch_pdl": True} if pdl else {}
    programs, given = (
        triton.cdiv(tiles, config.tiles),
        constants(layout.code, layout.four, layout.packed_codes.shape[-1], config),
    )
    launch(
        spread_sum_kernel,
        (programs, 1, 1),
        (spread, scales, layout.packed_codes, y, units, tiles - 1, units // (config.warps * config.unroll), scales.shape[1]),
        interned(**given, PDL=pdl, num_warps=config.warps, num_stages=1, **early),
        room=shared_room(programs, config, x.device),
    )  # fmt: skip
    return y
