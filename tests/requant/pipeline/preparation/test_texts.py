"""Texts that nobody named, and what a plan counts of a text."""

import dataclasses
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from requant.errors import TextError
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.prepare import prepare
from requant.pipeline.preparation.texts import calibration_text, evaluation_text, windows_there
from requant.recipe.schema import Calibration, Evaluation, Finetune, Recipe

from ...on_text import on_text
from ..plans import recipe_of


def test_an_unreachable_default_says_why_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(key: str, _field: str) -> Iterator[str]:
        raise TextError(f"{key} did not come.")
        yield

    monkeypatch.setattr("requant.text.sources._read_hub", unreachable)
    reason = r"did not come\. It is read because no --calibration was given\."
    for read, split in ((calibration_text, "train"), (evaluation_text, "test")):
        with pytest.raises(TextError, match=f"wikitext-2-raw-v1:{split} {reason}"):
            read(None, Recipe())
    with pytest.raises(TextError, match=r"mine did not come\.$"):
        calibration_text(None, on_text(Recipe(), "mine"))
    (tmp_path / "text.txt").write_text("some words")
    assert (
        evaluation_text(None, on_text(Recipe(), tmp_path / "text.txt")) is None
    )  # its last tenth is held out


def recipe_with(text: Path | str, *, of_its_own: bool, train_windows: int = 10_000) -> Recipe:
    """On short windows, more of them than the text holds, with a text for evaluation unless a part is held out."""
    return recipe_of(
        "rtn",
        calibration=Calibration(text=(str(text),), num_samples=5000, seq_len=24),
        evaluation=Evaluation(text=(str(text),) if of_its_own else (), context=32, windows=3000),
        finetune=Finetune(steps=1, train_windows=train_windows),
    )


@pytest.mark.parametrize("of_its_own", [True, False])
def test_a_plan_from_config_json_counts_the_windows_of_a_text_that_is_here(
    tiny_folder, tiny_text_file: Path, of_its_own: bool
) -> None:
    """As many as the run draws, where the text is short."""
    source, recipe = str(tiny_folder("llama")), recipe_with(tiny_text_file, of_its_own=of_its_own)
    prepared, planned = prepare(source, recipe), outline(source, recipe)
    assert len(prepared.train_windows) < 5000
    for part in ("windows", "train_windows", "eval_windows"):
        assert getattr(planned, part).shape == getattr(prepared, part).shape
    few = dataclasses.replace(recipe.calibration, num_samples=7)
    few = dataclasses.replace(recipe, calibration=few, finetune=Finetune(steps=1, train_windows=9))
    assert (len(outline(source, few).windows), len(outline(source, few).train_windows)) == (7, 9)


def test_the_tokens_of_a_long_text_are_estimated(tiny_folder, tiny_text_file: Path, monkeypatch) -> None:
    source, recipe = tiny_folder("llama"), recipe_with(tiny_text_file, of_its_own=True)
    exact, eval_exact = windows_there(source, recipe)
    characters = len(tiny_text_file.read_text())
    monkeypatch.setattr("requant.text.windows.COUNTED", characters // 4)
    estimate, eval_estimate = windows_there(source, recipe)
    assert estimate != exact
    assert (estimate, eval_estimate) == (pytest.approx(exact, rel=0.05), pytest.approx(eval_exact, rel=0.05))


def test_a_plan_counts_what_is_asked_for_where_it_cannot_read(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch
) -> None:
    """A text that is elsewhere or takes long to read, a folder without a tokenizer; of its own text, what it will write."""
    monkeypatch.setattr("requant.text.sources._read_hub", None)
    source = tiny_folder("llama")
    assert windows_there(source, recipe_with("some/set", of_its_own=True)) == (math.inf, math.inf)
    assert windows_there(source, recipe_with(tmp_path / "gone.txt", of_its_own=False)) == (math.inf, math.inf)
    here = recipe_with(tiny_text_file, of_its_own=True)
    shutil.copy(source / "config.json", tmp_path)
    assert windows_there(tmp_path, here) == (math.inf, math.inf)
    monkeypatch.setattr("requant.pipeline.preparation.texts.READ", 10)
    assert windows_there(source, here) == (math.inf, math.inf)
    itself = recipe_with("self", of_its_own=False)
    assert windows_there(source, itself) == (4500, pytest.approx(500 * 24 / 32))
    assert len(outline(str(source), itself).train_windows) == 4500


def test_a_plan_refuses_a_text_without_a_window(tiny_folder, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a few words")
    with pytest.raises(TextError, match=r"text.txt holds \d+ tokens and one window needs 24"):
        outline(str(tiny_folder("llama")), recipe_with(tmp_path / "text.txt", of_its_own=True))
