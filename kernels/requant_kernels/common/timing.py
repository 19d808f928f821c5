"""Cold-cache timing in a CUDA graph: the cost of a kernel inside a model, where every layer's weights come from memory.

A graph holds many calls that cycle over copies of the weights, together more than four times the L2 cache. The time of a
replay divided by the number of calls is the time of one call, launch included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

L2_BYTES = 60 << 20
MIN_CALLS = 48


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds per call over all replays."""

    median: float
    low: float
    high: float


def copies_needed(bytes_a_copy: int) -> int:
    """Copies of a layer that together exceed four times the L2 cache (at least 2, at most 512)."""
    return min(512, max(2, -(-4 * L2_BYTES // bytes_a_copy)))


def cold_time(calls: Sequence[Callable[[], object]], *, replays: int = 11) -> Timing:
    """Time of one call, cycling over `calls`, each with its own weights."""
    stream = torch.cuda.Stream()
    count = max(MIN_CALLS, len(calls))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
            call()
        torch.cuda.synchronize()
        graph.capture_begin()  # torch.cuda.graph() would empty the allocator's cache, which costs more than the timing
        for i in range(count):
            calls[i % len(calls)]()
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return Timing(median=median(times), low=min(times), high=max(times))
