"""2:4 matrices in a served model: dense below a number of tokens, sparse from there on, the same numbers."""

import json
import logging
from typing import Any

import pytest
import torch
from requant_kernels.sparsity import products
from torch import nn
from torch.nn import functional

from requant.errors import OutputError
from requant.formats.quantized_weight import QuantizedWeight
from requant.inference.convert import convert_to_kernels
from requant.inference.kernel_check import KernelCheck
from requant.inference.kernel_layers import Sibling
from requant.inference.quant_linear import QuantLinear
from requant.inference.semi_structured_linear import SemiStructuredLinear, semi_structured_linear
from requant.quantizers.semi_structured import SemiStructuredConfig, on_mask
from requant.sparsity.masks import keep2

from .layers import quant_linear


def weight_of(n: int, k: int, *, bits: int = 16, seed: int = 0) -> QuantizedWeight:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return on_mask(values, keep2(values.abs()), SemiStructuredConfig(bits=bits))


class Attention(nn.Module):
    def __init__(self, bits: int = 16) -> None:
        super().__init__()
        for i, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
            bias = torch.randn(32) if name != "k_proj" else None
            setattr(self, name, quant_linear(weight_of(32, 64, bits=bits, seed=i), bias))
        self.dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(x)], -1)


@pytest.fixture
def products_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Stand-ins for cuSPARSELt, which multiplies on a GPU only; the calls: (tokens, algorithm)."""
    calls: list[tuple[int, int]] = []

    def multiply(compressed: Any, x: Any, bias: Any, *, transpose_result: bool, alg_id: int) -> Any:
        assert transpose_result and x.shape[1] % 8 == 0
        calls.append((x.shape[1], alg_id))
        return functional.linear(x.T, compressed, bias)

    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", multiply)
    monkeypatch.setattr(products, "supports", lambda *_: True)
    monkeypatch.setattr(products, "algorithms", lambda *_: ((64, 3), (256, 5)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    return calls


def test_without_sparse_products_the_matrix_is_dense(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Attention(), torch.randn(3, 64)
    wanted = model(x)
    with caplog.at_level(logging.WARNING):
        convert_to_kernels(model, device="cpu")
    assert isinstance(model.q_proj, Sibling) and isinstance(model.o_proj, SemiStructuredLinear)
    assert model.o_proj.compressed is None and caplog.text == ""
    torch.testing.assert_close(model(x), wanted)
    with pytest.raises(OutputError, match="load it with device='cpu' and save that one"):
        model.state_dict()
    small = convert_to_kernels(Attention(bits=4), device="cpu")
    assert isinstance(small.o_proj, QuantLinear)


def test_tokens_choose_the_product(products_on_cpu: list[tuple[int, int]], monkeypatch) -> None:
    bias, weight = torch.randn(32).bfloat16(), weight_of(32, 64)
    layer = semi_structured_linear(weight, KernelCheck(torch.bfloat16), bias)
    assert products_on_cpu == [(64, 3), (72, 3), (256, 5), (264, 5)]  # the check, padded every other time
    products_on_cpu.clear()
    for shape in ((1, 64), (63, 64), (64, 64), (3, 67, 64), (300, 64)):
        x = torch.randn(shape).bfloat16()
        wanted = functional.linear(x, weight.dequantize().bfloat16(), bias)
        found = layer(x)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted)
    assert products_on_cpu == [(64, 3), (208, 3), (304, 5)]
    products_on_cpu.clear()
    layer.float()  # a cast leaves what is compressed alone, which is then not used
    layer(torch.randn(64, 64))
    assert products_on_cpu == [] and layer.compressed.dtype == torch.int16


def test_wrong_products_are_not_used(products_on_cpu, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight.roll(1, 0).contiguous())
    layer = semi_structured_linear(weight_of(32, 64), KernelCheck(torch.bfloat16))
    assert layer.compressed is None and "2:4 products are dense ones on this machine" in caplog.text
    assert len(products_on_cpu) == 1


def test_what_the_table_lacks_is_dense(tmp_path, monkeypatch, caplog) -> None:
    file = tmp_path / "table.json"
    monkeypatch.setattr(products, "TABLE", file)
    assert products.algorithms(8192, 8192, "GPU") == ()
    file.write_text(json.dumps({"GPU": {"8192x8192": [[512, 4], [2048, 1]], "4096x4096": []}}))
    products._table.cache_clear()
    rows = products.algorithms(8192, 8192, "GPU")
    assert [products.algorithm_for(m, rows) for m in (1, 511, 512, 2047, 4096)] == [None, None, 4, 4, 1]
    assert products.algorithms(4096, 4096, "GPU") == ()
    assert products.algorithms(8192, 8192, "other") == products.algorithms(9000, 8192, "GPU") == ()
    for damaged in ("[]", '{"GPU": {"8192x8192": [[512, 4], [8, 1]]}}', '{"GPU": {"8192x8192": [3]}}', "{"):
        file.write_text(damaged)
        products._table.cache_clear()
        assert products.algorithms(8192, 8192, "GPU") == ()
        assert "damaged and not used" in caplog.text
    products._table.cache_clear()


def test_the_table_that_ships_is_whole() -> None:
    for shapes in products._table(products.TABLE).values():
        for shape, rows in shapes.items():
            n, k = map(int, shape.split("x"))
            assert min(n, k) > 0 and all(first >= 1 and algorithm >= 0 for first, algorithm in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_the_products_are_right_also_in_a_graph(dtype: torch.dtype, monkeypatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(products, "algorithms", lambda *_: ((64, 0),))
    weight = weight_of(4096, 512).to(device)
    if not products.supports(4096, 512, dtype, device):
        pytest.skip("no sparse products on this GPU")
    layer = semi_structured_linear(weight, KernelCheck(dtype), torch.randn(4096, device=device).to(dtype))
    assert layer.compressed is not None  # the check passed
    for tokens in (1, 64, 100, 1024):
        x = torch.randn(tokens, 512, device=device).to(dtype)
        wanted = functional.linear(x.double(), weight.dequantize().double(), layer.bias.double())
        assert ((layer(x).double() - wanted).norm() / wanted.norm()).item() < 4e-3
    x = torch.randn(128, 512, device=device).to(dtype)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, layer(x))
