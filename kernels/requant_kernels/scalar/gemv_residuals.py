"""Residuals of `gemv.py`: sliced ELL (`common/sparse.py`), gathered while the k_tiles are multiplied.

    y[row] += sum over the row's slots of value * x[column]

A thread processes slots of one row; a slot is a column and a value, and 8 threads hold 8 adjacent slots of a row. Slots
are loaded two k_tiles before they are multiplied, and their activations one (`gemv.py`), so this file has the parts of that
loop. Activations are gathered from global memory, through the L1 cache, or, for one token, from shared memory (`staged`).
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

import triton
import triton.language as tl

# Copy 16 bytes from global ($2) to shared memory ($1) if $3 is not 0.
COPY_PTX = tl.constexpr("""{ .reg .pred %inside; setp.ne.s32 %inside, $3, 0;
@%inside cp.async.ca.shared.global [$1], [$2], 16; mov.b32 $0, 0; }""")


@triton.jit
def first_slot(slice_ptr, position, iterations, TILING: tl.constexpr):
    """Every thread's first slot `[slot_lanes, rows]`, the end of its row `[1, rows]`, and the number of slots of the longest
    row that remain after the loop."""
    TILES: tl.constexpr = TILING.tiles
    LANES: tl.constexpr = TILING.slot_lanes
    slot = tl.load(slice_ptr + position)[None, :] * 128
    end = tl.load(slice_ptr + position + 1)[None, :] * 128
    in_loop = TILING.slots * TILING.slot_stride * (iterations * TILING.stages + 1)
    left = tl.max(tl.max(end - slot, 1), 0) - in_loop
    slot += (tl.arange(0, 16 * TILES) % 16)[None, :] * 8 + (
        tl.arange(0, LANES) % 8 + tl.arange(0, LANES) // 8 * 128
    )[:, None]
    return slot, end, left


@triton.jit
def load_slots(ell_columns_ptr, ell_values_ptr, slot, end, COUNT: tl.constexpr, TILING: tl.constexpr):
    """COUNT pairs (columns, values) at `slot` `[slot_lanes, rows]`, 0 from `end` `[1, rows]` on.

    One slot per thread, slots before rows: Triton uses the same layout for the gathers, so no data moves between threads.
    """
    slots = ()
    for i in tl.static_range(COUNT):
        at = slot + i * TILING.slot_stride
        inside = at < end
        column = (
            tl.load(ell_columns_ptr + at, mask=inside, other=0, eviction_policy="evict_first").to(tl.int32)
            & 0xFFFF
        )
        value = tl.load(ell_values_ptr + at, mask=inside, other=0, eviction_policy="evict_first")
        slots = slots + ((column, value),)
    return slots


@triton.jit
def stage_activations(x_ptr, K, TILING: tl.constexpr):
    """Copy all activations of one token to shared memory, 16 bytes per thread at a time; returns their address."""
    WARPS: tl.constexpr = TILING.warps
    base = tl.inline_asm_elementwise(TILING.reserve_ptx, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    for i in range(tl.cdiv(K, 256 * WARPS)):
        column = (i * 32 * WARPS + tl.arange(0, 32 * WARPS)) * 8
        tl.inline_asm_elementwise(
            COPY_PTX, "=r,r,l,r", [base + column * 2, (x_ptr + column).to(tl.int64), (column < K).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.inline_asm_elementwise(
        "cp.async.wait_all; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
    return base


@triton.jit
def gather(x_ptr, column, base, TILING: tl.constexpr):
    """Activations at `column`: for one token in the shape of `column`; for several, transposed, with a last dimension."""
    TOKENS: tl.constexpr = TILING.sparse_tokens
    if TILING.staged:
        x = tl.inline_asm_elementwise(
            "ld.shared.u16 $0, [$1];", "=r,r", [base + column * 2], dtype=tl.int32, is_pure=False, pack=1
        )
        x = x.to(tl.int16).to(x_ptr.dtype.element_ty, bitcast=True)
    elif TOKENS == 1:
        x = tl.load(x_ptr + column)
    else:
        x = tl.load(x_ptr + (column[:, :, None] * TOKENS + tl.arange(0, TOKENS)[None, None, :]))
    return x


@triton.jit
def zero_sums(TILING: tl.constexpr):
    """Zeros `[slot_lanes, rows]`, or `[slot_lanes, rows, tokens]` for several tokens."""
    LANES: tl.constexpr = TILING.slot_lanes
    TILES: tl.constexpr = TILING.tiles
    TOKENS: tl.constexpr = TILING.sparse_tokens
    return tl.zeros([LANES, 16 * TILES] if TOKENS == 1 else [LANES, 16 * TILES, TOKENS], tl.float32)


@triton.jit
def multiply_slot(sums, value, x, TILING: tl.constexpr):
    """sums += values times activations, slot by slot."""
    value = value.to(tl.float32)
    return sums + (value if TILING.sparse_tokens == 1 else value[:, :, None]) * x.to(tl.float32)


@triton.jit
def finish_slots(sums, current, upcoming, x, slot, end, left, ell_columns_ptr, ell_values_ptr, x_ptr, base,
                  TILING: tl.constexpr):  # fmt: skip
    """The residuals after the last k_tile: those in flight, then `left` slots of rows that are longer than the loop.

    Returns the sums `[rows, 1 or tokens]`.
    """
    SLOTS: tl.constexpr = TILING.slots
    for i in tl.static_range(SLOTS):
        sums = multiply_slot(sums, current[i][1], x[i], TILING)
    if left > 0:
        for i in tl.static_range(SLOTS):
            sums = multiply_slot(sums, upcoming[i][1], gather(x_ptr, upcoming[i][0], base, TILING), TILING)
        left -= SLOTS * TILING.slot_stride
        slot += SLOTS * TILING.slot_stride
        while left > 0:
            more = load_slots(ell_columns_ptr, ell_values_ptr, slot, end, 1, TILING)
            sums = multiply_slot(sums, more[0][1], gather(x_ptr, more[0][0], base, TILING), TILING)
            slot += TILING.slot_stride
            left -= TILING.slot_stride
    sums = tl.sum(sums, 0)
    if TILING.sparse_tokens == 1:
        sums = sums[:, None]
    return sums
