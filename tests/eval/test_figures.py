"""The figures of the pages show what the results say."""

import json
import re
import shutil
from pathlib import Path

import pytest

from eval.figures import DRAWN, FIGURES, RESULTS, digest, nodes, svg, totals

MEASURED = [name for name, (gather, _) in DRAWN.items() if gather(RESULTS)]


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_up_to_date(name: str) -> None:
    assert (FIGURES / f"{name}.svg").exists() == (name in MEASURED), "run `python -m eval.figures`"


@pytest.mark.parametrize("name", MEASURED)
def test_figures_have_the_numbers_of_the_results(name: str) -> None:
    committed = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    assert f"numbers {digest(DRAWN[name][0](RESULTS))}" in committed, "run `python -m eval.figures`"


@pytest.mark.parametrize("name", MEASURED)
def test_a_figure_carries_its_numbers_and_follows_them(name: str, tmp_path: Path) -> None:
    drawn = svg(name)
    assert drawn == svg(name) and drawn.startswith("<?xml") and "<dc:date>" not in drawn
    assert svg(name, tmp_path) == "", "no results, no figure"
    for file in RESULTS.glob("paper_tables-*.json"):
        shutil.copy(file, tmp_path)
    changed = tmp_path / "paper_tables-bench-32m.json"
    text = changed.read_text()
    changed.write_text(re.sub(r'("(?:pqi|error_percent)": )(-?)\d', r"\g<1>\g<2>9", text))
    assert svg(name, tmp_path) != drawn


def test_figures_of_sparsity_follow_their_results(tmp_path: Path) -> None:
    rows = [
        {"bits_per_weight": 9.0, "kl": 0.8, "training_tokens": 0},
        {"bits_per_weight": 9.0, "kl": 0.4, "training_tokens": 9},
    ]
    (tmp_path / "sparsity-bench-32m.json").write_text(json.dumps({"rows": rows}))
    shutil.copy(RESULTS / "quality-bench-32m.json", tmp_path)
    points = DRAWN["sparsity"][0](tmp_path)
    assert points["2:4, one shot"] == [(9.0, 0.8)] and points["2:4, trained"] == [(9.0, 0.4)]
    assert len(points["plain codes, mode best"]) >= 8
    row = {"n": 8192, "k": 8192, "ratio": 0.7, "tokens": 1}
    products = [row, {**row, "tokens": 1024, "ratio": 1.4}, {"n": 8192, "k": 8192, "tokens": 8}]
    (tmp_path / "semi-structured-h100.json").write_text(json.dumps({"rows": products}))
    assert DRAWN["sparse-products"][0](tmp_path) == {"8192 x 8192": [(1, 0.7), (1024, 1.4)]}
    for name in ("sparsity", "sparse-products"):
        assert svg(name, tmp_path).startswith("<?xml")


def test_stages_are_drawn_by_run(tmp_path: Path) -> None:
    """Those that were measured; what takes little time is one part."""

    def run(**seconds: float) -> dict[str, object]:
        return {"seconds": seconds}

    latest = {"one GPU": run(finetuning=400, quantize=80, loss=1, samples=2)}
    for name, rows in (
        ("1b", {"run_1b": run(finetuning=900), "gradients_overwritten": latest}),
        ("8b", {"about": {}, "run_8b_2_gpus": run(finetuning=200), "earlier": run(finetuning=300)}),
    ):
        (tmp_path / f"speed-{name}-h200.json").write_text(json.dumps(rows))
    assert DRAWN["stages"][0](tmp_path) == {
        "1B, one GPU": {"training": 400, "codes": 80, "all else": 3},
        "8B, two GPUs": {"training": 200},
    }
    assert svg("stages", tmp_path).startswith("<?xml")


def test_what_is_gathered() -> None:
    shares = totals(RESULTS)
    assert set(shares) >= {"bench-32m\n4 bits", "demo-4m\n2 bits"}
    assert all(0.9 < row["pqi"] < 1.1 for row in shares.values())
    rules = {name: passes for name, passes, _ in nodes(RESULTS)["4"]}
    assert rules["gauss2"] == 2 and rules["plain32"] == 32
