"""What a run defaults to."""

import dataclasses

import pytest

from requant.pipeline.preparation.outline import outline
from requant.recipe.defaults import (
    MOST_STEPS,
    SEEN_AT_MOST,
    default_recipe,
    finetune_steps,
    needed_own_windows,
)
from requant.recipe.schema import Finetune
from requant.run.rounds import rounds_of


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


@pytest.mark.parametrize(
    ("steps", "real", "length", "own"),
    [
        (1000, 1962, 1024, 6038),  # 98.3 million tokens, 8000 windows twelve times
        (1000, 8000, 1024, 0),
        (200, 2048, 2048, 0),  # a model of 1 B sees a window five times
        (200, 100, 2048, 700),  # but not those of a short text
        (0, 10, 1024, 0),
    ],
)
def test_the_model_writes_what_keeps_a_window_from_being_seen_too_often(
    steps: int, real: int, length: int, own: int
) -> None:
    finetune = Finetune(steps=steps)
    assert needed_own_windows(finetune, phases=6, windows=real, length=length) == own
    seen = 6 * steps * finetune.tokens_per_step
    assert not own or seen <= SEEN_AT_MOST * (real + own) * length < seen + SEEN_AT_MOST * length


def test_a_run_on_a_gpu_writes_text_by_default(tiny_folder) -> None:
    source = str(tiny_folder("llama"))
    recipe = default_recipe(source, None, gpu=True)
    steps, positions = MOST_STEPS, outline(source, recipe).train_windows.shape[1]
    found = outline(source, recipe)
    phases = len(rounds_of(found.targets, recipe.finetune.rounds))
    assert found.own_windows == needed_own_windows(
        dataclasses.replace(recipe.finetune, steps=steps),
        phases=phases,
        windows=recipe.finetune.train_windows,
        length=positions,
    )
    assert found.own_windows > 0 and found.recipe.finetune.own_windows is None
    for finetune in (
        dataclasses.replace(recipe.finetune, own_windows=0),
        dataclasses.replace(recipe.finetune, steps=0),
    ):
        assert outline(source, dataclasses.replace(recipe, finetune=finetune)).own_windows == 0
    assert outline(source, default_recipe(source, None)).own_windows == 0
    for slow in ("gemma3", "qwen3-moe"):  # sliding windows, experts one by one: no CUDA graph of a step
        assert outline(str(tiny_folder(slow)), recipe).own_windows == 0
