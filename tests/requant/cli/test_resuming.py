"""`--resume OUTPUT` goes on with the arguments of the run that was interrupted, and takes no others."""

import hashlib
from pathlib import Path

import pytest

from requant.cli.resuming import COMMANDS, restored_arguments
from requant.errors import InputError, OutputError
from requant.recipe.defaults import default_sparsify_recipe
from requant.recipe.schema import Recipe
from requant.recipe.yaml_files import dump_recipe
from requant.run.ownership import claim
from requant.run.workspace import Workspace


class Stopped(BaseException):
    """As sudden as a kill, for this process."""


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch):
    """`stop_after(n)`: ends the process after the n-th result from now; 0: never."""
    put, left = Workspace.put, [0]

    def counted(self, *args, **kwargs) -> None:
        put(self, *args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            raise Stopped

    monkeypatch.setattr(Workspace, "put", counted)
    return lambda n: left.__setitem__(0, n)


@pytest.fixture
def folder(tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs are started: a model and a text have relative names there."""
    (tmp_path / "model").symlink_to(tiny_folder("llama"))
    (tmp_path / "text.txt").symlink_to(tiny_text_file)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


TEXT = ("--model", "model", "--calibration", "text.txt", "--num-samples", "2", "--seq-len", "32", "-q")
RUNS = {
    "quantize": ("--code-bits", "3", "--method", "rtn", "--mode", "dense", "--seed", "3"),
    "sparsify": ("--method", "magnitude", "--bits", "4"),
    "sweep": ("--bits", "4.5,5.5", "--method", "rtn", "--mode", "dense"),
}


def sha256(folder: Path) -> list[str]:
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.rglob("*.safetensors"))]


@pytest.mark.parametrize(
    ("command", "stop"),
    [
        ("quantize", 3),
        pytest.param("sweep", 17, marks=pytest.mark.slow),
        pytest.param("sparsify", 3, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_run_that_was_interrupted(
    cli, folder: Path, monkeypatch, stop_after, command: str, stop: int
) -> None:
    """From another folder, and with nothing but the output."""
    assert cli(command, *TEXT, *RUNS[command], "--output", "alone")[0] == 0
    stop_after(stop)
    with pytest.raises(Stopped):
        cli(command, *TEXT, *RUNS[command], "--output", "out")
    stop_after(0)
    monkeypatch.chdir(folder / "elsewhere")
    code, out, error = cli(command, "--resume", "../out", "--json")
    assert (code, error) == (0, "") and out.startswith("{")
    assert sha256(folder / "out") == sha256(folder / "alone") != []
    assert sorted(path.name for path in folder.iterdir()) == [
        "alone",
        "elsewhere",
        "model",
        "out",
        "text.txt",
    ]
    assert not list((folder / "out").rglob("run.json"))
    done = f"{folder / 'out'} is finished; nothing is left to do.\n"
    assert cli(command, "--resume", folder / "out") == (0, done, "")


def test_the_arguments_come_back_with_the_output_where_it_is_now(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moved.partial").mkdir()
    claim(tmp_path / "moved.partial", ["quantize", "--bits", "3", "--output", "out"])
    ends = ["--resume", "--output", str(tmp_path / "moved")]
    again = restored_arguments(["quantize", "--resume", "moved", "--gpus", "2", "-q"])
    assert again == ["quantize", "--bits", "3", "--output", "out", *ends, "--gpus", "2", "-q"]
    claim(tmp_path / "moved.partial", ["quantize", "--bits", "3", *ends])
    assert restored_arguments(["quantize", "--log-file", "x", "--resume", "moved/"]) == [
        "quantize", "--bits", "3", *ends, "--log-file", str(tmp_path / "x"),
    ]  # fmt: skip
    again = restored_arguments(["quantize", "--resume", "moved", "--log-file=y"])
    assert again[-1] == f"--log-file={tmp_path / 'y'}"  # beside the command, wherever the run was started


@pytest.mark.parametrize("command", ["quantize", "sweep", "sparsify"])
def test_what_is_no_output_is_not_finished(cli, tmp_path: Path, monkeypatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("empty", "file", ""):
        code, _, error = cli(command, "--resume", name)
        assert code == 2 and f"is not the output of `requant {command}`; name the one to resume" in error


@pytest.mark.parametrize("command", COMMANDS)
def test_what_another_command_has_finished_is_not_this_ones(cli, tmp_path: Path, command: str) -> None:
    (tmp_path / "quantize").mkdir()
    (tmp_path / "quantize" / "recipe.yaml").write_text(dump_recipe(Recipe()))
    (tmp_path / "sparsify").mkdir()
    (tmp_path / "sparsify" / "recipe.yaml").write_text(
        dump_recipe(default_sparsify_recipe("demo", None, steps=0))
    )
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    for other in COMMANDS:
        folder = tmp_path / other
        code, out, error = cli(command, "--resume", folder)
        if other == command:
            assert (code, out) == (0, f"{folder} is finished; nothing is left to do.\n")
            continue
        assert (code, out) == (2, "") and error == (
            f"requant: {folder} is not the output of `requant {command}` but a finished one of `requant {other}`; name the "
            "one to resume.\n"
        )


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["quantize", "--bits", "3", "--resume"],
        ["quantize", "--resume", "--bits", "3"],
        ["eval", "--resume", "x"],
    ],
)
def test_other_commands_stay_as_they_are(words: list[str]) -> None:
    assert restored_arguments(words) == words


def test_what_does_not_go_together_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fails(*words: str) -> str:
        with pytest.raises((InputError, OutputError)) as error:
            restored_arguments(words)
        return str(error.value)

    assert fails("quantize", "--resume", "out", "--bits", "3") == (
        "`requant quantize --resume out` takes all arguments from that run: leave out --bits, or repeat them all, with "
        "--output out --resume."
    )
    assert "leave out --model=demo" in fails("quantize", "--model=demo", "-q", "--resume", "out")
    assert "there is no interrupted run of" in fails("quantize", "--resume", "out")
    (tmp_path / "out.partial").mkdir()
    claim(tmp_path / "out.partial", ["sweep", "--bits", "2,3"])
    assert fails("quantize", "--resume", "out").startswith("that run is a sweep: `requant sweep --resume ")
    claim(tmp_path / "out.partial", None)
    assert "was started from Python" in fails("quantize", "--resume", "out")
    monkeypatch.setattr("os.getcwd", lambda: str(tmp_path / "gone"))
    claim(tmp_path / "out.partial", ["quantize", "--bits", "3"])
    assert "which is not here (No such file or directory)" in fails(
        "quantize", "--resume", str(tmp_path / "out")
    )


@pytest.mark.parametrize("left", ["folder", "lock"])
@pytest.mark.parametrize("words", [("--resume", "out"), ("--code-bits", "3", "--output", "out", "--resume")])
def test_what_a_run_left_that_was_killed_at_its_very_end_goes(
    cli, tmp_path, monkeypatch, left, words
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.yaml").write_text("mode: best\n")
    if left == "folder":
        (tmp_path / "out.partial").mkdir()
        claim(tmp_path / "out.partial", ["quantize", "--code-bits", "3", "--output", "out"])
    else:
        (tmp_path / "out.partial.lock").write_text("")
    code, out, error = cli("quantize", *words)
    if len(words) == 2:
        assert (code, error) == (0, "") and "is finished" in out
    else:
        assert code == 2 and "exists already" in error
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_run_has_made_stays_beside_a_folder_of_that_name(cli, tmp_path, monkeypatch) -> None:
    """Which somebody made while it ran: it is refused, and the run goes on once it is gone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out.partial").mkdir()
    claim(tmp_path / "out.partial", ["quantize", "--code-bits", "3", "--output", "out"])
    code, _, error = cli("quantize", "--code-bits", "3", "--output", "out", "--resume")
    assert code == 2 and "exists already" in error
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.partial"}
