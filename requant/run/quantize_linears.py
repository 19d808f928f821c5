"""The loop over all matrices of a run: collect statistics, quantize, save to the workspace.

    parallel      statistics of all matrices are taken in the original model
    sequential    statistics of a matrix's inputs are taken with every earlier matrix quantized (`calibration.inputs`),
                  block by block or input by input

One pass collects the statistics of as many matrices as memory allows. A resumed run that still lacks some matrices collects
their statistics again. With several processes (`ranks.py`) each quantizes the matrices that it owns.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedModel

from requant import progress, ranks
from requant.calibration.batches import own_chunks, tokens_at_once
from requant.calibration.block_by_block import Descent
from requant.calibration.collect import (
    GRADIENT_STATISTICS,
    INPUT_STATISTICS,
    batch_bytes,
    bytes_needed,
    collect,
    working_bytes,
)
from requant.calibration.exchange import exchanged_bytes
from requant.calibration.hidden_states import HiddenStateCache
from requant.calibration.stats import LinearStats
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, pack, unpack
from requant.models.devices import free_memory
from requant.models.hosted import hosted_blocks
from requant.models.targets import SIBLINGS, QuantTarget, siblings
from requant.quantizers.registry import find_method
from requant.run.context import RunContext, Weights
from requant.run.side_by_side import quantized
from requant.run.stage_cache import load_weights, save_weight
from requant.run.workspace import digest

USABLE = 0.9  # of free memory; between tensors there are gaps
TargetsWithStatistics = Iterator[tuple[list[QuantTarget], dict[str, LinearStats]]]


def quantize_linears(
    run: RunContext, detached: Mapping[str, Bool[Tensor, "n k"]] | None, *, label: str
) -> Weights:
    """Every linear through the recipe's quantizer, in the model's order; `detached` masks weights for the sparse part.

    Statistics come from the original model. With `calibration.inputs` those of inputs come from a model whose earlier
    matrices are quantized already, so that a matrix can compensate their errors: `quantized` advances block by block
    (Frantar et al. 2022), `corrected` input by input, together with the original's inputs. Gradients are always the
    original's.
    """
    method = find_method(run.recipe.method)
    sequential = run.recipe.calibration.inputs != "original" and bool(method.needs & INPUT_STATISTICS)
    keys = _keys(run, detached, sequential=sequential)
    done = load_weights(run, "linear", keys, {target.name: target.codes_device for target in run.targets})
    pending = [target for target in run.targets if target.name not in done]
    compile_ahead(run, pending, wait=False)
    own, left = (len(ranks.owned(targets)) for targets in (run.targets, pending))
    calibrate = sequential_calibration if sequential else parallel_calibration
    with progress.counted(own, label=run.label(label), unit="matrices", done=own - left) as bar:
        for members, statistics in calibrate(run, pending, method.needs, done):

            def quantize(
                target: QuantTarget, stats: Mapping[str, LinearStats] = statistics
            ) -> QuantizedWeight:
                device = target.device
                masks = {} if detached is None else {"detached": detached[target.name].to(device)}
                weight = run.original[target.name].to(device).float()
                return method.quantize(weight, stats[target.name], run.config_of(target), **masks)

            done.update(make_codes(run, members, quantize, stage="linear", keys=keys, bar=bar))
    return {target.name: done[target.name] for target in run.targets}


def make_codes(
    run: RunContext,
    targets: Sequence[QuantTarget],
    quantize: Callable[[QuantTarget], QuantizedWeight],
    *,
    stage: str,
    keys: Mapping[str, str],
    bar: progress.Counter,
) -> Weights:
    """The codes of all targets, on every rank: `quantize(target)` of each rank's own, which are saved one by one."""
    made: Weights = {}
    with run.stage("quantize"):
        compile_ahead(run, targets)
        method, own = find_method(run.recipe.method), ranks.owned(targets)
        work = max((working_bytes(target, method.needs) for target in own), default=0)
        for target, weight in quantized(own, quantize, work=work if method.side_by_side else None):
            # packed before codes of a hosted matrix go to the host, where that takes longer
            save_weight(run, stage, keys[target.name], weight, rank=target.rank)
            made[target.name] = weight if target.hosted is None else weight.to(target.codes_device)
            bar.update()
        return shared_codes(targets, made)


def compile_ahead(run: RunContext, targets: Sequence[QuantTarget], *, wait: bool = True) -> None:
    """Compile the kernels that codes of the targets of this rank take, in the background or for now."""
    method, own = find_method(run.recipe.method), ranks.owned(targets)
    if own and method.compile_ahead is not None:
        method.compile_ahead(map(run.config_of, own), own[0].device, wait=wait)


def shared_codes(targets: Sequence[QuantTarget], made: Weights) -> Weights:
    """The codes of all targets, on every rank, from those that each rank made of its own."""
    found: Weights = {}
    for target in targets:
        packed = pack(made[target.name]) if ranks.world_size() > 1 and target.rank == ranks.rank() else None
        spec, tensors = (None, {}) if packed is None else (packed[0].to_json(), packed[1])
        spec, tensors = ranks.shared(spec, tensors, source=target.rank)
        found[target.name] = (
            made[target.name]
            if target.rank == ranks.rank()
            else unpack(PackedSpec.from_json(target.name, spec), tensors, device=target.codes_device)
        )
    return found


def parallel_calibration(
    run: RunContext, pending: Sequence[QuantTarget], needs: frozenset[str], _done: Weights
) -> TargetsWithStatistics:
    """Targets with their statistics in the original model."""
    yield from gathered_in_chunks(run, pending, needs)


def gathered_in_chunks(
    run: RunContext, targets: Sequence[QuantTarget], needs: frozenset[str]
) -> TargetsWithStatistics:
    """Targets with their statistics in the original model, as many together as memory allows.

    Of a hosted model all chunks together take one pass, which goes on where it stopped; with gradients the last blocks come
    first. Where the host has no room for that, and of any other model, every chunk takes a pass of its own.
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


def sequential_calibration(
    run: RunContext, pending: Sequence[QuantTarget], needs: frozenset[str], done: Weights
) -> TargetsWithStatistics:
    """Targets in the order of the forward pass; inputs are those of the model with the `done` weights quantized."""
    corrected, path = run.recipe.calibration.inputs == "corrected", run.path(done)
    run.apply_original_weights()
    original = copy.deepcopy(run.model) if corrected else None
    for chunk in chunks_that_fit(run, pending, needs):
        gradients = gather(run, chunk, needs - INPUT_STATISTICS)
        run.apply_original_weights()
        first, last = chunk[0].block, chunk[-1].block
        for target in run.targets:
            if target.block < first:
                target.set_weight(partial(path.end, target))
        # with those that an earlier run quantized already
        span = [target for target in run.targets if first <= target.block <= last]
        yield from sequential_statistics(run, span, needs, done, gradients, reference=original)
        release(run, gradients)


def sequential_statistics(
    run: RunContext,
    targets: Sequence[QuantTarget],
    needs: frozenset[str],
    done: Weights,
    gradients: Mapping[str, LinearStats],
    *,
    reference: PreTrainedModel | None,
) -> TargetsWithStatistics:
    """Targets that are not `done`, with statistics of their inputs in the model as it stands, and those of `gradients`.

    Each target is written into the model, quantized, before the next ones are visited. With a `reference`, a copy of the
    original model, targets come input by input and with statistics of its inputs too, else block by block.
    """
    path, own = run.path(done), HiddenStateCache(run.model, run.windows)
    original = None if reference is None else HiddenStateCache(reference, run.windows)
    other_needs = needs - INPUT_STATISTICS
    for members in by_block(targets) if reference is None else by_input(targets):
        waiting = [target for target in members if target.name not in done]
        if waiting:
            with run.stage("statistics"):
                for cache in (own,) if original is None else (original, own):
                    cache.advance_to(waiting[0].block)
                inputs = collect(
                    run.model,
                    run.windows,
                    waiting,
                    needs=needs & INPUT_STATISTICS,
                    cache=own,
                    reference=original,
                    all_experts=run.recipe.calibration.all_experts,
                )
            merged = {
                target.name: _merged(inputs[target.name], gradients[target.name], other_needs)
                for target in ranks.owned(waiting)
            }
            yield waiting, merged
            release(run, merged)
            release(run, inputs)
        for target in members:
            target.set_weight(partial(path.end, target))


def _merged(stats: LinearStats, other: LinearStats, names: frozenset[str]) -> LinearStats:
    """`stats` with the fields in `names` taken from `other`."""
    return dataclasses.replace(stats, **{name: getattr(other, name) for name in names})


def _keys(
    run: RunContext, detached: Mapping[str, Bool[Tensor, "n k"]] | None, *, sequential: bool
) -> dict[str, str]:
    """Matrix -> workspace key; in a sequential run it depends on all earlier matrices."""
    keys: dict[str, str] = {}
    inputs, chain = run.recipe.calibration.inputs, ""
    if run.recipe.calibration.all_experts:
        inputs += ", all experts"
    for target in run.targets:
        mask = "" if detached is None else detached[target.name]
        config = dataclasses.asdict(run.config_of(target))
        keys[target.name] = digest(
            run.fingerprint, target.name, run.recipe.method, config, mask, inputs, chain
        )
        chain = keys[target.name] if sequential else ""
    return keys


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


def release(run: RunContext, statistics: dict[str, LinearStats]) -> None:
    """Empty a chunk's mapping before the next chunk is collected, whoever still holds it; what the run keeps stays.

    A chunk takes half of the free memory: two of them, and the activations of a pass, do not fit.
    """
    if statistics is not run.statistics:
        statistics.clear()


def share_statistics(run: RunContext, shared: dict[str, LinearStats]) -> None:
    """Take the original model's statistics from `shared`, or collect them all and put them there, if memory has room."""
    method = find_method(run.recipe.method)
    needs = method.needs | method.predictor_needs
    if not shared and len(chunks_that_fit(run, run.targets, needs)) == 1:
        shared.update(gather(run, run.targets, needs))
    run.statistics.update(shared)


def _gathered(run: RunContext, targets: Sequence[QuantTarget], needs: frozenset[str]) -> bool:
    """Whether the run holds these statistics of all targets already."""
    held = [run.statistics.get(target.name) for target in ranks.owned(targets)]
    return ranks.all_agree(
        all(stats is not None and all(getattr(stats, need) is not None for need in needs) for stats in held)
    )


def by_block(targets: Sequence[QuantTarget]) -> list[list[QuantTarget]]:
    """The targets, one list a transformer block."""
    blocks = dict.fromkeys(target.block for target in targets)
    return [[target for target in targets if target.block == block] for block in blocks]


def by_input(targets: Sequence[QuantTarget]) -> list[list[QuantTarget]]:
    """The targets in the model's order; those that read the same tensor (`models.targets.SIBLINGS`) form one list.

    Experts of a layer run side by side, so all of their gates and ups form one list, and then all of their downs.
    """
    groups: dict[tuple[str, ...], list[QuantTarget]] = {}
    last: tuple[QuantTarget, tuple[str, ...]] | None = None
    for target in targets:
        if target.experts is not None:
            key = (target.experts, *siblings(target.kind))
        elif last is not None and last[0].block == target.block and _siblings(last[0].kind, target.kind):
            key = last[1]
        else:
            key = (target.name,)
        groups.setdefault(key, []).append(target)
        last = target, key
    return list(groups.values())


def _siblings(kind: str, other: str) -> bool:
    return any({kind, other} <= set(kinds) for kinds in SIBLINGS)


def statistics_budget(free: int, beside: int) -> float:
    """Of the `free` bytes of a device those that statistics may take at once, where `beside` them that much is needed."""
    return min(free / 2, USABLE * free - beside)


def chunks_that_fit(
    run: RunContext, targets: Sequence[QuantTarget], needs: frozenset[str]
) -> list[list[QuantTarget]]:
    """The targets in chunks of whole blocks whose statistics take at most half of the free memory of every rank.

    They leave room on a GPU for a batch of the pass that collects them, with what goes to other ranks, then for the work on
    a matrix.
    """
    if not targets or _gathered(run, targets, needs):
        return [list(targets)] if targets else []
    free = ranks.smallest(free_memory(targets[0].device))
    beside = max(working_bytes(target, needs) for target in targets)
    kind = targets[0].device.type
    hosted = hosted_blocks(run.model) is not None
    count, length = run.windows.shape
    batch = 0
    if kind == "cuda":
        batch = batch_bytes(run.model, (count, length), needs, by_block=hosted)
    if ranks.world_size() > 1:
        tokens = tokens_at_once(run.model, count, length, gpu=kind == "cuda", gradients=True)
        given = exchanged_bytes(run.model, targets, tokens, needs, kind=kind, by_block=hosted)
        batch = max(batch, given)  # it is sent when the logits are gone
    beside = max(beside, batch)
    return in_chunks(targets, needs, statistics_budget(free, beside))


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
