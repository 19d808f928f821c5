"""Recipes and configurations whose plans are tested."""

import dataclasses
from pathlib import Path

from eval.shapes import config_of
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Detach, Evaluation, Recipe


def recipe_of(method: str, **changes) -> Recipe:
    base = Recipe(
        mode="dense",
        method=method,
        quantizer=METHODS[method].config(bits=3),
        calibration=Calibration(num_samples=2, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        detach=Detach(outlier_rule="uniform", outlier_fraction=0.02, significant_fraction=0.01, steps=1),
    )
    return dataclasses.replace(base, **changes)


def save_shape(shape: str, folder: Path) -> str:
    """A folder with the config of a Llama's shape."""
    config_of(shape).save_pretrained(folder)
    return str(folder)
