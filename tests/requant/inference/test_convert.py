"""The kernels' layout in a model: the same numbers, one launch for siblings, nothing saved, nothing silent."""

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from requant_kernels.ops import multiply
from torch import nn

from requant.errors import OutputError
from requant.formats.bands import Bands
from requant.formats.grid import Grid
from requant.formats.quantized_weight import QuantizedWeight, pack
from requant.formats.sparse import sparse_residual
from requant.inference import convert, kernel_layers
from requant.inference.convert import convert_to_kernels, kernel_layout
from requant.inference.kernel_check import KernelCheck
from requant.inference.kernel_layers import BandedLinear, KernelEmbedding, KernelLinear, Sibling
from requant.inference.load import load
from requant.inference.quant_embedding import QuantEmbedding, tied_head
from requant.inference.quant_linear import QuantLinear
from requant.models.experts import Expert

from .layers import quant_linear


def grid(n: int, k: int, *, bits: int = 3, density: float = 0.02, seed: int = 0, scaled: bool = False) -> Any:
    """A grid in groups of 64, which the kernels take."""
    g = torch.Generator().manual_seed(seed)
    groups = -(-k // 64)
    dense = Grid(
        codes=torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=g),
        scales=(torch.rand(n, groups, generator=g) * 0.1).half(),
        zero_points=torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8, generator=g),
        column_scales=(torch.rand(k, generator=g) + 0.5).half() if scaled else None,
        bits=bits,
        group_size=64,
    )
    places = torch.rand(n, k, generator=g) < density
    return QuantizedWeight(
        dense=dense, sparse=sparse_residual(torch.randn(n, k, generator=g), dense.dequantize(), places)
    )


class Attention(nn.Module):
    """Three layers that take one x, and one that takes what they made."""

    def __init__(self, *weights: QuantizedWeight, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            quant_linear(w, torch.randn(w.shape[0]) if bias and i != 1 else None)
            for i, w in enumerate(weights)
        )
        self.dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return x + self.o_proj(q * torch.cat([k, v], -1))


def attention(**kwargs: Any) -> Attention:
    return Attention(
        grid(64, 128), grid(32, 128, density=0), grid(32, 128, seed=2), grid(128, 64, seed=3), **kwargs
    )


@pytest.mark.parametrize("kind", ["codebook", "codebook-int8", "trellis-int8"])
@pytest.mark.parametrize("int8", [False, True])
def test_a_layer_is_the_dequantized_layer(random_weight, kind: str, int8: bool) -> None:
    weight, bias, x = random_weight(40, 172, kind=kind, int8=int8), torch.randn(40), torch.randn(2, 3, 172)
    layer = KernelLinear(kernel_layout(weight), bias)
    assert torch.allclose(layer(x), F.linear(x, weight.dequantize(), bias), atol=1e-5)
    assert "in_features=172, out_features=40, bits=3" in repr(layer)


def test_matrices_with_residuals_are_tuned_beside_those_without(random_weight, monkeypatch) -> None:
    """The tables hold launches of both."""
    weight, tuned = random_weight(40, 172, kind="codebook"), []
    plain = QuantizedWeight(dense=weight.dense, sparse=None)
    model = nn.ModuleList(KernelLinear(kernel_layout(each)) for each in (weight, plain, plain))
    monkeypatch.setattr(
        "requant_kernels.autotune.tune", lambda layouts, tokens: tuned.extend(layouts) or len(layouts)
    )
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "is_cuda", True)
        assert convert.tune_kernels(model) == 2
    assert [layout.sparse is None for layout in tuned] == [False, True]


@pytest.mark.parametrize("bias", [False, True])
def test_siblings_share_a_matrix_and_change_nothing(bias: bool) -> None:
    model, x = attention(bias=bias), torch.randn(2, 5, 128)
    want = model(x)
    convert_to_kernels(model, device="cpu")
    assert all(isinstance(getattr(model, name), Sibling) for name in ("q_proj", "k_proj", "v_proj"))
    assert isinstance(model.o_proj, KernelLinear)
    assert torch.allclose(model(x), want, atol=1e-4)
    assert torch.allclose(copy.deepcopy(model)(x), want, atol=1e-4)
    held = sum(b.numel() * b.element_size() for b in model.q_proj.siblings.matrix.buffers())
    assert held < 128 * 256  # the packed bits of whole blocks, and no copy of the codes


def trellis_attention(random_trellis: Any) -> Attention:
    return Attention(
        *(random_trellis(n, 64, seed=seed) for seed, n in enumerate((64, 32, 32))),
        random_trellis(64, 64, seed=3),
    )


def test_trellis_siblings_share_one_rotation_of_their_input(random_trellis) -> None:
    model, x = trellis_attention(random_trellis), torch.randn(2, 5, 64)
    want = model(x)
    convert_to_kernels(model, device="cpu")
    matrix = model.q_proj.siblings.matrix
    assert matrix.layout.parts == (64, 32, 32) and model.v_proj.siblings.matrix is matrix
    assert torch.allclose(model(x), want, atol=1e-4)


def test_matrices_of_an_expert_stay_apart(random_trellis) -> None:
    """They are stacked with those of the other experts (`inference/experts.py`)."""
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    layers = [nn.Linear(k, n, bias=False) for n, k in shapes.values()]
    model: Any = nn.Sequential(Expert(layers, list(shapes), None))
    for name, shape in shapes.items():
        model[0].set_submodule(name, quant_linear(random_trellis(*shape), None))
    model.dtype = torch.float32
    convert_to_kernels(model, device="cpu")
    assert {type(model[0].get_submodule(name)) for name in shapes} == {KernelLinear}


def test_siblings_that_cannot_be_multiplied_together_are_apart(
    random_trellis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A joined matrix that a kernel gets wrong costs two launches more, not its kernels."""
    model, x = trellis_attention(random_trellis), torch.randn(2, 5, 64)
    want = model(x)

    def wrong_where_joined(x: torch.Tensor, layout: Any, bias: Any) -> torch.Tensor:
        return multiply(x, layout, bias) * (2 if layout.parts else 1)

    monkeypatch.setattr("requant.inference.kernel_layers.multiply", wrong_where_joined)
    convert_to_kernels(model, device="cpu")
    assert {type(getattr(model, name)) for name in ("q_proj", "k_proj", "v_proj")} == {KernelLinear}
    assert torch.allclose(model(x), want, atol=1e-4)
    (record,) = caplog.records
    assert (
        "3 of the quantized matrices are multiplied one by one, not joined: the kernel for"
        in record.getMessage()
    )


def test_siblings_asked_in_any_order_and_with_other_inputs() -> None:
    model, x, z = attention(), torch.randn(1, 128), torch.randn(1, 128)
    want = {name: getattr(model, name)(x) for name in ("q_proj", "k_proj", "v_proj")}
    other = model.k_proj(z)
    convert_to_kernels(model, device="cpu")
    for order in (("v_proj", "q_proj", "k_proj"), ("k_proj", "k_proj", "q_proj"), ("v_proj",)):
        for name in order:
            assert torch.allclose(getattr(model, name)(x), want[name], atol=1e-4)
    assert torch.allclose(model.k_proj(z), other, atol=1e-4)
    assert torch.allclose(model.q_proj(x), want["q_proj"], atol=1e-4)


def test_siblings_keep_no_activations() -> None:
    model = convert_to_kernels(attention(), device="cpu")
    model(torch.randn(3, 128))
    siblings = model.q_proj.siblings
    assert siblings.x is None and siblings.pending == [None, None, None]


COMPILED = """
import torch
from tests.requant.inference.test_convert import attention, convert_to_kernels

for backend in ("eager", "aot_eager"):
    model, x, launches = convert_to_kernels(attention(), device="cpu"), torch.randn(2, 5, 128), []

    def counting(graph, inputs):
        launches.append(sum("requant" in str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert launches == [2], launches
"""


@pytest.mark.slow
def test_compiled_without_a_graph_break_in_one_launch_each() -> None:
    """In a process of its own: the type checks of the tests are not part of a server's graph."""
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", ""), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_only_what_is_alike_is_joined() -> None:
    weights = [grid(16, 64), grid(16, 64, bits=2), grid(16, 64, seed=4), grid(64, 16)]
    model, x = Attention(*weights), torch.randn(2, 64)
    want = [layer(x) for layer in (model.q_proj, model.k_proj, model.v_proj)]
    convert_to_kernels(model, device="cpu")
    assert [type(model.get_submodule(name)) for name in ("q_proj", "k_proj", "v_proj")] == [
        Sibling, KernelLinear, Sibling,
    ]  # fmt: skip
    for layer, y in zip((model.q_proj, model.k_proj, model.v_proj), want, strict=True):
        assert torch.allclose(layer(x), y, atol=1e-4)


def test_column_scales_have_to_agree() -> None:
    same = [grid(16, 64, scaled=True), grid(16, 64, scaled=True)]
    model = Attention(*same, grid(16, 64, scaled=True, seed=9), grid(64, 16))
    x = torch.randn(2, 64)
    want = [layer(x) for layer in (model.q_proj, model.k_proj, model.v_proj)]
    convert_to_kernels(model, device="cpu")
    assert isinstance(model.q_proj, Sibling) and isinstance(model.v_proj, KernelLinear)
    for layer, y in zip((model.q_proj, model.k_proj, model.v_proj), want, strict=True):
        assert torch.allclose(layer(x), y, atol=1e-4)


def test_what_no_kernel_takes_stays_and_is_said(random_weight, caplog: pytest.LogCaptureFixture) -> None:
    """Groups of 48 columns are finer than the kernels' 32-column steps."""
    model = Attention(*(random_weight(32, 64) for _ in range(3)), random_weight(64, 32, kind="codebook"))
    x = torch.randn(2, 64)
    want = model.q_proj(x)
    with caplog.at_level(logging.WARNING):
        convert_to_kernels(model, device="cpu")
    assert isinstance(model.q_proj, QuantLinear) and isinstance(model.o_proj, KernelLinear)
    assert torch.equal(model.q_proj(x), want)
    assert "3 of the quantized matrices are dequantized at every call" in caplog.text
    assert "group_size 48 is not a multiple of 32" in caplog.text


def test_float32_on_a_gpu_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = attention()
    with caplog.at_level(logging.WARNING):
        served = convert_to_kernels(model, device="meta")
    assert isinstance(served.q_proj, QuantLinear)
    assert "4 of the quantized matrices" in caplog.text and "load with dtype='bfloat16'" in caplog.text


def test_a_served_model_refuses_to_be_saved(make_checkpoint, tmp_path) -> None:
    folder, plain = make_checkpoint("llama", kind="codebook")
    model = convert_to_kernels(load(folder), device="cpu")
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-4)
    with pytest.raises(OutputError, match="load it with device='cpu' and save that one"):
        model.save_pretrained(tmp_path / "again")
    with pytest.raises(OutputError):
        model.state_dict()


class EmbeddingAndHead(nn.Module):
    """An embedding and a head, on the same codes or each on its own; by default of a grid."""

    def __init__(self, *, tied: bool, weight: QuantizedWeight | None = None) -> None:
        super().__init__()
        layout, tensors = pack(grid(40, 128, bits=4, density=0) if weight is None else weight)
        self.embed = QuantEmbedding(layout, nn.Embedding(40, 128, padding_idx=3))
        for name, tensor in tensors.items():
            self.embed.get_buffer(name).copy_(tensor)
        own = quant_linear(grid(40, 128, bits=4, density=0, seed=5))
        self.head = tied_head(self.embed, nn.Linear(128, 40, bias=False)) if tied else own
        self.dtype = torch.float32

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head(tied: bool) -> None:
    model, tokens = EmbeddingAndHead(tied=tied), torch.tensor([[1, 39, 3], [0, 8, 8]])
    rows, want = model.embed(tokens), model(tokens)
    convert_to_kernels(model, device="cpu")
    assert isinstance(model.embed, KernelEmbedding) and isinstance(model.head, KernelLinear)
    assert torch.equal(model.embed(tokens), rows)
    assert torch.allclose(model(tokens), want, atol=1e-5)
    assert (model.embed.matrix is model.head) == tied
    words = {t.data_ptr() for t in model.buffers() if t.dtype == torch.int32}
    assert len(words) == (1 if tied else 2)  # one copy in memory
    assert model.to(torch.bfloat16).embed(tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rotate_input", [True, False])
def test_embedding_and_head_of_a_trellis(random_trellis, tied: bool, rotate_input: bool) -> None:
    weight = random_trellis(40, 128, rotate_input=rotate_input, rotate_output=False)
    model, tokens = EmbeddingAndHead(tied=tied, weight=weight), torch.tensor([[1, 39, 3], [0, 8, 8]])
    rows, want = model.embed(tokens), model(tokens)
    convert_to_kernels(model, device="cpu")
    assert isinstance(model.embed, KernelEmbedding) and isinstance(model.head, KernelLinear)
    assert torch.allclose(model.embed(tokens), rows, atol=1e-6)
    assert torch.allclose(model(tokens), want, atol=1e-5)
    assert (model.embed.matrix is model.head) == tied
    assert model.to(torch.bfloat16).embed(tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_in_bands(random_trellis, tied: bool, shared: bool) -> None:
    """Products side by side, rows from the band of their token, whether bands share a rotation or not."""
    parts = [
        random_trellis(n, 128, rotate_output=False, seed=n, input_seed=0 if shared else n).dense
        for n in (16, 24)
    ]
    weight = QuantizedWeight(dense=Bands(parts=tuple(parts)), sparse=None)
    model, tokens = EmbeddingAndHead(tied=tied, weight=weight), torch.tensor([[1, 39, 15], [16, 8, 8]])
    rows, want = model.embed(tokens), model(tokens)
    assert torch.equal(rows, weight.dequantize()[tokens])
    convert_to_kernels(model, device="cpu")
    assert isinstance(model.embed.matrix, BandedLinear) and isinstance(model.head, BandedLinear) == tied
    assert model.embed.matrix.rotates_once == shared
    assert torch.allclose(model.embed(tokens), rows, atol=1e-6)
    assert torch.allclose(model(tokens), want, atol=1e-5)
    assert (model.embed.matrix is model.head) == tied
    words = {t.data_ptr() for t in model.buffers() if t.dtype == torch.int32}
    assert len(words) == (2 if tied else 3)  # one copy in memory; the other head is a grid
    assert model.to(torch.bfloat16).embed(tokens).dtype == torch.bfloat16


def test_bands_that_are_wrong_in_one_launch_are_multiplied_one_by_one(
    random_trellis, monkeypatch, caplog
) -> None:
    parts = [random_trellis(n, 128, rotate_output=False, seed=n).dense for n in (16, 24)]
    weight = QuantizedWeight(dense=Bands(parts=tuple(parts)), sparse=None)
    monkeypatch.setattr(kernel_layers, "multiply_bands", lambda x, _: x.new_ones(len(x), 40))
    layer = convert.kernel_linear(weight, KernelCheck(torch.float32), bias=torch.ones(40))
    assert isinstance(layer, BandedLinear) and not layer.rotates_once
    assert "multiplied band by band: the kernel for" in caplog.text
    x = torch.randn(3, 128)
    assert torch.allclose(layer(x), x @ weight.dequantize().T + 1, atol=1e-4)


def test_rows_that_cannot_be_looked_up_are_refused(random_trellis) -> None:
    layer = KernelLinear(kernel_layout(random_trellis(40, 128)))
    with pytest.raises(ValueError, match="a trellis whose output is not rotated"):
        layer.rows(torch.tensor([1]), torch.float32)
    with pytest.raises(ValueError, match="a grid without residuals"):
        KernelLinear(kernel_layout(grid(16, 64))).rows(torch.tensor([1]), torch.float32)


def test_casts_move_the_bias_and_leave_the_weights() -> None:
    weight = grid(16, 64)
    layer = KernelLinear(kernel_layout(weight), torch.randn(16))
    cast = copy.deepcopy(layer).to(torch.bfloat16)
    assert cast.bias.dtype == torch.bfloat16 and cast.scales.dtype == torch.float16
    assert torch.equal(cast.packed_codes, layer.packed_codes)
    assert layer.to("meta").packed_codes.is_meta
