"""Runs of every mode are killed at random moments, by seed, and resumed: to the same bytes, and with nothing left beside.

`KILLS=17` runs one case again. Processes are forked from one that has imported everything, for a run of a tiny model takes
less time than importing torch; a case is killed up to three times before it may end.
"""

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from requant.quantizers.registry import METHODS, PRUNING_METHODS
from requant.recipe.schema import Budget, Calibration, Detach, Evaluation, Finetune, Recipe, Recovery
from requant.recipe.yaml_files import dump_recipe

CASES = 50
MOST_KILLS = 3
COMMAND = """
import sys
sys.argv = ["requant", *{arguments!r}]
sys.stdout = sys.stderr = open({log!r}, "a")
from requant.cli import main
main()
"""
PRELOADED = [
    "requant.cli",
    "requant.report.save",
    "requant.report.sweep",
    "transformers.models.llama.modeling_llama",
]

MODES = {  # name -> command, and what differs from COMMON
    "best": ("quantize", {"mode": "best", "method": "kmeans", "budget": Budget(bits=4.5)}),
    "sparse": (
        "sparsify",
        {"mode": "sparse", "method": "wanda", "recovery": Recovery(method="ast", mask_every=2)},
    ),
    "sweep": ("sweep", {"mode": "dense", "method": "rtn", "budget": Budget(bits=4.5)}),
    "paper": ("quantize", {"mode": "paper", "method": "lut", "finetune": Finetune(steps=0)}),
    "dense": ("quantize", {"mode": "dense", "method": "gptq"}),
}


def recipe_of(mode: str, model: Path, text: Path) -> Recipe:
    differs = MODES[mode][1]
    methods = PRUNING_METHODS if mode == "sparse" else METHODS
    common = {
        "model": str(model),
        "calibration": Calibration(text=(str(text),), num_samples=7, seq_len=32),
        "evaluation": Evaluation(context=32, windows=2, samples=0),
        "finetune": Finetune(steps=6, tokens_per_step=96, eval_every=2),
        "quantizer": methods[differs["method"]].config(),
    }
    if mode == "paper":
        common["detach"] = Detach(
            outlier_fraction=0.01, significant_fraction=0.01, temperatures=(1.0,), steps=1
        )
    return Recipe(**(common | differs))


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """A run that nobody killed."""

    arguments: list[str]
    files: dict[str, str]  # name -> SHA-256
    seconds: float


def sha256(folder: Path) -> dict[str, str]:
    """Weights and headers of all checkpoints in a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix == ".safetensors" or path.name in ("config.json", "recipe.yaml")
    }


class Processes:
    """Runs of the command line in processes of their own."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        first = self.context.Process(target=exec, args=("",))  # waits for the imports
        first.start()
        first.join()

    def start(self, arguments: list[str], log: Path) -> multiprocessing.process.BaseProcess:
        process = self.context.Process(target=exec, args=(COMMAND.format(arguments=arguments, log=str(log)),))
        process.start()
        return process

    def finish(self, arguments: list[str], log: Path) -> None:
        process = self.start(arguments, log)
        process.join()
        assert process.exitcode == 0, log.read_text()


@pytest.fixture(scope="module")
def processes() -> Processes:
    return Processes()


@pytest.fixture(scope="module")
def undisturbed(
    processes: Processes, tiny_folder, tiny_text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Undisturbed]:
    """A mode's run, made when it is first asked for."""
    made: dict[str, Undisturbed] = {}

    def of(mode: str) -> Undisturbed:
        if mode not in made:
            folder = tmp_path_factory.mktemp(mode)
            recipe = folder / "recipe.yaml"
            recipe.write_text(dump_recipe(recipe_of(mode, tiny_folder("llama"), tiny_text_file)))
            arguments = [MODES[mode][0], "--recipe", str(recipe), "--save-every", "0"]
            arguments += ["--bits", "4.5,5.5"] if mode == "sweep" else []
            start = time.monotonic()
            processes.finish([*arguments, "--output", str(folder / "out")], folder / "log")
            seconds = time.monotonic() - start
            made[mode] = Undisturbed(arguments=arguments, files=sha256(folder / "out"), seconds=seconds)
        return made[mode]

    return of


def cases() -> Iterator[object]:
    chosen = os.environ.get("KILLS")
    for number in range(CASES) if chosen is None else [int(chosen)]:
        marks = () if chosen is not None else pytest.mark.slow
        yield pytest.param(number, marks=marks, id=f"{number}-{list(MODES)[number % len(MODES)]}")


@pytest.mark.parametrize("number", list(cases()))
def test_a_killed_run_resumes_to_the_same_bytes(
    processes: Processes, undisturbed: Callable[[str], Undisturbed], tmp_path: Path, number: int
) -> None:
    """Killed at up to three moments, each anywhere in the time that a whole run takes, then resumed to the end."""
    draw = random.Random(number)
    expected = undisturbed(list(MODES)[number % len(MODES)])
    output, log = tmp_path / "runs" / "out", tmp_path / "log"
    start = [*expected.arguments, "--output", str(output)]
    again = [expected.arguments[0], "--resume", str(output), "--save-every", "0"]

    def words() -> list[str]:  # a run that left nothing yet is started again, as its user would
        return again if output.exists() or any(tmp_path.rglob("run.json")) else start

    def killed_after(seconds: float) -> bool:
        process = processes.start(words(), log)
        process.join(seconds)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
        return process.exitcode != 0

    moment = draw.uniform(0.0, 0.9) * expected.seconds
    while not killed_after(moment):  # a busy machine was faster this time
        shutil.rmtree(output.parent)
        moment /= 2
    for _ in range(draw.randrange(MOST_KILLS)):
        killed_after(draw.uniform(0.0, 0.9) * expected.seconds)
    processes.finish(words(), log)
    assert sha256(output) == expected.files
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert not [path for path in output.rglob("*") if "partial" in path.name or path.name == "run.json"]
