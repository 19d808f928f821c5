"""Viterbi search through the bitshift trellis on a GPU: one CTA a sequence, the 65536 states in registers.

A state s is a window of 16 bits of the stream (QTIP: Tseng et al. 2024, arXiv 2406.11235); a step shifts `shift` new bits
in. All states with the same last 16 - shift bits u have the same future, so only the cheapest of them survives:

    cost'[u] = min over p of ( cost[s >> shift] + |x - values[s]|^2 ),   s = p 2^(16 - shift) + u

The costs of the 2^(16 - shift) values of u pass through shared memory between steps; the surviving p of each u, the
back-pointer, goes to global memory. Where steps have different numbers of bits, the costs after a step are indexed by the
bits that the next step keeps.

Threads split the states by u, so that the minimum over p stays inside a thread. The back-pointer travels in the low bits of
its cost: costs are not negative, so their bit patterns compare like integers, and an argmin is one integer minimum. A
step takes about six machine instructions a state.

`_backtrack` reads the path back, many sequences a CTA, because each of its loads depends on the one before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

UNREACHABLE = tl.constexpr(1e30)  # finite, so that a back-pointer in its low bits makes no NaN
BACK_POINTER_BYTES = 1 << 31  # memory for the back-pointers of the sequences searched at once
SEQUENCES_PER_CTA = 32  # of the backtracking


@triton.jit
def _step(cost, distance, state, back_pointers, SHIFT: tl.constexpr, NEXT: tl.constexpr):
    """The costs after a step of SHIFT bits, indexed by the bits that the next step, of NEXT bits, keeps."""
    WIDTH: tl.constexpr = 1 << (16 - NEXT)
    CANDIDATES: tl.constexpr = 1 << NEXT
    total = tl.gather(cost, state >> SHIFT, 0) + distance
    tagged = (total.to(tl.int32, bitcast=True) & -CANDIDATES) | (state >> (16 - NEXT))
    best = tl.min(tl.reshape(tagged, [CANDIDATES, WIDTH]), axis=0)
    tl.store(back_pointers + tl.arange(0, WIDTH), (best & (CANDIDATES - 1)).to(tl.uint8))
    return best.to(tl.float32, bitcast=True)


@triton.jit
def _forward(
    targets, values, pinned, back_pointers, final, STEPS: tl.constexpr, VECTOR: tl.constexpr, SHIFTS: tl.constexpr,
    MAX_WIDTH: tl.constexpr, PINNED: tl.constexpr,
):  # fmt: skip
    """The forward pass of one sequence; grid: sequences. `final`: the costs after the last step."""
    sequence = tl.program_id(0).to(tl.int64)
    PERIOD: tl.constexpr = len(SHIFTS)
    FIRST_WIDTH: tl.constexpr = 1 << (16 - SHIFTS[0])
    state = tl.arange(0, 65536)
    first = tl.load(values + state * VECTOR)
    if VECTOR == 2:
        second = tl.load(values + state * VECTOR + 1)
    u = tl.arange(0, FIRST_WIDTH)
    if PINNED:
        cost = tl.where(u == tl.load(pinned + sequence), 0.0, UNREACHABLE)
    else:
        cost = tl.zeros([FIRST_WIDTH], tl.float32)
    for start in range(0, STEPS, PERIOD):
        now = cost
        for i in tl.static_range(PERIOD):
            at = sequence * STEPS + start + i
            distance = first.to(tl.float32) - tl.load(targets + at * VECTOR)
            distance *= distance
            if VECTOR == 2:
                other = second.to(tl.float32) - tl.load(targets + at * VECTOR + 1)
                distance += other * other
            now = _step(
                now, distance, state, back_pointers + at * MAX_WIDTH, SHIFTS[i], SHIFTS[(i + 1) % PERIOD]
            )
        cost = now
    tl.store(final + sequence * FIRST_WIDTH + u, cost)


@triton.jit
def _backtrack(
    back_pointers, ends, states, sequences, STEPS: tl.constexpr, SHIFTS: tl.constexpr, MAX_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The states of BLOCK sequences, last step first; `ends`: the last 16 - SHIFTS[0] bits of their last states."""
    PERIOD: tl.constexpr = len(SHIFTS)
    sequence = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = sequence < sequences
    u = tl.load(ends + sequence, mask=inside, other=0)
    for back in range(0, STEPS, PERIOD):
        for j in tl.static_range(PERIOD):
            step = sequence * STEPS + (STEPS - 1 - back - j)
            p = tl.load(back_pointers + step * MAX_WIDTH + u, mask=inside, other=0).to(tl.int32)
            state = (p << (16 - SHIFTS[(PERIOD - j) % PERIOD])) + u
            tl.store(states + step, state, mask=inside)
            u = state >> SHIFTS[PERIOD - 1 - j]


def viterbi_paths(
    targets: Tensor, values: Tensor, *, shifts: tuple[int, ...], pinned: Tensor | None
) -> Tensor:
    """The cheapest path of every sequence.

    Args:
        targets: Float32 [b, t, v], v = 1 or 2 weights a step.
        values: Float32 [65536, v], exact in float16: what each state stands for.
        shifts: new bits of each step, 1 to 8, repeated along the steps.
        pinned: Int64 [b] or None: the last 16 - shifts[0] bits of the state before the first step and of the last state.

    Returns:
        Int64 [b, t], the state at each step.
    """
    b, steps, vector = targets.shape
    table = values.half().contiguous()
    targets = targets.contiguous()
    if len(set(shifts)) == 1:
        shifts = shifts[:1]
    max_width, width = 1 << (16 - min(shifts)), 1 << (16 - shifts[0])
    chunk = max(1, BACK_POINTER_BYTES // (max_width * steps))
    states = torch.empty(b, steps, dtype=torch.int32, device=targets.device)
    for low in range(0, b, chunk):
        part = targets[low : low + chunk]
        size = part.shape[0]
        back_pointers = torch.empty(size, steps, max_width, dtype=torch.uint8, device=targets.device)
        final = torch.empty(size, width, device=targets.device)
        ends = None if pinned is None else pinned[low : low + chunk].to(torch.int32)
        # more bits a step spill with 32 warps, fewer are slower with 16 (measured on an H200)
        _forward[(size,)](
            part, table, part if ends is None else ends, back_pointers, final, STEPS=steps, VECTOR=vector, SHIFTS=shifts,
            MAX_WIDTH=max_width, PINNED=pinned is not None, num_warps=32 if min(shifts) <= 2 else 16,
        )  # fmt: skip
        if ends is None:
            ends = final.argmin(1).to(torch.int32)
        _backtrack[(triton.cdiv(size, SEQUENCES_PER_CTA),)](
            back_pointers, ends, states[low : low + chunk], size, STEPS=steps, SHIFTS=shifts, MAX_WIDTH=max_width,
            BLOCK=SEQUENCES_PER_CTA, num_warps=1,
        )  # fmt: skip
    return states.long()
