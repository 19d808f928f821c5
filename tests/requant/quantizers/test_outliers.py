"""Outliers next to a codebook: the right weights, as many as the budget counted, and worth what was predicted."""

import pytest
import torch

from requant.allocation.sizes import packed_spec
from requant.calibration.stats import LinearStats
from requant.errors import RecipeError
from requant.formats.quantized_weight import pack
from requant.quantizers.outliers import OUTLIER_FRACTIONS, outlier_count, outlier_mask, remaining_loss
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Recipe


@pytest.fixture
def heavy():
    """Weights with a heavy tail, and what their errors cost."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 300, generator=generator)
    weight[torch.rand(40, 300, generator=generator) < 0.004] *= 12
    return weight, torch.rand(40, 300, generator=generator) + 0.1


def test_outliers_are_taken_before_all(heavy):
    weight, cost = heavy
    mask = outlier_mask(weight, cost, bits=3, outlier_fraction=0.01)
    assert int(mask.sum()) == outlier_count(0.01, (40, 300)) == 120
    outliers = weight.abs() > 6
    assert 20 < int(outliers.sum()) < 60 and mask[outliers].float().mean() > 0.95


def test_what_is_dear_is_taken(heavy):
    weight, cost = heavy
    cost[:, 17] *= 1000  # one input that is far larger than all others
    mask = outlier_mask(weight, cost, bits=2, outlier_fraction=0.01)
    assert mask[:, 17].float().mean() > 10 * mask.float().mean()


def test_more_outliers_leave_less(heavy):
    found = [remaining_loss(*heavy)[fraction] for fraction in OUTLIER_FRACTIONS]
    assert 1 > found[0] > found[1] > found[2] > found[3] > 0
    assert remaining_loss(*heavy, bits=2)[0.01] < 0.6  # the tail is gone: worth far more than 0.16 bits


def test_the_prediction_is_what_kmeans_finds(heavy):
    weight, cost = heavy
    method = METHODS["kmeans"]

    def error(fraction: float) -> float:
        found = method.quantize(
            weight, LinearStats(fisher=cost), method.config(bits=3, outlier_fraction=fraction)
        )
        return float((cost * (found.dequantize() - weight).square()).sum())

    predicted = remaining_loss(weight, cost)[0.01]
    assert error(0.01) / error(0.0) == pytest.approx(predicted, rel=0.15)


def test_a_tile_never_fills(heavy):
    """Its outliers are counted in a byte, even where one run of weights is worth all of them."""
    weight, cost = torch.zeros(4, 600), torch.ones(4, 600)
    weight[0, 256:512] = torch.linspace(5, 9, 256)
    mask = outlier_mask(weight, cost, bits=2, outlier_fraction=0.12)
    assert int(mask[0, 256:512].sum()) == 255 and int(mask.sum()) == outlier_count(0.12, (4, 600)) - 1


@pytest.mark.parametrize("method", ["kmeans", "lut"])
@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.004, 0.02])
def test_bytes_are_those_that_were_planned(layer, method: str, fraction: float):
    made = layer(12, 300)
    config = METHODS[method].config(bits=3, outlier_fraction=fraction)
    found = METHODS[method].quantize(made.weight, made.stats, config)
    layout = pack(found)[0]
    assert layout == packed_spec(Recipe(mode="dense", method=method, quantizer=config), (12, 300))
    assert layout.num_entries == outlier_count(fraction, (12, 300))
    if layout.sparse is not None:
        assert layout.sparse.values == "int8"
        plain = METHODS[method].quantize(made.weight, made.stats, METHODS[method].config(bits=3))
        assert made.output_error(found) < made.output_error(plain)


def test_places_that_are_given_come_first(layer):
    made = layer(6, 172)
    config = METHODS["lut"].config(bits=3, outlier_fraction=0.02)
    found = METHODS["lut"].quantize(made.weight, made.stats, config, detached=made.detached)
    assert torch.equal(found.sparse.dequantize() != 0, made.detached) and found.sparse.row_scales is None


def test_fractions_are_checked():
    with pytest.raises(RecipeError, match=r"outlier_fraction is 0.5, but it takes a fraction from 0 to 0.2"):
        METHODS["kmeans"].config(outlier_fraction=0.5)
    with pytest.raises(RecipeError, match=r"quantizer\.outlier_fraction has no meaning in mode paper"):
        Recipe(mode="paper", method="kmeans", quantizer=METHODS["kmeans"].config(outlier_fraction=0.01))
