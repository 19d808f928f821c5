"""Weighted k-means against the exact dynamic program over all weights of a row."""

import numpy as np
import pytest
import torch

from requant.calibration.stats import LinearStats
from requant.errors import NumericalError
from requant.quantizers import kmeans


def exact_cost(weight, fisher, count):
    """The least possible sum F (w - level)^2 of one row, O(count k^2)."""
    order = np.argsort(weight)
    weight, fisher = weight[order].astype(np.float64), fisher[order].astype(np.float64)
    sums = [np.concatenate([[0], np.cumsum(term)]) for term in (fisher, fisher * weight, fisher * weight**2)]
    mass, moment, energy = (total[None, :] - total[:, None] for total in sums)
    index = np.arange(len(weight) + 1)
    ascending = index[:, None] < index
    cost = np.where(ascending, energy - moment**2 / np.where(ascending, mass, 1), np.inf)
    np.fill_diagonal(cost, 0)
    best = cost[0]
    for _ in range(count - 1):
        best = (best[:, None] + cost).min(0)
    return best[-1]


def relative_cost(weight, fisher, bits):
    """Cost of the levels found over the least cost, row by row."""
    levels = kmeans.fit_levels(weight.double(), fisher.double(), None, bits=bits)
    distance = (weight.double()[:, :, None] - levels[:, None, :]).abs().amin(2)
    found = (fisher * distance.square()).sum(1)
    least = [exact_cost(w.numpy(), f.numpy(), 2**bits) for w, f in zip(weight, fisher, strict=True)]
    return found / torch.tensor(least, dtype=torch.float64)


@pytest.mark.parametrize(("k", "bits"), [(20, 2), (64, 3), (100, 4), (128, 3), (128, 5)])
def test_narrow_rows_are_optimal(layer, k, bits):
    made = layer(6, k)
    assert relative_cost(made.weight, made.stats.fisher, bits).max() < 1 + 1e-6


@pytest.mark.parametrize("kind", ["normal", "outliers", "bfloat16"])
@pytest.mark.parametrize("bits", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_wide_rows_are_within_a_fifth_of_a_percent(layer, bits, kind):
    made = layer(3, 1408)
    weight = made.weight
    if kind == "outliers":
        weight = torch.where(made.detached, 5 * weight, weight)
    elif kind == "bfloat16":  # equal weights, many a row
        weight = weight.bfloat16().float()
    assert relative_cost(weight, made.stats.fisher, bits).max() < 1.002


@pytest.mark.parametrize(("bits", "tolerance"), [(5, 0.03), (6, 0.1)])
def test_wide_codes_are_near_the_optimum(layer, bits, tolerance):
    made = layer(2, 700)
    assert relative_cost(made.weight.bfloat16().float(), made.stats.fisher, bits).max() < 1 + tolerance


def test_levels_ascend_and_codes_are_nearest(layer):
    made = layer(5, 300)
    dense = kmeans.quantize(made.weight, made.stats, kmeans.KmeansConfig(bits=3)).dense
    assert (dense.levels.float().diff(dim=1) >= 0).all()
    distances = (made.weight[:, :, None] - dense.levels.float()[:, None, :]).abs()
    assert torch.allclose(distances.gather(2, dense.codes.long()[:, :, None])[:, :, 0], distances.amin(2))


def test_worked_example():
    weight = torch.tensor([[0.0, 1.0, 8.0, 9.0, 20.0, 40.0]])
    fisher = torch.tensor([[3.0, 1.0, 1.0, 1.0, 5.0, 5.0]])
    config = kmeans.KmeansConfig(bits=2, level_bits=16)
    dense = kmeans.quantize(weight, LinearStats(fisher=fisher), config).dense
    assert dense.levels.tolist() == [[0.25, 8.5, 20.0, 40.0]]
    assert dense.codes.tolist() == [[0, 0, 1, 1, 2, 3]]


def test_fewer_weights_than_levels(layer):
    made = layer(3, 40)
    dense = kmeans.quantize(made.weight, made.stats, kmeans.KmeansConfig(bits=8)).dense
    assert dense.levels.shape == (3, 256)
    assert torch.equal(dense.dequantize(), made.weight.half().float())


def test_detached_places_weigh_nothing(layer):
    made = layer(3, 300)
    absent = LinearStats(fisher=made.stats.fisher.masked_fill(made.detached, 0))
    config = kmeans.KmeansConfig(bits=3)
    with_mask = kmeans.quantize(made.weight, made.stats, config, detached=made.detached)
    assert torch.equal(with_mask.dense.levels, kmeans.quantize(made.weight, absent, config).dense.levels)


def test_rows_without_fisher_are_uniform(layer):
    made = layer(4, 300)
    fisher = made.stats.fisher.clone()
    fisher[1] = 0
    config = kmeans.KmeansConfig(bits=3)
    levels = kmeans.quantize(made.weight, LinearStats(fisher=fisher), config).dense.levels
    uniform = kmeans.quantize(made.weight, LinearStats(fisher=torch.ones_like(fisher)), config).dense.levels
    weighted = kmeans.quantize(made.weight, made.stats, config).dense.levels
    assert torch.equal(levels[1], uniform[1])
    assert torch.equal(levels[[0, 2, 3]], weighted[[0, 2, 3]])


def test_scale_of_fisher_does_not_matter(layer):
    made = layer(3, 300)
    config = kmeans.KmeansConfig(bits=3)
    tiny = LinearStats(fisher=made.stats.fisher * 2.0**-60)
    assert torch.equal(
        kmeans.quantize(made.weight, tiny, config).dense.codes,
        kmeans.quantize(made.weight, made.stats, config).dense.codes,
    )


def test_negative_fisher(layer):
    made = layer(3, 64)
    made.stats.fisher[0, 0] = -1
    with pytest.raises(NumericalError, match=r"stats\.fisher holds negative values"):
        kmeans.quantize(made.weight, made.stats, kmeans.KmeansConfig())
