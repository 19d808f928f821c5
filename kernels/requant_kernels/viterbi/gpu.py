"""Viterbi search through the bitshift trellis on a GPU: one CTA per sequence, the 65536 states in registers.

A state s is a 16-bit window of the stream (QTIP: Tseng et al. 2024, arXiv 2406.11235); a step shifts in `shift` new bits.
All states with the same last 16 - shift bits u have the same future, so only the cheapest of them survives:

    cost'[u] = min over p of ( cost[s >> shift] + |x - values[s]|^2 ),   s = p 2^(16 - shift) + u

The costs of the 2^(16 - shift) values of u pass through shared memory between steps; the surviving p of each u, the
back-pointer, goes to global memory. If steps have different numbers of bits, the costs after a step are indexed by the
bits that the next step keeps.

A state's 16 bits are, from the highest, [ registers | thread | registers ]. The high ones contain all p of a u, so that the
minimum over p stays inside a thread. The low ones, LOW of them, are among the newest `shift` bits, which do not affect the
cost before the step: one read of shared memory serves 2^LOW states. The back-pointer travels in the low bits of its cost:
costs are nonnegative, so their bit patterns compare like integers, and an argmin is one integer minimum. The back-pointers
of a thread's u are packed into one word, at most 4 KB per step.

What matters most is that nothing spills beyond L1. Values of pairs stay in float16, two per register, until they are used,
and are subtracted in that type (`_total`); in float32 they were 400 KB of a CTA's local memory, and a search took 2.5 to 4.8
times as long. Next come instructions, of which a step takes five per state, eight if a state represents two weights: two for
the cost, one for the back-pointer and half a one for the minimum are the least. So the mask that clears the low bits is an
argument, for of two constants an instruction can hold one, and the index of the costs is a sum of what depends on the
thread and what does not, so that an address is computed once.

`_backtrack` follows the path backward. Which of a step's back-pointers counts is known only from the step after it, so that
a load would wait for the load before it; a CTA reads all of them instead, four steps early.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_ptx
from requant_kernels.common.launch import interned, launch

# cost + (a - x)^2 + (b - y)^2 for a pair of float16 in a word; differences are rounded to float16
PAIR_ERROR: tl.constexpr = tl.constexpr("""{
    .reg .b32 both; .reg .b16 low, high; .reg .f32 a, b;
    sub.rn.f16x2 both, $2, $3;
    mov.b32 {low, high}, both;
    cvt.f32.f16 a, low;
    cvt.f32.f16 b, high;
    fma.rn.f32 a, a, a, $1;
    fma.rn.f32 $0, b, b, a;
}""")
UNREACHABLE = tl.constexpr(1e30)  # finite, so that a back-pointer in its low bits creates no NaN
BACK_POINTER_BYTES = 1 << 31  # memory for the back-pointers of the sequences searched at once
MOST_WORDS = 1024  # of back-pointers per step
WARPS = 32  # of the forward pass, at most


@triton.jit
def _total(cost, x, values, VECTOR: tl.constexpr, PTX: tl.constexpr):
    """The costs of all states with the step's target x added to the costs before it.

    Pairs are subtracted in float16. This rounds targets by up to 2^-11 of their value, which changes the least cost by
    the square of that.
    """
    if VECTOR == 1:
        error = values.to(tl.float32) - tl.load(x)
        total = cost + error * error
    else:
        targets = _half_bits(tl.load(x)) | (_half_bits(tl.load(x + 1)) << 16)
        if PTX:
            total = tl.inline_asm_elementwise(
                PAIR_ERROR, "=f,f,r,r", [cost, values, targets], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            first = (_low_half(values) - _low_half(targets)).to(tl.float32)
            second = (_low_half(values >> 16) - _low_half(targets >> 16)).to(tl.float32)
            total = cost + first * first + second * second
    return total


@triton.jit
def _half_bits(x):
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _low_half(word):
    return word.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _step(
    cost, x, values, high, mask, back_pointers, VECTOR: tl.constexpr, PTX: tl.constexpr,
    SHIFT: tl.constexpr, NEXT: tl.constexpr, LOW: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """The costs after a step of SHIFT bits, indexed by the bits that the next step, of NEXT bits, keeps.

    `mask` clears the bits that hold a back-pointer.
    """
    CANDIDATES: tl.constexpr = 1 << NEXT
    WIDTH: tl.constexpr = 1 << (16 - NEXT)
    # high >> (SHIFT - LOW), as a sum over registers and threads
    before = (high // THREADS * (THREADS >> (SHIFT - LOW))) + ((high & (THREADS - 1)) >> (SHIFT - LOW))
    total = _total(tl.gather(cost, before, 0)[None, :], x, values, VECTOR, PTX)
    p = high >> (16 - NEXT - LOW)
    tagged = (total.to(tl.int32, bitcast=True) & mask) | p[None, :]
    best = tl.min(tl.reshape(tagged, [1 << LOW, CANDIDATES, WIDTH >> LOW]), axis=1)
    # a thread has all u that agree in the middle bits: their back-pointers make one word
    FIELDS: tl.constexpr = WIDTH // WORDS >> LOW
    field = tl.arange(0, 1 << LOW)[:, None] + (tl.arange(0, FIELDS) << LOW)[None, :]
    pointers = (tl.reshape(best, [1 << LOW, FIELDS, WORDS]) & (CANDIDATES - 1)) << (field * NEXT)[:, :, None]
    tl.store(back_pointers + tl.arange(0, WORDS), tl.sum(tl.sum(pointers, axis=0), axis=0))
    return tl.reshape(tl.trans(best), [WIDTH]).to(tl.float32, bitcast=True)


# the compiler does not know the mask, nor that it is a multiple of 16
@triton.jit(do_not_specialize=["mask"])
def _forward(
    targets, values, pinned, back_pointers, final, mask, STEPS: tl.constexpr, VECTOR: tl.constexpr, SHIFTS: tl.constexpr,
    LOW: tl.constexpr, WORDS: tl.constexpr, THREADS: tl.constexpr, PINNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The forward pass of one sequence; grid: sequences. `final`: the costs after the last step."""
    sequence = tl.program_id(0).to(tl.int64)
    PERIOD: tl.constexpr = len(SHIFTS)
    FIRST_WIDTH: tl.constexpr = 1 << (16 - SHIFTS[0])
    high, low = tl.arange(0, 65536 >> LOW), tl.arange(0, 1 << LOW)
    state = (high << LOW)[None, :] + low[:, None]
    if LOW == 0:
        # Zero, which the compiler does not know: else a thread would load neighbours together, whose high bits are alike.
        state += (mask >> 31) + 1
    of_states = tl.load(values + state)
    u = tl.arange(0, FIRST_WIDTH)
    if PINNED:
        cost = tl.where(u == tl.load(pinned + sequence), 0.0, UNREACHABLE)
    else:
        cost = tl.zeros([FIRST_WIDTH], tl.float32)
    for start in range(0, STEPS, PERIOD):
        now = cost
        for i in tl.static_range(PERIOD):
            at = sequence * STEPS + start + i
            now = _step(
                now, targets + at * VECTOR, of_states, high, mask, back_pointers + at * WORDS,
                VECTOR, PTX, SHIFTS[i], SHIFTS[(i + 1) % PERIOD], LOW, WORDS, THREADS,
            )  # fmt: skip
        cost = now
    tl.store(final + sequence * FIRST_WIDTH + u, cost)


@triton.jit
def _backtrack(
    back_pointers, ends, states, STEPS: tl.constexpr, SHIFTS: tl.constexpr, LOW: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The states of one sequence, last step first; grid: sequences. `ends`: the last 16 - SHIFTS[0] bits of the last state.

    The back-pointers of four steps are read while the path is followed through four others.
    """
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WORDS)
    rows = back_pointers + sequence * STEPS * WORDS + column
    states += sequence * STEPS
    u = tl.load(ends + sequence)
    a, b, c, d = _four_rows(rows, STEPS - 1, WORDS)
    for back in range(0, STEPS, 4):
        step = STEPS - 1 - back
        e, f, g, h = _four_rows(rows, tl.maximum(step - 4, 3), WORDS)
        u = _followed(a, states + step, column, u, 0, SHIFTS, LOW, WORDS)
        u = _followed(b, states + step - 1, column, u, 1, SHIFTS, LOW, WORDS)
        u = _followed(c, states + step - 2, column, u, 2, SHIFTS, LOW, WORDS)
        u = _followed(d, states + step - 3, column, u, 3, SHIFTS, LOW, WORDS)
        a, b, c, d = e, f, g, h


@triton.jit
def _four_rows(rows, last, WORDS: tl.constexpr):
    """The back-pointers of four steps, the `last` one first."""
    rows += last * WORDS
    return tl.load(rows), tl.load(rows - WORDS), tl.load(rows - 2 * WORDS), tl.load(rows - 3 * WORDS)


@triton.jit
def _followed(
    row, state, column, u, BACK: tl.constexpr, SHIFTS: tl.constexpr, LOW: tl.constexpr, WORDS: tl.constexpr
):
    """The state that survives in u after a step, BACK steps before a last one; the u of the step before."""
    PERIOD: tl.constexpr = len(SHIFTS)
    word = tl.sum(tl.where(column == (u >> LOW & (WORDS - 1)), row, 0))
    found = _state_before(word, u, SHIFTS[(PERIOD - BACK % PERIOD) % PERIOD], LOW, WORDS)
    tl.store(state, found)
    return found >> SHIFTS[PERIOD - 1 - BACK % PERIOD]


@triton.jit
def _state_before(word, u, NEXT: tl.constexpr, LOW: tl.constexpr, WORDS: tl.constexpr):
    """The state that survives in u, given the word that holds u's back-pointer."""
    field = u & ((1 << LOW) - 1) | u // (WORDS << LOW) << LOW
    p = word >> (field * NEXT) & ((1 << NEXT) - 1)
    return (p << (16 - NEXT)) + u


def viterbi_paths(
    targets: Tensor, values: Tensor, *, shifts: tuple[int, ...], pinned: Tensor | None
) -> Tensor:
    """The cheapest path of every sequence.

    Args:
        targets: Float32 [b, t, v], v = 1 or 2 weights per step.
        values: Float32 [65536, v], exact in float16: the values that each state represents.
        shifts: new bits of each step, 1 to 8, repeated along the steps.
        pinned: Int64 [b] or None: the last 16 - shifts[0] bits of the state before the first step and of the last state.

    Returns:
        Int64 [b, t], the state at each step.
    """
    b, steps, vector = targets.shape
    table = values.half().contiguous()
    if vector == 2:
        table = table.view(torch.int32)
    targets = targets.contiguous()
    if len(set(shifts)) == 1:
        shifts = shifts[:1]
    forward, backtrack = _constants(steps, vector, shifts, pinned is not None, supports_ptx(targets.device))
    words, width = forward["WORDS"], 1 << (16 - shifts[0])
    chunk = max(1, BACK_POINTER_BYTES // (4 * words * steps))
    states = torch.empty(b, steps, dtype=torch.int32, device=targets.device)
    for start in range(0, b, chunk):
        part = targets[start : start + chunk]
        size = part.shape[0]
        back_pointers = torch.empty(size, steps, words, dtype=torch.int32, device=targets.device)
        final = torch.empty(size, width, device=targets.device)
        ends = None if pinned is None else pinned[start : start + chunk].to(torch.int32)
        launch(
            _forward,
            (size, 1, 1),
            (part, table, part if ends is None else ends, back_pointers, final, -1 << max(shifts)),
            forward,
        )
        if ends is None:
            ends = final.argmin(1).to(torch.int32)
        launch(_backtrack, (size, 1, 1), (back_pointers, ends, states[start : start + chunk]), backtrack)
    return states.long()


@cache
def _constants(
    steps: int, vector: int, shifts: tuple[int, ...], pinned: bool, ptx: bool
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The constants of the forward pass and of the backtracking.

    LOW: the more low bits of a state a thread has all values of, the fewer reads, as long as the high ones hold all p.
    """
    most, warps = max(shifts), _warps(vector, shifts)
    states_of_a_thread = 65536 // (32 * warps)
    low = max(0, min(min(shifts), states_of_a_thread.bit_length() - 1 - most))
    words = min(MOST_WORDS, 1 << (16 - most - low))
    common: dict[str, Any] = {"STEPS": steps, "SHIFTS": shifts, "LOW": low, "WORDS": words}
    forward = {
        **common,
        "VECTOR": vector,
        "THREADS": 32 * warps,
        "PINNED": pinned,
        "PTX": ptx,
        "num_warps": warps,
    }
    return interned(**forward), interned(**common, num_warps=4)


def _warps(vector: int, shifts: tuple[int, ...]) -> int:
    """Of a CTA. The threads of fewer warps have more states each and read costs less often, which shortens a search by up to
    two fifths (`eval/results/viterbi-h200.json`), as long as a thread's back-pointers fit a word, and its values registers.
    """
    if vector == 1 and min(shifts) >= 6:
        return WARPS // 4
    if max(shifts) == 5 or (vector, shifts) == (1, (4,)):
        return WARPS // 2
    return WARPS
