"""A recipe with other calibration text."""

import dataclasses
from pathlib import Path

from requant.recipe.schema import Recipe


def on_text(recipe: Recipe, *texts: str | Path) -> Recipe:
    """The recipe, calibrated on these texts."""
    calibration = dataclasses.replace(recipe.calibration, text=tuple(map(str, texts)))
    return dataclasses.replace(recipe, calibration=calibration)
