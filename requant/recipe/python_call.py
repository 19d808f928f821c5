"""The recipe of a call from Python (`requant.quantize`, `requant.score`), whose model may be loaded already."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from requant.errors import ModelError, RecipeError
from requant.models.devices import pick_device
from requant.recipe.options import recipe_from_options
from requant.recipe.schema import Recipe


def recipe_for(
    model: str | PreTrainedModel | None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    text: str | Path | Sequence[str] | None,
    *,
    device: str,
    options: Mapping[str, Any],
) -> Recipe:
    """The recipe of a call from Python; it names the model and the text, since the checkpoint says what was done."""
    if text is not None:
        if options.get("calibration") is not None:
            raise RecipeError("text and calibration are the same option; give one of them.")
        options = {**options, "calibration": text}
    check_no_recipe(model)
    if not isinstance(model, str | PreTrainedModel | None):
        raise ModelError(
            f"model must be a text or a loaded model, not {type(model).__name__}; give a folder, a name, an alias or a "
            "PreTrainedModel of transformers (of adapters the result of merge_and_unload())."
        )
    if model is None or isinstance(model, str):
        gpu, name = pick_device(device).startswith("cuda"), model
    else:
        gpu, name = model.device.type == "cuda", model.name_or_path or type(model).__name__
    return recipe_from_options(recipe, model=name, gpu=gpu, **options)


def check_no_recipe(model: object) -> None:
    """Raise ModelError for a recipe in the place of the model."""
    if isinstance(model, Recipe | Mapping):
        raise ModelError("what was given as model is a recipe; give it as recipe=..., which names its model.")
