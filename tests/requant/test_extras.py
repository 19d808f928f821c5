"""The command that a missing extra is named with installs it."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from requant import extras


class Installed:
    def __init__(self, url: dict | None) -> None:
        self.url = url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.url is None else json.dumps(self.url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (None, "'requant[serve]'"),  # from an index
        ({"url": "file:///some/clone", "dir_info": {}}, "'/some/clone[serve]'"),
        ({"url": "file:///a%20b/clone", "dir_info": {}}, "'/a b/clone[serve]'"),
        ({"url": "file:///dist/requant.whl", "archive_info": {}}, "'requant[serve]'"),
        ({"url": "https://host/requant.git", "vcs_info": {}}, "'requant[serve]'"),
    ],
)
def test_an_installed_package_names_what_it_was_installed_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: dict | None, expected: str
) -> None:
    monkeypatch.setattr(extras, "SOURCES", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed(url))
    assert extras.requirement("serve") == expected


def test_a_checkout_names_itself() -> None:
    root = Path(extras.__file__).parents[1]
    assert (root / "pyproject.toml").is_file() and extras.requirement("gguf") == f"-e '{root}[gguf]'"
