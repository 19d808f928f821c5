"""What is named as quicker than a long run on a CPU."""

from pathlib import Path
from typing import Any

import pytest

from requant.pipeline.planning.quicker import quicker, warn_of_a_slow_run
from requant.pipeline.planning.schedule import expected_seconds
from requant.pipeline.preparation.prepare import prepare
from requant.recipe.options import recipe_from_options

WORDS = {"--finetune-steps": "finetune_steps", "--num-samples": "num_samples", "--method": "method"}


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.pipeline.planning.costs.product_rate", lambda *_: 1e7)


@pytest.fixture
def given(tiny_folder, tiny_text_file: Path) -> dict[str, Any]:
    return {"model": str(tiny_folder("llama")), "calibration": tiny_text_file, "seq_len": 32}


def test_a_choice_takes_what_its_own_plan_says(given: dict) -> None:
    given |= {"bits": 4, "num_samples": 32, "finetune_steps": 20}
    recipe = recipe_from_options(**given)
    prepared = prepare(recipe.model, recipe)
    whole = expected_seconds(prepared, recipe, "cpu")
    found = quicker(prepared, recipe, limit=whole)
    assert [*found] == ["--finetune-steps 0" + more for more in ("", " --num-samples 16", " --method lut")]
    for options, seconds in found.items():
        words = options.split()
        changes: dict[str, Any] = {
            WORDS[name]: value for name, value in zip(words[::2], words[1::2], strict=True)
        }
        changes |= {name: int(value) for name, value in changes.items() if value.isdecimal()}
        chosen = recipe_from_options(**given | changes)
        assert expected_seconds(prepare(chosen.model, chosen), chosen, "cpu") == pytest.approx(seconds)
        assert seconds < whole
    assert quicker(prepared, recipe, limit=0.0) == {}


def test_a_method_that_cannot_keep_the_budget_is_not_named(given: dict) -> None:
    few = recipe_from_options(**given, bits=1.5)
    assert [*quicker(prepare(few.model, few), few, limit=1e9)] == ["--num-samples 16"]


def test_the_method_of_the_run_is_no_quicker_one(given: dict) -> None:
    trained = recipe_from_options(**given, bits=4, method="lut", num_samples=16, finetune_steps=20)
    assert [*quicker(prepare(trained.model, trained), trained, limit=1e9)] == ["--finetune-steps 0"]


def test_a_long_run_is_warned_of_once_and_a_gpu_is_not(
    given: dict, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_from_options(**given, bits=4, finetune_steps=20)
    prepared = prepare(recipe.model, recipe)
    caplog.clear()
    warn_of_a_slow_run(prepared, recipe, "cuda")
    with monkeypatch.context() as patch:
        patch.setattr("requant.ranks.rank", lambda: 1)  # the first says so
        warn_of_a_slow_run(prepared, recipe, "cpu")
    assert not caplog.text
    warn_of_a_slow_run(prepared, recipe, "cpu")
    assert "on this CPU; quicker: --finetune-steps 0 (about " in caplog.text
