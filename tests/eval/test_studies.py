"""The studies' own arithmetic, on a model of two tiny blocks."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from eval.baselines import squeezellm
from eval.common import bits_per_weight, write_json
from eval.paper_tables import hessian_of_means, nodes, random_places, random_significant, shares, slope_along
from requant.calibration.passes import mean_loss
from requant.formats.sparse import sparse_mask
from requant.models.targets import find_linears
from requant.pipeline.paper import iqr_outliers
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Detach, Recipe
from requant.run.context import RunContext
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import Workspace
from requant.sensitivity.path import originals


@pytest.fixture
def run() -> RunContext:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    targets = find_linears(model)
    recipe = Recipe(
        quantizer=METHODS["kmeans"].config(bits=2),
        detach=Detach(outlier_fraction=0.01, significant_fraction=0.005),
    )
    windows = torch.randint(64, (3, 16))
    return RunContext(
        model=model,
        targets=targets,
        original=originals(targets),
        windows=windows,
        train_windows=windows,
        recipe=recipe,
        workspace=Workspace(None),
        fingerprint="",
        quiet=True,
    )


def test_the_papers_scaling_squares_sequence_means(run: RunContext) -> None:
    weights = quantize_linears(run, None, label="")
    target = run.targets[3]
    path = run.path(weights)
    found = hessian_of_means(path, run.windows)[target.name]
    path.apply_weights(0.0)
    target.parameter.requires_grad_(True)
    squares = torch.zeros(target.shape)
    for window in run.windows:
        logits = run.model(window[None]).logits[0, :-1]
        (gradient,) = torch.autograd.grad(functional.cross_entropy(logits, window[1:]), target.parameter)
        squares += gradient.square() / len(run.windows)
    torch.testing.assert_close(found, squares * path.step(target).square() / 2)


def test_the_slope_integrates_to_the_loss(run: RunContext) -> None:
    run = dataclasses.replace(run, recipe=Recipe(quantizer=METHODS["kmeans"].config(bits=4)))
    path = run.path(quantize_linears(run, None, label=""))
    path.apply_weights(0.0)
    start = mean_loss(run.model, run.windows)
    path.apply_weights(1.0)
    measured = mean_loss(run.model, run.windows) - start
    errors = {
        row["nodes"]: abs(row["error_percent"]) for row in nodes(slope_along(path, run.windows), measured)
    }
    assert errors["gauss4"] < 0.5
    assert errors["plain32"] < errors["plain8"] < errors["plain4"]


def test_shares_grow_to_the_whole() -> None:
    found = shares({"a": torch.tensor([[3.0, -1.0]]), "b": -torch.ones(1, 200)})
    assert found["sum_of_absolutes"] == 204 and found["signed_sum"] == -198
    assert found["top"]["0.5%"] == pytest.approx(3 / 204)


def test_squeezellm_detaches_outliers_and_then_fisher(run: RunContext) -> None:
    weights = squeezellm(run)
    outliers = iqr_outliers(run, {})
    entries = sum(w.sparse.values.numel() for w in weights.values() if w.sparse is not None)
    assert entries == round(0.01 * run.total_weights) + round(0.005 * run.total_weights)
    for name, weight in weights.items():
        assert (sparse_mask(weight.sparse, weight.shape, torch.device("cpu")) | ~outliers[name]).all()


def test_random_places_are_as_many_as_asked(run: RunContext) -> None:
    masks = random_places(run, 0.0045)
    assert sum(mask.sum().item() for mask in masks.values()) == round(0.0045 * run.total_weights)
    weights = quantize_linears(run, masks, label="")
    more = random_significant(run, weights)
    assert bits_per_weight(more)["sparse_fraction"] > bits_per_weight(weights)["sparse_fraction"]


def test_bits_are_codes_levels_and_padding(run: RunContext) -> None:
    weights = quantize_linears(run, None, label="")
    name = run.targets[0].name
    found = bits_per_weight({name: weights[name]})
    assert found["bits_by_part"] == {"codes": 2.0, "levels": (8 * 4 + 16) / 32}
    assert found["bits_per_weight"] == 3.5 and found["sparse_fraction"] == 0


def test_results_are_rounded_and_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "deep" / "a.json", {"x": [1 / 3, 2], "y": {"z": None, "t": (1e-9 / 3,)}})
    assert json.loads((tmp_path / "deep" / "a.json").read_text()) == {
        "x": [0.333333, 2],
        "y": {"z": None, "t": [3.33333e-10]},
    }
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["a.json"]


def test_rows_share_statistics_but_not_seconds(run: RunContext) -> None:
    other = dataclasses.replace(run, seconds={})
    quantize_linears(other, None, label="")
    assert run.statistics and not run.seconds
