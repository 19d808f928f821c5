"""Licence and languages of the original's model card, however it is written, or a warning that they are lost."""

from pathlib import Path

import pytest

from requant.report.summary import terms


@pytest.mark.parametrize(
    "card",
    [
        "---\nlicense: mit\nlanguage: [en]\n---\n# x\n",
        "---\r\nlicense: mit\r\nlanguage: [en]\r\n---\r\n# x\r\n",  # of an editor on Windows
        "\ufeff---\nlicense: mit\nlanguage:\n- en\n---",
        "\n--- \nlicense: mit\nlanguage: [en]\nother: a --- b\n---\n",
    ],
    ids=["plain", "crlf", "bom", "spaces"],
)
def test_they_are_taken_over(card: str, tmp_path: Path, caplog) -> None:
    (tmp_path / "README.md").write_bytes(card.encode())
    assert terms(tmp_path) == {"license": "mit", "language": ["en"]} and not caplog.messages


def test_norwegian_is_a_language(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlanguage: [en, no]\n---\n")
    assert terms(tmp_path) == {"language": ["en", "no"]}


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ("---\nlicense: mit\nlicense: x\n---\n", "the key license twice in one place"),
        ("---\nlicense: [\n---\n", "while parsing"),
        ("---\n- license: mit\n---\n", "no mapping of keys to values"),
    ],
)
def test_a_card_that_cannot_be_read_is_warned_of(card: str, reason: str, tmp_path: Path, caplog) -> None:
    (tmp_path / "README.md").write_text(card)
    assert terms(tmp_path) == {}
    assert reason in caplog.text and "licence and languages are not taken over" in caplog.text


@pytest.mark.parametrize("card", [None, "# No metadata\n", "---\n---\n"])
def test_a_card_without_metadata_is_nothing_to_say_of(card: str | None, tmp_path: Path, caplog) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert terms(tmp_path) == {} and not caplog.messages
