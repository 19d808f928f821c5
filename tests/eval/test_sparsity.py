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
        (file,) = (file for file in out.iterdir() if ("-part" in file.stem) == ("part" in given))
        return json.loads(file.read_text())["rows"]

    return run


def test_a_row_is_measured_once(study, monkeypatch, capsys) -> None:
    (first,) = study(only=["magnitude"])
    assert first["bits_by_part"]["codes"] == 8 and first["bits_per_weight"] == pytest.approx(9, abs=0.1)
    assert first["training_tokens"] == 0
    rows = study(only=["magnitude", "magnitude, ast*distilled", DISTILLED])
    assert [row["label"] for row in rows] == ["magnitude", DISTILLED, ON_TEXT] and rows[0] == first
    assert "magnitude                        is measured already" in capsys.readouterr().out
    assert rows[1]["kl"] != rows[2]["kl"] and all(math.isfinite(row["kl"]) for row in rows)
    assert rows[1]["training_tokens"] == 192 and len(rows[1]["flip_rates"]) == 1
    monkeypatch.setattr(sparsity, "sparse", None)  # nothing is left to do
    assert study(only=["magnitude", DISTILLED, ON_TEXT])[0] == first


def test_parts_hold_what_the_whole_file_lacks_and_are_joined_in_the_order_of_the_table(
    study, tmp_path
) -> None:
    study(only=["wanda"])
    (part,) = study(only=["magnitude", "wanda"], part=1)
    assert part["label"] == "magnitude" and len(study(only=["wanda"])) == 1
    folder = tmp_path / "results"
    (file,) = folder.glob("*part1.json")
    whole = file.with_name(file.name.replace("-part1", ""))
    elsewhere = json.loads(file.read_text()) | {"device": "another"}
    file.write_text(json.dumps(elsewhere))
    study_name = Path(whole.stem.removeprefix("sparsity-"))
    sparsity.main(model=study_name, out=folder, join=True)
    assert list(folder.iterdir()) == [whole]
    magnitude, wanda = json.loads(whole.read_text())["rows"]
    assert magnitude["environment"]["device"] == "another" and "environment" not in wanda
    assert magnitude | part == magnitude and (part["label"], wanda["label"]) == ("magnitude", "wanda")
    with pytest.raises(typer.BadParameter, match="has no parts of sparsity-"):
        sparsity.main(model=study_name, out=folder, join=True)
    file.write_text(json.dumps(elsewhere | {"protocol": {}}))
    with pytest.raises(typer.BadParameter, match=r"part1\.json has another protocol: delete it"):
        sparsity.main(model=study_name, out=folder, join=True)


def test_a_row_of_other_settings_is_measured_again_and_another_protocol_refused(study, tmp_path) -> None:
    (short,) = study(only=[DISTILLED])
    (file,) = (tmp_path / "results").iterdir()
    older = json.loads(file.read_text())
    del older["rows"][0]["recipe"]["finetune"]["blockwise"]  # as before there was such a setting
    older["model"]["fingerprint"] = "by other versions"
    file.write_text(json.dumps(older))
    assert study(only=[DISTILLED])[0] == older["rows"][0]
    (longer,) = study(only=[DISTILLED], steps=4)
    assert (short["training_tokens"], longer["training_tokens"]) == (192, 256)
    with pytest.raises(typer.BadParameter, match="is of another protocol: delete it, or give another --out"):
        study(only=[DISTILLED], seq_len=16)
    with pytest.raises(typer.BadParameter, match="no row has that label; there are: magnitude, wanda"):
        study(only=["gptq"])
