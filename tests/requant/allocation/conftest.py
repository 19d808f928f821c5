"""Small runs under a budget."""

import dataclasses
from pathlib import Path

import pytest

from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Detach, Evaluation, Recipe
from requant.run.workspace import Workspace

from ..on_text import on_text

TINY = ("--num-samples", 2, "--seq-len", 32, "--quiet")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs go to the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tiny_folder, tiny_text_file: Path):
    """`run("llama")`: a run in mode `dense` that has read its model and texts."""

    def of(name: str):
        recipe = Recipe(
            mode="dense",
            method="rtn",
            quantizer=METHODS["rtn"].config(),
            calibration=Calibration(num_samples=4, seq_len=32),
            evaluation=Evaluation(context=32, windows=2, samples=0),
        )
        prepared = prepare(str(tiny_folder(name)), on_text(recipe, tiny_text_file))
        return start(prepared, recipe, workspace=Workspace(None), quiet=True)

    return of


def recipe_of(method: str = "rtn", **changes) -> Recipe:
    base = Recipe(
        mode="dense",
        method=method,
        quantizer=METHODS[method].config(**({"group_size": 32} if method in ("rtn", "gptq", "awq") else {})),
        calibration=Calibration(num_samples=2, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        detach=Detach(outlier_fraction=0.02, significant_fraction=0.01, steps=1, temperatures=(1.0,)),
    )
    return dataclasses.replace(base, **changes)


def started(folder: Path, text: Path, recipe: Recipe):
    prepared = prepare(str(folder), on_text(recipe, text))
    return start(prepared, recipe, workspace=Workspace(None), quiet=True)
