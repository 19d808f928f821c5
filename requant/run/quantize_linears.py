"""The loop over all matrices of a run: statistics, codes, and each matrix saved to the workspace.

    parallel      statistics of all matrices are taken in the original model (`statistics.py`)
    sequential    statistics of a matrix's inputs are taken with every earlier matrix quantized (`calibration.inputs`),
                  block by block or input by input

A resumed run that still lacks some matrices collects their statistics again. With several processes (`ranks.py`) each
quantizes the matrices that it owns.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedModel

from requant import progress, ranks
from requant.calibration.collect import collect, working_bytes
from requant.calibration.hidden_states import HiddenStateCache
from requant.calibration.stats import INPUT_STATISTICS, LinearStats
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, pack, unpack
from requant.models.targets import QuantTarget, by_block, by_input
from requant.quantizers.registry import find_method
from requant.run.context import RunContext, Weights
from requant.run.side_by_side import Batch, batches_for, quantized, workers_for
from requant.run.stage_cache import load_weights, save_weight
from requant.run.statistics import TargetsWithStatistics, chunks_that_fit, gather, gathered_in_chunks, release
from requant.run.workspace import digest


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
    calibrated = (
        sequential_calibration(run, pending, method.needs, done)
        if sequential
        else gathered_in_chunks(run, pending, method.needs)
    )
    with progress.counted(own, label=run.label(label), unit="matrices", done=own - left) as bar:
        for members, statistics in calibrated:

            def quantize(
                batch: Batch, stats: Mapping[str, LinearStats] = statistics
            ) -> Sequence[QuantizedWeight]:
                config = run.config_of(batch[0])
                weights = [run.original[target.name].to(target.device).float() for target in batch]
                own = [stats[target.name] for target in batch]
                masks = [] if detached is None else [detached[t.name].to(t.device) for t in batch]
                if method.quantize_batch is not None and len(batch) > 1:
                    return method.quantize_batch(weights, own, config, detached=masks or None)
                mask = {"detached": masks[0]} if masks else {}
                return [method.quantize(weights[0], own[0], config, **mask)]

            done.update(make_codes(run, members, quantize, stage="linear", keys=keys, bar=bar))
    return {target.name: done[target.name] for target in run.targets}


def make_codes(
    run: RunContext,
    targets: Sequence[QuantTarget],
    quantize: Callable[[Batch], Sequence[QuantizedWeight]],
    *,
    stage: str,
    keys: Mapping[str, str],
    bar: progress.Counter,
) -> Weights:
    """The codes of all targets, on every rank: each rank makes those of its own, which are saved one by one.

    `quantize` is given several of one shape and the same settings where the method can quantize them together.
    """
    made: Weights = {}
    method, own = find_method(run.recipe.method), ranks.owned(targets)

    def work(target: QuantTarget) -> int:
        return working_bytes(target, method.needs)

    with run.stage("quantize"):
        compile_ahead(run, targets)
        batches: list[Batch] = [[target] for target in own]
        if method.quantize_batch is not None:
            batches = batches_for(own, run.config_of, work)
        workers = workers_for(batches, work) if method.side_by_side else 1
        for target, weight in quantized(batches, quantize, workers=workers):
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
    return {
        target.name: codes_of_rank(
            target.rank, made.get(target.name), name=target.name, device=target.codes_device
        )
        for target in targets
    }


def codes_of_rank(
    source: int, own: QuantizedWeight | None, *, name: str, device: torch.device
) -> QuantizedWeight:
    """The codes of one matrix that rank `source` has, on every rank, packed and sent from device to device; what others have
    of their `own` counts nothing."""
    if ranks.world_size() == 1:
        assert own is not None
        return own
    mine = own if ranks.rank() == source else None
    spec, packed = (None, {}) if mine is None else pack(mine)
    entry, _ = ranks.shared(None if spec is None else spec.to_json(), {}, source=source)
    sent = PackedSpec.from_json(name, entry)
    tensors = {
        suffix: torch.empty(each.shape, dtype=each.dtype, device=device)
        if mine is None
        else packed[suffix].to(device).contiguous()
        for suffix, each in sent.tensors().items()
    }
    # as bytes, which every backend takes
    ranks.copy_from(source, [each.view(-1).view(torch.uint8) for each in tensors.values() if each.numel()])
    return unpack(sent, tensors) if mine is None else mine


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
