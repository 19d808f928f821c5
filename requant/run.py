"""The context of one run and the two things every mode does with it: quantize all linears, measure the loss.

A mode (`paper.py`) is a function of a `Run`. Results go through the workspace, matrix by matrix, so an interrupted run
resumes at the matrix where it stopped; statistics are gathered again when some matrix still needs them.
"""

import copy
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import requant
from requant.calibration import LinearStats
from requant.calibration.passes import mean_loss
from requant.calibration.statistics import OF_INPUTS, bytes_needed, collect
from requant.calibration.stream import Stream
from requant.checkpoint.layout import MatrixLayout
from requant.checkpoint.packing import pack, unpack
from requant.formats import QuantizedWeight
from requant.knapsack import Allocation
from requant.models import SIBLINGS, LinearSite
from requant.quantizers import METHODS
from requant.recipe import Recipe, to_dict
from requant.sensitivity import QuantizedPath, Scores
from requant.sensitivity.scores import score
from requant.workspace import Workspace, digest, model_digest

logger = logging.getLogger(__name__)
Weights = dict[str, QuantizedWeight]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every stage needs; `statistics` and `seconds` fill up as the run goes."""

    model: PreTrainedModel
    sites: Sequence[LinearSite]
    original: Mapping[str, Tensor]  # [n, k], CPU, the source's dtype
    windows: Int64[Tensor, "b t"]
    recipe: Recipe
    workspace: Workspace
    fingerprint: str  # of the model, its matrices to quantize, the windows and the versions
    quiet: bool
    source: Path | None = None  # the model's folder
    bits: Mapping[str, int | float] = field(
        default_factory=dict
    )  # of matrices whose width is not the recipe's
    shares: Mapping[str, float] = field(default_factory=dict)  # of entries beside the codes, where allotted
    allocation: Allocation | None = None
    pool: Int64[Tensor, "p t"] | None = (
        None  # the windows that training may use, where they are more than `windows`
    )
    others: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # parameters that learned: original, learned
    statistics: dict[str, LinearStats] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total_weights(self) -> int:
        return sum(site.size for site in self.sites)

    def config_of(self, site: LinearSite) -> Any:
        """The quantizer's settings for one matrix."""
        bits = self.bits.get(site.name, self.recipe.quantizer.bits)
        share = {"share": self.shares[site.name]} if site.name in self.shares else {}
        return dataclasses.replace(self.recipe.quantizer, bits=bits, **share)

    def path(self, weights: Weights) -> QuantizedPath:
        return QuantizedPath(
            model=self.model,
            sites=self.sites,
            original=self.original,
            quantized=weights,
            others=self.others,
        )

    @property
    def training_windows(self) -> Int64[Tensor, "p t"]:
        return self.windows if self.pool is None else self.pool

    def original_of(self, name: str, parameter: Tensor) -> Tensor:
        """A copy, on the CPU, of what a parameter outside of the matrices was before anything learned."""
        if name in self.others:
            return self.others[name][0]
        return parameter.detach().to("cpu", copy=True)

    def label(self, text: str) -> str | None:
        return None if self.quiet else text

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of the body to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def fingerprint(model: PreTrainedModel, sites: Sequence[LinearSite], windows: Int64[Tensor, "b t"]) -> str:
    """A hash of what every stage depends on, whatever the recipe."""
    return digest(
        [requant.__version__, torch.__version__, next(model.parameters()).device.type],
        model.config.to_json_string(),
        model_digest(model),
        [site.name for site in sites],
        windows,
    )


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


Measured = Iterator[tuple[list[LinearSite], dict[str, LinearStats]]]


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


def stored_weight(run: Run, stage: str, key: str, site: LinearSite) -> QuantizedWeight | None:
    """A matrix that a finished stage left, on the model's device."""
    stored = run.workspace.get(stage, key)
    if stored is None:
        return None
    layout = MatrixLayout.from_json(site.name, stored.value)
    return unpack(layout, stored.tensors).to(site.parameter.device)


def store_weight(run: Run, stage: str, key: str, weight: QuantizedWeight) -> None:
    """Keep a matrix for a run that resumes."""
    if run.workspace.folder is not None:
        layout, tensors = pack(weight)
        run.workspace.put(stage, key, tensors=tensors, value=layout.to_json())


def kept_outcome(run: Run, stage: str) -> Weights | None:
    """All matrices, and into `run.others` what learned beside them, if a finished stage left them."""
    keys = _outcome_keys(run, stage)
    beside = run.workspace.get("others", keys[""])
    found = {site.name: stored_weight(run, stage, keys[site.name], site) for site in run.sites}
    weights = {name: weight for name, weight in found.items() if weight is not None}
    if beside is None or len(weights) < len(found):
        return None
    for name in beside.value:
        run.others[name] = (beside.tensors[f"{name}.start"], beside.tensors[f"{name}.end"])
    return weights


def keep_outcome(run: Run, stage: str, weights: Weights) -> None:
    """Keep the outcome of a stage for a run that resumes."""
    keys = _outcome_keys(run, stage)
    for name, weight in weights.items():
        store_weight(run, stage, keys[name], weight)
    ends = {
        f"{name}.{end}": pair[i]
        for name, pair in run.others.items()
        for i, end in enumerate(("start", "end"))
    }
    run.workspace.put("others", keys[""], tensors=ends, value=list(run.others))


def _outcome_keys(run: Run, stage: str) -> dict[str, str]:
    """A key a matrix, and one for all else under the empty name."""
    sections = (
        "mode",
        "calibration",
        "method",
        "quantizer",
        "sensitivity",
        "detach",
        "tuning",
        "budget",
        "seed",
    )
    base = digest(run.fingerprint, recipe_part(run.recipe, *sections), run.training_windows, stage)
    return {name: digest(base, name) for name in ("", *(s.name for s in run.sites))}


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


def scores(run: Run, name: str, weights: Weights, *, label: str) -> Scores:
    """Signed scores of every weight for the step from the originals to `weights`."""
    with run.stage("sensitivity"):
        return score(
            name, run.path(weights), run.windows, nodes=run.recipe.sensitivity.nodes, label=run.label(label)
        )


def loss(
    run: Run, weights: Weights, *, windows: Int64[Tensor, "b t"] | None = None, label: str | None = None
) -> float:
    """F on the calibration windows with `weights` in the model; the originals for an empty dict."""
    with run.stage("loss"):
        run.path(weights).place(1.0 if weights else 0.0)
        return mean_loss(
            run.model, run.windows if windows is None else windows, label=run.label(label) if label else None
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def recipe_part(recipe: Recipe, *names: str) -> dict[str, Any]:
    """The sections of a recipe that a stage depends on, for its key."""
    data = to_dict(recipe)
    return {name: data[name] for name in names}
