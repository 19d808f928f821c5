"""Matrices quantized side by side on one GPU, each on its own stream, when a single one would leave part of the GPU idle.

Trellis codes are made along anti-diagonals of tiles of 16 by 16 (`quantizers/trellis.py`), with a Viterbi search per tile
and one tile per SM: a matrix of 512 rows and columns keeps at most 32 SMs busy, on average half of them, whatever the GPU
has. So up to MOST matrices run at once, enough for their longest anti-diagonals to have twice as many tiles as the GPU has
SMs, and two of any size: one is searched while errors of the other are fed back, where an H100 takes 2.04 s in place of
2.46 for a matrix of 14336 x 4096. The codes of each matrix are those that it would get alone; memory is that of all matrices
that run at once, so no more run than fit half of what is free.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch

from requant.formats.hadamard import TILE
from requant.formats.quantized_weight import QuantizedWeight
from requant.models.devices import free_memory
from requant.models.targets import QuantTarget

MOST = 4  # beyond, threads wait for the interpreter
SMS = 132  # of an H100 or H200


def quantized(
    targets: Sequence[QuantTarget],
    quantize: Callable[[QuantTarget], QuantizedWeight],
    *,
    work: int | None,
) -> Iterator[tuple[QuantTarget, QuantizedWeight]]:
    """`(target, quantize(target))` of every target, in order; side by side on a GPU if `work` says in how many bytes one is
    quantized, at most; with None one after the other.

    What `quantize` reads was made by the caller's stream before it is asked for the next one, and is ready there when it
    comes out. The first goes alone, so that its kernels are compiled once.
    """
    workers = 1 if work is None else workers_for(targets, work)
    if workers == 1:
        yield from ((target, quantize(target)) for target in targets)
        return
    device = targets[0].parameter.device
    streams = [torch.cuda.Stream(device) for _ in range(workers)]

    @torch.no_grad()
    def on_stream(target: QuantTarget, stream: torch.cuda.Stream) -> QuantizedWeight:
        with torch.cuda.stream(stream):
            weight = quantize(target)
        stream.synchronize()
        return weight

    yield targets[0], quantize(targets[0])
    waiting: list[tuple[QuantTarget, Future[QuantizedWeight]]] = []
    with ThreadPoolExecutor(workers) as pool:

        def begin(target: QuantTarget, stream: torch.cuda.Stream) -> None:
            stream.wait_stream(torch.cuda.current_stream(device))
            waiting.append((target, pool.submit(on_stream, target, stream)))

        rest = iter(targets[1:])
        for target, stream in zip(islice(rest, workers), streams, strict=False):
            begin(target, stream)
        position = 0
        while waiting:
            target, future = waiting.pop(0)
            weight = future.result()
            if (following := next(rest, None)) is not None:
                begin(following, streams[position % workers])  # that of the one just finished
            position += 1
            yield target, weight
    torch.cuda.empty_cache()  # what the streams hold is of no use to others


def workers_for(targets: Sequence[QuantTarget], work: int) -> int:
    """How many of these matrices run at once where they are; 1 on a CPU."""
    if len(targets) < 3 or not targets[0].parameter.is_cuda:
        return 1
    device = targets[0].parameter.device
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return at_once(targets, work, free_memory(device), sms=sms)


def at_once(targets: Sequence[QuantTarget], work: int, free: int, *, sms: int = SMS) -> int:
    """How many of these matrices, each in `work` bytes, fill a GPU of so many SMs and fit half of its `free` bytes."""
    longest = max(min(target.shape) for target in targets) // TILE or 1
    return max(1, min(MOST, max(2, 2 * sms // longest), free // 2 // work))
