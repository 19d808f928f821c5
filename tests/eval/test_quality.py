"""The curve's own arithmetic, and one row of it on a tiny model."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import typer

from eval import plans, quality
from eval.curve_tables import (
    PHASES,
    best_ablation_table,
    best_peer,
    of_mode_best,
    quality_table,
    trained_peers_table,
)
from eval.parts import ENVIRONMENT
from requant.recipe.schema import Finetune


def test_the_peers_line_goes_through_their_points() -> None:
    assert best_peer(2.003).kl == pytest.approx(0.4599)
    assert best_peer(3.003).kl == pytest.approx(0.1163)
    assert best_peer(2.503).kl == pytest.approx(math.sqrt(0.4599 * 0.1163))
    assert 0.0301 > best_peer(4.5).kl > 0 and best_peer(4.5).mark == "~" and not best_peer(2.25).mark


def peer_row(peer: str, bits: float, kl: float) -> dict:
    found = {"name": peer, "label": f"{peer} in form", "peer": peer, "bits": round(bits), "seed": 0}
    found |= {"recipe": {"finetune": {"steps": 300, "rounds": 6}}}
    return found | {"bits_per_weight": bits, "perplexity": 25.0, "kl": kl, "second": {"kl": kl}}


def test_a_peer_that_trains_takes_the_place_of_one_that_does_not(tmp_path: Path) -> None:
    trained = [peer_row("A", 2.1, 0.3), peer_row("A", 3.1, 0.2), peer_row("B", 2.5, 0.01)]
    assert (best_peer(2.1, trained).name, best_peer(2.1, trained).kl) == ("A", 0.3)
    assert best_peer(3.003, trained).name == "QTIP-3INST"  # 0.116 for 0.21; one point of B makes no line
    assert not best_peer(4.0, trained).mark  # measured there, and A is not
    # rows of more steps than the peers take, or of more text, are no match for them
    ours = [
        {key: value for key, value in peer_row(name, bits, kl).items() if key != "peer"}
        | {"label": name, "bits": bits, "recipe": {"finetune": {"steps": steps, "rounds": 6}}}
        for name, bits, kl, steps in (
            ("text-only", 2.1, 0.2, 300),
            ("text-only", 3.1, 0.05, 300),
            ("text-only", 2.2, 0.01, 301),
            ("text-only", 3.2, 0.01, 301),
            ("best", 2.4, 0.01, 300),
        )
    ]
    (tmp_path / "quality-bench-32m.json").write_text(json.dumps({"rows": [*ours, *trained]}))
    assert "| 2.1* | 2.100 | 25.00 | 0.2000 | 0.2000 |  | A | 0.3000 | 0.67 |" in quality_table(tmp_path)
    lines = trained_peers_table(tmp_path).splitlines()
    assert len(lines) == 5 and lines[3].startswith(
        "| bench-32m | B in form | 1800 | 2.500 | 25.00 | 0.0100 |"
    )
    assert lines[3].endswith(f"| {0.2 * 0.25**0.4:.4f} | {20 * 0.25**0.4:.2f} |")  # between 0.2 and 0.05
    assert "in form" not in best_ablation_table(tmp_path)
    for row in trained:  # as long as none of ours
        row["recipe"] = {"finetune": {"steps": 302, "rounds": 6}}
    (tmp_path / "quality-bench-32m.json").write_text(json.dumps({"rows": [*ours, *trained]}))
    assert all(line.endswith("|  |  |") for line in trained_peers_table(tmp_path).splitlines()[2:])


def test_rows_are_named_by_plan_bits_and_seed() -> None:
    assert quality.parse("best:2.25:1") == ("best", 2.25, 1)
    assert quality.parse("codes:3") == ("codes", 3.0, 0)
    with pytest.raises(typer.BadParameter, match="there are: best"):
        quality.parse("better:2")
    for row in (*plans.CURVE, *plans.ABLATION, *plans.PEERS_THAT_TRAIN):
        quality.parse(row)


def test_peers_that_train_have_the_steps_of_mode_best() -> None:
    """In a block as in all: QTIP trains after three kinds of a block and at the end, EfficientQAT once and at the end."""
    best = plans.PLANS["best"].finetune
    for name, plan in plans.PLANS.items():
        if plan.peer:
            assert PHASES[name] * plan.finetune.steps == best.rounds * best.steps, name


def test_parts_are_joined_and_newer_rows_win(tmp_path: Path) -> None:
    def write(name: str, device: str, **kl_of_bits: float) -> None:
        rows = [
            {"name": "best", "bits": int(bits[1:]), "seed": 0, "kl": kl} for bits, kl in kl_of_bits.items()
        ]
        header = {**dict.fromkeys(ENVIRONMENT, ""), "device": device, "protocol": "P"}
        (tmp_path / name).write_text(json.dumps({**header, "rows": rows}))

    write("quality-m.json", "x", _2=0.5, _3=0.1)
    write("quality-m-part0.json", "y", _2=0.3)
    quality.main(model=tmp_path / "m", out=tmp_path, join=True)
    found = json.loads((tmp_path / "quality-m.json").read_text())
    assert [(row["bits"], row["kl"]) for row in found["rows"]] == [(2, 0.3), (3, 0.1)]
    assert found["rows"][0]["environment"]["device"] == "y" and "environment" not in found["rows"][1]
    assert not list(tmp_path.glob("*part*"))


def test_a_budget_without_the_default_falls_back_to_the_earlier_one(tmp_path: Path) -> None:
    def row(name: str, bits: float, kl: float) -> dict:
        found = {
            "name": name,
            "label": name,
            "bits": bits,
            "bits_per_weight": bits,
            "seed": 0,
            "perplexity": 25.0,
        }
        return found | {"kl": kl, "second": {"kl": kl}}

    rows = [row("no-hidden", 2, 0.25), row("no-hidden", 3, 0.0711), row("best", 3, 0.0677)]
    assert [(r["name"], r["bits"]) for r in of_mode_best(rows)] == [("no-hidden", 2), ("best", 3)]
    (tmp_path / "quality-bench-32m.json").write_text(json.dumps({"rows": rows}))
    table = quality_table(tmp_path)
    assert "| 2* | 2.000 |" in table and "| 3 | 3.000 |" in table and "0.0711" not in table


def test_a_row_is_measured_and_leaves_the_original(tiny_study, tmp_path, monkeypatch) -> None:
    tuning = Finetune(steps=3, tokens_per_step=128, val_windows=1, eval_every=2)
    plan = dataclasses.replace(plans.PLANS["codebooks"], finetune=tuning)
    monkeypatch.setitem(plans.PLANS, "codebooks", plan)
    study = tiny_study(tuning)
    before = {name: p.clone() for name, p in study.prepared.model.named_parameters()}
    row = quality.measure(study, "codebooks", 4.0, 0)
    assert row["bits_per_weight"] <= 4.0 and row["kl"] > 0 and row["training_tokens"] > 4 * 32
    assert all((before[name] == p).all() for name, p in study.prepared.model.named_parameters())
    results = tmp_path / "results"
    results.mkdir()
    (results / "quality-bench-32m.json").write_text(
        json.dumps({"rows": [{**row, "name": "best", "bits": 2}]})
    )
    assert f"{row['kl']:.4f}" in quality_table(results) and f"{row['kl']:.4f}" in best_ablation_table(results)


def test_an_older_default_stands_in_where_the_newest_was_not_measured() -> None:
    def row(name: str, bits: float, steps: int, rounds: int = 6) -> dict:
        return {"name": name, "bits": bits, "recipe": {"finetune": {"steps": steps, "rounds": rounds}}}

    rows = [
        row("best", 2, 1000), row("300-steps", 2, 300), row("two-passes", 2, 300), row("two-passes", 3, 300),
        row("no-hidden", 3, 450, 4), row("no-hidden", 4, 450, 4), row("600-steps", 5, 600),
    ]  # fmt: skip
    names = [(row["name"], row["bits"]) for row in of_mode_best(rows)]
    assert names == [("best", 2), ("two-passes", 3), ("no-hidden", 4)]
    names = [(row["name"], row["bits"]) for row in of_mode_best(rows, steps=1800)]
    assert names == [("300-steps", 2), ("two-passes", 3), ("no-hidden", 4)]
