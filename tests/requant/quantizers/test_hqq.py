"""HQQ: never a larger lp norm than rounding to nearest, and a grid that follows the bulk of the weights."""

import copy

import pytest
import torch

from requant.calibration.stats import LinearStats
from requant.errors import RecipeError
from requant.evaluation.perplexity import perplexity_and_kl
from requant.pipeline.preparation.prepare import prepare
from requant.quantizers import hqq, rtn
from requant.recipe.defaults import default_recipe


def norms(weight: torch.Tensor, values: torch.Tensor, group_size: int, p: float) -> torch.Tensor:
    """sum |w - w~|^p of every group."""
    error = (values - weight).abs().pow(p)
    return torch.stack([part.sum(1) for part in error.split(group_size, 1)], 1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("k", [64, 172, 512])
def test_no_group_has_a_larger_lp_norm_than_rounding_to_nearest(layer, bits: int, k: int) -> None:
    weight = layer(16, k).weight
    config = hqq.HqqConfig(bits=bits, group_size=64)
    found = hqq.quantize(weight, LinearStats(), config).dequantize()
    nearest = rtn.quantize(weight, LinearStats(), rtn.RtnConfig(bits=bits, group_size=64)).dequantize()
    ours, theirs = (norms(weight, values, 64, config.p) for values in (found, nearest))
    assert (ours <= theirs * (1 + 1e-5)).all()
    assert ours.sum() < theirs.sum() * (0.98 if bits <= 4 else 1)


def test_an_outlier_does_not_cost_the_others(layer) -> None:
    """At 3 bits, one weight of 1 among weights of 0.05 would leave round to nearest two or three levels for the rest."""
    weight = layer(8, 128).weight
    weight[:, 5] = 1.0
    errors = {}
    for method, config in ((rtn, rtn.RtnConfig(bits=3)), (hqq, hqq.HqqConfig(bits=3))):
        error = method.quantize(weight, LinearStats(), config).dequantize() - weight
        error[:, 5] = 0
        errors[method] = error.abs().mean().item()
    assert errors[hqq] < 0.8 * errors[rtn]


@pytest.mark.slow
def test_the_demo_keeps_closer_to_the_original_than_by_rounding_to_nearest() -> None:
    recipe = default_recipe("demo", "hqq", "dense")
    prepared = prepare("demo", recipe, device="cpu", dtype="float32")
    original = copy.deepcopy(prepared.model)
    kl = {}
    for method, config in ((rtn, rtn.RtnConfig(bits=3)), (hqq, hqq.HqqConfig(bits=3))):
        for target in prepared.targets:
            weight = original.get_parameter(f"{target.name}.weight").detach().float()
            target.set_weight(method.quantize(weight, LinearStats(), config).dequantize())
        windows = prepared.eval_windows[:2]
        found = perplexity_and_kl(prepared.model, windows, text=prepared.evaluation, reference=original)
        kl[method] = found.mean_kl
    assert kl[hqq] < 0.95 * kl[rtn]


def test_the_shrinkage_operator_is_near_the_minimum() -> None:
    residual = torch.linspace(-2, 2, 41)
    grid = torch.linspace(-2, 2, 4001)[:, None]
    cost = grid.abs().pow(0.7) + 5 * (grid - residual).square()
    best = grid[cost.argmin(0), 0]
    found = hqq.shrink(residual[None, None], 0.7, 10.0)[0, 0]
    assert (found - best).abs().max() < 0.25
    assert ((found == 0) | (found.sign() == residual.sign())).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 0.0}, "p is 0.0"),
        ({"p": 1.5}, "p is 1.5"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"kappa": float("nan")}, "kappa nan"),
        ({"iterations": 0}, "iterations is 0"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        hqq.HqqConfig(**options)
