"""The kernels on the CPU, by Triton's interpreter, which is chosen when Triton is imported: a process of its own."""

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
        *((script,) for script in SCRIPTS[:2]),
        *(pytest.param((script, "all"), marks=pytest.mark.slow) for script in SCRIPTS),
    ],
    ids=" ".join,
)
def test_kernels_in_the_interpreter(interpreted, command: tuple[str, ...]) -> None:
    interpreted(*command)
