"""All matrices of a run through its quantizer, each with its statistics, as many together as memory allows.

    at once     statistics of the original model
    in order    statistics of inputs behind what is quantized already (`calibration.inputs`), by block or by input

Statistics are gathered again when a resumed run still lacks some matrix.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from requant.calibration.statistics import INPUT_STATISTICS, bytes_needed, collect
from requant.calibration.stats import LinearStats
from requant.calibration.stream import HiddenStateCache
from requant.models.devices import free_memory
from requant.models.targets import SIBLINGS, QuantTarget
from requant.quantizers.registry import METHODS
from requant.run.context import RunContext, Weights
from requant.run.stage_cache import load_weight, save_weight
from requant.run.workspace import digest

Measured = Iterator[tuple[list[QuantTarget], dict[str, LinearStats]]]


def quantize_linears(
    run: RunContext, detached: Mapping[str, Bool[Tensor, "n k"]] | None, *, label: str
) -> Weights:
    """Every linear through the recipe's quantizer, in the model's order; `detached` places go to the sparse part.

    Statistics come from the original model. Where the recipe says so, those of inputs come from a model in which all
    that comes before is quantized already, so that a matrix may mend the errors before it: `inputs: quantized` block by
    block (Frantar et al. 2022), `corrected` input by input, beside the original's inputs. Gradients stay the original's.
    """
    method = METHODS[run.recipe.method]
    sequential = run.recipe.calibration.inputs != "original" and bool(method.needs & INPUT_STATISTICS)
    keys = _keys(run, detached, sequential=sequential)
    found = {target.name: load_weight(run, "linear", keys[target.name], target) for target in run.targets}
    done: Weights = {name: weight for name, weight in found.items() if weight is not None}
    pending = [target for target in run.targets if target.name not in done]
    bar = tqdm(total=len(pending), desc=label, unit="matrix", disable=run.quiet or not pending)
    for members, statistics in (in_order if sequential else parallel)(run, pending, method.needs, done):
        for target in members:
            with run.stage("quantize"):
                done[target.name] = method.quantize(
                    run.original[target.name].to(target.parameter.device, torch.float32),
                    statistics[target.name],
                    run.config_of(target),
                    detached=None if detached is None else detached[target.name].to(target.parameter.device),
                )
            save_weight(run, "linear", keys[target.name], done[target.name])
            bar.update()
    bar.close()
    return {target.name: done[target.name] for target in run.targets}


def parallel(
    run: RunContext, pending: Sequence[QuantTarget], needs: frozenset[str], _done: Weights
) -> Measured:
    """Sites with their statistics in the original model, as many together as memory allows."""
    for chunk in chunks_that_fit(run, pending, needs):
        yield chunk, gather(run, chunk, needs)


def in_order(
    run: RunContext, pending: Sequence[QuantTarget], needs: frozenset[str], done: Weights
) -> Measured:
    """Sites in the order of the forward pass; statistics of inputs with all that is `done` quantized."""
    corrected = run.recipe.calibration.inputs == "corrected"
    run.path({}).place(0.0)
    original = copy.deepcopy(run.model) if corrected else None
    for chunk in chunks_that_fit(run, pending, needs):
        gradients = gather(run, chunk, needs - INPUT_STATISTICS)
        run.path({}).place(0.0)
        first, last = chunk[0].block, chunk[-1].block
        for target in run.targets:
            if target.block < first:
                target.set_weight(done[target.name].dequantize())
        span = [
            target for target in run.targets if first <= target.block <= last
        ]  # with those that an earlier run left
        yield from sequential_statistics(run, span, needs, done, gradients, reference=original)


def sequential_statistics(
    run: RunContext,
    targets: Sequence[QuantTarget],
    needs: frozenset[str],
    done: Weights,
    gradients: Mapping[str, LinearStats],
    *,
    reference: PreTrainedModel | None,
) -> Measured:
    """Sites that are not `done`, with statistics of their inputs in the model as it stands, and beside them `gradients`.

    The model takes the weights of every target that was passed. With a `reference`, a copy of the model before any of this,
    targets come input by input, else block by block.
    """
    stream = HiddenStateCache(run.model, run.windows)
    other = None if reference is None else HiddenStateCache(reference, run.windows)
    rest = needs - INPUT_STATISTICS
    for members in by_block(targets) if reference is None else by_input(targets):
        waiting = [target for target in members if target.name not in done]
        if waiting:
            with run.stage("statistics"):
                for one in (stream,) if other is None else (other, stream):
                    one.advance_to(waiting[0].block)
                inputs = collect(
                    run.model,
                    run.windows,
                    waiting,
                    needs=needs & INPUT_STATISTICS,
                    stream=stream,
                    reference=other,
                )
            yield (
                waiting,
                {target.name: _with(inputs[target.name], gradients[target.name], rest) for target in waiting},
            )
        for target in members:
            target.set_weight(done[target.name].dequantize())


def _with(stats: LinearStats, other: LinearStats, names: frozenset[str]) -> LinearStats:
    """The statistics with these fields of others."""
    return dataclasses.replace(stats, **{name: getattr(other, name) for name in names})


def _keys(
    run: RunContext, detached: Mapping[str, Bool[Tensor, "n k"]] | None, *, sequential: bool
) -> dict[str, str]:
    """A workspace key a matrix; in a sequential run it depends on all that came before."""
    keys: dict[str, str] = {}
    inputs, chain = run.recipe.calibration.inputs, ""
    for target in run.targets:
        mask = "" if detached is None else detached[target.name]
        config = dataclasses.asdict(run.config_of(target))
        keys[target.name] = digest(
            run.fingerprint, target.name, run.recipe.method, config, mask, inputs, chain
        )
        chain = keys[target.name] if sequential else ""
    return keys


def gather(run: RunContext, chunk: Sequence[QuantTarget], needs: frozenset[str]) -> dict[str, LinearStats]:
    """Statistics of a chunk in the original model; kept for the next quantization if it is the whole model."""
    if not needs:
        return {target.name: LinearStats() for target in chunk}
    if _gathered(run, chunk, needs):
        return run.statistics
    with run.stage("statistics"):
        run.path({}).place(0.0)
        label = run.label("statistics")
        gathered = collect(run.model, run.windows, chunk, needs=needs, label=label)
    if len(chunk) == len(run.targets):
        run.statistics.update(gathered)
    return gathered


def _gathered(run: RunContext, targets: Sequence[QuantTarget], needs: frozenset[str]) -> bool:
    """Whether the run holds these statistics of all targets already."""
    kept = [run.statistics.get(target.name) for target in targets]
    return all(
        stats is not None and all(getattr(stats, need) is not None for need in needs) for stats in kept
    )


def by_block(targets: Sequence[QuantTarget]) -> list[list[QuantTarget]]:
    """Sites in one list a transformer block."""
    blocks = dict.fromkeys(target.block for target in targets)
    return [[target for target in targets if target.block == block] for block in blocks]


def by_input(targets: Sequence[QuantTarget]) -> list[list[QuantTarget]]:
    """Sites in the model's order, those together that read one tensor (`models.SIBLINGS`)."""
    groups: list[list[QuantTarget]] = []
    for target in targets:
        last = groups[-1][-1] if groups else None
        if last is not None and last.block == target.block and _siblings(last.kind, target.kind):
            groups[-1].append(target)
        else:
            groups.append([target])
    return groups


def _siblings(kind: str, other: str) -> bool:
    return any({kind, other} <= set(kinds) for kinds in SIBLINGS)


def chunks_that_fit(
    run: RunContext, targets: Sequence[QuantTarget], needs: frozenset[str]
) -> list[list[QuantTarget]]:
    """Sites in runs of whole blocks whose statistics take at most half of the free memory."""
    if not targets or _gathered(run, targets, needs):
        return [list(targets)] if targets else []
    budget = free_memory(targets[0].parameter.device) / 2
    chunks: list[list[QuantTarget]] = [[]]
    used = 0
    for members in by_block(targets):
        size = sum(bytes_needed(target, needs) for target in members)
        if chunks[-1] and used + size > budget:
            chunks.append([])
            used = 0
        chunks[-1].extend(members)
        used += size
    return chunks
