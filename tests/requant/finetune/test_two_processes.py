"""Training on two processes: the quality of one, the same bytes every time, and another number of processes goes on."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from time import sleep

import psutil
import pytest

from requant.finetune import saved_training
from requant.finetune.blockwise import BlockwiseStep
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe
from requant.recipe.yaml_files import dump_recipe
from requant.run.workspace import Workspace

TWO = ("--gpus", "2", "--device", "cpu")


def recipe_with_training(folder: Path, text: Path, *, blockwise: bool) -> Recipe:
    """Steps of three windows, of which two processes take two and one; two windows are for validation."""
    return Recipe(
        model=str(folder),
        mode="best",
        calibration=Calibration(text=(str(text),), num_samples=16, seq_len=32),
        evaluation=Evaluation(context=32, windows=7),
        budget=Budget(bits=3.5),
        finetune=Finetune(steps=5, tokens_per_step=96, val_windows=2, eval_every=2, blockwise=blockwise),
    )


def two_processes(launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in two processes, by torchrun or by --gpus; it must end well."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "requant")
    start, end = (torchrun, ()) if launcher == "torchrun" else (("requant",), TWO)
    done = subprocess.run(
        [sys.executable, "-m", *start, *arguments, *end], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def kl_of(checkpoint: Path) -> float:
    return json.loads((checkpoint / "report.json").read_text())["after"]["mean_kl"]


@pytest.mark.slow
@pytest.mark.parametrize("blockwise", [False, True])
def test_training_on_two_processes(
    cli, tiny_folder, tiny_text_file: Path, tmp_path: Path, blockwise: bool
) -> None:
    """Gradients are summed in another order: not the same bytes, but the same quality, and the same bytes every time."""
    recipe = recipe_with_training(tiny_folder("llama"), tiny_text_file, blockwise=blockwise)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    command = ("quantize", "--recipe", str(tmp_path / "recipe.yaml"), "--quiet", "--output")
    assert cli(*command, tmp_path / "one")[0] == 0
    for launcher in ("torchrun", "gpus"):
        two_processes(launcher, *command, str(tmp_path / launcher))
    by_torchrun, by_gpus = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("torchrun", "gpus")
    )
    assert by_torchrun == by_gpus
    assert kl_of(tmp_path / "gpus") == pytest.approx(kl_of(tmp_path / "one"), rel=0.02)


@pytest.mark.slow
def test_another_number_of_processes_goes_on_inside_a_round(
    cli, tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block, where each process holds a part of what learns: stopped as one, gone on as two, and the reverse."""
    recipe = recipe_with_training(tiny_folder("llama"), tiny_text_file, blockwise=True)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    command = (
        "quantize",
        "--recipe",
        str(tmp_path / "recipe.yaml"),
        "--quiet",
        "--save-every",
        "0",
        "--output",
    )
    monkeypatch.setattr(saved_training, "MAX_FRACTION", math.inf)  # every step is saved
    steps, put = [], Workspace.put

    def counted(self, *args) -> None:
        plain(self, *args)
        steps.append(1)

    plain = BlockwiseStep.__call__
    monkeypatch.setattr(BlockwiseStep, "__call__", counted)
    assert cli(*command, tmp_path / "alone")[0] == 0
    total = len(steps)

    def stopping(self, stage: str, *args, **kwargs) -> None:
        put(self, stage, *args, **kwargs)
        if stage == "training" and kwargs["value"]["step"] == 3:
            raise KeyboardInterrupt

    steps.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "put", stopping)
        assert cli(*command, tmp_path / "out")[0] == 130
    assert len(steps) == 3
    shutil.copytree(tmp_path / "out.partial", tmp_path / "again.partial")
    two_processes("gpus", *command, str(tmp_path / "out"), "--resume")
    assert kl_of(tmp_path / "out") == pytest.approx(kl_of(tmp_path / "alone"), rel=0.02)

    run = subprocess.Popen(
        [sys.executable, "-m", "requant", *command, str(tmp_path / "again"), "--resume", *TWO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    before = {
        file: file.stat().st_mtime_ns for file in (tmp_path / "again.partial").glob("training-*.safetensors")
    }
    while run.poll() is None and not any(
        file.exists() and file.stat().st_mtime_ns > time for file, time in before.items()
    ):
        sleep(0.01)
    ranks_of_run = {child.environ().get("RANK"): child for child in psutil.Process(run.pid).children()}
    ranks_of_run["1"].kill()
    assert "process 1 of 2 was killed by SIGKILL" in run.communicate(timeout=120)[1]
    steps.clear()
    code, _, error = cli(*command, tmp_path / "again", "--resume")
    assert code == 0, error
    assert 0 < len(steps) < total - 3
    assert kl_of(tmp_path / "again") == pytest.approx(kl_of(tmp_path / "alone"), rel=0.02)
