"""Predicted against measured: what is measured alone is what a person would measure."""

import copy
from pathlib import Path

import pytest

import requant
from requant.calibration.passes import mean_loss
from requant.evaluation import diagnosis
from requant.evaluation.diagnosis import MATRIX_TOKENS_ON_CPU, diagnosed_windows, measured_by_matrix
from requant.pipeline.preparation.prepare import start
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Recipe
from requant.run.workspace import Workspace


def test_each_matrix_alone(trained_model, tokenizer, tiny_text_file: Path, monkeypatch) -> None:
    original = copy.deepcopy(trained_model)
    recipe = Recipe(
        mode="dense",
        method="rtn",
        quantizer=METHODS["rtn"].config(bits=3),
        calibration=Calibration(num_samples=64, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=1),
    )
    result = requant.quantize(trained_model, recipe, tiny_text_file, tokenizer=tokenizer)
    found = result.diagnosis.matrix_delta_loss
    windows = diagnosed_windows(result.prepared.windows)[: MATRIX_TOKENS_ON_CPU // 32]
    assert list(found) == [target.name for target in result.prepared.targets] and len(windows) == 32
    before = mean_loss(original, windows)
    for name in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        changed = copy.deepcopy(original)
        changed.get_submodule(name).weight.copy_(result.weights[name].dequantize())
        assert found[name] == pytest.approx(mean_loss(changed, windows) - before, rel=1e-4, abs=1e-7)
    run = start(result.prepared, recipe, workspace=Workspace(None), quiet=True)
    monkeypatch.setattr(diagnosis, "MATRIX_WEIGHTS_ON_CPU", 10)
    assert measured_by_matrix(run, result.weights, windows) == {}  # too large for a CPU
    for target in result.prepared.targets:  # the model is left quantized
        assert target.weight().equal(result.weights[target.name].dequantize())
    assert len(result.samples) == 1 and result.samples[0].before
