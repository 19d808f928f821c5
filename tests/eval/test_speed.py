"""The parts of mode `best` that are timed on a large model run on a tiny one, and the sum follows from them."""

import dataclasses
from pathlib import Path

import pytest

from eval import speed
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Finetune


def test_parts_of_mode_best(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wikitext-like.raw", "wiki.test.raw"):
        (tmp_path / name).write_text(Path(tiny_text_file).read_text())
    recipe = speed.best_recipe(Path(tiny_folder("llama")), tmp_path, num_samples=4, seq_len=32)
    assert (recipe.mode, recipe.method, recipe.budget.bits) == ("best", "trellis", 2.0)
    recipe = dataclasses.replace(
        recipe,
        method="kmeans",
        quantizer=METHODS["kmeans"].config(bits=2),
        finetune=Finetune(steps=10, tokens_per_step=64),
    )
    monkeypatch.setattr(speed, "timed", lambda work, device: (work(), 1.0)[1])
    found = speed.best_parts(recipe, "cpu", "float32")
    # four rounds of statistics, two blocks of codes, four rounds of ten steps, the original's states twice
    assert found["a step"] == 1 / speed.MIN_STEPS_TO_COMPILE and found["compiling"] == 0
    states = found["the original's states"]
    assert states > 1  # more than the 64 windows that are timed
    assert found["whole run, computed"] == pytest.approx(
        4 + 2 + 4 * 10 / speed.MIN_STEPS_TO_COMPILE + 2 * states
    )
