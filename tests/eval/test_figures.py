"""The figures of the pages show what the results say."""

import re
import shutil
from pathlib import Path

import pytest

from eval.figures import DRAWN, FIGURES, RESULTS, digest, nodes, svg, totals


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_up_to_date(name: str) -> None:
    committed = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    assert f"numbers {digest(DRAWN[name][0](RESULTS))}" in committed, "run `python -m eval.figures`"


@pytest.mark.parametrize("name", DRAWN)
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


def test_what_is_gathered() -> None:
    shares = totals(RESULTS)
    assert set(shares) >= {"bench-32m\n4 bits", "demo-4m\n2 bits"}
    assert all(0.9 < row["pqi"] < 1.1 for row in shares.values())
    rules = {name: passes for name, passes, _ in nodes(RESULTS)["4"]}
    assert rules["gauss2"] == 2 and rules["plain32"] == 32
