import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from requant.inference.quant_linear import QuantLinear

from .layers import quant_linear


@pytest.mark.parametrize(
    "kind", ["symmetric", "asymmetric", "awq", "codebook", "codebook-int8", "trellis", "trellis-int8"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_is_that_of_the_dequantized_layer(random_weight, kind: str, dtype: torch.dtype) -> None:
    weight = random_weight(40, 172, kind=kind)
    bias = torch.randn(40)
    layer = quant_linear(weight, bias, dtype=dtype)
    x = torch.randn(2, 3, 172).to(dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (2, 3, 40)
    assert torch.equal(y, F.linear(x, weight.dequantize().to(dtype), bias.to(dtype)))
    assert torch.equal(y, layer.dequantized(dtype)(x))


@pytest.mark.parametrize("kind", ["asymmetric", "awq", "codebook-int8"])
@pytest.mark.parametrize("options", [{}, {"int8": True}, {"int8": True, "one_scale": True}])
def test_bands_of_rows_are_the_whole(random_weight, monkeypatch, kind: str, options: dict[str, bool]) -> None:
    weight, x = random_weight(40, 172, kind=kind, **options), torch.randn(3, 172)
    monkeypatch.setattr("requant.inference.quant_linear.BAND_WEIGHTS", 172 * 7)
    banded = quant_linear(weight)(x)
    torch.testing.assert_close(banded, F.linear(x, weight.dequantize()), rtol=1e-5, atol=1e-6)


def test_a_transposed_layer_becomes_conv1d_again(random_weight) -> None:
    weight = random_weight(48, 64)
    layer = quant_linear(weight, torch.randn(48), transposed=True)
    plain = layer.dequantized(torch.float32)
    assert type(plain).__name__ == "Conv1D" and plain.weight.shape == (64, 48)
    x = torch.randn(5, 64)
    assert torch.equal(layer(x), plain(x))


def test_without_bias_or_sparse_part(random_weight) -> None:
    weight = random_weight(8, 64, density=0)
    layer = quant_linear(weight)
    assert (
        weight.sparse is None
        and layer.bias is None
        and isinstance(layer.dequantized(torch.float32), nn.Linear)
    )
    assert layer.state_dict().keys() == {"codes", "scales", "zero_points", "weight"}


def test_quantized_gives_the_containers_back(random_weight) -> None:
    weight = random_weight(8, 520, density=0.1)
    back = quant_linear(weight).quantized()
    assert torch.equal(back.dense.codes, weight.dense.codes)
    assert torch.equal(back.sparse.indices, weight.sparse.indices)
    assert torch.equal(back.dequantize(), weight.dequantize())


def test_casts_of_the_model_leave_the_weights_alone(random_weight) -> None:
    weight = random_weight(16, 64)
    layer = quant_linear(weight, torch.randn(16))
    for cast in (torch.bfloat16, torch.float64, torch.float16):
        layer = nn.Sequential(layer).to(cast)[0]
        assert layer.bias.dtype == cast
        assert torch.equal(layer.quantized().dequantize(), weight.dequantize())
    assert copy.deepcopy(layer).scales.dtype == torch.float16
    assert layer.to("meta").scales.is_meta


def test_state_dict_round_trip(random_weight) -> None:
    weight = random_weight(16, 300, kind="codebook", density=0.05)
    layer = quant_linear(weight, torch.randn(16))
    other = QuantLinear(layer.spec, bias=True)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(torch.ones(1, 300)), layer(torch.ones(1, 300)))


def test_gradients_reach_the_input(random_weight) -> None:
    weight = random_weight(16, 64)
    x = torch.randn(3, 64, requires_grad=True)
    quant_linear(weight)(x).sum().backward()
    assert torch.allclose(x.grad, weight.dequantize().sum(0).expand(3, 64), atol=1e-6)


def test_representation_says_what_it_is(random_weight) -> None:
    text = repr(quant_linear(random_weight(16, 64, density=0)))
    assert text == "QuantLinear(in_features=64, out_features=16, bias=False, grid, bits=3)"
