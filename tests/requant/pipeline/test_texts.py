"""Texts that nobody named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from requant.errors import TextError
from requant.pipeline.texts import calibration_text, evaluation_text
from requant.recipe.schema import Recipe


def test_an_unreachable_default_says_why_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(key: str, _field: str) -> Iterator[str]:
        raise TextError(f"{key} did not come")
        yield

    monkeypatch.setattr("requant.text.sources._read_hub", unreachable)
    reason = r"did not come\. It is read because no --calibration was given\."
    for read, split in ((calibration_text, "train"), (evaluation_text, "test")):
        with pytest.raises(TextError, match=f"wikitext-2-raw-v1:{split} {reason}"):
            read(None, Recipe(), [])
    with pytest.raises(TextError, match=r"mine did not come$"):
        calibration_text(None, Recipe(), ["mine"])
    (tmp_path / "text.txt").write_text("some words")
    assert evaluation_text(None, Recipe(), [str(tmp_path / "text.txt")]) is None  # its last tenth is held out
