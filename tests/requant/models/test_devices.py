"""What a process took at most is its own."""

import subprocess
import sys

import pytest

CHILD = """
import torch
from requant.models.devices import peak_memory, used_memory

used, peak = used_memory(torch.device("cpu")), peak_memory(torch.device("cpu"))
larger = bytearray(100 << 20)
print(used, peak, peak_memory(torch.device("cpu")))
"""
PARENT = f"""
import subprocess, sys

larger = bytearray(1 << 30)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is what getrusage says")
def test_the_peak_is_not_that_of_a_larger_parent() -> None:
    found = subprocess.run([sys.executable, "-c", PARENT], check=True, capture_output=True, text=True).stdout
    used, peak, later = map(int, found.split())
    assert used <= peak < used + (200 << 20)
    assert (90 << 20) < later - peak < (110 << 20)
