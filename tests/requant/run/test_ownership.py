"""The newest run of an output goes on, an older one stops, where locks do not keep them apart."""

import json
from pathlib import Path

import pytest
from filelock import FileLock

from requant.errors import OutputError, RequantError
from requant.run.ownership import claim, owner_of
from requant.run.workspace import Workspace

KEY = "ab" * 32


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", refuses)


@pytest.mark.usefixtures("without_locks")
def test_the_older_of_two_runs_stops(tmp_path: Path) -> None:
    older, newer = (Workspace(tmp_path / "w", resume=True) for _ in range(2))
    older.put("linear", KEY, value=1)
    assert newer.get("linear", KEY).value == 1
    for attempt in (
        lambda: older.put("linear", KEY, value=2),
        lambda: older.discard("linear", KEY),
        older.check,
        older.remove,
    ):
        with pytest.raises(
            RequantError, match=r"another run has taken over .*w \(process \d+ on .*\); this one"
        ) as error:
            attempt()
        assert error.value.exit_code == 1
    assert newer.get("linear", KEY).value == 1  # left alone
    newer.put("linear", KEY, value=3)
    newer.remove()
    assert not (tmp_path / "w").exists()
    with pytest.raises(RequantError, match="another run has finished it, or it was deleted; this one stops"):
        older.put("linear", KEY, value=4)
    assert not (tmp_path / "w").exists()


def test_an_owner_says_how_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert owner_of(tmp_path) is None
    claimed = claim(tmp_path, ["quantize", "--bits", "3"])
    assert owner_of(tmp_path) == claimed
    assert (claimed.arguments, claimed.started_in) == (["quantize", "--bits", "3"], str(tmp_path))
    assert claim(tmp_path, None).token != claimed.token
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


GOOD = {"token": "a", "process": 1, "host": "h", "since": "s", "arguments": ["quantize"], "started_in": "d"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps(GOOD | {"more": 1}),
        json.dumps(GOOD | {"arguments": "quantize"}),
        json.dumps(GOOD | {"arguments": [1]}),
        json.dumps(GOOD | {"arguments": {"a": 1}}),
        json.dumps(GOOD | {"started_in": 3}),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(OutputError, match=r"run\.json is damaged; repeat that run's arguments"):
        owner_of(tmp_path)
