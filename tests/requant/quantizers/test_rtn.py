"""The uniform grid: half a step of error, zero kept, tails of any length."""

import pytest
import torch

from requant.calibration.stats import LinearStats
from requant.quantizers import rtn


def quantize(weight, **options):
    return rtn.quantize(weight, LinearStats(), rtn.RtnConfig(**options))


@pytest.mark.parametrize(("symmetric", "steps"), [(True, 0.5), (False, 1.0)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_error_is_half_a_step(layer, bits, symmetric, steps):
    """Within the grid always; at its ends the rounded zero point of an asymmetric grid may cost half a step more."""
    weight = layer(6, 172).weight
    grid = quantize(weight, bits=bits, group_size=64, symmetric=symmetric).dense
    errors = (grid.dequantize() - weight).abs() / grid.scales.float().repeat_interleave(64, 1)[:, :172]
    inner = (grid.codes > 0) & (grid.codes < 2**bits - 1)
    assert errors[inner].max() <= 0.5001
    assert errors.max() <= steps + 2**bits / 2**11  # a float16 scale is up to 2^-11 too small


def test_worked_example():
    weight = torch.tensor([[-1.0, 0.0, 0.4, 0.6, 2.0, 2.0, 2.0, 2.0]])
    grid = quantize(weight, bits=2, group_size=8).dense
    assert grid.scales.tolist() == [[1.0]]
    assert grid.zero_points.tolist() == [[1]]
    assert grid.codes.tolist() == [[0, 1, 1, 2, 3, 3, 3, 3]]
    assert grid.dequantize().tolist() == [[-1, 0, 0, 1, 2, 2, 2, 2]]


def test_zero_stays_zero(layer):
    weight = layer(4, 172).weight
    weight[:, ::3] = 0
    for symmetric in (False, True):
        restored = quantize(weight, bits=3, symmetric=symmetric).dequantize()
        assert (restored[:, ::3] == 0).all()


def test_groups_are_independent_and_the_last_is_short(layer):
    weight = layer(3, 172).weight
    whole = quantize(weight, bits=3, group_size=64).dense
    assert whole.scales.shape == (3, 3)
    for start in (0, 64, 128):
        part = quantize(weight[:, start : start + 64], bits=3, group_size=64).dense
        assert torch.equal(part.codes, whole.codes[:, start : start + 64])


def test_one_group_a_row(layer):
    weight = layer(3, 172).weight
    grid = quantize(weight, bits=3, group_size=-1).dense
    assert grid.group_size == 172
    assert grid.scales.shape == (3, 1)


def test_tiny_weights_are_zero_not_nan():
    weight = torch.full((2, 64), 1e-12)
    assert quantize(weight, bits=4).dequantize().abs().max() == 0
