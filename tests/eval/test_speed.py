"""The parts of mode `best` that are timed on a large model run on a tiny one."""

import dataclasses
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

from eval import shapes, speed
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
    assert found["a step"] == 1 / 10 and found["compiling"] == 0
    assert 0 < found["predicted_bytes"] < found["peak_bytes"]  # which are those of the whole process on a CPU


def test_shapes_are_those_of_their_names() -> None:
    for shape, billions in (("1b", 1.24), ("3b", 3.21), ("8b", 8.03)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shapes.config_of(shape))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.005)
    with pytest.raises(typer.BadParameter, match="there are: 1b, 3b, 8b"):
        shapes.config_of("9b")
