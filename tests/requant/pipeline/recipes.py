"""A recipe of a run in mode `paper` that takes a second, and ways to change it."""

import dataclasses

from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Detach, Evaluation, Recipe

RECIPE = Recipe(
    quantizer=METHODS["kmeans"].config(bits=3),
    calibration=Calibration(num_samples=4, seq_len=32),
    evaluation=Evaluation(context=32, windows=4, samples=0),
    detach=Detach(outlier_fraction=0.01, significant_fraction=0.01, temperatures=(0.5, 2.0), steps=2),
)


def changed(recipe: Recipe = RECIPE, *, bits: int = 3, method: str = "kmeans", **sections) -> Recipe:
    recipe = dataclasses.replace(recipe, method=method, quantizer=METHODS[method].config(bits=bits))
    for name, value in sections.items():
        new = dataclasses.replace(getattr(recipe, name), **value) if isinstance(value, dict) else value
        recipe = dataclasses.replace(recipe, **{name: new})
    return recipe
