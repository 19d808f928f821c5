from pathlib import Path

import pytest


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default outputs go to the working directory."""
    monkeypatch.chdir(tmp_path)
