"""Work on a GPU as a CUDA graph: captured once, and one launch from then on.

A replay reads and writes the same tensors as the capture. Numbers on the host stay what they were at the capture, so
whatever changes from call to call must be in tensors that both share.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """A stream for the warm-up before a capture, which compiles kernels and sets up libraries; waits for the device."""
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
    torch.cuda.synchronize(device)


def captured(run: Callable[[], object], device: torch.device, *, pool: Any = None) -> torch.cuda.CUDAGraph:
    """The graph of `run()`, which is not carried out; what it allocates stays in `pool`, or in one of its own.

    Raises RuntimeError where `run` does what cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    # a capture that fails leaves its own stream as the current one
    with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(graph, pool=pool):
        run()
    return graph
