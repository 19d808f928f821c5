"""A warning, before it begins, that a run will take long on a CPU, with the options that at least halve its time."""

import dataclasses
import logging
from collections.abc import Iterator

from requant import ranks
from requant.allocation.sizes import packed_spec
from requant.display import format_seconds
from requant.pipeline.planning.schedule import expected_seconds
from requant.pipeline.preparation.outline import Outline
from requant.pipeline.preparation.prepare import Prepared
from requant.quantizers.registry import METHODS
from requant.recipe.defaults import default_recipe
from requant.recipe.schema import Recipe

logger = logging.getLogger(__name__)
SLOW_RUN = 600.0  # expected seconds
FEW_SAMPLES = 16
# the best of those that take less time on a CPU; grids of 3 bits have three times its KL
QUICKER_METHOD = "lut"


def warn_of_a_slow_run(prepared: Prepared | Outline, recipe: Recipe, device: str) -> None:
    """Warn of a run on a CPU that takes more than SLOW_RUN seconds."""
    if device != "cpu" or ranks.rank() > 0:  # each measures a time of its own
        return
    seconds = expected_seconds(prepared, recipe, device)
    if seconds <= SLOW_RUN:
        return
    found = quicker(prepared, recipe, limit=seconds / 2)
    choices = ", ".join(f"{options} (about {format_seconds(each)})" for options, each in found.items())
    logger.warning(
        "this run takes about %s on this CPU%s.",
        format_seconds(seconds),
        f"; quicker: {choices}" if choices else "; a GPU is quicker",
    )


def quicker(prepared: Prepared | Outline, recipe: Recipe, *, limit: float) -> dict[str, float]:
    """Options -> expected seconds on a CPU, where the budget can be kept with them in at most `limit`."""
    found: dict[str, float] = {}
    for options, changed in _choices(recipe):
        windows = prepared.windows[: changed.calibration.num_samples]
        seconds = expected_seconds(dataclasses.replace(prepared, windows=windows), changed, "cpu")
        if seconds <= limit and _fits(prepared, changed):
            found[options] = seconds
    return found


def _choices(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    untrained = ""
    if recipe.finetune.trains:
        recipe = dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, steps=0))
        yield (untrained := "--finetune-steps 0"), recipe
    if recipe.calibration.num_samples > FEW_SAMPLES:
        few = dataclasses.replace(recipe.calibration, num_samples=FEW_SAMPLES)
        yield f"{untrained} --num-samples {FEW_SAMPLES}".strip(), dataclasses.replace(recipe, calibration=few)
    # options of a method are not those of another
    if recipe.mode != "best" or recipe.method == QUICKER_METHOD or recipe.modules:
        return
    other = default_recipe(recipe.model, QUICKER_METHOD, recipe.mode)
    other = dataclasses.replace(
        other, calibration=recipe.calibration, evaluation=recipe.evaluation, budget=recipe.budget
    )
    yield f"{untrained} --method {QUICKER_METHOD}".strip(), other


def _fits(prepared: Prepared | Outline, recipe: Recipe) -> bool:
    """Whether the method's fewest bits are within the budget."""
    if recipe.mode != "best" or recipe.budget.bits is None:
        return True
    fewest = min(METHODS[recipe.method].bits)
    found = sum(packed_spec(recipe, target.shape, fewest, None, {}).bytes for target in prepared.targets)
    return found <= recipe.budget.bits * sum(target.size for target in prepared.targets) / 8
