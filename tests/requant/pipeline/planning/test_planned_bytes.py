"""Bytes are planned exactly for codes, and within a few percent for the sparse part."""

from pathlib import Path

import pytest

import requant
from requant.checkpoint.sizes import byte_table
from requant.pipeline.planning.plan import make_plan
from requant.pipeline.preparation.prepare import prepare
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Calibration, Finetune

from ...on_text import on_text
from ..plans import recipe_of

SLOW = {method: pytest.mark.slow for method in ("trellis", "awq", "hqq", "kmeans")}


@pytest.mark.parametrize("method", [pytest.param(m, marks=SLOW.get(m, ())) for m in METHODS])
@pytest.mark.parametrize("name", ["gpt2"])
def test_predicted_bytes_of_the_dense_part_are_exact(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, method: str, name: str
) -> None:
    source, recipe = str(tiny_folder(name)), recipe_of(method)
    plan = make_plan(prepare(source, on_text(recipe, tiny_text_file)), recipe)
    table = byte_table(requant.save(requant.quantize(source, recipe, tiny_text_file), tmp_path / "out"))
    assert plan.bits_per_weight == pytest.approx(table.bits_per_weight, rel=1e-6)
    assert plan.bytes_after == table.bytes  # headers included
    assert plan.weights == sum(matrix.weights for matrix in table.matrices.values())


def test_predicted_bytes_of_mode_best_are_exact(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    """Training changes no byte, and mode `best` has no sparse part."""
    recipe = recipe_of(
        "kmeans",
        mode="best",
        budget=Budget(bits=4.5),
        calibration=Calibration(num_samples=4, seq_len=32),
        finetune=Finetune(steps=1, tokens_per_step=64),
    )
    source = str(tiny_folder("llama"))
    plan = make_plan(prepare(source, on_text(recipe, tiny_text_file)), recipe)
    table = byte_table(requant.save(requant.quantize(source, recipe, tiny_text_file), tmp_path / "out"))
    assert (
        plan.bits_per_weight == pytest.approx(table.bits_per_weight, rel=1e-6) and plan.bits_per_weight <= 4.5
    )


def test_the_sparse_part_is_expected_within_a_few_percent(
    tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    recipe = recipe_of("kmeans", mode="paper")
    source = str(tiny_folder("llama"))
    plan = make_plan(prepare(source, on_text(recipe, tiny_text_file)), recipe)
    table = byte_table(requant.save(requant.quantize(source, recipe, tiny_text_file), tmp_path / "out"))
    assert plan.bits_per_weight == pytest.approx(table.bits_per_weight, rel=0.03)
    assert plan.bytes_after == pytest.approx(table.bytes, rel=0.005)
