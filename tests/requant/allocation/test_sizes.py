"""A budget is a promise about bytes on disk: what is planned is what the files have."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import requant
from requant.allocation.budget import allocate_bits
from requant.allocation.knapsack import TOLERANCE
from requant.allocation.sizes import packed_spec, sparse_bytes
from requant.checkpoint.sizes import byte_table
from requant.formats.quantized_weight import pack, with_trainable_params
from requant.models.weight_files import folder_bytes
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Finetune
from requant.recipe.yaml_files import load_recipe
from requant.run.workspace import Workspace

from .conftest import TINY, recipe_of, started


def matrix_bytes(checkpoint: Path) -> tuple[int, int]:
    """Bytes of everything stored for the matrices, counted in the file itself, and their weights."""
    table, tensors = byte_table(checkpoint), load_file(checkpoint / "model.safetensors")
    stored = sum(t.nbytes for name, t in tensors.items() if name.rpartition(".")[0] in table.matrices)
    return stored, sum(matrix.weights for matrix in table.matrices.values())


@pytest.mark.parametrize(
    ("method", "bits", "mode"),
    [
        ("rtn", "3.3", "dense"),
        pytest.param("gptq", "3", "dense", marks=pytest.mark.slow),
        ("hqq", "4", "best"),
        pytest.param("kmeans", "6.1", "paper", marks=pytest.mark.slow),
    ],
)
def test_bits_are_kept_to_the_byte(cli, tiny_folder, tiny_text_file: Path, method, bits, mode) -> None:
    code, out, error = cli(
        "quantize", "--model", tiny_folder("llama"), "--bits", bits, "--method", method, "--mode", mode,
        "--calibration", tiny_text_file, "--output", "out", *TINY
    )  # fmt: skip
    assert code == 0, error
    stored, weights = matrix_bytes(Path("out"))
    assert (1 - TOLERANCE) * float(bits) <= 8 * stored / weights <= float(bits)
    assert f"{stored:,} (" in out and "loss predicted by the budget" in out
    assert len({m.spec.bits for m in byte_table("out").matrices.values()}) > 1
    assert load_recipe("out/recipe.yaml").budget.bits == float(bits)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param("llama", 0.5, marks=pytest.mark.slow),
        ("llama-tied", 0.35),
        pytest.param("gpt2", 0.35, marks=pytest.mark.slow),
    ],
)
def test_a_size_is_kept_to_the_byte(cli, tiny_folder, tiny_text_file: Path, name: str, share: float) -> None:
    size = round(share * folder_bytes(tiny_folder(name)))
    code, out, error = cli(
        "quantize", "--model", tiny_folder(name), "--size", size, "--method", "kmeans", "--mode", "dense",
        "--calibration", tiny_text_file, "--output", "out", *TINY
    )  # fmt: skip
    assert code == 0, error
    found = Path("out/model.safetensors").stat().st_size
    assert (1 - TOLERANCE) * size <= found <= size
    assert f"{size:,}" in out and f"{found:,} (" in out


def test_mode_best_keeps_it_with_what_is_learned(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    """Beside the codes, and in an embedding of 6 bits."""
    budget = Budget(bits=4.0, head_bits=6.0)
    recipe = recipe_of(mode="best", finetune=Finetune(steps=2, train_windows=8), budget=budget)
    result = requant.quantize(str(tiny_folder("llama-tied")), recipe, tiny_text_file)
    table = byte_table(requant.save(result, tmp_path / "out"))
    assert (1 - TOLERANCE) * 4 <= table.bits_per_weight <= 4
    with torch.no_grad():
        ids = torch.arange(40)[None]
        assert torch.equal(requant.load(tmp_path / "out")(ids).logits, result.model(ids).logits)


@pytest.mark.parametrize("values", ["float16", "int8"])
def test_a_sparse_part_is_paid_by_the_budget(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, values: str
) -> None:
    recipe = recipe_of(mode="paper", budget=Budget(bits=5.0))
    recipe = dataclasses.replace(recipe, detach=dataclasses.replace(recipe.detach, values=values))
    saved = requant.save(
        requant.quantize(str(tiny_folder("llama")), recipe, tiny_text_file), tmp_path / "out"
    )
    table = byte_table(saved)
    assert sum(matrix.spec.num_entries for matrix in table.matrices.values()) > 1000
    assert {m.spec.sparse.values for m in table.matrices.values() if m.spec.sparse} == {values}
    assert (1 - 2 * TOLERANCE) * 5 <= table.bits_per_weight <= 5


def test_learned_scales_of_a_trellis_are_paid_by_the_budget(tiny_folder, tiny_text_file: Path) -> None:
    plain = recipe_of("trellis", budget=Budget(bits=2.5))
    tuned = dataclasses.replace(plain, finetune=Finetune(steps=3))
    n, k = 64, 172
    for bits, size in ((2, n + 2), (6, n + 2), (7, 2 * n)):  # a byte each and a magnitude, or float16
        difference = packed_spec(tuned, (n, k), bits).bytes - packed_spec(plain, (n, k), bits).bytes
        assert difference == size - 4 * 2 - 2  # in place of bits in words, and a magnitude
    folder = tiny_folder("llama")
    for recipe in (plain, tuned):
        run = started(folder, tiny_text_file, recipe)
        found = allocate_bits(run)
        layouts = [packed_spec(recipe, target.shape, found.bits[target.name]) for target in run.targets]
        assert found.bytes == sum(layout.bytes for layout in layouts) <= 2.5 * run.total_weights / 8


def test_bytes_of_a_sparse_part_are_left(tiny_folder, tiny_text_file: Path) -> None:
    folder, recipe = tiny_folder("llama"), recipe_of(budget=Budget(bits=4.5))
    run = started(folder, tiny_text_file, dataclasses.replace(recipe, mode="paper"))
    found, left = allocate_bits(run), sparse_bytes(run.recipe, run.targets)
    layouts = [packed_spec(run.recipe, target.shape, found.bits[target.name]) for target in run.targets]
    spent = sum(layout.bytes for layout in layouts)
    assert left > 0.03 * 3 * run.total_weights  # 3 % of the weights, 3 bytes each, and counts
    assert found.bytes == spent + left <= 4.5 * run.total_weights / 8
    assert spent < allocate_bits(started(folder, tiny_text_file, recipe)).bytes - 0.8 * left


@pytest.mark.parametrize(("method", "steps"), [pytest.param("lut", 0, marks=pytest.mark.slow), ("kmeans", 2)])
def test_8_bit_levels_are_planned_to_the_byte(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, method: str, steps: int
) -> None:
    """Each matrix as planned, trained or not."""
    budget = Budget(bits=3.6, outliers=False)
    recipe = recipe_of(method, mode="best", budget=budget, finetune=Finetune(steps=steps, train_windows=8))
    result = requant.quantize(str(tiny_folder("llama")), recipe, tiny_text_file)
    table = byte_table(requant.save(result, tmp_path / "out"))
    for layout in (matrix.spec for matrix in table.matrices.values()):
        assert layout == packed_spec(recipe, layout.shape, layout.bits) and layout.version == 3
    assert (1 - TOLERANCE) * 3.6 <= table.bits_per_weight <= 3.6


@pytest.mark.parametrize("bits", [2, 6, 7])
def test_what_a_trellis_learns_is_planned_to_the_byte(random_weight, bits: int) -> None:
    weight = random_weight(40, 70, kind="trellis", bits=bits, density=0)
    recipe = recipe_of("trellis", finetune=Finetune(steps=1))
    recipe = dataclasses.replace(recipe, quantizer=dataclasses.replace(recipe.quantizer, code="3inst"))
    signs = dataclasses.replace(weight.dense, output_scales=torch.ones(40).half() * 0.25)
    weight = dataclasses.replace(weight, dense=signs)
    learned = {"output_scales": 0.25 + 0.05 * torch.randn(40, generator=torch.Generator().manual_seed(0))}
    layout, _ = pack(with_trainable_params(weight, learned))
    assert layout == packed_spec(recipe, (40, 70), bits) and (layout.version == 3) == (bits <= 6)


def test_entries_compete_with_bits(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    """Within the same budget they lower the predicted loss, and what they take is counted to the byte."""
    recipe = recipe_of("kmeans", mode="best", budget=Budget(bits=2.9))
    recipe = dataclasses.replace(recipe, quantizer=METHODS["kmeans"].config(level_bits=8))
    folder = tiny_folder("llama")
    codes = dataclasses.replace(recipe, budget=Budget(bits=2.9, outliers=False))
    alone, both = (allocate_bits(started(folder, tiny_text_file, each)) for each in (codes, recipe))
    assert not alone.outlier_fractions and both.outlier_fractions and both.predicted < alone.predicted
    kept = Workspace(tmp_path / "kept.partial", resume=True)
    result = requant.quantize(str(folder), recipe, tiny_text_file, workspace=kept)
    again = requant.quantize(str(folder), recipe, tiny_text_file, workspace=kept)
    assert again.allocation == result.allocation  # the options come back from the workspace as they were
    table = byte_table(requant.save(result, tmp_path / "out"))
    for name, matrix in table.matrices.items():
        share = both.outlier_fractions.get(name, 0.0)
        assert matrix.spec == packed_spec(recipe, matrix.spec.shape, both.bits[name], share)
        assert (matrix.spec.num_entries > 0) == (name in both.outlier_fractions)
    assert (1 - TOLERANCE) * 2.9 <= table.bits_per_weight <= 2.9


def test_entries_are_in_a_size_too(tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch) -> None:
    """With the headers of their tensors, which in so small a file would cost more than entries are worth."""
    monkeypatch.setattr(
        "requant.allocation.budget.outlier_factors", lambda run: {s.name: {0.02: 0.1} for s in run.targets}
    )
    folder = tiny_folder("llama")
    size = round(0.4 * folder_bytes(folder))
    recipe = recipe_of("kmeans", mode="best", budget=Budget(size=size, head_bits=16.0, embedding_bits=16.0))
    result = requant.quantize(str(folder), recipe, tiny_text_file)
    assert result.allocation is not None and result.allocation.outlier_fractions
    found = (requant.save(result, tmp_path / "out") / "model.safetensors").stat().st_size
    assert (1 - TOLERANCE) * size <= found <= size
