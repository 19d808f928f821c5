"""A run that is stopped inside a phase of training goes on there, and ends with the bytes of one that was left alone."""

import hashlib
import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import requant
from requant.errors import OutputError
from requant.finetune import saved_training
from requant.finetune.blockwise import BlockwiseStep
from requant.finetune.saved_training import SavedTraining
from requant.finetune.step import TrainingStep
from requant.quantizers.registry import METHODS, PRUNING_METHODS
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe, Recovery
from requant.recipe.yaml_files import dump_recipe
from requant.run.workspace import Workspace

STEPS = 5
ROUNDS = 4  # the last one does not train, but the phase after it does


def recipe_of(kind: str, folder: Path, text: Path) -> Recipe:
    """`best`: three rounds that train and the last phase; `codes`: the last phase; the others: recovery of 2:4 matrices."""
    common = {
        "model": str(folder),
        "calibration": Calibration(text=(str(text),), num_samples=7, seq_len=32),
        "evaluation": Evaluation(context=32, windows=2, samples=0),
        "finetune": Finetune(
            steps=STEPS,
            rounds=ROUNDS,
            tokens_per_step=96,
            lr=3e-2,
            warmup_steps=2,
            eval_every=2,
            blockwise=kind == "best-blockwise",
        ),
    }
    if kind in ("ast", "fixed"):
        config = PRUNING_METHODS["wanda"].config(bits=4)
        recovery = Recovery(method=kind, mask_every=2)
        return Recipe(mode="sparse", method="wanda", quantizer=config, recovery=recovery, **common)
    mode = "best" if kind.startswith("best") else "dense"
    method = "trellis" if kind == "best-trellis" else "kmeans"
    config = METHODS[method].config()
    return Recipe(
        mode=mode, method=method, quantizer=config, budget=Budget(bits=3.5, head_bits=4.0), **common
    )


class Stopped(BaseException):
    """As sudden as a kill, for this process."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A one for every step of training that is made."""
    made: list[int] = []

    def counted(call):
        def count(self, *args) -> None:
            call(self, *args)
            made.append(1)

        return count

    for kind in (TrainingStep, BlockwiseStep):
        monkeypatch.setattr(kind, "__call__", counted(kind.__call__))
    monkeypatch.setattr(saved_training, "MAX_FRACTION", math.inf)  # every step is saved
    return made


def run(recipe: Recipe, output: Path, *, resume: bool = False) -> str:
    """Quantize and save; SHA-256 of the weights."""
    workspace = Workspace(output.with_name("w"), resume=resume, save_every=0.0)
    result = requant.quantize(recipe.model, recipe, workspace=workspace)
    requant.save(result, output)
    workspace.remove()
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("kind", "shape", "stops"),
    [
        pytest.param("best", "llama", (STEPS + 2,), marks=pytest.mark.slow),
        pytest.param("best-blockwise", "llama", (STEPS + 2,), marks=pytest.mark.slow),
        ("ast", "llama", (3,)),
        pytest.param("best", "llama", (2, STEPS, 3 * STEPS + 3), marks=pytest.mark.slow),
        pytest.param("codes", "llama-tied", (1, STEPS - 1), marks=pytest.mark.slow),
        pytest.param("fixed", "gpt2", (2,), marks=pytest.mark.slow),
        pytest.param("best", "qwen3-moe", (3, STEPS + 2), marks=pytest.mark.slow),
        pytest.param("best-trellis", "llama", (STEPS + 2,), marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_at_the_step_that_was_saved(
    tiny_folder, tiny_text_file, tmp_path, monkeypatch, steps, kind, shape, stops
) -> None:
    """Stopped after the n-th state of training was saved, for all n of `stops`; nothing is trained twice."""
    recipe = recipe_of(kind, tiny_folder(shape), tiny_text_file)
    alone = run(recipe, tmp_path / "alone" / "out")
    total = len(steps)
    assert total == STEPS * (ROUNDS if kind.startswith("best") else 1)
    put, left = Workspace.put, 0

    def stopping(self, stage: str, *args, **kwargs) -> None:
        nonlocal left
        put(self, stage, *args, **kwargs)
        left -= stage == "training"
        if stage == "training" and left == 0:
            raise Stopped

    monkeypatch.setattr(Workspace, "put", stopping)
    for stop in stops:
        steps.clear()
        folder = tmp_path / str(stop)
        left = stop
        with pytest.raises(Stopped):
            run(recipe, folder / "out")
        assert len(steps) == stop
        assert run(recipe, folder / "out", resume=True) == alone
        assert len(steps) == total
        assert [path.name for path in folder.iterdir()] == ["out"]


@pytest.mark.parametrize("by_block", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_goes_on_by_the_other_kind_of_step(
    tiny_folder, tiny_text_file, tmp_path, monkeypatch, steps, by_block
) -> None:
    """As on a GPU of another size: moments that the one has in 16 bits are float32 in the other."""
    recipe = recipe_of("codes", tiny_folder("llama"), tiny_text_file)
    put = Workspace.put

    def stopping(self, stage: str, *args, **kwargs) -> None:
        put(self, stage, *args, **kwargs)
        if stage == "training" and len(steps) == 2:
            raise Stopped

    monkeypatch.setattr(Workspace, "put", stopping)
    monkeypatch.setattr("requant.finetune.final.trains_by_block", lambda *_, **__: by_block)
    with pytest.raises(Stopped):
        run(recipe, tmp_path / "out")
    monkeypatch.setattr("requant.finetune.final.trains_by_block", lambda *_, **__: not by_block)
    run(recipe, tmp_path / "out", resume=True)
    assert len(steps) == STEPS


@pytest.mark.slow
def test_it_begins_anew_where_codes_that_it_was_trained_with_are_damaged(
    tiny_folder, tiny_text_file, tmp_path, monkeypatch, steps, caplog
) -> None:
    """The last ones, made of weights that rounds before had trained, which are not trained again beside the state."""
    recipe = recipe_of("best", tiny_folder("llama"), tiny_text_file)
    alone = run(recipe, tmp_path / "alone" / "out")
    steps.clear()
    put = Workspace.put

    def stopping(self, stage: str, *args, **kwargs) -> None:
        put(self, stage, *args, **kwargs)
        if stage == "training" and len(steps) == STEPS + 2:
            raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Workspace, "put", stopping)
        run(recipe, tmp_path / "out")
    last = max((tmp_path / "w").glob("codes-*"), key=lambda file: file.stat().st_mtime_ns)
    last.write_bytes(last.read_bytes()[:-1])
    assert run(recipe, tmp_path / "out", resume=True) == alone
    assert len(steps) == STEPS + 2 + STEPS * ROUNDS
    assert "codes that belong to the saved state of training are gone; it begins anew" in caplog.text


def test_sigterm_ends_the_step_and_saves_it(
    cli, tiny_folder, tiny_text_file, tmp_path, monkeypatch, steps
) -> None:
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe_of("codes", tiny_folder("llama"), tiny_text_file)))
    command = ["quantize", "--recipe", tmp_path / "r.yaml", "--quiet", "--output"]
    assert cli(*command, tmp_path / "alone")[0] == 0
    steps.clear()
    update = TrainingStep._update

    def interrupted(self, index: int) -> None:
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "_update", interrupted)
        code, _, error = cli(*command, tmp_path / "out")
    assert code == 130 and "--resume continues" in error
    assert len(steps) == 3  # the third was not broken off
    assert cli(*command, tmp_path / "out", "--resume")[0] == 0
    assert len(steps) == STEPS
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("alone", "out")]
    assert files[0] == files[1]


def test_a_second_signal_does_not_wait_for_the_step(tmp_path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    saved = SavedTraining(workspace=Workspace(tmp_path / "w"), key="ab" * 32, found=None)
    with pytest.raises(KeyboardInterrupt), saved.interrupts_noted() as noted:
        os.kill(os.getpid(), signal.SIGINT)
        assert noted == [signal.SIGINT]
        os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_saving_takes_a_tenth_of_the_time_at_most(tmp_path, monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def state() -> dict[str, torch.Tensor]:
        clock[0] += 60.0  # a slow disk
        return {"tensor.0": torch.ones(1)}

    saved = SavedTraining(
        workspace=Workspace(tmp_path / "w", save_every=300.0), key="ab" * 32, found=None, saved_at=0.0
    )
    for wait, due in ((299.0, False), (2.0, True)):
        clock[0] += wait
        assert saved.due == due
    saved.save(state, step=1, best_kl=0.5)
    for wait, due in ((599.0, False), (2.0, True)):
        clock[0] += wait
        assert saved.due == due
    assert not SavedTraining(workspace=Workspace(None, save_every=0.0), key="", found=None).due


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch, caplog) -> None:
    def full(*_, **__) -> None:
        raise OutputError("w cannot be written (No space left)")

    monkeypatch.setattr(Workspace, "put", full)
    saved = SavedTraining(workspace=Workspace(tmp_path / "w"), key="ab" * 32, found=None)
    saved.save(lambda: {"tensor.0": torch.ones(1)}, step=1, best_kl=0.5)
    assert "the state of training was not saved: w cannot be written" in caplog.text
