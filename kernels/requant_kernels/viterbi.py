"""Viterbi search through the bitshift trellis on a GPU: one program a sequence, its 65536 states in registers.

A state is a window of 16 bits of the stream; a step shifts `shift` new bits in. Two states with the same last
16 - shift bits share their future, so a step is

    cost'[u] = min over p of ( cost[s >> shift] + |x - values[s]|^2 ),   s = p 2^(16 - shift) + u

over 2^(16 - shift) numbers u that pass through shared memory between steps; the winning p of each u goes to global
memory. Threads split the states by u, so the minimum over p stays inside a thread, and the winner rides in the low bits
of its cost (costs are not negative, so they keep their order as integers): an argmin is one integer minimum. About six
machine instructions a state and step.

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
def _forward(
    targets,
    values,
    pinned,
    winners,
    final,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    PINNED: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    R: tl.constexpr = 1 << SHIFT
    U: tl.constexpr = 1 << (16 - SHIFT)
    state = tl.arange(0, 65536)
    first = tl.load(values + state * VECTOR)
    if VECTOR == 2:
        second = tl.load(values + state * VECTOR + 1)
    u = tl.arange(0, U)
    if PINNED:
        cost = tl.where(u == tl.load(pinned + sequence), 0.0, UNREACHABLE)
    else:
        cost = tl.zeros([U], tl.float32)
    for step in range(STEPS):
        at = (sequence * STEPS + step) * VECTOR
        distance = first.to(tl.float32) - tl.load(targets + at)
        total = tl.gather(cost, state >> SHIFT, 0) + distance * distance
        if VECTOR == 2:
            distance = second.to(tl.float32) - tl.load(targets + at + 1)
            total += distance * distance
        tagged = (total.to(tl.int32, bitcast=True) & -R) | (state >> (16 - SHIFT))
        best = tl.min(tl.reshape(tagged, [R, U]), axis=0)
        tl.store(winners + (sequence * STEPS + step) * U + u, (best & (R - 1)).to(tl.uint8))
        cost = best.to(tl.float32, bitcast=True)
    tl.store(final + sequence * U + u, cost)


@triton.jit
def _trace(winners, ends, states, sequences, STEPS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    U: tl.constexpr = 1 << (16 - SHIFT)
    sequence = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = sequence < sequences
    u = tl.load(ends + sequence, mask=inside, other=0)
    for back in range(STEPS):
        step = sequence * STEPS + (STEPS - 1 - back)
        p = tl.load(winners + step * U + u, mask=inside, other=0).to(tl.int32)
        state = p * U + u
        tl.store(states + step, state, mask=inside)
        u = state >> SHIFT


def viterbi_paths(targets: Tensor, values: Tensor, *, shift: int, pinned: Tensor | None) -> Tensor:
    """The cheapest path of every sequence.

    Args:
        targets: Float32 [b, t, v], v = 1 or 2 weights a step.
        values: Float32 [65536, v], exact in float16: what each state stands for.
        shift: new bits a step, 1 to 8.
        pinned: Int64 [b] or None: the last 16 - shift bits of the state before the first step and of the last state.

    Returns:
        Int64 [b, t], the state at each step.
    """
    b, steps, vector = targets.shape
    table = values.half().contiguous()
    targets = targets.contiguous()
    width = 1 << (16 - shift)
    chunk = max(1, _WINNERS_BYTES // (width * steps))
    states = torch.empty(b, steps, dtype=torch.int32, device=targets.device)
    for low in range(0, b, chunk):
        part = targets[low : low + chunk]
        size = part.shape[0]
        winners = torch.empty(size, steps, width, dtype=torch.uint8, device=targets.device)
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
            SHIFT=shift,
            PINNED=pinned is not None,
            num_warps=32 if shift <= 2 else 16,  # more spill; fewer wait (measured on an H200)
        )
        if ends is None:
            ends = final.argmin(1).to(torch.int32)
        _trace[(triton.cdiv(size, _TRACE_BLOCK),)](
            winners,
            ends,
            states[low : low + chunk],
            size,
            STEPS=steps,
            SHIFT=shift,
            BLOCK=_TRACE_BLOCK,
            num_warps=1,
        )
    return states.long()
