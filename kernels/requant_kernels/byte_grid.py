"""One token of a symmetric grid of 2 to 4 bits, on integer tensor cores: `byte_texts.py` has the idea and the PTX.

A program owns 16 R rows; its warps share the columns, 256 at a time. Words and scales travel by `cp.async` into a ring of
`DEPTH` places in shared memory, every lane's own bytes (`copies.py`), and are requested before the kernel before has ended.
Then every warp turns activations into fixed point, a block at a time, and after one barrier each multiplies its blocks.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none, reportAssignmentType=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels import copies
from requant_kernels.byte_texts import (
    BLOCK_BYTES,
    FACTORS,
    block_asm,
    block_constraints,
    fix_asm,
    request_asm,
    request_constraints,
)
from requant_kernels.launching import interned, launch
from requant_kernels.layouts import GridLayout, Layout
from requant_kernels.rooms import room_size
from requant_kernels.tuning import DecodeConfig, multiprocessors

BLOCK = tl.constexpr(BLOCK_BYTES)


@triton.jit
def _request(words, scales, to_words, to_scales, block, blocks, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
             BITS: tl.constexpr, SCALES: tl.constexpr, A_GROUP: tl.constexpr):  # fmt: skip
    """Begin to copy block `block` `[warp, 1]` of every tile to a place of the ring."""
    inside = (block < blocks).to(tl.int32)
    sources = ()
    for r in tl.static_range(len(words)):
        sources = sources + ((words[r] + block * (BITS * 128)).to(tl.int64),)
    for r in tl.static_range(len(scales)):
        sources = sources + ((scales[r] + block // A_GROUP * (8 * SCALES)).to(tl.int64),)
    tl.inline_asm_elementwise(
        ASM, CONSTRAINTS, (to_words, to_scales, inside) + sources, dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["last_tile"])
def byte_grid_kernel(
    x_ptr, w_ptr, s_ptr, rows_ptr, bias_ptr, y_ptr, K, n, last_tile,
    REQUEST: tl.constexpr, REQUEST_CONSTRAINTS: tl.constexpr, FIX: tl.constexpr, MULTIPLY: tl.constexpr,
    MULTIPLY_CONSTRAINTS: tl.constexpr, ROOM_ASM: tl.constexpr, X_AT: tl.constexpr, FACTOR: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr, R: tl.constexpr, DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y `[n]` = weight @ x `[K]`; grid: R tiles of 16 rows each. K: whole blocks. GROUP 0: one scale a row."""
    SCALES: tl.constexpr = 0 if GROUP == 0 else (2 if GROUP == 128 else 1)
    A_GROUP: tl.constexpr = GROUP // 256 if GROUP > 256 else 1
    OWN: tl.constexpr = R * (BITS * 512 + SCALES * 128)  # bytes of a warp in a place of the ring
    blocks = K // 256
    warp, lane = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    base = copies.room(ROOM_ASM)
    words, scales = (), ()
    # where the number of tiles is odd, the last one is computed, and written, twice alike
    for r in tl.static_range(R):
        tile = tl.minimum(tl.program_id(0) * R + r, last_tile).to(tl.int64)
        words = words + (w_ptr + tile * blocks * (BITS * 128) + lane * 4,)
        groups = tl.cdiv(blocks, A_GROUP) * SCALES
        scales = scales + (s_ptr.to(tl.pointer_type(tl.int32)) + tile * groups * 8 + lane // 4,)
    place = base + warp * OWN
    for u in tl.static_range(DEPTH - 1):
        _request(words, scales, place + u * (W * OWN) + lane * 16, place + u * (W * OWN) + R * BITS * 512 + lane * 4,
                 warp + u * W, blocks, REQUEST, REQUEST_CONSTRAINTS, BITS, SCALES, A_GROUP)  # fmt: skip
    START: tl.constexpr = X_AT + BLOCK  # zeros lie before the activations
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # zeros, for lanes whose columns are of another class
    tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, 0;", "=r,r,r",
        [base + X_AT + lane * 16 + warp * 0, warp * 0 + lane * 0], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    zero = base + START + K * 2  # what is taken off for the zero point, 16 bytes of 128 columns
    of_x = zero + K // 8  # scales of the activations
    for i in range(tl.cdiv(blocks, W)):
        block = i * W + warp
        group = block * 2 + lane // 16
        tl.inline_asm_elementwise(
            FIX, "=r,l,r,r,r,r",
            [
                (x_ptr + block * 256 + lane * 8).to(tl.int64), (block < blocks).to(tl.int32),
                base + START + block * BLOCK + lane // 4 * 64 + lane % 4 * 8, zero + group * 16 + lane % 4 * 4,
                of_x + group * 4,
            ],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()
    # activations of every class: zeros, but for two columns g
    mine, nothing = (
        base + START + warp * BLOCK + lane // 4 % 2 * 32 + lane % 4 * 8,
        base + X_AT + lane % 4 * 8,
    )
    x, steps = (), ()
    for c in tl.static_range(4):
        own = lane // 8 == c
        x = x + (tl.where(own, mine, nothing),)
        steps = steps + (tl.where(own, W * BLOCK, 0) + warp * 0,)
    acc = ()
    for _ in tl.static_range(2 * R):
        acc = acc + (tl.zeros([W, 32], tl.float32),)
    free = (DEPTH - 1) * (W * OWN)  # the place that was read last
    for i in range(tl.cdiv(blocks, W)):
        block = i * W + warp
        _request(words, scales, place + free + lane * 16, place + free + R * BITS * 512 + lane * 4,
                 block + (DEPTH - 1) * W, blocks, REQUEST, REQUEST_CONSTRAINTS, BITS, SCALES, A_GROUP)  # fmt: skip
        free += W * OWN
        free = tl.where(free == DEPTH * (W * OWN), 0, free)
        copies.wait(DEPTH - 1)
        acc = tl.inline_asm_elementwise(
            MULTIPLY, MULTIPLY_CONSTRAINTS,
            acc + ((block < blocks).to(tl.int32), place + free + lane * 16, place + free + R * BITS * 512 + lane * 4)
            + x + (zero + block * 32 + lane % 4 * 4, of_x + block * 8),
            dtype=(tl.float32,) * (2 * R), is_pure=False, pack=1,
        )  # fmt: skip
        moved = ()
        for c in tl.static_range(4):
            moved = moved + (x[c] + steps[c],)
        x = moved
    factor = tl.where(lane % 4 == 0, FACTOR[0], 0.0)
    for c in tl.static_range(1, 4):
        factor += tl.where(lane % 4 == c, FACTOR[c], 0.0)
    for r in tl.static_range(R):
        tile = tl.minimum(tl.program_id(0) * R + r, last_tile)
        # rows g and g + 8 of a tile: [W, 8, 4, 2]
        sums = tl.reshape(tl.join(acc[2 * r] * factor, acc[2 * r + 1] * factor), [W, 8, 4, 2])
        y = tl.sum(tl.sum(sums, 2), 0)  # [g, rh]
        g, rh = tl.arange(0, 8)[:, None], tl.arange(0, 2)[None, :]
        row = tile * 16 + g + 8 * rh
        if GROUP == 0:
            y *= tl.load(s_ptr + tile * 16 + g * 2 + rh).to(tl.float32)
        out = row
        if rows_ptr is not None:
            out = tl.load(rows_ptr + row)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + out, mask=out < n, other=0.0).to(tl.float32)
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=out < n)


def scales_of(layout: GridLayout) -> int:
    """Of a row and block, beside its words."""
    return 0 if layout.kernel_group == 0 else 2 if layout.kernel_group == 128 else 1


def room_of(layout: GridLayout, config: DecodeConfig, processors: int) -> tuple[int, int | None]:
    """Where the ring ends, and all that is declared; None where it is more than a program gets."""
    ring = config.unroll * config.warps * config.tiles * (layout.bits * 512 + scales_of(layout) * 128)
    least = ring + BLOCK_BYTES + 2 * layout.k + layout.k // 8 + layout.k // 32
    programs = -(-layout.words.shape[0] // config.tiles)
    return ring, room_size(least, 256 * config.warps, programs, processors)


def takes(x: Tensor, layout: Layout, config: DecodeConfig) -> bool:
    """Whether this kernel can multiply: one token, a symmetric grid and nothing else, whole blocks, enough room."""
    if not isinstance(layout, GridLayout) or layout.bits > 4 or x.shape[0] != 1 or config.unroll < 2:
        return False
    others = (layout.zero_points, layout.sparse, layout.column_scales)
    whole = layout.k % 256 == 0 and layout.kernel_group % 128 == 0
    aligned = x.data_ptr() % 16 == 0 and layout.words.data_ptr() % 16 == 0
    room = room_of(layout, config, multiprocessors(x.device))[1]
    return all(other is None for other in others) and whole and aligned and room is not None


def constants(layout: GridLayout, dtype: torch.dtype, config: DecodeConfig) -> dict[str, object]:
    """What the kernel is told of a layout and a launch."""
    bits, tiles, scales = layout.bits, config.tiles, scales_of(layout)
    ring, size = room_of(layout, config, multiprocessors(layout.words.device))
    assert size is not None
    return {
        "REQUEST": request_asm(bits, scales, tiles), "REQUEST_CONSTRAINTS": request_constraints(tiles),
        "FIX": fix_asm(bits, "fp16" if dtype == torch.float16 else "bf16"), "MULTIPLY": block_asm(bits, scales, tiles),
        "MULTIPLY_CONSTRAINTS": block_constraints(tiles), "ROOM_ASM": copies.room_asm(size), "X_AT": ring,
        "FACTOR": tuple(1 / factor if factor else 0.0 for factor in FACTORS[bits]), "BITS": bits,
        "GROUP": layout.kernel_group, "W": config.warps, "R": tiles, "DEPTH": config.unroll, "PDL": config.pdl,
    }  # fmt: skip


def byte_grid(x: Tensor, layout: Layout, bias: Tensor | None, config: DecodeConfig) -> Tensor:
    """y [1, n] of x [1, k]; `takes` says for what."""
    assert isinstance(layout, GridLayout)
    y = torch.empty(1, layout.n, dtype=x.dtype, device=x.device)
    early: dict[str, object] = {"launch_pdl": True} if config.pdl else {}
    if config.max_registers:
        early["maxnreg"] = config.max_registers
    tiles = layout.words.shape[0]
    launch(
        byte_grid_kernel,
        (triton.cdiv(tiles, config.tiles), 1, 1),
        (x, layout.words, layout.scales, layout.rows, bias, y, layout.k, layout.n, tiles - 1),
        interned(**constants(layout, x.dtype, config), num_warps=config.warps, num_stages=1, **early),
    )
    return y
