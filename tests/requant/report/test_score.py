import errno
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import requant
from requant.errors import OutputError, RecipeError, WriteError
from requant.models.loading import load_model
from requant.models.targets import find_linears
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Recipe
from requant.report import score

RECIPE = Recipe(
    mode="dense",
    method="rtn",
    quantizer=METHODS["rtn"].config(bits=3),
    calibration=Calibration(num_samples=4, seq_len=32),
    evaluation=Evaluation(context=32),
)


def test_scores_on_disk_add_up_to_the_table(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    source = str(tiny_folder("llama"))
    found = requant.score(source, RECIPE, tiny_text_file, output=tmp_path / "deep" / "out")
    assert re.fullmatch(r"Sensitivities\(\d+ matrices, measured dF -?\d+\.\d{4}\)", repr(found))
    folder = tmp_path / "deep" / "out"
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    scores = [f"{score}/model.safetensors" for score in ("gradient", "hessian", "pqi")]
    assert names == sorted([*scores, "plot.svg", "table.json"])
    rows = json.loads((folder / "table.json").read_text())
    assert rows == json.loads(json.dumps(found.rows())) and [row["block"] for row in rows] == [
        "0",
        "1",
        "model",
    ]
    targets = {target.name: target for target in find_linears(load_model(source, device="cpu", dtype="auto"))}
    for name_of_score in ("gradient", "hessian", "pqi"):
        tensors = load_file(folder / name_of_score / "model.safetensors")
        assert {name: tuple(t.shape) for name, t in tensors.items()} == {
            n: s.shape for n, s in targets.items()
        }
        assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
        total = sum(tensor.double().sum().item() for tensor in tensors.values())
        assert rows[-1][name_of_score] == pytest.approx(total)
        for block in (0, 1):
            part = sum(t.double().sum().item() for n, t in tensors.items() if targets[n].block == block)
            assert rows[block][name_of_score] == pytest.approx(part)
    assert (tmp_path / "deep").stat().st_mode & 0o077 and folder.stat().st_mode & 0o777 == 0o755
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["out"]
    assert (folder / "plot.svg").read_text().startswith("<svg")


def test_pqi_predicts_what_is_measured(trained_model, tokenizer, tiny_text_file: Path) -> None:
    recipe = Recipe(
        mode="dense",
        method="rtn",
        quantizer=METHODS["rtn"].config(bits=2),
        calibration=Calibration(num_samples=64, seq_len=32),
        evaluation=Evaluation(context=32),
    )
    found = requant.score(trained_model, recipe, tiny_text_file, tokenizer=tokenizer)
    row = found.rows()[-1]
    assert row["pqi"] == pytest.approx(row["measured"], rel=0.05)
    assert found.diagnosis.disagreement < 0.05


def test_an_output_that_exists_is_refused_before_work(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(score, "prepare", lambda *args, **kwargs: pytest.fail("worked"))
    with pytest.raises(OutputError, match="exists already"):
        requant.score("demo", RECIPE, output=tmp_path)


@pytest.mark.parametrize(
    "option",
    [{"mode": "best"}, {"sensitivity": "pqi"}, {"finetune_steps": 9}, {"own_windows": 9}, {"eval_text": "x"}],
)
def test_options_that_would_change_nothing_are_refused(option, monkeypatch) -> None:
    monkeypatch.setattr(score, "prepare", lambda *args, **kwargs: pytest.fail("worked"))
    with pytest.raises(RecipeError, match=f"{next(iter(option))} has no meaning for score"):
        requant.score("demo", RECIPE, **option)


def test_the_mode_that_it_has_is_no_contradiction(monkeypatch) -> None:
    def prepared(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(score, "prepare", prepared)
    with pytest.raises(InterruptedError):
        requant.score("demo", RECIPE, mode="dense")


def test_a_full_disk_leaves_nothing(tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(score, "write_shards", full)
    with pytest.raises(
        WriteError, match=r"out cannot be written \(No space left on device\); free some space"
    ):
        requant.score(str(tiny_folder("llama")), RECIPE, tiny_text_file, output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
