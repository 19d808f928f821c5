"""Statistics of the original model for the matrices of a run: collected in chunks that fit the memory, then released.

A pass over the text collects the statistics of as many whole blocks as fit half of the free memory. Statistics of the whole
model, where they fit at once, stay in the run: those that the allocation took serve the first codes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.batches import own_chunks, tokens_at_once
from requant.calibration.block_by_block import Descent
from requant.calibration.collect import batch_bytes, bytes_needed, collect, working_bytes
from requant.calibration.exchange import exchanged_bytes
from requant.calibration.hidden_states import HiddenStateCache
from requant.calibration.stats import GRADIENT_STATISTICS, LinearStats
from requant.models.devices import free_memory
from requant.models.hosted import hosted_blocks
from requant.models.targets import QuantTarget, by_block
from requant.quantizers.registry import find_method
from requant.run.context import RunContext

USABLE = 0.9  # of free memory; between tensors there are gaps
TargetsWithStatistics = Iterator[tuple[list[QuantTarget], dict[str, LinearStats]]]


def share_statistics(run: RunContext, shared: dict[str, LinearStats]) -> None:
    """Take the original model's statistics from `shared`, or collect them all and put them there, if they fit the memory."""
    method = find_method(run.recipe.method)
    needs = method.needs | method.predictor_needs
    if not shared and len(chunks_that_fit(run, run.targets, needs)) == 1:
        shared.update(gather(run, run.targets, needs))
    run.statistics.update(shared)


def gathered_in_chunks(
    run: RunContext, targets: Sequence[QuantTarget], needs: frozenset[str]
) -> TargetsWithStatistics:
    """Targets with their statistics in the original model, in chunks that fit the memory.

    The chunks of a hosted model share one pass, which pauses after each chunk and then continues; with gradients it starts
    at the last blocks. Where the host lacks memory for that, and in all other models, every chunk takes a pass of its own.
    """
    chunks = chunks_that_fit(run, targets, needs)
    descent = cache = None
    if hosted_blocks(run.model) is not None and len(chunks) > 1:
        if not needs & GRADIENT_STATISTICS:
            cache = HiddenStateCache(run.model, run.windows)
        else:
            stops = [chunk[0].block for chunk in chunks]
            descent = Descent.with_stops(run.model, own_chunks(run.windows, run.model, gradients=True), stops)
            if descent is not None:
                chunks.reverse()
    for chunk in chunks:
        statistics = gather(run, chunk, needs, cache=cache, descent=descent)
        yield chunk, statistics
        release(run, statistics)


def gather(
    run: RunContext,
    chunk: Sequence[QuantTarget],
    needs: frozenset[str],
    *,
    cache: HiddenStateCache | None = None,
    descent: Descent | None = None,
) -> dict[str, LinearStats]:
    """Statistics of `chunk` in the original model; kept in the run for the next quantization if it is the whole model."""
    if not needs:
        return {target.name: LinearStats() for target in chunk}
    if _gathered(run, chunk, needs):
        return run.statistics
    with run.stage("statistics"):
        run.apply_original_weights()
        label = run.label("statistics")
        all_experts = run.recipe.calibration.all_experts
        gathered = collect(
            run.model,
            run.windows,
            chunk,
            needs=needs,
            cache=cache,
            descent=descent,
            all_experts=all_experts,
            label=label,
        )
    if len(chunk) == len(run.targets):
        run.statistics.update(gathered)
    return gathered


def _gathered(run: RunContext, targets: Sequence[QuantTarget], needs: frozenset[str]) -> bool:
    """Whether the run holds these statistics of all targets already."""
    held = [run.statistics.get(target.name) for target in ranks.owned(targets)]
    return ranks.all_agree(
        all(stats is not None and all(getattr(stats, need) is not None for need in needs) for stats in held)
    )


def release(run: RunContext, statistics: dict[str, LinearStats]) -> None:
    """Empty a chunk's mapping before the next chunk is collected, whoever still holds it; what the run keeps stays.

    A chunk takes half of the free memory: two of them, and the activations of a pass, do not fit.
    """
    if statistics is not run.statistics:
        statistics.clear()


def chunks_that_fit(
    run: RunContext, targets: Sequence[QuantTarget], needs: frozenset[str]
) -> list[list[QuantTarget]]:
    """The targets in chunks of whole blocks whose statistics take at most half of the free memory of every rank.

    They leave room for a batch of the pass that collects them, then for the work on a matrix.
    """
    if not targets or _gathered(run, targets, needs):
        return [list(targets)] if targets else []
    device, several = targets[0].device, ranks.world_size() > 1
    free = ranks.smallest(free_memory(device))
    work = max(working_bytes(target, needs) for target in targets)
    hosted = hosted_blocks(run.model) is not None
    batch = pass_bytes(
        run.model, targets, run.windows, needs, kind=device.type, hosted=hosted, several=several
    )
    return in_chunks(targets, needs, statistics_budget(free, max(work, batch)))


def pass_bytes(
    model: PreTrainedModel,
    targets: Sequence[QuantTarget],
    windows: Int64[Tensor, "b t"],
    needs: frozenset[str],
    *,
    kind: str,
    hosted: bool,
    several: bool,
) -> int:
    """Bytes of a batch of the pass that collects statistics on a device of a `kind`, beside the statistics themselves.

    On a GPU its logits and activations; with `several` ranks at least what it contributes to the matrices of others, which
    is sent when the logits are gone.
    """
    count, length = windows.shape
    batch = batch_bytes(model, (count, length), needs, by_block=hosted) if kind == "cuda" else 0
    if not several:
        return batch
    tokens = tokens_at_once(model, count, length, gpu=kind == "cuda", gradients=True)
    return max(batch, exchanged_bytes(model, targets, tokens, needs, kind=kind, by_block=hosted))


def statistics_budget(free: int, beside: int) -> float:
    """Bytes of a device with so many `free` that statistics may take at once, where other work needs `beside` them."""
    return min(free / 2, USABLE * free - beside)


def in_chunks(
    targets: Sequence[QuantTarget], needs: frozenset[str], budget: float
) -> list[list[QuantTarget]]:
    """The targets in chunks of whole blocks, as many as have statistics of at most `budget` bytes on every rank; one at
    least."""
    chunks: list[list[QuantTarget]] = [[]]
    used: Counter[int] = Counter()  # rank -> bytes
    for members in by_block(targets):
        sizes = bytes_needed(members, needs)
        if chunks[-1] and max((used + sizes).values(), default=0) > budget:
            chunks.append([])
            used.clear()
        chunks[-1].extend(members)
        used += sizes
    return chunks
