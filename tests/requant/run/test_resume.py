"""A run that dies goes on where it stopped, and ends with the bytes of one that was left alone."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import requant
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Detach, Evaluation, Finetune, Recipe
from requant.recipe.yaml_files import dump_recipe, load_recipe
from requant.run.workspace import Workspace

KILLED = """
import os, signal, sys
from requant.run.workspace import Workspace
from requant.cli import main
stop, put, count = int(sys.argv.pop(1)), Workspace.put, 0
def counted(self, *args, **kwargs):
    global count
    put(self, *args, **kwargs)
    count += 1
    if count == stop:
        os.kill(os.getpid(), signal.SIGKILL)
Workspace.put = counted
main()
"""
STAGES = (
    14 + 1 + 2 * (14 + 1) + 2
)  # matrices; mean scores; at two temperatures matrices and a loss; two steps


@pytest.fixture(scope="module")
def arguments(tiny_folder, tiny_text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    recipe = Recipe(
        model=str(tiny_folder("llama")),
        quantizer=METHODS["kmeans"].config(bits=3),
        calibration=Calibration(text=(str(tiny_text_file),), num_samples=2, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        detach=Detach(outlier_fraction=0.01, significant_fraction=0.01, temperatures=(0.5, 2.0), steps=2),
    )
    file = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    return ["quantize", "--recipe", str(file), "--quiet"]


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bytes of the same recipe through Python, without a workspace."""
    recipe = load_recipe(arguments[2])
    return sha256(
        requant.save(requant.quantize(recipe.model, recipe), tmp_path_factory.mktemp("undisturbed") / "out")
    )


class Stopped(BaseException):
    """As sudden as a kill, for this process."""


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch):
    """`stop_after(n, how)`: calls `how` after the n-th stored result from now; n = 0 never."""
    put = Workspace.put
    state = {"left": 0, "how": lambda: None}

    def counted(self, *args, **kwargs) -> None:
        put(self, *args, **kwargs)
        state["left"] -= 1
        if state["left"] == 0:
            state["how"]()

    monkeypatch.setattr(Workspace, "put", counted)
    return lambda n, how=None: state.update(left=n, how=how or (lambda: (_ for _ in ()).throw(Stopped())))


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the matrices that were quantized, in order; clear it between runs."""
    calls: list[tuple[int, int]] = []
    own = METHODS["kmeans"]

    def quantize(weight, *args, **kwargs):
        calls.append(tuple(weight.shape))
        return own.quantize(weight, *args, **kwargs)

    monkeypatch.setitem(METHODS, "kmeans", dataclasses.replace(own, quantize=quantize))
    return calls


@pytest.mark.slow
def test_a_killed_run_resumes(
    cli, arguments: list[str], undisturbed: str, quantized: list, tmp_path: Path
) -> None:
    """SIGKILL in the middle of the second quantization."""
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    done = 14 + 1 + 5
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(done), *arguments, "--output", str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert not output.exists() and len(list(partial.glob("*.safetensors"))) == done
    quantized.clear()
    code, _, error = cli(*arguments, "--output", output, "--resume")
    assert code == 0, error
    assert (
        len(quantized) == 2 * 14 - 5
    )  # what was left of two temperatures; the last quantization was one of them
    assert sha256(output) == undisturbed and not partial.exists()


@pytest.mark.parametrize(
    "stop",
    [STAGES - 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 14, 15, 20, STAGES - 3, STAGES))],
)
def test_wherever_it_stops(
    cli, arguments, undisturbed: str, stop_after, quantized, tmp_path: Path, stop: int
) -> None:
    output = tmp_path / "out"
    stop_after(stop)
    with pytest.raises(Stopped):
        cli(*arguments, "--output", output)
    assert not output.exists()
    quantized.clear()
    stop_after(0)
    assert cli(*arguments, "--output", output, "--resume")[0] == 0
    stored = stop - (stop > 14) - (stop > 29) - (stop > 44) - (stop > 45) - (stop > 46)
    assert len(quantized) == 42 - min(stored, 42)
    assert sha256(output) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("stop", [STAGES + 3, STAGES + 14])
def test_a_tuned_run_resumes(cli, arguments, stop_after, tmp_path: Path, stop: int) -> None:
    """Tuning ends in one result a matrix; some of them are not enough, and it is done again."""
    tuning = Finetune(steps=2, tokens_per_step=64, val_windows=2, eval_every=1)
    recipe = dataclasses.replace(load_recipe(arguments[2]), finetune=tuning)
    recipe = dataclasses.replace(recipe, calibration=dataclasses.replace(recipe.calibration, num_samples=6))
    (tmp_path / "tuned.yaml").write_text(dump_recipe(recipe))
    command = ["quantize", "--recipe", tmp_path / "tuned.yaml", "--quiet", "--output"]
    stop_after(stop)
    with pytest.raises(Stopped):
        cli(*command, tmp_path / "out")
    stop_after(0)
    assert cli(*command, tmp_path / "out", "--resume")[0] == 0
    assert cli(*command, tmp_path / "alone")[0] == 0
    assert sha256(tmp_path / "out") == sha256(tmp_path / "alone")


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped(
    cli, arguments, undisturbed: str, stop_after, tmp_path: Path
) -> None:
    """Everything between is split: inputs, gradients, scores, codes, evaluation; the bytes are those of one process."""
    stop_after(10)
    with pytest.raises(Stopped):
        cli(*arguments, "--output", tmp_path / "out")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "requant",
            *arguments,
            "--output",
            tmp_path / "out",
            "--gpus",
            "2",
            "--device",
            "cpu",
            "--resume",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("checkpoint") == 1  # one of the two prints
    assert sha256(tmp_path / "out") == undisturbed


@pytest.mark.slow
def test_one_process_goes_on_where_two_were_killed(
    cli, arguments, undisturbed: str, stop_after, tmp_path: Path
) -> None:
    """One of two processes dies, which ends the run with one sentence."""
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    run = subprocess.Popen(
        [sys.executable, "-m", "requant", *arguments, "--output", output, "--gpus", "2", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while run.poll() is None and not list(partial.glob("linear-*.safetensors")):
        time.sleep(0.01)
    ranks = {child.environ().get("RANK"): child for child in psutil.Process(run.pid).children()}
    ranks["1"].kill()
    out, error = run.communicate(timeout=60)
    assert (run.returncode, out) == (1, "")
    assert error == (
        "requant: process 1 of 2 was killed by SIGKILL, which ends the run (SIGKILL: memory may have run out); "
        "`requant quantize --resume`, with any number of GPUs, continues where it stopped.\n"
    )
    assert not output.exists() and not ranks["0"].is_running()
    stop_after(0)
    assert cli(*arguments, "--output", output, "--resume")[0] == 0
    assert sha256(output) == undisturbed


def test_without_resume_it_starts_over(
    cli, arguments, undisturbed, stop_after, quantized, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    stop_after(20)
    with pytest.raises(Stopped):
        cli(*arguments, "--output", output)
    quantized.clear()
    stop_after(0)
    assert cli(*arguments, "--output", output)[0] == 0
    assert len(quantized) == 42 and sha256(output) == undisturbed


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        pytest.param(["--skip", "o_proj"], 3 * 12, marks=pytest.mark.slow),
        (["--mode", "dense"], 0),
        pytest.param(["--code-bits", "4"], 3 * 14, marks=pytest.mark.slow),
        pytest.param(["--num-samples", "3"], 3 * 14, marks=pytest.mark.slow),
        pytest.param(["--seed", "1"], 3 * 14, marks=pytest.mark.slow),
        pytest.param(["--dtype", "bfloat16"], 3 * 14, marks=pytest.mark.slow),
        pytest.param(["--sensitivity", "marginal"], None, marks=pytest.mark.slow),
    ],
)
def test_a_changed_recipe_meets_no_old_result(
    cli, arguments, stop_after, quantized, tmp_path: Path, change: list[str], anew: int | None
) -> None:
    """What depends on the change is made again; what does not is kept."""
    output = tmp_path / "out"
    stop_after(STAGES)
    with pytest.raises(Stopped):
        cli(*arguments, "--output", output)
    stop_after(0)
    quantized.clear()
    assert cli(*arguments, *change, "--output", output, "--resume")[0] == 0
    assert anew is None or len(quantized) == anew
    assert cli(*arguments, *change, "--output", tmp_path / "alone")[0] == 0
    assert sha256(output) == sha256(tmp_path / "alone")


def test_ctrl_c(cli, arguments: list[str], undisturbed: str, stop_after, tmp_path: Path) -> None:
    output = tmp_path / "out"
    stop_after(9, lambda: os.kill(os.getpid(), signal.SIGINT))
    code, out, error = cli(*arguments, "--output", output)
    assert code == 130 and out == ""
    assert error == "requant: interrupted; the same command with --resume continues where it stopped.\n"
    assert not output.exists() and not list(tmp_path.glob(".out*"))
    stop_after(0)
    assert cli(*arguments, "--output", output, "--resume")[0] == 0
    assert sha256(output) == undisturbed


def test_ctrl_c_while_saving_leaves_no_folder(
    cli, arguments, undisturbed: str, monkeypatch, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        # the last call before the folder gets its name
        patch.setattr(
            "requant.checkpoint.new_folder.os.umask", lambda *_: os.kill(os.getpid(), signal.SIGINT)
        )
        assert cli(*arguments, "--output", output)[0] == 130
    assert not output.exists() and not list(tmp_path.glob(".out*"))
    assert cli(*arguments, "--output", output, "--resume")[0] == 0
    assert sha256(output) == undisturbed
