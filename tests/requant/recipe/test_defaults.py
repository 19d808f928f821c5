"""What a run defaults to."""

import dataclasses

import pytest

from requant.pipeline.prepare import outline
from requant.recipe.defaults import MOST_STEPS, default_recipe, finetune_steps


@pytest.mark.parametrize(
    ("parameters", "steps"), [(32e6, 1000), (240e6, 1000), (480e6, 500), (1.24e9, 200), (8e9, 200)]
)
def test_larger_models_train_fewer_steps(parameters: float, steps: int) -> None:
    assert finetune_steps(int(parameters)) == steps


def test_a_model_says_how_long_it_trains_unless_the_recipe_does(tiny_folder) -> None:
    source = str(tiny_folder("llama"))
    recipe = default_recipe(source, None, gpu=True)
    assert recipe.finetune.steps is None
    assert outline(source, recipe).recipe.finetune.num_steps == MOST_STEPS
    said = dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, steps=7))
    assert outline(source, said).recipe.finetune.num_steps == 7
