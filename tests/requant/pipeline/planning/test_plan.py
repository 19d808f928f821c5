"""A plan is made from a configuration alone, and says what the run will do."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from requant.allocation.budget import allocate_bits
from requant.pipeline.planning.memory import CHARACTER_BYTES_KEPT
from requant.pipeline.planning.plan import make_plan
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Finetune, Mode
from requant.run.workspace import Workspace

from ...on_text import on_text
from ..plans import recipe_of


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["dense", "paper"])
def test_every_method_has_a_plan(tiny_folder, tiny_text_file: Path, method: str, mode: str) -> None:
    recipe = recipe_of(method, mode=mode)
    plan = make_plan(prepare(str(tiny_folder("llama")), on_text(recipe, tiny_text_file)), recipe)
    assert plan.matrices == dict.fromkeys(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], 2
    )
    assert 0 < plan.bytes_after < plan.bytes_before and plan.seconds > 0
    assert plan.peak_memory > plan.bytes_before
    text = "\n".join(plan.lines())
    assert "14 (2 q_proj, " in text and f"{plan.bytes_before:,} -> {plan.bytes_after:,}" in text


@pytest.mark.parametrize(("name", "mode"), [("llama", "dense"), ("llama-tied", "paper")])
def test_a_configuration_is_enough_for_a_plan(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, name: str, mode: str
) -> None:
    """The bytes are those of a plan that has read the weights; there are none to read here."""
    recipe = recipe_of("gptq", mode=mode)
    source = tiny_folder(name)
    shutil.copy(source / "config.json", tmp_path)
    prepared = prepare(str(source), on_text(recipe, tiny_text_file))
    expected = make_plan(prepared, recipe)
    characters = len(prepared.calibration.text) + len(prepared.evaluation.text)
    outlined = outline(str(tmp_path), recipe)
    assert {p.device.type for p in outlined.model.parameters()} == {"meta"}
    plan = make_plan(outlined, recipe, device="cpu")
    assert plan.matrices == expected.matrices and plan.bits_per_weight == expected.bits_per_weight
    texts = CHARACTER_BYTES_KEPT * characters  # what they leave; an outline does not read them
    assert plan.peak_memory == expected.peak_memory - texts
    assert plan.bytes_after == expected.bytes_after


def test_a_plan_from_the_configuration_computes_in_the_dtype_of_the_run(tiny_folder, tmp_path: Path) -> None:
    """float32 on a CPU, where 16 bits may be fifty times slower; the original's bytes are those of its own dtype."""
    config = json.loads((tiny_folder("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    recipe = recipe_of("gptq", mode="dense")
    for device, computed in [("cpu", torch.float32), ("cuda", torch.bfloat16)]:
        outlined = outline(str(tmp_path), recipe, device=device, gpus=2)
        plan = make_plan(outlined, recipe, device=device)
        parameters = list(outlined.model.parameters())
        assert {each.dtype for each in parameters} == {computed}
        assert plan.bytes_before == 2 * sum(each.numel() for each in parameters) > plan.bytes_after
        unit, units = ("process", "processes") if device == "cpu" else ("GPU", "GPUs")
        text = "\n".join(dataclasses.replace(plan, gpus=2, device_memory=1 << 40).lines())
        assert f" GiB a {unit}\n" in text and f" on 2 {units}" in text


def test_tables_that_the_run_will_choose_for_get_usual_bits(tiny_folder, tmp_path: Path) -> None:
    """Not the fewest, which no run would take; and the plan says that they are a guess."""
    shutil.copy(tiny_folder("llama") / "config.json", tmp_path)
    recipe = recipe_of("trellis", budget=Budget(bits=3.0))
    guessed, given = (
        make_plan(outline(str(tmp_path), own), own, device="cuda")
        for own in (
            recipe,
            dataclasses.replace(recipe, budget=Budget(bits=3.0, embedding_bits=6.0, head_bits=6.0)),
        )
    )
    assert guessed.bytes_after == given.bytes_after and given.tables is None
    text = "\n".join(guessed.lines())
    assert f"-> about {guessed.bytes_after:,}\n  embedding at 6 bits, head at 6 bits, as is usual" in text


def test_a_plan_says_how_often_it_trains(tiny_folder) -> None:
    """After the rounds that the model's blocks allow; a recipe without training has no such line."""
    source = str(tiny_folder("llama"))

    def lines(mode: Mode, finetune: Finetune) -> list[str]:
        recipe = recipe_of("gptq", mode=mode, finetune=finetune)
        plan = make_plan(outline(source, recipe), recipe, device="cpu")
        return [line for line in plan.lines() if line.startswith("training ")]

    expected = "training        300 steps of 32 tokens"
    few = Finetune(steps=300, tokens_per_step=32)
    assert lines("best", few) == [f"{expected} after each of 6 rounds"]
    assert lines("best", dataclasses.replace(few, rounds=100)) == [f"{expected} after each of 8 rounds"]
    assert lines("paper", few) == [expected]
    own = dataclasses.replace(few, own_windows=1500)
    assert lines("paper", own) == [f"{expected}, with 1,500 windows that the model writes"]
    assert lines("best", Finetune(steps=0)) == []


def test_a_plan_counts_no_tokens_of_experts(tiny_folder, tiny_text_file: Path, monkeypatch) -> None:
    """A pass over the text which only a report would show; the bits of a budget need the other passes."""
    recipe = recipe_of("gptq", budget=Budget(bits=4.5))
    prepared = prepare(str(tiny_folder("qwen3-moe")), on_text(recipe, tiny_text_file))
    run = start(prepared, recipe, workspace=Workspace(None), quiet=True)
    assert len(run.routed_tokens) > 0
    monkeypatch.setattr("requant.pipeline.preparation.prepare.routed_tokens", None)
    assert make_plan(prepared, recipe).allocation == allocate_bits(run)


@pytest.mark.parametrize("scored", [False, True])
def test_a_plan_from_the_configuration_names_the_texts_of_the_run(
    tiny_folder, tiny_text_file: Path, scored: bool
) -> None:
    """Without a text to score, the end of the other is held out."""
    recipe = on_text(recipe_of("rtn"), tiny_text_file)
    evaluation = (str(tiny_text_file),) if scored else ()
    recipe = dataclasses.replace(recipe, evaluation=dataclasses.replace(recipe.evaluation, text=evaluation))
    source = tiny_folder("llama")
    from_shapes = make_plan(outline(source, recipe, dtype="float32", device="cpu"), recipe, device="cpu")
    plan = make_plan(prepare(str(source), recipe), recipe)
    assert from_shapes.calibration.endswith(plan.calibration)  # a path, of which the run says the name
    assert from_shapes.scored_on.endswith(plan.scored_on)
    assert ("held out" in from_shapes.scored_on) is not scored


@pytest.mark.parametrize("method", ["rtn", "trellis"])
def test_processes_of_one_cpu_share_its_cores(tiny_folder, monkeypatch, method: str) -> None:
    """So two take as long as one, and not half, but for what only one can do."""
    monkeypatch.setattr("requant.pipeline.planning.costs.product_rate", lambda dtype, device: 1e11)
    recipe = recipe_of(method, mode="dense")
    one, two = (
        make_plan(
            outline(tiny_folder("llama"), recipe, device="cpu", gpus=gpus), recipe, device="cpu"
        ).seconds
        for gpus in (1, 2)
    )
    assert 0.9 * one < two < 1.3 * one
