"""From the command line to a formula it is four calls, as CONTRIBUTING says: a reader can follow every one of them."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import requant
from requant.evaluation import perplexity
from requant.evaluation.compare import evaluate_all
from requant.quantizers.registry import METHODS, PRUNING_METHODS
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe
from requant.sensitivity import scores, sums

PACKAGE = str(Path(requant.__file__).parent)
RECIPE = Recipe(
    mode="dense",
    method="rtn",
    quantizer=METHODS["rtn"].config(bits=3),
    calibration=Calibration(num_samples=2, seq_len=32),
    evaluation=Evaluation(context=32, windows=2, samples=0),
)


@pytest.fixture
def calls() -> list[str]:
    """Filled by a formula that `spied` wraps: the functions of the package that led to it, the first call first."""
    return []


def spied(formula: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def spy(*args: Any, **kwargs: Any) -> Any:
        frame, found = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                found.append(frame.f_code.co_qualname)
            frame = frame.f_back
        calls[:] = calls or [*without_local_functions(reversed(found)), formula.__name__]
        return formula(*args, **kwargs)

    return spy


def without_local_functions(names: Iterable[str]) -> list[str]:
    """A local function is read as a part of its function, and what runs it for that function (a map) is passed over."""
    found: list[str] = []
    for name in names:
        function = name.partition(".<locals>")[0]
        if name != function and function in found:
            del found[found.index(function) + 1 :]
        else:
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("mode", "method", "most"),
    [
        ("dense", "rtn", 4),
        ("paper", "rtn", 4),
        ("sparse", "magnitude", 4),
        ("best", "rtn", 4),
    ],
)
def test_calls_to_a_quantizer(
    mode: Any, method: str, most: int, calls: list[str], tiny_folder, tiny_text_file: Path, monkeypatch
) -> None:
    methods: dict[str, Any] = PRUNING_METHODS if mode == "sparse" else METHODS
    own = methods[method]
    monkeypatch.setitem(methods, method, dataclasses.replace(own, quantize=spied(own.quantize, calls)))
    config = own.config(bits=16 if mode == "sparse" else 3)
    steps = Finetune(steps=2, tokens_per_step=64) if mode == "best" else Finetune()
    recipe = dataclasses.replace(RECIPE, mode=mode, method=method, quantizer=config, finetune=steps)
    requant.quantize(str(tiny_folder("llama")), recipe, tiny_text_file)
    assert len(calls) <= most and calls[0] == "quantize", calls


def test_calls_to_a_predicted_loss(calls: list[str], tiny_folder, tiny_text_file: Path, monkeypatch) -> None:
    """One more than to a quantizer: the predictor that the recipe names."""
    own = METHODS["rtn"]
    formula = spied(own.predicted_losses, calls)
    monkeypatch.setitem(METHODS, "rtn", dataclasses.replace(own, predicted_losses=formula))
    requant.quantize(
        str(tiny_folder("llama")), dataclasses.replace(RECIPE, budget=Budget(bits=4.0)), tiny_text_file
    )
    assert len(calls) <= 5 and calls[0] == "quantize", calls


def test_calls_to_a_score(
    calls: list[str], tiny_folder, tiny_text_file: Path, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scores, "pqi", spied(scores.pqi, calls))
    requant.score(str(tiny_folder("llama")), RECIPE, tiny_text_file, output=tmp_path / "scores")
    assert len(calls) <= 4 and calls[0] == "score", calls


def test_calls_to_the_sum_of_a_score(
    calls: list[str], tiny_folder, tiny_text_file: Path, monkeypatch
) -> None:
    monkeypatch.setattr(sums, "_along_the_line", spied(sums._along_the_line, calls))
    requant.score(str(tiny_folder("llama")), RECIPE, tiny_text_file)
    assert len(calls) <= 4 and calls[0] == "score", calls


def test_calls_to_the_quality(calls: list[str], tiny_folder, tiny_text_file: Path, monkeypatch) -> None:
    monkeypatch.setattr(perplexity, "_score", spied(perplexity._score, calls))
    evaluate_all([str(tiny_folder("llama"))], text=[str(tiny_text_file)], context=32, windows=1)
    assert len(calls) <= 4 and calls[1] == "evaluate_all", calls  # within `on_its_gpu`
