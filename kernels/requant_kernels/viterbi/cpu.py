"""The forward pass and the way back of a Viterbi search on a CPU, as loops that numba compiles to vector instructions.

Costs before a step belong to the bits that it keeps, so 2**shift neighbouring states share one: they are spread out first,
and all that follows runs over neighbouring addresses. No choice is written down on the way: costs of all steps are kept,
and one path asks again which state was the cheapest. A walk through 256 weights of one a step takes 5 ms on a core;
torch's operators take 26 for the same. The interpreter is released, so threads walk side by side.
"""

# pyright: reportMissingTypeStubs=none, reportUntypedFunctionDecorator=none, reportUnknownMemberType=none

import numpy as np
from jaxtyping import Float32, Int64
from numba import njit
from numpy import ndarray

FAR = np.float32(1e30)  # no path; infinity would need slower minima
VECTORIZABLE = {"nnan", "nsz"}  # what a minimum needs to be one instruction; sums keep their order


@njit(nogil=True, boundscheck=False)
def _spread(before, shift, wide):
    """wide[c] = before[c >> shift]; a number of copies that is known makes stores of whole vectors."""
    if shift == 1:
        for j in range(before.shape[0]):
            cost = before[j]
            wide[2 * j] = cost
            wide[2 * j + 1] = cost
    elif shift == 2:
        for j in range(before.shape[0]):
            cost = before[j]
            for i in range(4):
                wide[4 * j + i] = cost
    elif shift == 3:
        for j in range(before.shape[0]):
            cost = before[j]
            for i in range(8):
                wide[8 * j + i] = cost
    else:
        for j in range(before.shape[0]):
            cost = before[j]
            for i in range(1 << (shift - 4)):
                start = (j << shift) + 16 * i
                for k in range(16):
                    wide[start + k] = cost


@njit(nogil=True, boundscheck=False)
def _add(total, weight, values):
    for c in range(total.shape[0]):
        total[c] += weight * values[c]


@njit(nogil=True, fastmath=VECTORIZABLE, boundscheck=False)
def _relax(distance, weight, values, wide, after):
    """after[u] = the least of distance + weight * values + wide over the states that end in u."""
    width = after.shape[0]
    for u in range(width):
        after[u] = distance[u] + weight * values[u] + wide[u]
    for start in range(width, distance.shape[0], width):
        own, value, cost = (
            distance[start : start + width],
            values[start : start + width],
            wide[start : start + width],
        )
        for u in range(width):
            after[u] = min(after[u], own[u] + weight * value[u] + cost[u])


@njit(nogil=True, boundscheck=False)
def _walk(target, values, squares, shifts, pinned, costs, wide, distance, states):
    """One sequence; `pinned` -1: free ends."""
    steps, vector = target.shape
    total, period = squares.shape[0], shifts.shape[0]
    costs[0] = np.float32(0.0) if pinned < 0 else FAR
    if pinned >= 0:
        costs[0, pinned] = np.float32(0.0)
    for t in range(steps):
        shift, width = shifts[t % period], total >> shifts[(t + 1) % period]
        _spread(costs[t, : total >> shift], shift, wide)
        used = squares
        if vector > 1:
            distance[:] = squares
            for j in range(1, vector):
                _add(distance, np.float32(-2.0) * target[t, j], values[j])
            used = distance
        _relax(used, np.float32(-2.0) * target[t, 0], values[0], wide, costs[t + 1, :width])
    u = pinned if pinned >= 0 else np.argmin(costs[steps, : total >> shifts[steps % period]])
    for t in range(steps - 1, -1, -1):
        shift, width = shifts[t % period], total >> shifts[(t + 1) % period]
        best, least = u, np.float32(np.inf)
        for c in range(u, total, width):
            cost = squares[c] + costs[t, c >> shift]
            for j in range(vector):
                cost -= np.float32(2.0) * target[t, j] * values[j, c]
            if cost < least:
                best, least = c, cost
        states[t] = best
        u = best >> shift


@njit(nogil=True, boundscheck=False)
def _all(targets, values, squares, shifts, pinned, states):
    total = squares.shape[0]
    costs = np.empty((targets.shape[1] + 1, total >> shifts.min()), np.float32)
    wide, distance = np.empty(total, np.float32), np.empty(total, np.float32)
    for i in range(targets.shape[0]):
        _walk(targets[i], values, squares, shifts, pinned[i], costs, wide, distance, states[i])


def cheapest_walks(
    targets: Float32[ndarray, "b t v"],
    values: Float32[ndarray, "s v"],
    shifts: tuple[int, ...],
    pinned: Int64[ndarray, " b"] | None,
) -> Int64[ndarray, "b t"]:
    """The states of the cheapest walk through every sequence; step i moves `shifts[i % len(shifts)]` bits.

    `pinned`: the last bits, as many as a first step keeps, of the state before the first step and of the last one.
    """
    columns = np.ascontiguousarray(values.T)
    states = np.empty(targets.shape[:2], np.int64)
    ends = np.full(len(targets), -1) if pinned is None else np.ascontiguousarray(pinned)
    squares = np.square(columns).sum(0, dtype=np.float32)
    _all(np.ascontiguousarray(targets), columns, squares, np.array(shifts), ends, states)
    return states
