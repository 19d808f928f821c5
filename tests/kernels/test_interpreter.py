"""The kernels on the CPU, by Triton's interpreter, which is chosen when Triton is imported: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "script",
    ["interpret.py", "emulate.py", "emulate_copies.py", "emulate_byte_grid.py", "emulate_spread_sums.py"],
)
def test_kernels_in_the_interpreter(script: str) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1] / "kernels"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, here / script],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
