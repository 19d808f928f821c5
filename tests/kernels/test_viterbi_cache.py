"""Loops of numba are kept on disk where that is possible, and compiled where it is not: the same paths either way."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba.core.caching import CacheImpl
from requant_kernels.viterbi import cpu

SEARCH = """
import numpy as np
from requant_kernels.viterbi import cpu

g = np.random.default_rng(0)
targets, values = (g.standard_normal((size, 1)).astype(np.float32) for size in (64, 256))
paths = cpu.viterbi_paths(targets[None], values, (2,), None)
print(paths.tolist(), sum(cpu._search_batch.stats.cache_hits.values()))
"""


def searched(folder: Path, before: str = "") -> tuple[str, int]:
    """The paths, and whether the loops came from disk, in a process of its own whose numba keeps them in `folder`."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", before + SEARCH],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stderr == "", run.stderr
    paths, _, hits = run.stdout.strip().rpartition(" ")
    return paths, int(hits)


FULL = """
import os
def full(*_): raise OSError(28, "No space left on device")
os.replace = full
"""
NOWHERE = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
"""


@pytest.mark.parametrize("fails", ["folder", "disk"])
def test_a_loop_that_cannot_be_kept_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def double(x):
        return 2 * x

    if fails == "folder":
        monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
        monkeypatch.setattr("numba.core.caching.os.replace", full)
    assert cpu._compiled()(double)(3) == 6
    assert not list(tmp_path.rglob("*.nbi"))


@pytest.mark.slow
def test_loops_are_kept_and_found_again(tmp_path: Path) -> None:
    first = searched(tmp_path / "kept")
    assert first[1] == 0 and list((tmp_path / "kept").rglob("*.nbi"))
    assert searched(tmp_path / "kept") == (first[0], 1)
    for file in (tmp_path / "kept").rglob("*.nbi"):
        file.write_bytes(file.read_bytes()[:20])
    assert searched(tmp_path / "kept") == first, "files that are cut short are passed over"
    for before in (FULL, NOWHERE):
        assert searched(tmp_path / "new", before) == first
        assert not list(tmp_path.glob("new/**/*.nbi"))
