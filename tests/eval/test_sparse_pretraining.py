"""`eval.sparse_pretraining` trains every row once, the same twice, and goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from eval import sparse_pretraining
from eval.common import CALIBRATION


@pytest.fixture
def study(tiny_folder, tiny_text_file: Path, tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    (data / CALIBRATION).write_text(tiny_text_file.read_text())

    def run(out: str, *, part: int | None = None, **options: Any) -> list[dict[str, Any]]:
        given: dict[str, Any] = {"steps": 12, "windows_per_step": 4, "seq_len": 32, "hidden": 32, "blocks": 1}
        given |= {"seed": [0], "device": "cpu", **options}
        sparse_pretraining.main(model=tiny_folder("llama"), data=data, out=tmp_path / out, part=part, **given)
        name = "sparse-pretraining" if part is None else f"sparse-pretraining-part{part}"
        return json.loads((tmp_path / out / f"{name}.json").read_text())["rows"]

    return run


def test_rows_are_trained_once_and_alike(study, tmp_path: Path) -> None:
    rows = study("one", only=["dense", "transposable*"])
    assert [row["label"] for row in rows] == ["dense", "transposable, MVUE, dense end"]
    more = study("one", only=["dense", "s-ste"], seed=[0, 1])
    assert more[:2] == rows  # seconds too: they were not trained again
    assert [(row["label"], row["seed"]) for row in more[2:]] == [("s-ste", 0), ("dense", 1), ("s-ste", 1)]
    assert len({row["val_loss"] for row in more}) == 5 and all(row["val_loss"] < 6 for row in more)
    again = study("two", only=["s-ste"])
    assert again[0]["val_loss"] == more[2]["val_loss"] and again[0]["flip_rates"] == more[2]["flip_rates"]
    (own,) = study("one", part=3, only=["dense", "sr-ste"])  # what the whole file has is left out
    assert own["label"] == "sr-ste" and len(study("one", only=["dense"])) == 5
    sparse_pretraining.main(out=tmp_path / "one", join=True)
    joined = json.loads((tmp_path / "one" / "sparse-pretraining.json").read_text())["rows"]
    assert [(row["seed"], row["label"]) for row in joined] == [
        (0, "dense"), (0, "s-ste"), (0, "transposable, MVUE, dense end"), (0, "sr-ste"), (1, "dense"), (1, "s-ste"),
    ]  # fmt: skip
    with pytest.raises(typer.BadParameter, match="has other settings: delete it, or give another --out"):
        study("one", steps=13)


def test_too_few_steps_to_compare_masks_are_refused(study) -> None:
    with pytest.raises(typer.BadParameter, match=r"--steps 9: .* give 10 steps or more"):
        study("few", steps=9)
    assert len(study("few", steps=10, only=["s-ste"])[0]["flip_rates"]) == 1
