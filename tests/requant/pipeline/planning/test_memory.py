"""The planned memory of a CPU run against what a run takes, and what it is counted from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from requant.calibration.collect import bytes_needed
from requant.calibration.experts import share_of_experts
from requant.models.targets import by_block
from requant.pipeline.planning.plan import make_plan
from requant.pipeline.planning.statistics import most_statistics
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.prepare import prepare
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Calibration, Finetune, Recipe

from ...on_text import on_text
from ..plans import recipe_of


@pytest.mark.parametrize(
    ("family", "share"), [("mixtral", 2 / 4), ("qwen2-moe", 2 / 4), ("deepseek-v3", 2 / 8)]
)
def test_a_token_sees_as_many_experts_as_the_config_says(tiny_folder, family: str, share: float) -> None:
    """By it activations are counted: a mixture's are a fraction of its matrices'. Experts that are skipped are experts."""
    recipe = recipe_of("kmeans")
    outlined = outline(str(tiny_folder(family)), recipe)
    assert share_of_experts(outlined.model, outlined.targets) == share
    of_one = [target for target in outlined.targets if ".experts.0." in target.name]
    assert share_of_experts(outlined.model, of_one) == share


def test_the_memory_of_a_cpu_run_follows_the_batch(tiny_folder, tiny_text_file: Path, monkeypatch) -> None:
    """A batch has 2048 tokens at most, and the code that searches for trellis codes is part of the process."""
    source = str(tiny_folder("llama"))

    def peak(method: str, num_samples: int) -> int:
        recipe = recipe_of(method, calibration=Calibration(num_samples=num_samples, seq_len=64))
        return make_plan(prepare(source, on_text(recipe, tiny_text_file)), recipe).peak_memory

    one, four = peak("rtn", 1), peak("rtn", 4)
    logits = 18 * 1.5 * 64 * 264  # of a window; the vocabulary has 264 tokens
    assert four - one > 3 * logits
    assert peak("trellis", 4) - four > 100 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--method", "rtn", "--mode", "dense"),
        ("--method", "gptq", "--mode", "dense"),
        ("--method", "trellis", "--mode", "dense", "--num-samples", "4"),
    ],
)
def test_the_memory_of_a_cpu_run_is_what_it_takes(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A process of its own, for its peak is the whole process's."""
    command = [
        sys.executable, "-m", "requant", "quantize", "--code-bits", "4", "--num-samples", "2", "--device", "cpu", "--json",
        "--output", str(tmp_path / "out"), *options,
    ]  # fmt: skip
    planned, done = (
        json.loads(subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout)
        for more in (["--dry-run"], [])
    )
    assert planned["peak_memory"] == pytest.approx(done["peak_memory"], rel=0.15)


def test_codes_come_beside_the_statistics_of_their_pass(tiny_folder, monkeypatch) -> None:
    """All at once where everything fits; on a smaller GPU those of earlier passes, and of earlier rounds, too."""
    source = str(tiny_folder("llama"))
    needs = METHODS["trellis"].needs

    def most(recipe: Recipe, memory: int) -> tuple[int, int]:
        monkeypatch.setattr("requant.pipeline.planning.statistics.total_memory", lambda _device: memory)
        return most_statistics(outlined, recipe, "cuda")

    dense = recipe_of("trellis", mode="dense")
    outlined = outline(source, dense)
    blocks = by_block(outlined.targets)
    statistics = max(bytes_needed(outlined.targets, needs).values())
    codes = sum(target.size for target in outlined.targets)
    assert most(dense, 10**12) == (statistics, statistics + codes)
    of_one = max(bytes_needed(blocks[0], needs).values())
    own = sum(target.size for target in blocks[0])
    last = len(blocks) - 1
    assert most(dense, 0) == (of_one + last * own, of_one + codes)  # a block a pass
    rounds = recipe_of("trellis", mode="best", finetune=Finetune(steps=1, rounds=2))
    assert most(rounds, 10**12)[1] < statistics + codes


def test_statistics_that_only_the_allocation_needs_count(tiny_folder, monkeypatch) -> None:
    """Losses of `lut` are predicted from gradients, which its codes do not need."""
    monkeypatch.setattr("requant.pipeline.planning.statistics.total_memory", lambda _device: 10**12)
    outlined = outline(str(tiny_folder("llama")), recipe_of("lut", mode="dense"))
    planned = {
        bits: most_statistics(outlined, recipe_of("lut", mode="dense", budget=Budget(bits=bits)), "cuda")[0]
        for bits in (None, 3.0)
    }
    needed = METHODS["lut"].needs, METHODS["lut"].allocation_needs
    assert list(planned.values()) == [max(bytes_needed(outlined.targets, each).values()) for each in needed]
    assert planned[3.0] > 2 * planned[None]
