"""Viterbi search through the bitshift trellis on a GPU: one program a sequence, its 65536 states in registers.

A state is a window of 16 bits of the stream; a step shifts `shift` new bits in. Two states with the same last
16 - shift bits share their future, so a step is

    cost'[u] = min over p of ( cost[s >> shift] + |x - values[s]|^2 ),   s = p 2^(16 - shift) + u

over 2^(16 - shift) numbers u that pass through shared memory between steps; the winning p of each u goes to global
memory. Where steps are of uneven bits, the costs after a step are by what the next one keeps. Threads split the states
by u, so the minimum over p stays inside a thread, and the winner rides in the low bits of its cost (costs are not
negative, so they keep their order as integers): an argmin is one integer minimum. About six machine instructions a
state and step.

`_trace` reads the path back, many sequences a program, because each of its loads waits for the one before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

UNREACHABLE = tl.constexpr(1e30)  # finite, so that tagging its low bits makes no NaN
_WINNERS_BYTES = 1 << 31  # memory for the winners of the sequences searched at once
_TRACE_BLOCK = 32


@triton.jit
def _step(cost, distance, state, winners, SHIFT: tl.constexpr, NEXT: tl.constexpr):
    """The costs after a step of SHIFT bits, by the bits that the step after it, of NEXT, keeps."""
    U: tl.constexpr = 1 << (16 - NEXT)
    R: tl.constexpr = 1 << NEXT
    total = tl.gather(cost, state >> SHIFT, 0) + distance
    tagged = (total.to(tl.int32, bitcast=True) & -R) | (state >> (16 - NEXT))
    best = tl.min(tl.reshape(tagged, [R, U]), axis=0)
    tl.store(winners + tl.arange(0, U), (best & (R - 1)).to(tl.uint8))
    return best.to(tl.float32, bitcast=True)


@triton.jit
def _forward(
    targets,
    values,
    pinned,
    winners,
    final,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTS: tl.constexpr,
    WIDEST: tl.constexpr,
    PINNED: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    PERIOD: tl.constexpr = len(SHIFTS)
    FIRST: tl.constexpr = 1 << (16 - SHIFTS[0])
    state = tl.arange(0, 65536)
    first = tl.load(values + state * VECTOR)
    if VECTOR == 2:
        second = tl.load(values + state * VECTOR + 1)
    u = tl.arange(0, FIRST)
    if PINNED:
        cost = tl.where(u == tl.load(pinned + sequence), 0.0, UNREACHABLE)
    else:
        cost = tl.zeros([FIRST], tl.float32)
    for start in range(0, STEPS, PERIOD):
        now = cost
        for i in tl.static_range(PERIOD):
            at = sequence * STEPS + start + i
            distance = first.to(tl.float32) - tl.load(targets + at * VECTOR)
            distance *= distance
            if VECTOR == 2:
                other = second.to(tl.float32) - tl.load(targets + at * VECTOR + 1)
                distance += other * other
            now = _step(now, distance, state, winners + at * WIDEST, SHIFTS[i], SHIFTS[(i + 1) % PERIOD])
        cost = now
    tl.store(final + sequence * FIRST + u, cost)


@triton.jit
def _trace(
    winners, ends, states, sequences, STEPS: tl.constexpr, SHIFTS: tl.constexpr, WIDEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    PERIOD: tl.constexpr = len(SHIFTS)
    sequence = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = sequence < sequences
    u = tl.load(ends + sequence, mask=inside, other=0)
    for back in range(0, STEPS, PERIOD):
        for j in tl.static_range(PERIOD):
            step = sequence * STEPS + (STEPS - 1 - back - j)
            p = tl.load(winners + step * WIDEST + u, mask=inside, other=0).to(tl.int32)
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
    widest, width = 1 << (16 - min(shifts)), 1 << (16 - shifts[0])
    chunk = max(1, _WINNERS_BYTES // (widest * steps))
    states = torch.empty(b, steps, dtype=torch.int32, device=targets.device)
    for low in range(0, b, chunk):
        part = targets[low : low + chunk]
        size = part.shape[0]
        winners = torch.empty(size, steps, widest, dtype=torch.uint8, device=targets.device)
        final = torch.empty(size, width, device=targets.device)
        ends = None if pinned is None else pinned[low : low + chunk].to(torch.int32)
        _forward[(size,)](
            part,
            table,
            part if ends is None else ends,
            winners,
            final,
            STEPS=steps,
            VECTOR=vector,
            SHIFTS=shifts,
            WIDEST=widest,
            PINNED=pinned is not None,
            num_warps=32 if min(shifts) <= 2 else 16,  # more spill; fewer wait (measured on an H200)
        )
        if ends is None:
            ends = final.argmin(1).to(torch.int32)
        _trace[(triton.cdiv(size, _TRACE_BLOCK),)](
            winners,
            ends,
            states[low : low + chunk],
            size,
            STEPS=steps,
            SHIFTS=shifts,
            WIDEST=widest,
            BLOCK=_TRACE_BLOCK,
            num_warps=1,
        )
    return states.long()
