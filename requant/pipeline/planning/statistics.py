"""How a run will collect its statistics, from shapes: what they may take of the memory, and in how many passes.

A pass over the text collects the statistics of as many whole blocks as fit half of the memory that is free beside the model,
leaving room for a batch of the pass, and then for the work on a matrix (`run/statistics.py`). It goes back no further
than to the first of its blocks:

    operations = forward + share (recomputed forward, if need be, + backward),    share = blocks from that one on / all

A model on the host takes one pass, which stops between blocks and goes on (`calibration/block_by_block.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from requant import ranks
from requant.allocation.budget import has_budget
from requant.calibration.batches import recomputes_blocks, tokens_at_once, vocabulary_of
from requant.calibration.collect import bytes_needed
from requant.calibration.experts import share_of_experts
from requant.models.devices import total_memory
from requant.models.targets import QuantTarget, by_block, find_blocks
from requant.pipeline.preparation.outline import Outline
from requant.pipeline.preparation.prepare import Prepared
from requant.pipeline.preparation.shape_bytes import (
    block_statistics,
    largest_block,
    outside_bytes,
    parameter_bytes,
    work_bytes,
)
from requant.quantizers.registry import METHODS, find_method
from requant.recipe.schema import Recipe
from requant.run.rounds import rounds_of
from requant.run.statistics import in_chunks, pass_bytes, statistics_budget

# what the C library holds for blocks that it does not map one by one, over what lives in them
HEAP_FACTOR = 1.5
MAPPED_BYTES = 32 << 20  # a block from which on it does
LOGIT_BYTES = 18  # at the beginning of a backward pass, four to five copies in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticsMemory:
    """Bytes on a device while statistics are collected, then while codes are made from them."""

    model: int  # its floats, twice if inputs are corrected
    codes: int  # a byte a weight, in the end
    batch: int  # of a pass: logits and activations, or what goes to other GPUs
    work: int  # on a matrix
    statistics: int  # at most, at once; one block's always fit


def statistics_memory(
    prepared: Prepared | Outline, recipe: Recipe, device: str, needs: frozenset[str], *, coded: int = 0
) -> StatisticsMemory:
    """What a run has on a device of a type while it collects what codes or the allocation need, where so many weights are
    `coded` when it divides its blocks into passes."""
    model, codes = parameter_bytes(prepared.model), sum(target.size for target in prepared.targets)
    if prepared.hosted:
        model, codes = outside_bytes(prepared.model, prepared.targets) + largest_block(prepared.targets), 0
        coded = 0
    if recipe.calibration.inputs == "corrected":
        model *= 2
    batch = pass_bytes(
        prepared.model,
        prepared.targets,
        prepared.windows,
        needs,
        kind=device,
        hosted=prepared.hosted,
        several=ranks.count_owners(prepared.targets) > 1,
    )
    if device == "cpu":
        batch = max(batch, _backward_bytes(prepared))
    work = work_bytes(prepared.targets, needs)
    free = total_memory(torch.device(device)) - model - coded
    budget = statistics_budget(free, work if device == "cpu" else max(work, batch))
    block = block_statistics(prepared.targets, needs)
    return StatisticsMemory(
        model=model, codes=codes, batch=batch, work=work, statistics=max(block, round(budget))
    )


def statistics_passes(
    prepared: Prepared | Outline,
    recipe: Recipe,
    device: str,
    targets: Sequence[QuantTarget],
    needs: frozenset[str],
    *,
    coded: int = 0,
) -> list[float]:
    """The passes that these statistics of the matrices take, where so many weights are `coded` before: of each the share of
    blocks that it goes back through."""
    if prepared.hosted:
        return [1.0]
    blocks = len(find_blocks(prepared.model)[1])
    chunks = _chunks(prepared, recipe, device, targets, needs, coded=coded)
    return [1 - chunk[0].block / blocks for chunk in chunks]


def most_statistics(prepared: Prepared | Outline, recipe: Recipe, device: str) -> tuple[int, int]:
    """Bytes of statistics and of the codes beside them, at most: while a chunk is collected, and when it has its codes.

    Only then it is released; statistics that the allocation took in one pass stay for the first codes. Chunks are what fits
    when the first of a stage is collected: for the allocation, and for codes without rounds, before there are any codes.
    """
    parts = [list(prepared.targets)]
    if recipe.trains_in_rounds:
        parts = rounds_of(prepared.targets, recipe.finetune.rounds)
    needs, codes, kept = find_method(recipe.method).needs, 0, 0
    collecting: list[int] = []
    if has_budget(recipe):
        first = METHODS[recipe.method].allocation_needs
        allocation = _chunks(prepared, recipe, device, prepared.targets, first)
        collecting = [_held(chunk, first) for chunk in allocation]
        kept = collecting[0] if len(allocation) == 1 else 0
    coding = list(collecting)  # what its losses are predicted in is that of codes
    for members in parts:
        for chunk in _chunks(prepared, recipe, device, members, needs, coded=codes):
            collecting.append(_held(chunk, needs) + codes)
            codes += 0 if prepared.hosted else sum(target.size for target in chunk)
            coding.append(max(kept, _held(chunk, needs)) + codes)
        kept = 0
    return max(collecting), max(coding)


def most_needs(recipe: Recipe) -> frozenset[str]:
    """The statistics that a run collects at once, at most."""
    return METHODS[recipe.method].allocation_needs if has_budget(recipe) else find_method(recipe.method).needs


def _held(chunk: Sequence[QuantTarget], needs: frozenset[str]) -> int:
    """Bytes of the statistics of a chunk, on the rank that has the most."""
    return max(bytes_needed(chunk, needs).values())


def _chunks(
    prepared: Prepared | Outline,
    recipe: Recipe,
    device: str,
    targets: Sequence[QuantTarget],
    needs: frozenset[str],
    *,
    coded: int = 0,
) -> list[list[QuantTarget]]:
    budget = float(statistics_memory(prepared, recipe, device, needs, coded=coded).statistics)
    return in_chunks(targets, needs, budget)


def _backward_bytes(prepared: Prepared | Outline) -> int:
    """Logits, inputs and outputs of every linear for a batch of a CPU, float32; of one block where blocks are recomputed.

    Most of these are small blocks, made and freed in turn, between which gaps remain.
    """
    tokens = tokens_at_once(prepared.model, *prepared.windows.shape, gpu=False)
    vocabulary = vocabulary_of(prepared.model)
    share = share_of_experts(prepared.model, prepared.targets)
    floats = [
        sum(sum(target.shape) * (1 if target.experts is None else share) for target in members)
        for members in by_block(prepared.targets)
    ]
    count, length = prepared.windows.shape
    again = recomputes_blocks(prepared.model, (count, length), gpu=False)
    activations = 4 * tokens * (max(floats) if again else sum(floats))
    logits = LOGIT_BYTES * tokens * vocabulary
    if 4 * tokens * vocabulary <= MAPPED_BYTES:
        logits *= HEAP_FACTOR
    return round(logits + HEAP_FACTOR * activations)
