"""`eval.sparsity` goes on where it stopped, and says when a file is of another protocol."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer

from eval import sparsity
from eval.common import CALIBRATION, SECOND, TEST

DISTILLED, ON_TEXT = "magnitude, ast", "magnitude, ast, not distilled"


@pytest.fixture
def study(tiny_folder, tiny_text_file: Path, tmp_path: Path):
    """`study(**options)`: the rows after a run on a tiny model."""
    data, out = tmp_path / "data", tmp_path / "results"
    data.mkdir()
    for name in (CALIBRATION, TEST, SECOND):
        (data / name).write_text(tiny_text_file.read_text())

    def run(**options: Any) -> list[dict[str, Any]]:
        given: dict[str, Any] = {
            "num_samples": 8,
            "seq_len": 32,
            "windows": 2,
            "steps": 3,
            "tokens_per_step": 64,
        } | options
        sparsity.main(model=tiny_folder("llama"), data=data, out=out, device="cpu", **given)
        (file,) = out.iterdir()
        return json.loads(file.read_text())["rows"]

    return run


def test_a_row_is_measured_once(study, monkeypatch, capsys) -> None:
    (first,) = study(only=["magnitude"])
    assert first["bits_by_part"]["codes"] == 8 and first["bits_per_weight"] == pytest.approx(9, abs=0.1)
    assert first["training_tokens"] == 0
    rows = study(only=["magnitude", "magnitude, ast*distilled", DISTILLED])
    assert [row["label"] for row in rows] == ["magnitude", DISTILLED, ON_TEXT] and rows[0] == first
    assert "magnitude                        is in sparsity-" in capsys.readouterr().out
    assert rows[1]["kl"] != rows[2]["kl"] and all(math.isfinite(row["kl"]) for row in rows)
    assert rows[1]["training_tokens"] == 192 and len(rows[1]["flip_rates"]) == 1
    monkeypatch.setattr(sparsity, "sparse", None)  # nothing is left to do
    assert study(only=["magnitude", DISTILLED, ON_TEXT])[0] == first


def test_a_row_of_other_settings_is_measured_again_and_another_protocol_refused(study) -> None:
    (short,) = study(only=[DISTILLED])
    (longer,) = study(only=[DISTILLED], steps=4)
    assert (short["training_tokens"], longer["training_tokens"]) == (192, 256)
    with pytest.raises(typer.BadParameter, match="is of another protocol: delete it, or give another --out"):
        study(only=[DISTILLED], seq_len=16)
    with pytest.raises(typer.BadParameter, match="no row has that label; there are: magnitude, wanda"):
        study(only=["gptq"])
