"""From a budget to the width of every matrix: which bytes are free to spend, and on what.

    bits    everything stored for the quantized matrices, at most `bits * weights / 8` bytes
    size    the weight files whole: matrices, embedding, head, norms, headers

Bytes are exact, for they follow from the layout (`planned_layout`); only the entries of a sparse part are set aside
beforehand, with a count for every tile. `predictors.py` says what bits are worth, `knapsack.py` spends them. A run
without a budget gives every matrix the recipe's width; mode `best` takes even that as a promise.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from requant.checkpoint.layout import MatrixLayout
from requant.checkpoint.save import checkpoint_bytes
from requant.errors import RecipeError
from requant.formats import INDEX_TILE
from requant.knapsack import TOLERANCE, Allocation, Option, allocate, neighbours
from requant.models import LinearSite
from requant.predictors import predicted_losses
from requant.recipe import Recipe
from requant.run import Run, recipe_part
from requant.vocabulary import (
    Vocabulary,
    part_sizes,
    vocabulary_curvature,
    vocabulary_layout,
    vocabulary_losses,
    vocabulary_of,
    wanted_widths,
)
from requant.workspace import digest

__all__ = ["TOLERANCE", "Allocation", "allocate_bits", "planned_layout", "with_allocation"]
VALUE_AND_INDEX = 3  # bytes of a residual in float16 with its index in the tile


def allocate_bits(run: Run, *, reserve: int | None = None) -> Allocation:
    """The width of every matrix, and of embedding and head, under the recipe's budget.

    `reserve` bytes of the budget are left for a sparse part; None: what the recipe's own mode needs. A run that has its
    allocation already gets that one. Raises RecipeError, with what can be reached, for a budget that cannot.
    """
    if run.allocation is not None:
        return run.allocation
    recipe = run.recipe
    vocabulary = vocabulary_of(run.model)
    widths = wanted_widths(recipe.budget, vocabulary)
    asked = asked_bits(recipe)
    if not has_budget(recipe):
        return uniform(recipe, run.sites, widths)
    sparse = sparse_bytes(run) if reserve is None else reserve
    if asked is not None:
        budget, fixed = int(asked * run.total_weights / 8), sparse
    else:
        assert recipe.budget.size is not None
        budget, fixed = recipe.budget.size, sparse + bytes_beside(run, vocabulary)
    sizes = {site.name: matrix_sizes(recipe, site.shape) for site in run.sites}
    if asked is None:
        for role, part in vocabulary.parts.items():
            sizes[role] = part_sizes(run.model, run.source, part, widths[role])
    check_reachable(run, sizes, budget, fixed)
    losses = _losses(run, vocabulary, sizes, 8 * (budget - fixed) / run.total_weights)
    options = {
        name: [Option(bits=bits, bytes=size, loss=losses[name][bits]) for bits, size in choices.items()]
        for name, choices in sizes.items()
    }
    choice = allocate(options, budget - fixed)
    taken = {role: choice.options[role].bits if role in sizes else found[0] for role, found in widths.items()}
    return Allocation(
        bits={site.name: choice.options[site.name].bits for site in run.sites},
        bytes=choice.bytes + fixed,
        budget=budget,
        predicted=choice.loss,
        predictor=recipe.budget.predictor,
        curve={near + fixed: loss for near, loss in neighbours(options, budget - fixed).items()},
        embedding_bits=taken["embedding"],
        head_bits=taken.get("head", taken["embedding"]),
    )


def with_allocation(run: Run, allocation: Allocation) -> Run:
    """The run that gives every matrix its width; results kept for another allocation are none of its."""
    if allocation.budget is None:
        return dataclasses.replace(run, allocation=allocation)
    return dataclasses.replace(
        run,
        allocation=allocation,
        bits=allocation.bits,
        fingerprint=digest(run.fingerprint, allocation.bits),
    )


def asked_bits(recipe: Recipe) -> float | None:
    """Bits a weight that the run promises; None where it promises none, or a size."""
    if recipe.budget.bits is not None or recipe.budget.size is not None or recipe.mode != "best":
        return recipe.budget.bits
    return float(recipe.quantizer.bits)


def has_budget(recipe: Recipe) -> bool:
    """Whether bits are spent matrix by matrix."""
    return recipe.budget.size is not None or asked_bits(recipe) is not None


def planned_layout(recipe: Recipe, shape: tuple[int, int], bits: int | None = None) -> MatrixLayout:
    """What the method's container will store for a matrix without residuals, by default at the recipe's width."""
    config: Any = recipe.quantizer
    width = config.bits if bits is None else bits
    match recipe.method:
        case "kmeans" | "lut":
            return MatrixLayout(format="codebook", bits=width, shape=shape)
        case "trellis":
            learned = recipe.tuning.steps > 0
            return MatrixLayout(
                format="trellis",
                bits=width,
                shape=shape,
                code=config.code,
                input_signs=True,
                output_signs=not learned,
            )
    return MatrixLayout(
        format="grid",
        bits=width,
        shape=shape,
        group_size=shape[1] if config.group_size == -1 else config.group_size,
        zero_points=not config.symmetric,
        column_scales=recipe.method == "awq",
    )


def matrix_sizes(recipe: Recipe, shape: tuple[int, int]) -> dict[int, int]:
    """Width -> bytes of a matrix, at every width that the method takes."""
    return {bits: planned_layout(recipe, shape, bits).bytes for bits in widths_of(recipe)}


def widths_of(recipe: Recipe) -> list[int]:
    """The widths that the recipe's quantizer takes, ascending."""
    found = []
    for bits in range(1, 9):
        try:
            dataclasses.replace(recipe.quantizer, bits=bits)
        except RecipeError:
            continue
        found.append(bits)
    return found


def sparse_bytes(run: Run) -> int:
    """What the residuals of mode `paper` take at most: values, indices, and counts in every matrix."""
    detach = run.recipe.detach
    fraction = detach.outlier_fraction + detach.significant_fraction
    if run.recipe.mode != "paper" or not fraction:
        return 0
    entries = fraction * run.total_weights + len(run.sites) / 2 + 1  # each matrix rounds its share
    counts = sum(site.shape[0] * -(-site.shape[1] // INDEX_TILE) for site in run.sites)
    return round(VALUE_AND_INDEX * entries) + counts


def bytes_beside(run: Run, vocabulary: Vocabulary) -> int:
    """Bytes of the weight files that no matrix, embedding or head accounts for: norms, biases, headers.

    At most: the headers are those of the longest numbers that any choice could write.
    """
    widest = widths_of(run.recipe)[-1]
    layouts = {site.name: planned_layout(run.recipe, site.shape, widest) for site in run.sites}
    if sparse_bytes(run):
        layouts = {
            name: dataclasses.replace(layout, sparse=layout.shape[0] * layout.shape[1])
            for name, layout in layouts.items()
        }
    grids = {part.name: vocabulary_layout(part.shape, 8) for part in vocabulary.parts.values()}
    whole = checkpoint_bytes(run.model, source=run.source, modules=layouts, vocabulary=grids)
    return whole - sum(layout.bytes for layout in (*layouts.values(), *grids.values()))


def uniform(recipe: Recipe, sites: Sequence[LinearSite], widths: Mapping[str, Sequence[int]]) -> Allocation:
    """The recipe's width everywhere: no budget, no promise."""
    return Allocation(
        bits={site.name: recipe.quantizer.bits for site in sites},
        bytes=sum(planned_layout(recipe, site.shape).bytes for site in sites),
        embedding_bits=widths["embedding"][0],
        head_bits=widths.get("head", widths["embedding"])[0],
    )


def check_reachable(run: Run, sizes: Mapping[str, Mapping[int, int]], budget: int, fixed: int) -> None:
    """Raise RecipeError for a budget that no choice meets: too small for the least, or larger than the most."""
    least, most = (fixed + sum(pick(choices.values()) for choices in sizes.values()) for pick in (min, max))
    if least <= budget <= most / (1 - TOLERANCE):
        return
    which, reached = ("smallest", least) if budget < least else ("largest", most)
    if asked_bits(run.recipe) is None:
        raise RecipeError(
            f"--size {run.recipe.budget.size:,} cannot be met: the {which} checkpoint that method "
            f"'{run.recipe.method}' makes of this model has {reached:,} bytes."
        )
    bits = 8 * reached / run.total_weights
    shown = math.ceil(1000 * bits) / 1000 if budget < least else math.floor(1000 * bits) / 1000
    raise RecipeError(
        f"--bits {asked_bits(run.recipe):g} cannot be met: the {which} that method '{run.recipe.method}' makes of this "
        f"model is {shown:.3f} bits a weight, all stored bytes counted."
    )


def _losses(
    run: Run, vocabulary: Vocabulary, sizes: Mapping[str, Mapping[int, int]], average: float
) -> dict[str, dict[int, float]]:
    """Name -> width -> predicted loss, nats a token; `average` bits decide the width that predictors quantize at."""
    widths = widths_of(run.recipe)
    reference = min(widths, key=lambda bits: abs(bits - average))
    key = digest(
        run.fingerprint,
        recipe_part(run.recipe, "calibration", "method", "quantizer", "sensitivity"),
        [run.recipe.budget.predictor, reference],
    )
    stored = run.workspace.get("predictor", key)
    if stored is None:
        losses = predicted_losses(run, widths, at=reference)
        run.workspace.put("predictor", key, value=losses)
    else:  # JSON has no whole numbers for keys
        losses = {name: {int(b): loss for b, loss in found.items()} for name, found in stored.value.items()}
    tables = {role: list(sizes[role]) for role in vocabulary.parts if role in sizes}
    if any(set(choices) != {16} for choices in tables.values()):
        curvature = vocabulary_curvature(run, vocabulary)
        return losses | vocabulary_losses(vocabulary, curvature, tables)
    return losses | {role: {16: 0.0} for role in tables}


def vocabulary_savings(model: PreTrainedModel, source: Path | None, allocation: Allocation) -> int:
    """Bytes that quantizing embedding and head saves."""
    bits = {"embedding": allocation.embedding_bits, "head": allocation.head_bits}
    saved = 0
    for role, part in vocabulary_of(model).parts.items():
        sizes = part_sizes(model, source, part, (bits[role], 16))
        saved += sizes[16] - sizes[bits[role]]
    return saved
