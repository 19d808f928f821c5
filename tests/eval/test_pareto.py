"""The picture of files: what dominates what, and that ours are on the front."""

from pathlib import Path

import pytest

from eval.markdown import RESULTS
from eval.pareto import OURS, PEER, File, files, files_table


@pytest.mark.parametrize(
    ("other", "dominated"),
    [
        ({"megabytes": 11.0, "kl": 0.2}, True),
        ({"megabytes": 10.0, "kl": 0.1}, False),
        ({"megabytes": 9.0, "kl": 0.2}, False),
        ({"megabytes": 11.0, "kl": 0.2, "tokens_per_s": 300.0}, False),
        ({"megabytes": 11.0, "kl": 0.2, "tokens_per_s": 100.0}, True),
    ],
)
def test_better_in_one_way_and_worse_in_none(other: dict[str, float], dominated: bool) -> None:
    file = File(program=PEER, label="a", megabytes=10.0, kl=0.1, tokens_per_s=200.0)
    assert file.dominates(File(program=OURS, label="b", **other)) == dominated


def test_no_file_of_ours_is_dominated_by_a_peers() -> None:
    found = files(RESULTS)
    ours, theirs = ([file for file in found if file.program == program] for program in (OURS, PEER))
    assert {"--bits 2", "--bits 3", "--bits 4"} < {file.label for file in ours}
    assert [file for file in ours if any(other.dominates(file) for other in theirs)] == []
    assert sum(any(file.dominates(other) for file in ours) for other in found) >= 10


def test_without_results_there_is_nothing(tmp_path: Path) -> None:
    assert files(tmp_path) == [] and files_table(tmp_path) == ""
