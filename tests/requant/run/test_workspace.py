import errno
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout
from torch import nn

from requant.errors import OutputError, WriteError
from requant.run import workspace
from requant.run.workspace import Made, Workspace, digest, model_digest

KEY = "ab" * 32


def test_results_come_back(tmp_path: Path) -> None:
    kept = Workspace(tmp_path / "w")
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(4, dtype=torch.uint8),
        "empty": torch.zeros(0, 2, dtype=torch.int32),
        "turned": torch.randn(4, 3).T,
    }
    kept.put("linear", KEY, tensors=tensors, value={"x": [1, 2.5, None]})
    kept.put("mean-scores", KEY, value=0.1)
    for again in (kept, Workspace(tmp_path / "w", resume=True)):
        found = again.get("linear", KEY)
        assert found is not None and found.value == {"x": [1, 2.5, None]}
        assert found.tensors.keys() == tensors.keys()
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
        assert again.get("mean-scores", KEY).value == 0.1
        assert again.get("linear", "cd" * 32) is None and again.get("temperature", KEY) is None


def test_without_resume_it_starts_over(tmp_path: Path) -> None:
    Workspace(tmp_path / "w").put("linear", KEY, value=1)
    assert Workspace(tmp_path / "w").get("linear", KEY) is None
    assert Workspace(tmp_path / "w", resume=True).get("linear", KEY) is None  # cleared by the run before


def test_a_second_run_keeps_out_while_the_first_one_lives(tmp_path: Path) -> None:
    other = FileLock(tmp_path / "w.lock")  # what another process would hold
    with other, pytest.raises(OutputError, match="another run is writing"):
        Workspace(tmp_path / "w").put("linear", KEY, value=1)
    assert not (tmp_path / "w").exists()
    kept = Workspace(tmp_path / "w")
    kept.put("linear", KEY, value=1)
    with pytest.raises(Timeout):
        other.acquire(timeout=0)
    kept.remove()
    assert list(tmp_path.iterdir()) == []
    with other:  # free again
        pass


def test_a_folder_is_reserved_before_anything_is_made_in_it(tmp_path: Path) -> None:
    other = FileLock(tmp_path / "w.lock")
    with Workspace(tmp_path / "w").reserved():
        assert not (tmp_path / "w").exists()
        with pytest.raises(Timeout):
            other.acquire(timeout=0)
    with pytest.raises(KeyError), Workspace(tmp_path / "w").reserved():
        raise KeyError  # a model that cannot be loaded
    assert list(tmp_path.iterdir()) == []
    with Workspace(tmp_path / "absent" / "w").reserved():
        assert list(tmp_path.iterdir()) == []
    kept = Workspace(tmp_path / "w")
    with kept.reserved():
        kept.put("linear", KEY, value=1)
        with kept.reserved():  # by this run itself
            pass
    with pytest.raises(Timeout):
        other.acquire(timeout=0)
    kept.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_run_at_work_is_found_before_any_is_started(tmp_path: Path) -> None:
    refused = pytest.raises(OutputError, match="another run is writing")
    with FileLock(tmp_path / "w.lock"), refused, Workspace(tmp_path / "w").reserved():
        pytest.fail("it was taken")
    (tmp_path / "w.lock").touch()  # left by a run that was killed
    with pytest.raises(KeyError), Workspace(tmp_path / "w").reserved():
        raise KeyError
    assert (tmp_path / "w.lock").exists()
    Workspace(tmp_path / "w").put("linear", KEY, value=1)


def test_a_command_that_never_works_touches_nothing(tmp_path: Path) -> None:
    Workspace(tmp_path / "w").put("linear", KEY, value=1)
    Workspace(tmp_path / "w").remove()
    Workspace(tmp_path / "new")
    assert Workspace(tmp_path / "w", resume=True).get("linear", KEY).value == 1
    assert not (tmp_path / "new").exists()


def test_nothing_is_kept_without_a_folder() -> None:
    none = Workspace(None)
    none.put("linear", KEY, value=1)
    assert none.get("linear", KEY) is None
    none.remove()


def test_remove(tmp_path: Path) -> None:
    kept = Workspace(tmp_path / "w")
    kept.put("linear", KEY, value=1)
    kept.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["thesis.txt", "model-00001-of-00002.safetensors", "folder"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_somebody_else_is_not_deleted(tmp_path: Path, name: str, resume: bool) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / name).write_text("precious")
    with pytest.raises(
        OutputError, match=f"holds {name}, which no run of requant wrote; move that folder away"
    ):
        Workspace(tmp_path / "w", resume=resume).get("linear", KEY)
    assert (tmp_path / "w" / name).read_text() == "precious"


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100])
def test_a_damaged_result_is_made_again(tmp_path: Path, damage: bytes, caplog) -> None:
    Workspace(tmp_path / "w").put("linear", KEY, tensors={"a": torch.ones(8)}, value=1)
    file = next((tmp_path / "w").glob("linear-*"))
    file.write_bytes(damage)
    kept = Workspace(tmp_path / "w", resume=True)
    assert kept.get("linear", KEY) is None
    assert f"{file} is damaged" in caplog.text
    kept.put("linear", KEY, value=2)
    assert kept.get("linear", KEY).value == 2


def test_tensors_are_written_as_they_are(tmp_path: Path) -> None:
    """Of any dtype and shape, transposed or empty, there or yet to be made."""
    tensors = {
        "odd": torch.arange(3, dtype=torch.int8),
        "count": torch.tensor(5.5),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "long": torch.tensor([1, 2**40]),
        "empty": torch.zeros(0, 4),
        "mask": torch.tensor([True, False, True]),
    }
    kept = Workspace(tmp_path / "w")
    for making in (False, True):
        kept.put(
            "linear", KEY, tensors={n: Made.of(t) if making else t for n, t in tensors.items()}, value=[1]
        )
        found = kept.get("linear", KEY)
        assert found.value == [1] and found.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor)


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_all_ranks_make_all_tensors(tmp_path: Path, monkeypatch, writes: bool, full: bool) -> None:
    """In one order, whoever writes, and although the disk is full: each waits for the others."""
    made: list[str] = []

    def making(name: str, tensor: torch.Tensor) -> Made:
        return Made(spec=Made.of(tensor).spec, make=lambda: made.append(name) or tensor)

    def on_a_full_disk(path, specs, tensors, metadata) -> None:
        next(tensors)
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    if full:
        monkeypatch.setattr(workspace, "write_as_made", on_a_full_disk)
    kept = Workspace(tmp_path / "w")
    tensors = {"b": torch.ones(2), "c": torch.ones(3, dtype=torch.float16), "a": torch.ones(4)}
    with pytest.raises(OutputError) if full and writes else nullcontext():
        kept.put(
            "linear", KEY, tensors={n: making(n, t) for n, t in tensors.items()}, rank=0 if writes else 1
        )
    assert made == ["a", "b", "c"]
    assert (kept.get("linear", KEY) is not None) == (writes and not full)


def test_what_a_killed_run_was_writing_does_not_count(tmp_path: Path, monkeypatch) -> None:
    def killed(path, specs, tensors, metadata) -> None:
        Path(path).write_bytes(b"half")
        raise SystemExit

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(workspace, "write_as_made", killed)
        Workspace(tmp_path / "w").put("linear", KEY, value=1)
    kept = Workspace(tmp_path / "w", resume=True)
    assert kept.get("linear", KEY) is None
    assert [path.name for path in (tmp_path / "w").rglob("*") if path.is_file()] == ["run.json"]
    kept.put("linear", KEY, value=2)
    assert kept.get("linear", KEY).value == 2


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    kept = Workspace(tmp_path / "w")

    def full(path, specs, tensors, metadata) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(workspace, "write_as_made", full)
    with pytest.raises(
        OutputError, match=r"cannot be written \(No space left on device\); free some space and run again"
    ):
        kept.put("linear", KEY, value=1)
    assert [path.name for path in (tmp_path / "w").rglob("*") if path.is_file()] == ["run.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OutputError, match=r"cannot be made \((File exists|Not a directory)\); choose another --output"
    ):
        Workspace(tmp_path / "file" / "w").get("linear", KEY)


@pytest.mark.parametrize(
    ("resume", "kind", "message"),
    [
        (
            True,
            WriteError,
            "cannot be written (No space left on device); free some space and run again with --resume.",
        ),
        (False, OutputError, "cannot be made (No space left on device); choose another --output."),
    ],
)
def test_a_run_that_finds_a_full_disk(
    tmp_path: Path, monkeypatch, resume: bool, kind: type[OutputError], message: str
) -> None:
    """One that goes on is not sent to another output, where it would begin anew."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(workspace, "claim", full)
    with pytest.raises(OutputError) as raised:
        Workspace(tmp_path / "w", resume=resume).get("linear", KEY)
    assert type(raised.value) is kind and str(raised.value).endswith(message)


def test_digest_tells_apart_what_differs() -> None:
    ones = torch.ones(2, 3)
    parts = [
        (1, 23),
        (12, 3),
        ("1", 23),
        (0.1,),
        (0.1 + 1e-17, 0),
        (0.10000000000000002,),
        (None,),
        ([1, 23],),
        ({"a": 1},),
        (b"1",),
        (ones,),
        (ones.T.contiguous(),),
        (ones.double(),),
        (ones.view(6),),
        (torch.zeros(2, 3),),
        (),
    ]
    assert len({digest(*part) for part in parts}) == len(parts)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(ones.T) == digest(ones.T.contiguous())
    assert digest(torch.ones(2, 2, dtype=torch.bool)) != digest(torch.ones(2, 2, dtype=torch.uint8))
    assert digest(torch.zeros(0)) and digest(torch.tensor(1.0)) and digest(torch.ones(2).bfloat16())


def test_model_digest() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    first = model_digest(model)
    assert first == model_digest(model)
    model[0].bias.data[0] += 1e-3
    second = model_digest(model)
    model[1].running_mean += 1
    assert len({first, second, model_digest(model), model_digest(model.bfloat16())}) == 4


def test_model_digest_reads_copies_and_hashes_tied_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict(
        {"table": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False), "last": nn.Linear(5, 2)}
    )
    model["head"].weight = model["table"].weight
    hashed: list[tuple[object, ...]] = []
    expected, plain = model_digest(model), digest
    monkeypatch.setattr(workspace, "digest", lambda *parts: hashed.append(parts) or plain(*parts))
    copies = {"last.weight": model["last"].weight.detach().T.contiguous().T}
    assert model_digest(model, copies) == expected  # by their values, in whatever order they lie
    assert len(hashed) == 3 + 1 and any(parts[0] is copies["last.weight"] for parts in hashed)
    assert model_digest(model, {"last.weight": copies["last.weight"] + 1}) != expected
    model["head"].weight = nn.Parameter(model["table"].weight.detach().clone())
    assert model_digest(model) == expected


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch, caplog) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise NotImplementedError

    kept = Workspace(tmp_path / "w")
    monkeypatch.setattr(kept.lock, "acquire", refuses)
    kept.put("linear", KEY, value=1)
    assert "cannot be locked" in caplog.text and kept.get("linear", KEY).value == 1
    kept.remove()
    assert not (tmp_path / "w").exists()
