"""Predicted against measured: what is measured alone is what a person would measure."""

import copy
from pathlib import Path

import pytest

import requant
from requant.calibration.passes import mean_loss
from requant.evaluation import diagnosis
from requant.evaluation.diagnosis import KIND_TOKENS_ON_CPU, diagnosed_windows, measured_by_kind
from requant.models.experts import unfuse_experts
from requant.pipeline.preparation.prepare import start
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Recipe
from requant.run.workspace import Workspace


def grid_recipe(*, num_samples: int) -> Recipe:
    return Recipe(
        mode="dense",
        method="rtn",
        quantizer=METHODS["rtn"].config(bits=3),
        calibration=Calibration(num_samples=num_samples, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=1),
    )


def test_each_matrix_alone(trained_model, tokenizer, tiny_text_file: Path, monkeypatch) -> None:
    original = copy.deepcopy(trained_model)
    recipe = grid_recipe(num_samples=64)
    result = requant.quantize(trained_model, recipe, tiny_text_file, tokenizer=tokenizer)
    found = result.diagnosis.kind_delta_loss
    windows = diagnosed_windows(result.prepared.windows)[: KIND_TOKENS_ON_CPU // 32]
    assert (
        list(found) == [(target.block, target.kind) for target in result.prepared.targets]
        and len(windows) == 32
    )
    before = mean_loss(original, windows)
    for block, name in enumerate(("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj")):
        changed = copy.deepcopy(original)
        changed.get_submodule(name).weight.copy_(result.weights[name].dequantize())
        assert found[block, name.rpartition(".")[2]] == pytest.approx(
            mean_loss(changed, windows) - before, rel=1e-4, abs=1e-7
        )
    run = start(result.prepared, recipe, workspace=Workspace(None), quiet=True)
    monkeypatch.setattr(diagnosis, "KIND_WEIGHTS_ON_CPU", 10)
    assert measured_by_kind(run, result.weights, windows) == {}  # too large for a CPU
    for target in result.prepared.targets:  # the model is left quantized
        assert target.weight().equal(result.weights[target.name].dequantize())
    assert len(result.samples) == 1 and result.samples[0].before


def test_experts_of_a_block_are_measured_together(tiny_model, tokenizer, tiny_text_file: Path) -> None:
    model = tiny_model("qwen3-moe")
    original = copy.deepcopy(model)
    recipe = grid_recipe(num_samples=4)
    result = requant.quantize(model, recipe, tiny_text_file, tokenizer=tokenizer)
    found = result.diagnosis.kind_delta_loss
    ups = [target for target in result.prepared.targets if (target.block, target.kind) == (1, "up_proj")]
    assert len(ups) == 4 and len(found) == 2 * 7 and len(result.prepared.targets) == 2 * (4 + 3 * 4)
    windows = diagnosed_windows(result.prepared.windows)
    unfuse_experts(original)
    before = mean_loss(original, windows)
    for target in ups:
        original.get_submodule(target.name).weight.copy_(result.weights[target.name].dequantize())
    assert found[1, "up_proj"] == pytest.approx(mean_loss(original, windows) - before, rel=1e-4, abs=1e-7)
