"""The matrices that a recipe quantizes, each with the options that `modules` gives it and the process that works on it."""

import dataclasses
import logging
from collections.abc import Sequence

from transformers import PreTrainedModel

from requant.allocation.budget import has_budget
from requant.calibration.stats import INPUT_STATISTICS
from requant.errors import RecipeError
from requant.models.targets import QuantTarget, divided, find_linears
from requant.quantizers.registry import METHODS, find_method
from requant.recipe.schema import Recipe

logger = logging.getLogger(__name__)


def recipe_targets(model: PreTrainedModel, recipe: Recipe, *, processes: int) -> list[QuantTarget]:
    """The matrices to quantize, divided among `processes`; the model may be one of shapes alone.

    Raises RecipeError where patterns of `modules` give one of them what excludes each other.
    """
    targets = find_linears(model, skip=recipe.skip, options=recipe.modules)
    for target in targets:
        try:
            dataclasses.replace(recipe.quantizer, **target.options)
        except RecipeError as error:
            raise RecipeError(f"modules: {target.name}: {error}") from error
    return divided(targets, processes)


def all_experts_counts(recipe: Recipe) -> bool:
    """Whether the recipe sends all tokens to every expert and its method reads statistics of inputs, which that changes."""
    budget = has_budget(recipe)
    needs = METHODS[recipe.method].allocation_needs if budget else find_method(recipe.method).needs
    return recipe.calibration.all_experts and bool(needs & INPUT_STATISTICS)


def warn_of_no_experts(targets: Sequence[QuantTarget], recipe: Recipe) -> None:
    """Warn where the recipe sends all tokens to experts that the model does not have, or whose inputs nothing reads."""
    if not recipe.calibration.all_experts:
        return
    if not any(target.experts for target in targets):
        logger.warning(
            "--all-experts changes nothing here: none of the matrices is an expert's; leave it out."
        )
    elif not all_experts_counts(recipe):
        logger.warning(
            "--all-experts changes nothing here: method '%s' reads no statistics of inputs; leave it out.",
            recipe.method,
        )
