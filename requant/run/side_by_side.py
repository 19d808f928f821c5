"""Matrices quantized side by side on one GPU, when a single one would leave part of the GPU idle.

Trellis codes are made along anti-diagonals of tiles of 16 by 16 (`quantizers/block_ldlq.py`), with a Viterbi search per tile
and one tile per SM: a matrix of 512 rows and columns keeps at most 32 SMs busy, on average half of them, whatever the GPU
has. So matrices of one shape and the same settings, experts above all, are searched in batches (`Method.quantize_batch`),
whose longest anti-diagonals have WAVES tiles for each SM, if BATCH_BYTES suffice for them. And up to MOST batches run at
once, each on its own stream, enough for twice as many tiles as the GPU has SMs, and two of any size: one is searched while
errors of the other are fed back, where an H100 takes 2.04 s in place of 2.46 for a matrix of 14336 x 4096. The codes of each
matrix are those that it would get alone; memory is that of all matrices that run at once, so no more run than fit half of
what is free.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch

from requant.formats.hadamard import TILE
from requant.formats.quantized_weight import QuantizedWeight
from requant.models.devices import free_memory
from requant.models.targets import QuantTarget

MOST = 4  # beyond, threads wait for the interpreter
WAVES = 3  # of tiles, in a batch: the last one is as full as the others, or nearly
BATCH_BYTES = 1 << 30  # of a batch: eight experts of 768 x 2048; large matrices fill a GPU alone
SMS = 132  # of an H100 or H200

Batch = Sequence[QuantTarget]


def quantized(
    batches: Sequence[Batch],
    quantize: Callable[[Batch], Sequence[QuantizedWeight]],
    *,
    workers: int,
) -> Iterator[tuple[QuantTarget, QuantizedWeight]]:
    """`(target, its codes)` of every target, batch by batch, with so many batches at once on their GPU.

    What `quantize` reads was made by the caller's stream before it is asked for the next one, and is ready there when it
    comes out. The first goes alone, so that its kernels are compiled once.
    """
    if workers == 1:
        for batch in batches:
            yield from zip(batch, quantize(batch), strict=True)
        return
    device = batches[0][0].parameter.device
    streams = [torch.cuda.Stream(device) for _ in range(workers)]

    @torch.no_grad()
    def on_stream(batch: Batch, stream: torch.cuda.Stream) -> Sequence[QuantizedWeight]:
        with torch.cuda.stream(stream):
            weights = quantize(batch)
        stream.synchronize()
        return weights

    yield from zip(batches[0], quantize(batches[0]), strict=True)
    waiting: list[tuple[Batch, Future[Sequence[QuantizedWeight]]]] = []
    with ThreadPoolExecutor(workers) as pool:

        def begin(batch: Batch, stream: torch.cuda.Stream) -> None:
            stream.wait_stream(torch.cuda.current_stream(device))
            waiting.append((batch, pool.submit(on_stream, batch, stream)))

        rest = iter(batches[1:])
        for batch, stream in zip(islice(rest, workers), streams, strict=False):
            begin(batch, stream)
        position = 0
        while waiting:
            batch, future = waiting.pop(0)
            weights = future.result()
            if (following := next(rest, None)) is not None:
                begin(following, streams[position % workers])  # that of the one just finished
            position += 1
            yield from zip(batch, weights, strict=True)
    torch.cuda.empty_cache()  # what the streams hold is of no use to others


def workers_for(batches: Sequence[Batch], work: Callable[[QuantTarget], int]) -> int:
    """How many of these batches run at once where they are; 1 on a CPU."""
    if len(batches) < 3 or not batches[0][0].parameter.is_cuda:
        return 1
    device = batches[0][0].parameter.device
    return at_once(batches, work, free_memory(device), sms=_sms(device))


def batches_for(
    targets: Sequence[QuantTarget],
    settings: Callable[[QuantTarget], Hashable],
    work: Callable[[QuantTarget], int],
) -> list[Batch]:
    """Batches of these matrices where they are; of one each on a CPU."""
    if not targets or not targets[0].parameter.is_cuda:
        return [[target] for target in targets]
    device = targets[0].parameter.device
    return batched(targets, settings, work, free_memory(device), sms=_sms(device))


def batched(
    targets: Sequence[QuantTarget],
    settings: Callable[[QuantTarget], Hashable],
    work: Callable[[QuantTarget], int],
    free: int,
    *,
    sms: int = SMS,
) -> list[Batch]:
    """Batches of one shape and the same `settings`, whose tiles fill a GPU of so many SMs, and of which two fit half of its
    `free` bytes if each matrix takes `work`."""
    alike: dict[Hashable, list[QuantTarget]] = {}
    for target in targets:
        alike.setdefault((target.shape, settings(target)), []).append(target)
    found: list[Batch] = []
    for members in alike.values():
        fit = min(BATCH_BYTES, free // 4) // work(members[0])
        size = max(1, min(WAVES * sms // _longest(members[0]), fit))
        found += [members[start : start + size] for start in range(0, len(members), size)]
    return found


def at_once(
    batches: Sequence[Batch], work: Callable[[QuantTarget], int], free: int, *, sms: int = SMS
) -> int:
    """How many of these batches fill a GPU of so many SMs and fit half of its `free` bytes."""
    longest = max(len(batch) * _longest(batch[0]) for batch in batches)
    return max(1, min(MOST, max(2, 2 * sms // longest), free // 2 // bytes_of_largest(batches, work)))


def bytes_of_largest(batches: Sequence[Batch], work: Callable[[QuantTarget], int]) -> int:
    """What the batch takes that takes most, if each matrix takes `work`."""
    return max(len(batch) * work(batch[0]) for batch in batches)


def _longest(target: QuantTarget) -> int:
    """Tiles of the longest anti-diagonal."""
    return min(target.shape) // TILE or 1


def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
