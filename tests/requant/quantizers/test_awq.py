"""Column scales: never worse than none, and chosen by the error of the output."""

import pytest
import torch

from requant.calibration.stats import LinearStats
from requant.errors import RecipeError
from requant.quantizers import awq, rtn


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_search_lowers_the_error(layer, bits):
    made = layer(24, 256)
    plain = rtn.quantize(made.weight, made.stats, rtn.RtnConfig(bits=bits))
    scaled = awq.quantize(made.weight, made.stats, awq.AwqConfig(bits=bits, clip_steps=1))
    clipped = awq.quantize(made.weight, made.stats, awq.AwqConfig(bits=bits))
    assert made.output_error(clipped) < made.output_error(scaled) < made.output_error(plain)


def test_one_alpha_and_no_clipping_is_rounding_to_nearest(layer):
    made = layer(8, 172)
    alone = awq.quantize(made.weight, made.stats, awq.AwqConfig(bits=3, alphas=1, clip_steps=1))
    expected = rtn.quantize(made.weight, made.stats, rtn.RtnConfig(bits=3))
    assert torch.equal(alone.dense.codes, expected.dense.codes)
    assert (alone.dense.column_scales == 1).all()


def test_large_inputs_get_large_scales(layer):
    made = layer(8, 128)
    scales = awq.quantize(made.weight, made.stats, awq.AwqConfig(bits=3)).dense.column_scales.float()
    order = made.stats.input_mean_abs.argsort()
    assert (scales[order].diff() >= 0).all()
    assert torch.isclose(scales.max() * scales.min(), torch.tensor(1.0), rtol=1e-2)


def test_scales_of_dead_inputs_fit_float16():
    scales = awq.column_scales(torch.tensor([0.0, 1e-30, 1.0, 1e20]), 0.95)
    assert scales.isfinite().all()
    assert (scales > 0).all()


def test_group_errors_are_the_diagonal_blocks(layer):
    made = layer(3, 172)
    error = torch.randn(3, 172, generator=torch.Generator().manual_seed(0))
    groups = awq.group_errors(error, made.stats.hessian, group_size=64)
    expected = torch.stack(
        [
            torch.einsum(
                "ni,ij,nj->n", part, made.stats.hessian[start : start + 64, start : start + 64], part
            )
            for start, part in ((s, error[:, s : s + 64]) for s in (0, 64, 128))
        ],
        1,
    )
    assert torch.allclose(groups, expected, rtol=1e-4)


def test_inputs_of_zeros(layer):
    made = layer(3, 64)
    stats = LinearStats(hessian=torch.zeros(64, 64), input_mean_abs=torch.zeros(64))
    quantized = awq.quantize(made.weight, stats, awq.AwqConfig(bits=4))
    assert (quantized.dense.column_scales == 1).all()


@pytest.mark.parametrize(("field", "value"), [("alphas", 0), ("clip_steps", 0), ("clip_steps", 21)])
def test_search_out_of_range(field, value):
    with pytest.raises(RecipeError, match=f"{field} is {value}"):
        awq.AwqConfig(**{field: value})
