"""The kernels on the CPU, by Triton's interpreter, which is chosen when Triton is imported: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


SCRIPTS = (
    "interpret.py",
    "emulate_trellis.py",
    "emulate_experts_prefill.py",
    "emulate_gemv_mma.py",
)  # a half or a third of the cases by default (`case_selection.py`)


@pytest.mark.parametrize(
    "command",
    [
        *((script,) for script in SCRIPTS[:3]),  # PTX models test the last one's kernels too
        *(pytest.param((script, "all"), marks=pytest.mark.slow) for script in SCRIPTS),
    ],
    ids=" ".join,
)
def test_kernels_in_the_interpreter(command: tuple[str, ...]) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1] / "kernels"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, here / command[0], *command[1:]],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
