"""What every quantizer promises, whatever its method."""

import dataclasses

import pytest
import torch

from requant.calibration.stats import LinearStats
from requant.errors import InputError, NumericalError, RecipeError
from requant.quantizers.registry import METHODS

NAMES = ["rtn", "kmeans", "lut", "gptq", "awq"]


@pytest.fixture(params=NAMES)
def method(request):
    return METHODS[request.param]


@pytest.mark.parametrize("k", [64, 172, 520, 1216])
def test_any_width(method, layer, k):
    made = layer(5, k)
    quantized = method.quantize(made.weight, made.stats, method.config(bits=4))
    assert quantized.shape == (5, k)
    assert quantized.sparse is None
    assert quantized.dense.codes.max() < 16
    assert made.output_error(quantized) < 0.02


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_every_width_of_code_uses_its_range_and_not_more(method, layer, bits):
    made = layer(3, 300)
    codes = method.quantize(made.weight, made.stats, method.config(bits=bits)).dense.codes
    assert int(codes.max()) < 2**bits
    assert codes.unique().numel() > 2 ** (bits - 2)


def test_more_bits_less_error(method, layer):
    made = layer(4, 256)
    errors = [
        made.output_error(method.quantize(made.weight, made.stats, method.config(bits=bits)))
        for bits in (2, 3, 4, 6, 8)
    ]
    assert errors == sorted(errors, reverse=True)


def test_pure(method, layer):
    made = layer(4, 172)
    before = [
        tensor.clone() for tensor in (made.weight, made.stats.hessian, made.stats.fisher, made.detached)
    ]
    results = [
        method.quantize(made.weight, made.stats, method.config(bits=3), detached=made.detached)
        for _ in range(2)
    ]
    after = (made.weight, made.stats.hessian, made.stats.fisher, made.detached)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert torch.equal(results[0].dense.codes, results[1].dense.codes)
    assert torch.equal(results[0].dequantize(), results[1].dequantize())


def test_detached_places_are_the_sparse_part(method, layer):
    made = layer(6, 172)
    quantized = method.quantize(made.weight, made.stats, method.config(bits=3), detached=made.detached)
    assert torch.equal(quantized.sparse.dequantize() != 0, made.detached)
    if method not in (METHODS["gptq"], METHODS["lut"]):  # there they are free values of the least squares
        restored = quantized.dequantize()[made.detached]
        assert torch.allclose(restored, made.weight[made.detached], atol=1e-4)


def test_detached_outliers_do_not_cost_the_others(method, layer):
    made = layer(4, 172)
    outliers = torch.where(made.detached, 100 * torch.ones_like(made.weight), made.weight)
    quantized = method.quantize(outliers, made.stats, method.config(bits=3), detached=made.detached)
    plain = method.quantize(made.weight, made.stats, method.config(bits=3), detached=made.detached)
    assert torch.equal(quantized.dense.codes[~made.detached], plain.dense.codes[~made.detached])


def test_everything_detached(method, layer):
    made = layer(2, 64)
    quantized = method.quantize(
        made.weight, made.stats, method.config(bits=3), detached=torch.ones_like(made.detached)
    )
    assert torch.allclose(quantized.dequantize(), made.weight, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.375, -2.0])
def test_constant_weights_stay(method, layer, value):
    made = layer(3, 172)
    quantized = method.quantize(torch.full_like(made.weight, value), made.stats, method.config(bits=3))
    # float16 scales err by 2^-11; gptq passes that on, awq has column scales besides
    tolerance = 1e-2 if method in (METHODS["gptq"], METHODS["awq"]) else 1e-3
    assert torch.allclose(quantized.dequantize(), torch.full_like(made.weight, value), rtol=tolerance)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_bad_weight(method, layer, bad):
    made = layer(3, 64)
    made.weight[1, 2] = bad
    with pytest.raises(NumericalError, match="1 of 192 weights are NaN, infinite or larger than 65504"):
        method.quantize(made.weight, made.stats, method.config())


@pytest.mark.parametrize("bits", [-1, 0, 1, 9, 64])
def test_bits_out_of_range(method, bits):
    with pytest.raises(RecipeError, match=f"bits is {bits}, but codes are 2 to 8 bits wide"):
        method.config(bits=bits)


@pytest.mark.parametrize("name", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("group_size", [-2, 0, 7])
def test_group_size_out_of_range(name, group_size):
    with pytest.raises(RecipeError, match=f"group_size is {group_size}, but a group has at least 8 columns"):
        METHODS[name].config(group_size=group_size)


@pytest.mark.parametrize("name", ["kmeans", "gptq", "awq"])
def test_statistics_are_checked(name, layer):
    method, made = METHODS[name], layer(3, 64)
    field = min(method.needs)
    with pytest.raises(InputError, match=f"stats.{field} is missing"):
        method.quantize(made.weight, LinearStats(), method.config())
    with pytest.raises(
        InputError, match=rf"stats.{field} has shape \[.*172\], but this matrix needs \[.*64\]"
    ):
        method.quantize(made.weight, layer(3, 172).stats, method.config())
    getattr(made.stats, field)[0, 0] = float("nan")
    with pytest.raises(NumericalError, match=f"stats.{field} holds NaN or infinity: calibrate in float32"):
        method.quantize(made.weight, made.stats, method.config())


def test_needs_are_fields_of_the_statistics(method):
    assert method.needs <= {field.name for field in dataclasses.fields(LinearStats)}


def test_order_of_the_methods(layer):
    """Scaling and compensation both beat rounding to nearest, under the measure that they share."""
    made = layer(32, 512)
    rtn, awq, gptq = (
        made.output_error(METHODS[name].quantize(made.weight, made.stats, METHODS[name].config(bits=3)))
        for name in ("rtn", "awq", "gptq")
    )
    assert max(awq, gptq) < 0.8 * rtn


@pytest.mark.gpu
def test_same_on_cuda(method, layer):
    made = layer(40, 520)
    stats = LinearStats(
        hessian=made.stats.hessian.cuda(),
        input_mean_abs=made.stats.input_mean_abs.cuda(),
        fisher=made.stats.fisher.cuda(),
    )
    here = method.quantize(made.weight, made.stats, method.config(bits=3), detached=made.detached)
    there = method.quantize(
        made.weight.cuda(), stats, method.config(bits=3), detached=made.detached.cuda()
    ).dequantize()
    assert there.is_cuda
    # A rounding that falls the other way is passed on, so a few codes may differ.
    assert (there.cpu() != here.dequantize()).float().mean() < 0.05
