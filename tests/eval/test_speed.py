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
    for shape, billions in (("1b", 1.24), ("3b", 3.21), ("8b", 8.03), ("70b", 70.55), ("30b-a3b", 30.53)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shapes.config_of(shape))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.005)
    assert shapes.config_of("70b", 2).num_hidden_layers == 2
    with pytest.raises(typer.BadParameter, match="there are: 1b, 3b, 8b, 70b, 30b-a3b"):
        shapes.config_of("9b")
    with pytest.raises(typer.BadParameter, match="70b has 80 blocks, not 81"):
        shapes.config_of("70b", 81)


def test_a_share_is_trained_as_the_whole(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block and, where a GPU of 40 GB has no room for rounds, at the end only."""
    for name in ("wikitext-like.raw", "wiki.test.raw"):
        (tmp_path / name).write_text(Path(tiny_text_file).read_text())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tiny = Path(tiny_folder("llama"))
    recipe = speed.best_recipe(tiny, tmp_path, num_samples=4, seq_len=32)
    monkeypatch.setitem(shapes.SHAPES, "8b", {**shapes.SHAPES["8b"], "vocab_size": 2048})
    whole = speed.trained_as_the_whole(recipe, "8b", tiny, "cuda").finetune
    assert (whole.blockwise, whole.rounds, whole.steps) == (True, 6, 200)
    asked = dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, steps=7))
    monkeypatch.setattr("requant.pipeline.preparation.completion.total_memory", lambda _: 40 * 10**9)
    at_the_end = speed.trained_as_the_whole(asked, "8b", tiny, "cuda").finetune
    assert (at_the_end.blockwise, at_the_end.rounds, at_the_end.steps) == (True, 0, 7)


@pytest.mark.slow
def test_a_whole_run_is_the_command(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    """In two processes: its seconds by stage, and its own peak beside the predicted one."""
    for name in ("wikitext-like.raw", "wiki.test.raw"):
        (tmp_path / name).write_text(Path(tiny_text_file).read_text())
    recipe = speed.best_recipe(
        Path(tiny_folder("llama")), tmp_path, num_samples=4, seq_len=32, bits=3.5, steps=2
    )
    recipe = dataclasses.replace(recipe, method="kmeans", quantizer=METHODS["kmeans"].config(bits=2))
    found = speed.whole_run(recipe, "cpu", "float32", gpus=2, keep=tmp_path / "kept", log=tmp_path / "log")
    assert (tmp_path / "kept" / "model.safetensors").is_file()
    seconds, planned = found["seconds"], found["planned_seconds"]
    assert min(seconds[stage] for stage in ("statistics", "quantize", "finetuning", "evaluation")) > 0
    log = (tmp_path / "log").read_text()
    assert planned["evaluation"] > 0 and all(f"{stage} took" in log for stage in planned)
    assert sum(seconds.values()) == pytest.approx(found["wall_seconds"])
    assert found["bits_per_weight"] <= 3.5 and found["peak_bytes"] > 0 and found["predicted_bytes"] > 0
