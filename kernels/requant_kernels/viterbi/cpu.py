"""Viterbi search through the bitshift trellis on a CPU: loops that numba compiles to vector instructions.

The recursion is that of `gpu.py`:

    cost'[u] = min over states s that end in u of ( cost[s >> shift] + |x - values[s]|^2 ),   |x|^2 left out

The cost before a step belongs to the bits that the step keeps, so 2^shift adjacent states share it. `_repeat` first
replicates it for them; everything after that runs over consecutive addresses. New costs are computed CHUNK at a time, so
that they and the repeated ones stay in the L1 cache, which takes a quarter to a third off the time at 2 to 4 bits.

No back-pointers are stored, which would cost a store per state and step. Instead the costs after all steps are kept, and
the backward pass re-evaluates the 2^shift predecessors of the one state that it is in. A search through 256 weights,
one per step, takes 4 ms on a core; torch operators take 26 ms. The GIL is released, so threads can search in parallel.

Compiling the loops takes seconds and 140 MB. numba caches them on disk if it finds a writable folder: next to
this file, in the user's cache, or NUMBA_CACHE_DIR; nothing depends on it.
"""

# pyright: reportMissingTypeStubs=none, reportUntypedFunctionDecorator=none, reportUnknownMemberType=none

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64
from numba import njit
from numpy import ndarray

UNREACHABLE = np.float32(1e30)  # finite: comparing with infinity makes the minimum slower
CHUNK = 2048  # 8 KiB per array
MINIMUM_FLAGS = {"nnan", "nsz"}  # with them a minimum is one vector instruction; sums are not reordered


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit` for loops that hold no Python object, cached on disk if possible."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            loops: Any = njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # no writable folder
            return njit(nogil=True, **options)(function)
        for name in ("load_overload", "save_overload"):
            setattr(loops._cache, name, _or_nothing(getattr(loops._cache, name)))
        return loops

    return decorate


def _or_nothing(call: Callable[..., Any]) -> Callable[..., Any]:
    """None if the call fails, which numba takes as a loop that is not cached: a full disk or damaged file ends no run."""

    def attempt(*args: Any) -> Any:
        with suppress(Exception):
            return call(*args)
        return None

    return attempt


@_compiled(boundscheck=False)
def _repeat(cost, shift, few, repeated):
    """repeated[s] = cost[s >> shift]. Constant trip counts let the compiler store whole vectors, up to four at once: longer
    runs are built from the shorter ones in `few`. (Eight at once take three times as long since LLVM 22.)"""
    if shift == 1:
        for j in range(cost.shape[0]):
            value = cost[j]
            repeated[2 * j] = value
            repeated[2 * j + 1] = value
    elif shift == 2:
        for j in range(cost.shape[0]):
            value = cost[j]
            for i in range(4):
                repeated[4 * j + i] = value
    else:
        if shift == 3:
            for j in range(cost.shape[0]):
                value = cost[j]
                few[2 * j] = value
                few[2 * j + 1] = value
        else:
            times = 1 << (shift - 4)
            for j in range(cost.shape[0]):
                value = cost[j]
                for k in range(times):
                    for i in range(4):
                        few[4 * (times * j + k) + i] = value
        for j in range(cost.shape[0] << (shift - 2)):
            value = few[j]
            for i in range(4):
                repeated[4 * j + i] = value


@_compiled(boundscheck=False)
def _multiply_add(total, weight, values):
    for s in range(total.shape[0]):
        total[s] += weight * values[s]


@_compiled(fastmath=MINIMUM_FLAGS, boundscheck=False)
def _first(distance, weight, values, cost, new_cost):
    """new_cost = distance + weight * values + cost."""
    for u in range(new_cost.shape[0]):
        new_cost[u] = distance[u] + weight * values[u] + cost[u]


@_compiled(fastmath=MINIMUM_FLAGS, boundscheck=False)
def _smaller(distance, weight, values, cost, before, new_cost):
    """new_cost = min(before, distance + weight * values + cost); `before` must be another array: a minimum written
    over it becomes a masked store (LLVM 22), which takes three times as long."""
    for u in range(new_cost.shape[0]):
        new_cost[u] = min(before[u], distance[u] + weight * values[u] + cost[u])


@_compiled(boundscheck=False)
def _relax(distance, weight, values, cost, shift, few, repeated, least, new_cost):
    """new_cost[u] = min of distance[s] + weight * values[s] + cost[s >> shift] over the states s that end in u.

    The running minima alternate between the two rows of `least`; the last ones go to `new_cost`.
    """
    width = new_cost.shape[0]
    size = min(width, repeated.shape[0])
    last = distance.shape[0] - width
    for u in range(0, width, size):
        row = 0
        for start in range(u, distance.shape[0], width):
            stop = start + size
            _repeat(cost[start >> shift : stop >> shift], shift, few, repeated)
            found = new_cost[u : u + size] if start >= last else least[row, :size]
            if start == u:
                _first(distance[start:stop], weight, values[start:stop], repeated, found)
            else:
                before = least[1 - row, :size]
                _smaller(distance[start:stop], weight, values[start:stop], repeated, before, found)
            row = 1 - row


@_compiled(boundscheck=False)
def _search(target, values, squares, shifts, pinned, costs, few, repeated, least, distance, states):
    """One sequence: costs of all steps forward, then the path backward. `pinned` -1: free ends."""
    steps, vector = target.shape
    num_states, period = squares.shape[0], shifts.shape[0]
    costs[0] = np.float32(0.0) if pinned < 0 else UNREACHABLE
    if pinned >= 0:
        costs[0, pinned] = np.float32(0.0)
    for t in range(steps):
        shift, width = shifts[t % period], num_states >> shifts[(t + 1) % period]
        base = squares
        if vector > 1:
            distance[:] = squares
            for j in range(1, vector):
                _multiply_add(distance, np.float32(-2.0) * target[t, j], values[j])
            base = distance
        weight = np.float32(-2.0) * target[t, 0]
        _relax(
            base,
            weight,
            values[0],
            costs[t, : num_states >> shift],
            shift,
            few,
            repeated,
            least,
            costs[t + 1, :width],
        )
    u = pinned if pinned >= 0 else np.argmin(costs[steps, : num_states >> shifts[steps % period]])
    for t in range(steps - 1, -1, -1):
        shift, width = shifts[t % period], num_states >> shifts[(t + 1) % period]
        best, cheapest = u, np.float32(np.inf)
        for s in range(u, num_states, width):
            cost = squares[s] + costs[t, s >> shift]
            for j in range(vector):
                cost -= np.float32(2.0) * target[t, j] * values[j, s]
            if cost < cheapest:
                best, cheapest = s, cost
        states[t] = best
        u = best >> shift


@_compiled(boundscheck=False)
def _search_batch(targets, values, squares, shifts, pinned, states):
    num_states = squares.shape[0]
    costs = np.empty((targets.shape[1] + 1, num_states >> shifts.min()), np.float32)
    few, repeated = np.empty(CHUNK // 4, np.float32), np.empty(CHUNK, np.float32)
    least = np.empty((2, CHUNK), np.float32)
    distance = np.empty(num_states, np.float32)
    for i in range(targets.shape[0]):
        _search(
            targets[i], values, squares, shifts, pinned[i], costs, few, repeated, least, distance, states[i]
        )


def viterbi_paths(
    targets: Float32[ndarray, "b t v"],
    values: Float32[ndarray, "s v"],
    shifts: tuple[int, ...],
    pinned: Int64[ndarray, " b"] | None,
) -> Int64[ndarray, "b t"]:
    """The cheapest path of every sequence, as the states at each step.

    Args:
        targets: b sequences of t steps of v weights.
        values: the values that each state represents.
        shifts: new bits of each step, repeated along the steps.
        pinned: the last bits, as many as a first step keeps, of the state before the first step and of the last state.
    """
    columns = np.ascontiguousarray(values.T)
    states = np.empty(targets.shape[:2], np.int64)
    ends = np.full(len(targets), -1) if pinned is None else np.ascontiguousarray(pinned)
    squares = np.square(columns).sum(0, dtype=np.float32)
    _search_batch(np.ascontiguousarray(targets), columns, squares, np.array(shifts), ends, states)
    return states
