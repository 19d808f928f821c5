"""The parts of mode `best` that are timed on a large model run on a tiny one, and the sum follows from them."""

import dataclasses
from pathlib import Path

import pytest

from eval.speed import best_parts, best_recipe
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Finetune


def test_parts_of_mode_best(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    for name in ("wikitext-like.raw", "wiki.test.raw"):
        (tmp_path / name).write_text(Path(tiny_text_file).read_text())
    recipe = best_recipe(Path(tiny_folder("llama")), tmp_path, num_samples=4, seq_len=32)
    assert (recipe.mode, recipe.method, recipe.budget.bits) == ("best", "trellis", 2.0)
    recipe = dataclasses.replace(
        recipe,
        method="kmeans",
        quantizer=METHODS["kmeans"].config(bits=2),
        finetune=Finetune(steps=10, tokens_per_step=64),
    )
    found = best_parts(recipe, "cpu", "float32")
    blocks, rounds = 2, 4
    assert found["the original's states"] > 0
    assert found["whole run, computed"] == pytest.approx(
        found["compiling"]
        + rounds * found["statistics"]
        + blocks * found["codes of a block"]
        + rounds * 10 * found["a step"]
        + 2 * found["the original's states"]
    )
