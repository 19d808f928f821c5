import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def recomputing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`recomputing(True)`: from now on backward passes compute the blocks of every model again, as of a large one."""

    def switch(on: bool) -> None:
        monkeypatch.setattr("requant.calibration.batches.RECOMPUTE_ABOVE", 0 if on else sys.maxsize)

    return switch
