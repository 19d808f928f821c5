"""What a budget gives to whom: bits of matrices, of embedding and head, and what cannot be had."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import requant
from requant.allocation.budget import EMBEDDING_AND_HEAD_LOSS, allocate_bits, with_allocation
from requant.allocation.embedding_and_head import (
    embedding_and_head_losses,
    embedding_and_head_of,
    table_method,
)
from requant.allocation.knapsack import TOLERANCE
from requant.allocation.predictors import curvature
from requant.allocation.sizes import available_bits, packed_spec
from requant.checkpoint.sizes import byte_table
from requant.errors import RecipeError
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.trellis import TrellisConfig
from requant.recipe.schema import Budget, Detach, Finetune, Mode
from requant.recipe.yaml_files import load_recipe
from requant.run.context import Allocation, RunContext
from requant.run.rounds import FIRST_WEIGHT
from requant.run.workspace import Workspace

from ..on_text import on_text
from .conftest import TINY, recipe_of, started


def test_quarters_of_a_bit_spend_a_budget_better(tiny_folder, tiny_text_file: Path) -> None:
    folder, found = tiny_folder("llama"), {}
    for quarters in (True, False):
        budget = Budget(bits=2.5, quarters=quarters)
        found[quarters] = allocate_bits(started(folder, tiny_text_file, recipe_of("trellis", budget=budget)))
    assert all(bits % 1 == 0 for bits in found[False].bits.values())
    assert any(bits % 1 for bits in found[True].bits.values())
    assert all(allocation.bytes <= allocation.budget for allocation in found.values())
    assert found[True].predicted < 0.98 * found[False].predicted
    pair = dataclasses.replace(recipe_of("trellis"), quantizer=TrellisConfig(code="pair"))
    assert available_bits(pair) == [quarters / 4 for quarters in range(4, 17)]
    assert available_bits(recipe_of()) == list(range(2, 9))


def test_no_budget_is_the_recipes_width(tiny_folder, tiny_text_file: Path) -> None:
    run = started(tiny_folder("llama"), tiny_text_file, recipe_of())
    found = allocate_bits(run)
    assert set(found.bits.values()) == {4} and found.budget is None and found.predicted is None
    assert with_allocation(run, found).fingerprint == run.fingerprint  # results of earlier runs stay valid
    assert found.embedding_bits == found.head_bits == 16


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("bits", [3.0, 4.0])
def test_embedding_and_head_have_the_fewest_bits_that_add_little(
    tiny_folder, tiny_text_file: Path, name: str, bits: float
) -> None:
    run = started(tiny_folder(name), tiny_text_file, recipe_of(budget=Budget(bits=bits)))
    found = allocate_bits(run)
    assert found.bytes <= bits * run.total_weights / 8  # theirs come on top
    kept = allocate_bits(
        dataclasses.replace(
            run, recipe=recipe_of(budget=Budget(bits=bits, head_bits=16.0, embedding_bits=16.0))
        )
    )
    parts = embedding_and_head_of(run.model)
    widths = [*table_method(run.recipe).bits, 16]
    losses = embedding_and_head_losses(run, parts, dict.fromkeys(parts.parts, widths))
    limit = EMBEDDING_AND_HEAD_LOSS * kept.predicted / len(losses)
    chosen = {"embedding": found.embedding_bits, "head": found.head_bits}
    for role, of in losses.items():
        assert of[chosen[role]] <= limit and all(of[b] > limit for b in widths if b < chosen[role])
    added = sum(of[chosen[role]] for role, of in losses.items())
    assert found.predicted == pytest.approx(kept.predicted + added) and added > 0


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_split_of_a_file_as_large_is_what_its_size_gives(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, name: str
) -> None:
    """`--size` with the number that `--bits` names makes the choice that was named."""
    folder = tiny_folder(name)
    by_bits = requant.quantize(str(folder), recipe_of(budget=Budget(bits=3.5)), tiny_text_file)
    file = sum(each.stat().st_size for each in requant.save(by_bits, tmp_path / "o").glob("*.safetensors"))
    assert by_bits.allocation is not None and by_bits.allocation.predicted is not None
    split = by_bits.allocation.best_split
    assert split is not None and split.predicted < 0.9 * by_bits.allocation.predicted
    assert split.embedding_bits < by_bits.allocation.embedding_bits and split.bits > 3.5
    assert file <= split.size <= 1.01 * file + 4096  # the longest header, and what --bits leaves unspent
    run = started(folder, tiny_text_file, recipe_of(budget=Budget(size=split.size)))
    found = allocate_bits(run)
    assert found.predicted == pytest.approx(split.predicted, rel=1e-6) and found.best_split is None
    assert (found.embedding_bits, found.head_bits) == (split.embedding_bits, split.head_bits)
    stored = sum(packed_spec(run.recipe, t.shape, found.bits[t.name]).bytes for t in run.targets)
    assert 8 * stored / run.total_weights == pytest.approx(split.bits)


def test_no_split_is_named_where_there_is_no_choice(tiny_folder, tiny_text_file: Path) -> None:
    """Or where it would hardly lose less."""
    fixed = started(
        tiny_folder("llama"),
        tiny_text_file,
        recipe_of(budget=Budget(bits=3.5, head_bits=8.0, embedding_bits=8.0)),
    )
    assert allocate_bits(fixed).best_split is None
    free = started(tiny_folder("llama"), tiny_text_file, recipe_of(budget=Budget(bits=3.5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("requant.allocation.budget.CLEARLY_LESS", 0.0)
        assert allocate_bits(free).best_split is None


def test_an_allocation_is_made_once(tiny_folder, tiny_text_file: Path) -> None:
    run = started(tiny_folder("llama"), tiny_text_file, recipe_of(budget=Budget(bits=4.0)))
    decided = with_allocation(run, allocate_bits(run))
    assert allocate_bits(decided) is decided.allocation
    assert decided.fingerprint != run.fingerprint
    assert [decided.config_of(target).bits for target in run.targets] == list(decided.bits.values())


def test_what_cannot_be_reached(tiny_folder, tiny_text_file: Path) -> None:
    folder = tiny_folder("llama")

    def refuse(message: str, **budget) -> None:
        with pytest.raises(RecipeError, match=message):
            allocate_bits(started(folder, tiny_text_file, recipe_of(budget=Budget(**budget))))

    refuse(
        r"--bits 2 cannot be met: the smallest that method 'rtn' .* is 2\.950 bits per weight, all stored bytes counted; "
        r"give --bits 2\.95, or give --method trellis, whose codes start at 1 bit",
        bits=2.0,
    )
    refuse(
        r"--size 20,000 cannot be met: the smallest checkpoint .* has \d\d,\d\d\d bytes; give", size=20_000
    )
    refuse(
        r"--size 9,000,000 cannot be met: the largest checkpoint .* has \d\d\d,\d\d\d bytes", size=9_000_000
    )


def test_the_smallest_that_the_message_names_can_be_had(tiny_folder, tiny_text_file: Path) -> None:
    folder = tiny_folder("llama")
    with pytest.raises(RecipeError) as caught:
        allocate_bits(started(folder, tiny_text_file, recipe_of(budget=Budget(bits=1.0))))
    bits = float(str(caught.value).rpartition(" is ")[2].split()[0])
    found = allocate_bits(started(folder, tiny_text_file, recipe_of(budget=Budget(bits=bits))))
    assert set(found.bits.values()) == {2}


@pytest.mark.usefixtures("full_reports")
def test_the_dry_run_shows_the_allocation(cli, tiny_folder, tiny_text_file: Path) -> None:
    arguments = ("quantize", "--model", tiny_folder("llama"), "--bits", 4.1, "--method", "gptq", "--mode", "dense",
                 "--calibration", tiny_text_file, "--output", "out", *TINY)  # fmt: skip
    code, out, error = cli(*arguments, "--dry-run")
    assert code == 0, error
    assert (
        "unspent)" in out and "predicted loss" in out and "by curvature" in out and "bytes would lose" in out
    )
    assert "  a file as large, --size " in out and " bits, matrices at " in out
    assert sum(line.startswith(("  q_proj", "  down_proj")) for line in out.splitlines()) == 2
    assert not Path("out").exists()
    code, out, _ = cli(*arguments, "--dry-run", "--json")
    plan = json.loads(out)
    split = plan["allocation"]["best_split"]
    code, out, _ = cli(*arguments)
    assert code == 0
    assert f"loss predicted for a file as large, --size {split['size']}" in out
    assert f"{split['predicted']:.4f}" in out
    assert f"embedding at {split['embedding_bits']} bits, matrices at {split['bits']:.2f}" in out
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert f"--size {split['size']}</code>" in page
    assert json.loads(Path("out/report.json").read_text())["budget"]["best_split"] == split
    table = byte_table("out")
    assert plan["allocation"]["bits"] == {name: m.spec.bits for name, m in table.matrices.items()}
    assert plan["allocation"]["bytes"] == sum(matrix.bytes for matrix in table.matrices.values())


def test_a_run_that_stops_goes_on_with_its_allocation(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same bytes as an undisturbed run; matrices of another budget are not taken up."""
    folder, recipe = str(tiny_folder("llama")), recipe_of("gptq", budget=Budget(bits=4.1, head_bits=8.0))
    undisturbed = requant.save(requant.quantize(folder, recipe, tiny_text_file), tmp_path / "undisturbed")
    kept = tmp_path / "kept.partial"
    put, made = Workspace.put, []

    def stopping(self, stage, *args, **kwargs) -> None:
        put(self, stage, *args, **kwargs)
        made.append(stage)
        if len(made) == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(Workspace, "put", stopping)
    with pytest.raises(KeyboardInterrupt):
        requant.quantize(folder, recipe, tiny_text_file, workspace=Workspace(kept))
    made[:] = ["already"] * 9
    resumed = requant.quantize(folder, recipe, tiny_text_file, workspace=Workspace(kept, resume=True))
    assert made[9:] == ["linear"] * 6 + ["embedding-and-head"]  # the predictor and eight matrices were there
    saved = requant.save(resumed, tmp_path / "resumed")
    assert (saved / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    made[:] = ["already"] * 9
    other = dataclasses.replace(recipe, budget=Budget(bits=5.3, head_bits=8.0))
    requant.quantize(folder, other, tiny_text_file, workspace=Workspace(kept, resume=True))
    assert made.count("linear") == 14


def test_bits_of_every_matrix_reach_the_report(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    recipe = recipe_of(budget=Budget(bits=4.1))
    result = requant.quantize(str(tiny_folder("llama")), recipe, tiny_text_file)
    assert result.allocation is not None
    assert {name: w.dense.bits for name, w in result.weights.items()} == result.allocation.bits
    page = (requant.save(result, tmp_path / "out") / "report.html").read_text()
    assert (
        "The budget" in page and f"{result.allocation.budget:,}" in page and "predicted by curvature" in page
    )


def test_a_matrix_that_matters_more_gets_more(tiny_folder, tiny_text_file: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = recipe_of(budget=Budget(bits=3.6))
    tokenizer = prepare(str(tiny_folder("llama")), on_text(recipe, tiny_text_file)).tokenizer
    name, found = "model.layers.1.mlp.down_proj", []
    for factor in (1, 32):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama")).eval().requires_grad_(False)
        model.get_parameter(f"{name}.weight").mul_(factor)
        prepared = prepare(model, on_text(recipe, tiny_text_file), tokenizer=tokenizer)
        found.append(allocate_bits(start(prepared, recipe, workspace=Workspace(None), quiet=True)))
    assert found[1].bits[name] > found[0].bits[name]
    assert found[1].bytes <= found[1].budget == found[0].budget


def test_what_training_mends_gives_its_bits_to_what_is_quantized_last(
    tiny_folder, tiny_text_file: Path
) -> None:
    """In mode best, and only where it trains; the predicted loss stays unweighted, so it cannot fall."""

    def allocated(weight: float, *, steps: int = 2, mode: Mode = "best") -> Allocation:
        recipe = recipe_of(
            mode=mode, budget=Budget(bits=3.6, first_round_weight=weight), finetune=Finetune(steps=steps)
        )
        return allocate_bits(started(tiny_folder("llama"), tiny_text_file, recipe))

    def of_last(found: Allocation, last: bool) -> float:
        return sum(bits for name, bits in found.bits.items() if name.endswith("down_proj") == last)

    plain, weighted = allocated(1.0), allocated(0.01)
    assert of_last(weighted, True) > of_last(plain, True)
    assert of_last(weighted, False) < of_last(plain, False)
    assert weighted.bytes <= weighted.budget and weighted.predicted > plain.predicted
    for unchanged in ({"steps": 0}, {"mode": "dense"}):
        assert allocated(0.01, **unchanged).bits == allocated(1.0, **unchanged).bits


@pytest.mark.parametrize(
    ("size", "weight", "other"), [(70_000, FIRST_WEIGHT, 1.0), (90_000, 1.0, FIRST_WEIGHT)]
)
def test_a_budget_for_the_file_weights_losses_by_the_bits_of_the_matrices(
    tiny_folder, tiny_text_file: Path, size: int, weight: float, other: float
) -> None:
    """2 of them in the smaller file, above 3 in the larger; with embedding and head both files have more than 3."""

    def allocated(first: float | None) -> Allocation:
        budget = Budget(size=size, embedding_bits=8.0, head_bits=8.0, first_round_weight=first)
        recipe = recipe_of("trellis", mode="best", budget=budget, finetune=Finetune(steps=2))
        return allocate_bits(started(tiny_folder("llama"), tiny_text_file, recipe))

    assert allocated(None).bits == allocated(weight).bits != allocated(other).bits


@pytest.mark.parametrize(
    ("size", "bits", "within"), [(110_000, 8, 0.05), (180_000, 16, 0.05), (110_000, None, 1.0)]
)
def test_predictors_quantize_at_what_a_budget_for_the_file_leaves_the_matrices(
    tiny_folder, tiny_text_file: Path, monkeypatch: pytest.MonkeyPatch, size: int, bits: Any, within: float
) -> None:
    """Without embedding and head, which take a third of the smaller file; where they are free, about."""
    averages: list[float] = []

    def predicted_losses(run: RunContext, widths: Any, average: float) -> Any:
        averages.append(average)
        return curvature(run, widths)

    monkeypatch.setattr("requant.allocation.budget.predicted_losses", predicted_losses)
    bits = bits and float(bits)
    recipe = recipe_of("trellis", budget=Budget(size=size, embedding_bits=bits, head_bits=bits))
    run = started(tiny_folder("llama"), tiny_text_file, recipe)
    found = allocate_bits(run)
    spent = sum(packed_spec(recipe, target.shape, found.bits[target.name]).bytes for target in run.targets)
    assert averages == [pytest.approx(8 * spent / run.total_weights, abs=within)]


@pytest.mark.parametrize("predictor", ["curvature", "measured"])
def test_bits_of_modules_are_fixed_and_the_budget_gives_out_the_rest(
    tiny_folder, tiny_text_file: Path, predictor
) -> None:
    recipe = recipe_of(
        budget=Budget(bits=5.5, predictor=predictor),
        modules={"*_proj": {"group_size": 16}, "down_proj": {"bits": 7}, "*.1.mlp.up_proj": {"bits": 2}},
    )
    run = started(tiny_folder("llama"), tiny_text_file, recipe)
    allocation = allocate_bits(run)
    fixed = {n: b for n, b in allocation.bits.items() if n.endswith(("down_proj", ".1.mlp.up_proj"))}
    assert sorted(fixed.values()) == [2, 7, 7]
    assert len(set(allocation.bits.values()) - {2, 7}) > 1
    assert allocation.budget is not None and 0 <= allocation.unspent <= TOLERANCE
    configs = [with_allocation(run, allocation).config_of(target) for target in run.targets]
    assert [c.bits for c in configs] == list(allocation.bits.values())
    assert {c.group_size for c in configs} == {16}
    stored = sum(
        packed_spec(recipe, t.shape, allocation.bits[t.name], options=t.options).bytes for t in run.targets
    )
    assert stored == allocation.bytes


def test_a_budget_that_fixed_bits_leave_no_room_for(tiny_folder, tiny_text_file: Path) -> None:
    recipe = recipe_of(budget=Budget(bits=3.0), modules={"*_proj": {"bits": 8}})
    with pytest.raises(
        RecipeError,
        match=r"--bits 3 cannot be met: the smallest .* with the bits that modules fixes is 8\.\d+ bits per weight",
    ):
        allocate_bits(started(tiny_folder("llama"), tiny_text_file, recipe))


@pytest.mark.parametrize("budget", [Budget(bits=5.0), Budget(size=20_000)])
def test_a_budget_that_residuals_alone_exceed(budget: Budget, tiny_folder, tiny_text_file: Path) -> None:
    detach = Detach(outlier_fraction=0.2, significant_fraction=0.2)  # of 24 bits each
    recipe = recipe_of(budget=budget, mode="paper", detach=detach)
    with pytest.raises(
        RecipeError,
        match=r"[,;] (or )?lower detach\.outlier_fraction and .* whose residuals take 9\.\d+ bits per weight\.$",
    ):
        allocate_bits(started(tiny_folder("llama"), tiny_text_file, recipe))


def test_modules_from_the_command_to_the_file(cli, tiny_folder, tiny_text_file: Path) -> None:
    code, _, error = cli(
        "quantize", "--model", tiny_folder("llama"), "--code-bits", 3, "--method", "rtn", "--mode", "dense",
        "--module", "*.down_proj:bits=5,symmetric=true", "--module", "o_proj:group_size=-1",
        "--calibration", tiny_text_file, "--output", "out", *TINY
    )  # fmt: skip
    assert code == 0, error
    specs = {name: matrix.spec for name, matrix in byte_table("out").matrices.items()}
    for name, spec in specs.items():
        down, wide = name.endswith("down_proj"), name.endswith("o_proj")
        assert spec.bits == (5 if down else 3)
        assert ("zero_points" in spec.tensors()) == (not down)
        groups = spec.tensors()["scales"].shape[1]
        assert groups == 1 if wide else groups == -(-spec.shape[1] // 128)
    assert load_recipe("out/recipe.yaml").modules == {
        "*.down_proj": {"bits": 5, "symmetric": True},
        "o_proj": {"group_size": -1},
    }
    code, _, error = cli(
        "quantize", "--model", tiny_folder("llama"), "--recipe", "out/recipe.yaml", "--module", "head:bits=5",
        "--calibration", tiny_text_file, "--output", "other", *TINY
    )  # fmt: skip
    assert code == 2 and "modules: 'head' matches no matrix; names look like" in error
