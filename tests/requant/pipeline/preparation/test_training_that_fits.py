"""Llamas of 1B to 70B are trained as the memory of their GPU allows: in rounds, at the end, from the host, or not at all."""

import dataclasses
from pathlib import Path

import pytest
import torch

from requant.pipeline.planning.plan import Plan, make_plan
from requant.pipeline.preparation.completion import FITS_RESIDENT
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.shape_bytes import parameter_bytes
from requant.recipe.defaults import default_recipe
from requant.recipe.schema import Budget, Calibration, Finetune, Recipe

from ..plans import save_shape


@pytest.mark.parametrize(("shape", "limit"), [("1b", 24), ("8b", 90)])
def test_large_shapes_are_trained_in_less_memory(tmp_path: Path, monkeypatch, shape: str, limit: int) -> None:
    """Block by block, within so many GiB; as a whole both take nearly twice as much and more, most of it in training.
    Without training all codes come beside statistics that fill half of what is free, which rounds of codes do not."""
    source = save_shape(shape, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # an H200 is taken
    recipe = default_recipe(source, None, gpu=True)
    recipe = dataclasses.replace(recipe, budget=Budget(bits=2.0))

    def gib(**changes) -> float:
        changed = dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, **changes))
        shaped = outline(source, changed, dtype="bfloat16")
        return make_plan(shaped, shaped.recipe, device="cuda").peak_memory / 2**30

    whole, untrained = gib(blockwise=False), gib(steps=0)
    monkeypatch.setattr("requant.models.devices._most_of_a_gpu", limit << 30)
    by_block = gib(blockwise=True)
    assert by_block < limit and untrained < 1.01 * limit and whole > 1.9 * by_block


def test_a_gpu_with_more_memory_takes_more_at_once(tmp_path: Path, monkeypatch) -> None:
    """As a whole a 1B shape takes what a GPU has, and by blocks all tokens of a step where that fits; in GiB as measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = save_shape("1b", tmp_path)
    recipe = dataclasses.replace(default_recipe(source, None, gpu=True), budget=Budget(bits=2.0))
    text = dataclasses.replace(recipe.finetune, train_windows=981)  # what the text had
    recipe = dataclasses.replace(recipe, finetune=text)

    def planned(memory: float) -> float:
        monkeypatch.setattr("requant.models.devices._most_of_a_gpu", round(memory * 2**30))
        shaped = outline(source, recipe, dtype="bfloat16", device="cuda")
        return make_plan(shaped, shaped.recipe, device="cuda").peak_memory / 2**30

    assert planned(140) == pytest.approx(62.5, rel=0.15)  # an H200, with 8 windows of 2048 at once
    assert planned(79) == pytest.approx(46.6, rel=0.15)  # an H100, with 4
    assert planned(24) == pytest.approx(18.8, rel=0.15)  # by block, 8 windows at once
    assert planned(18) < 17  # 4 at once


@pytest.mark.parametrize(
    ("shape", "memory", "fits"),
    [
        ("70b", 80, 58),
        ("8b", 24, 20),
        ("8b", 16, None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("8b", 40, 30), ("3b", 12, 11.5))),
    ],
)
def test_shapes_larger_than_the_gpu_are_trained_where_that_fits(
    tmp_path: Path, monkeypatch, shape: str, memory: int, fits: float | None
) -> None:
    """At the end only; in GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for place in (
        "preparation.hosting",
        "preparation.completion",
        "planning.memory",
        "planning.plan",
        "planning.statistics",
        "planning.workload",
    ):
        monkeypatch.setattr(f"requant.pipeline.{place}.total_memory", lambda _device: memory << 30)
    source = save_shape(shape, tmp_path)
    recipe = dataclasses.replace(default_recipe(source, None, gpu=True), budget=Budget(bits=2.0))
    shaped = outline(source, recipe, dtype="bfloat16", device="cuda")
    plan = make_plan(shaped, shaped.recipe, device="cuda")
    untrained = dataclasses.replace(
        shaped.recipe, finetune=dataclasses.replace(shaped.recipe.finetune, steps=0)
    )
    assert shaped.hosted and plan.training is not None
    if fits is None:
        assert shaped.bytes_to_train > 16 << 30 and plan.training.startswith("none: it would take about")
        return
    assert plan.training.startswith("200 steps of 16,384 tokens at the end only")
    assert 0.9 * fits < plan.peak_memory / 2**30 < fits
    without = make_plan(shaped, untrained, device="cuda")
    codes, floats = sum(target.size for target in shaped.targets), parameter_bytes(shaped.model)
    assert codes < without.host_memory < codes + floats - without.hosted_bytes + 2 * 2**30 < plan.host_memory
    assert without.seconds < plan.seconds


@pytest.mark.parametrize("every_case", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rounds_that_do_not_fit_are_left_out_by_default(
    tmp_path: Path, monkeypatch, every_case: bool
) -> None:
    """8B has rounds on a card of 90 GB, as many steps at the end on one of 48, and the steps of one round, from the host, on
    one of 40. Steps that are asked for are tried. Modes that train nothing by default stay on the GPU.
    """
    source = save_shape("8b", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = dataclasses.replace(default_recipe(source, None, gpu=True), budget=Budget(bits=2.0))

    def planned(gigabytes: int, chosen: Recipe = recipe) -> Plan:
        monkeypatch.setattr("requant.models.devices._most_of_a_gpu", gigabytes * 10**9)
        shaped = outline(source, chosen, dtype="bfloat16", device="cuda")
        plan = make_plan(shaped, shaped.recipe, device="cuda")
        assert plan.training is not None or chosen.mode == "dense"
        return plan

    def training(plan: Plan) -> str:
        return plan.training or ""

    rounds, at_the_end, hosted = map(planned, (90, 48, 40))
    assert training(rounds).startswith("200 steps of 16,384 tokens after each of 6 rounds")
    assert training(at_the_end).startswith("1200 steps of 16,384 tokens at the end only")
    assert training(hosted).startswith("200 steps of 16,384 tokens at the end only")
    assert at_the_end.hosted_bytes == 0 < hosted.hosted_bytes
    assert rounds.peak_memory > at_the_end.peak_memory > hosted.peak_memory
    assert at_the_end.peak_memory < FITS_RESIDENT * at_the_end.device_memory
    asked = dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, steps=200))
    tried = planned(48, asked)
    assert training(tried) == training(rounds) and tried.peak_memory > 1.1 * tried.device_memory
    assert planned(40, dataclasses.replace(recipe, mode="dense", finetune=Finetune())).hosted_bytes == 0
    if not every_case:
        return
    # of a model on the host what is planned is what it takes: 19.6 GiB
    assert training(planned(22)).startswith("none") and training(planned(23)) == training(hosted)
    own = planned(40, dataclasses.replace(recipe, calibration=Calibration(text=("self",))))
    assert own.hosted_bytes == 0 and training(own).startswith("none: it would take about 4")
