"""What a report says of a checkpoint is what the checkpoint has."""

from pathlib import Path

import pytest

import requant
from requant.checkpoint.sizes import byte_table
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe
from requant.report.summary import run_summary


@pytest.mark.parametrize(
    ("name", "method", "head_bits"),
    [
        ("llama", "rtn", None),
        ("gpt2", "rtn", None),  # an embedding of positions
        pytest.param("qwen3-moe", "lut", 4.0, marks=pytest.mark.slow),
        pytest.param("gemma4-per-layer", "rtn", 4.0, marks=pytest.mark.slow),
    ],
)
def test_bytes_by_part_are_those_of_the_files(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, name: str, method: str, head_bits: float | None
) -> None:
    folder = tiny_folder(name)
    recipe = Recipe(
        mode="dense",
        method=method,
        quantizer=METHODS[method].config(),
        budget=Budget(bits=4.5, head_bits=head_bits),
        calibration=Calibration(text=(str(tiny_text_file),), num_samples=4, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        finetune=Finetune(steps=0),
    )
    result = requant.quantize(str(folder), recipe)
    told = run_summary(result, tmp_path / "out").sizes
    requant.save(result, tmp_path / "out")
    found = byte_table(tmp_path / "out").spent
    assert {part: size for part, size in told.items() if size} == {
        part: size for part, size in found.items() if size
    }
