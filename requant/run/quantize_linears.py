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

from requant.calibration.statistics import OF_INPUTS, bytes_needed, collect
from requant.calibration.stats import LinearStats
from requant.calibration.stream import Stream
from requant.models.devices import free_memory
from requant.models.targets import SIBLINGS, LinearSite
from requant.quantizers.registry import METHODS
from requant.run.context import Run, Weights
from requant.run.stage_cache import store_weight, stored_weight
from requant.run.workspace import digest

Measured = Iterator[tuple[list[LinearSite], dict[str, LinearStats]]]


def quantize_linears(run: Run, detached: Mapping[str, Bool[Tensor, "n k"]] | None, *, label: str) -> Weights:
    """Every linear through the recipe's quantizer, in the model's order; `detached` places go to the sparse part.

    Statistics come from the original model. Where the recipe says so, those of inputs come from a model in which all
    that comes before is quantized already, so that a matrix may mend the errors before it: `inputs: quantized` block by
    block (Frantar et al. 2022), `corrected` input by input, beside the original's inputs. Gradients stay the original's.
    """
    method = METHODS[run.recipe.method]
    sequential = run.recipe.calibration.inputs != "original" and bool(method.needs & OF_INPUTS)
    keys = _keys(run, detached, sequential=sequential)
    found = {site.name: stored_weight(run, "linear", keys[site.name], site) for site in run.sites}
    done: Weights = {name: weight for name, weight in found.items() if weight is not None}
    pending = [site for site in run.sites if site.name not in done]
    bar = tqdm(total=len(pending), desc=label, unit="matrix", disable=run.quiet or not pending)
    for members, statistics in (in_order if sequential else at_once)(run, pending, method.needs, done):
        for site in members:
            with run.stage("quantize"):
                done[site.name] = method.quantize(
                    run.original[site.name].to(site.parameter.device, torch.float32),
                    statistics[site.name],
                    run.config_of(site),
                    detached=None if detached is None else detached[site.name].to(site.parameter.device),
                )
            store_weight(run, "linear", keys[site.name], done[site.name])
            bar.update()
    bar.close()
    return {site.name: done[site.name] for site in run.sites}


def at_once(run: Run, pending: Sequence[LinearSite], needs: frozenset[str], _done: Weights) -> Measured:
    """Sites with their statistics in the original model, as many together as memory allows."""
    for chunk in chunks_that_fit(run, pending, needs):
        yield chunk, gather(run, chunk, needs)


def in_order(run: Run, pending: Sequence[LinearSite], needs: frozenset[str], done: Weights) -> Measured:
    """Sites in the order of the forward pass; statistics of inputs with all that is `done` quantized."""
    corrected = run.recipe.calibration.inputs == "corrected"
    run.path({}).place(0.0)
    original = copy.deepcopy(run.model) if corrected else None
    for chunk in chunks_that_fit(run, pending, needs):
        gradients = gather(run, chunk, needs - OF_INPUTS)
        run.path({}).place(0.0)
        first, last = chunk[0].block, chunk[-1].block
        for site in run.sites:
            if site.block < first:
                site.set_weight(done[site.name].dequantize())
        span = [
            site for site in run.sites if first <= site.block <= last
        ]  # with those that an earlier run left
        yield from behind(run, span, needs, done, gradients, reference=original)


def behind(
    run: Run,
    sites: Sequence[LinearSite],
    needs: frozenset[str],
    done: Weights,
    gradients: Mapping[str, LinearStats],
    *,
    reference: PreTrainedModel | None,
) -> Measured:
    """Sites that are not `done`, with statistics of their inputs in the model as it stands, and beside them `gradients`.

    The model takes the weights of every site that was passed. With a `reference`, a copy of the model before any of this,
    sites come input by input, else block by block.
    """
    stream = Stream(run.model, run.windows)
    other = None if reference is None else Stream(reference, run.windows)
    rest = needs - OF_INPUTS
    for members in by_block(sites) if reference is None else by_input(sites):
        waiting = [site for site in members if site.name not in done]
        if waiting:
            with run.stage("statistics"):
                for one in (stream,) if other is None else (other, stream):
                    one.advance_to(waiting[0].block)
                inputs = collect(
                    run.model, run.windows, waiting, needs=needs & OF_INPUTS, stream=stream, reference=other
                )
            yield (
                waiting,
                {site.name: _with(inputs[site.name], gradients[site.name], rest) for site in waiting},
            )
        for site in members:
            site.set_weight(done[site.name].dequantize())


def _with(stats: LinearStats, other: LinearStats, names: frozenset[str]) -> LinearStats:
    """The statistics with these fields of others."""
    return dataclasses.replace(stats, **{name: getattr(other, name) for name in names})


def _keys(
    run: Run, detached: Mapping[str, Bool[Tensor, "n k"]] | None, *, sequential: bool
) -> dict[str, str]:
    """A workspace key a matrix; in a sequential run it depends on all that came before."""
    keys: dict[str, str] = {}
    inputs, chain = run.recipe.calibration.inputs, ""
    for site in run.sites:
        mask = "" if detached is None else detached[site.name]
        config = dataclasses.asdict(run.config_of(site))
        keys[site.name] = digest(run.fingerprint, site.name, run.recipe.method, config, mask, inputs, chain)
        chain = keys[site.name] if sequential else ""
    return keys


def gather(run: Run, chunk: Sequence[LinearSite], needs: frozenset[str]) -> dict[str, LinearStats]:
    """Statistics of a chunk in the original model; kept for the next quantization if it is the whole model."""
    if not needs:
        return {site.name: LinearStats() for site in chunk}
    if _gathered(run, chunk, needs):
        return run.statistics
    with run.stage("statistics"):
        run.path({}).place(0.0)
        label = run.label("statistics")
        gathered = collect(run.model, run.windows, chunk, needs=needs, label=label)
    if len(chunk) == len(run.sites):
        run.statistics.update(gathered)
    return gathered


def _gathered(run: Run, sites: Sequence[LinearSite], needs: frozenset[str]) -> bool:
    """Whether the run holds these statistics of all sites already."""
    kept = [run.statistics.get(site.name) for site in sites]
    return all(
        stats is not None and all(getattr(stats, need) is not None for need in needs) for stats in kept
    )


def by_block(sites: Sequence[LinearSite]) -> list[list[LinearSite]]:
    """Sites in one list a transformer block."""
    blocks = dict.fromkeys(site.block for site in sites)
    return [[site for site in sites if site.block == block] for block in blocks]


def by_input(sites: Sequence[LinearSite]) -> list[list[LinearSite]]:
    """Sites in the model's order, those together that read one tensor (`models.SIBLINGS`)."""
    groups: list[list[LinearSite]] = []
    for site in sites:
        last = groups[-1][-1] if groups else None
        if last is not None and last.block == site.block and _siblings(last.kind, site.kind):
            groups[-1].append(site)
        else:
            groups.append([site])
    return groups


def _siblings(kind: str, other: str) -> bool:
    return any({kind, other} <= set(kinds) for kinds in SIBLINGS)


def chunks_that_fit(run: Run, sites: Sequence[LinearSite], needs: frozenset[str]) -> list[list[LinearSite]]:
    """Sites in runs of whole blocks whose statistics take at most half of the free memory."""
    if not sites or _gathered(run, sites, needs):
        return [list(sites)] if sites else []
    budget = free_memory(sites[0].parameter.device) / 2
    chunks: list[list[LinearSite]] = [[]]
    used = 0
    for members in by_block(sites):
        size = sum(bytes_needed(site, needs) for site in members)
        if chunks[-1] and used + size > budget:
            chunks.append([])
            used = 0
        chunks[-1].extend(members)
        used += size
    return chunks
