"""GPTQ against the algorithm written out in float64, and what it does when H is not friendly."""

import logging

import pytest
import torch

from requant.calibration.stats import LinearStats
from requant.errors import NumericalError, RecipeError
from requant.quantizers import gptq, rtn


def plain_gptq(weight, hessian, *, bits, group_size, damp):
    """Optimal brain quantization in column order: the inverse of what is left of H, recomputed at every column."""
    work = weight.double().clone()
    k = work.shape[1]
    damped = hessian.double() + damp * hessian.double().diagonal().mean() * torch.eye(k)
    for j in range(k):
        if j % group_size == 0:
            fit = rtn.fit_grid(
                work[:, j : j + group_size].float(), bits=bits, group_size=group_size, symmetric=False
            )
            scale, zero = fit.scales.double()[:, 0], fit.zero_points.double()[:, 0]
        rounded = (((work[:, j] / scale).round() + zero).clamp(0, 2**bits - 1) - zero) * scale
        inverse = torch.linalg.inv(damped[j:, j:])
        work[:, j + 1 :] -= torch.outer((work[:, j] - rounded) / inverse[0, 0], inverse[0, 1:])
        work[:, j] = rounded
    return work.float()


@pytest.mark.parametrize(("k", "group_size"), [(40, 16), (150, 24), (150, 200), (300, 150)])
def test_equals_the_algorithm_written_out(layer, k, group_size):
    made = layer(4, k)
    config = gptq.GptqConfig(bits=3, group_size=group_size)
    restored = gptq.quantize(made.weight, made.stats, config).dequantize()
    expected = plain_gptq(made.weight, made.stats.hessian, bits=3, group_size=group_size, damp=0.01)
    assert torch.isclose(restored, expected, atol=1e-5).float().mean() > 0.99


@pytest.mark.parametrize(("k", "group_size"), [(520, 128), (520, 520), (300, 48), (500, 200), (64, 128)])
def test_blocks_cover_the_columns_and_respect_groups(k, group_size):
    ranges = list(gptq.blocks(k, group_size))
    assert [column for start, stop in ranges for column in range(start, stop)] == list(range(k))
    for start, stop in ranges:
        assert stop - start <= gptq.BLOCK
        for group in range(0, k, group_size):
            assert not start < group < stop < min(group + group_size, k)


def test_uncorrelated_inputs_leave_rounding_to_nearest(layer):
    made = layer(5, 300)
    stats = LinearStats(hessian=torch.eye(300))
    expected = rtn.quantize(made.weight, stats, rtn.RtnConfig(bits=3))
    for act_order in (False, True):
        config = gptq.GptqConfig(bits=3, act_order=act_order)
        restored = gptq.quantize(made.weight, stats, config)
        assert torch.equal(restored.dense.codes, expected.dense.codes)


@pytest.mark.parametrize("symmetric", [False, True])
def test_act_order_stores_neighbouring_groups(layer, symmetric):
    made = layer(16, 300)
    config = gptq.GptqConfig(bits=3, act_order=True, symmetric=symmetric)
    quantized = gptq.quantize(made.weight, made.stats, config)
    static = rtn.quantize(made.weight, made.stats, rtn.RtnConfig(bits=3, symmetric=symmetric))
    assert torch.equal(quantized.dense.scales, static.dense.scales)
    assert made.output_error(quantized) < 0.7 * made.output_error(static)


def test_dead_columns_are_rounded_to_nearest(layer):
    made = layer(4, 128)
    made.stats.hessian[:, 5] = 0
    made.stats.hessian[5, :] = 0
    quantized = gptq.quantize(made.weight, made.stats, gptq.GptqConfig(bits=4))
    step = quantized.dense.scales.float()[:, 0]
    assert ((quantized.dequantize() - made.weight)[:, 5].abs() <= 0.51 * step).all()


def test_hessian_of_zeros_is_rounding_to_nearest(layer):
    made = layer(4, 128)
    stats = LinearStats(hessian=torch.zeros(128, 128))
    expected = rtn.quantize(made.weight, stats, rtn.RtnConfig(bits=4)).dense.codes
    assert torch.equal(gptq.quantize(made.weight, stats, gptq.GptqConfig(bits=4)).dense.codes, expected)


def test_detached_places_pass_on_no_error(layer):
    made = layer(4, 64)
    column = torch.zeros_like(made.detached)
    column[:, 0] = True
    quantized = gptq.quantize(made.weight, made.stats, gptq.GptqConfig(bits=2), detached=column)
    rest = LinearStats(hessian=made.stats.hessian)
    assert torch.allclose(
        quantized.dequantize()[:, 0], made.weight[:, 0], atol=1e-4
    )  # nothing came before it
    dense = gptq.quantize(made.weight, rest, gptq.GptqConfig(bits=2))
    assert made.output_error(quantized) < made.output_error(dense)


def test_detached_places_are_free_values(layer):
    """Values as the errors left them serve the output better than the original ones."""
    made = layer(16, 256)
    quantized = gptq.quantize(made.weight, made.stats, gptq.GptqConfig(bits=3), detached=made.detached)
    copied = torch.where(made.detached, made.weight, quantized.dense.dequantize()) - made.weight
    total = (made.weight @ made.stats.hessian * made.weight).sum()
    assert made.output_error(quantized) < float((copied @ made.stats.hessian * copied).sum() / total)


def test_damping_escalates_and_says_so(layer, caplog):
    made = layer(3, 64)
    hessian = made.stats.hessian / made.stats.hessian.diagonal().mean()
    indefinite = hessian - (torch.linalg.eigvalsh(hessian)[0] + 0.05) * torch.eye(64)
    with caplog.at_level(logging.WARNING):
        gptq.quantize(made.weight, LinearStats(hessian=indefinite), gptq.GptqConfig(bits=4))
    assert "not positive definite at damp 0.01: trying 0.1" in caplog.text


def test_hopeless_hessian(layer):
    made = layer(3, 64)
    hessian = torch.eye(64)
    hessian[0, 1] = hessian[1, 0] = 50
    with pytest.raises(
        NumericalError, match="not positive definite even at damp 1: calibrate with more tokens"
    ):
        gptq.quantize(made.weight, LinearStats(hessian=hessian), gptq.GptqConfig())


@pytest.mark.parametrize("damp", [0.0, 1.0, -0.1])
def test_damp_out_of_range(damp):
    with pytest.raises(RecipeError, match=r"damp is .* but it is a fraction between 0 and 1"):
        gptq.GptqConfig(damp=damp)
