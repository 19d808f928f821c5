"""The vLLM plugin over every layer class, rank by rank: what the ranks compute together is the whole matrix.

Runs against doubles of vLLM's classes, and with `-m peers` against vLLM's own where they import (no GPU needed).
"""

import importlib
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from requant.errors import CheckpointError, ModelError
from requant.formats.quantized_weight import pack

from .vllm_layers import (
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    attention,
    close,
    config,
    load,
    outputs,
)


@pytest.mark.parametrize("kinds", [("codebook",) * 3, ("asymmetric",) * 3, ("symmetric", "codebook", "awq")])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fused_qkv(engine, matrix, kinds: tuple[str, ...], ranks: int) -> None:
    """Every rank has its heads of q, k and v; with more ranks than kv heads, neighbours share one."""
    rows = {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD}
    weights = {
        name: matrix(n, HIDDEN, kind, seed=i, density=0.03)
        for i, ((name, n), kind) in enumerate(zip(rows.items(), kinds, strict=True))
    }
    found = config(engine, **weights)
    x = torch.randn(5, HIDDEN)
    whole = [x @ weight.dequantize().T for weight in weights.values()]
    for rank in range(ranks):
        engine.ranks(rank, ranks)
        layer = attention(engine, found)
        for shard, weight in zip("qkv", weights.values(), strict=True):
            load(layer, weight, shard)
        own_q = HEADS * HEAD // ranks
        own_kv = max(1, KV_HEADS // ranks) * HEAD
        kv = rank * KV_HEADS // ranks * HEAD if ranks > KV_HEADS else rank * own_kv
        expected = [
            whole[0][:, rank * own_q :][:, :own_q],
            *(part[:, kv : kv + own_kv] for part in whole[1:]),
        ]
        close(outputs(layer, x), torch.cat(expected, 1))
        assert len(layer.kernels) == (1 if len(set(kinds)) == 1 else 3), (
            "one launch where one container holds all"
        )


@pytest.mark.parametrize("kind", ["codebook", "codebook-int8", "symmetric", "asymmetric", "awq"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gate_up_and_down(engine, matrix, kind: str, ranks: int) -> None:
    """Column-parallel into row-parallel: the ranks' results add up."""
    gate, up = (matrix(MLP, HIDDEN, kind, seed=seed, density=0.03) for seed in (0, 1))
    down = matrix(HIDDEN, MLP, kind, seed=2, density=0.03, int8=True)
    found = config(engine, gate_proj=gate, up_proj=up, down_proj=down)
    x = torch.randn(3, HIDDEN)
    inner, total, bias = [], torch.zeros(3, HIDDEN), torch.randn(HIDDEN)
    a, b = x @ gate.dequantize().T, x @ up.dequantize().T
    own = MLP // ranks
    for rank in range(ranks):
        engine.ranks(rank, ranks)
        layer = engine.layers.MergedColumnParallelLinear(
            HIDDEN, [MLP, MLP], bias=False, quant_config=found, prefix="model.layers.0.gate_up_proj"
        )
        load(layer, gate, 0)
        load(layer, up, 1)
        y = outputs(layer, x)
        mine = slice(rank * own, (rank + 1) * own)
        close(y, torch.cat([a[:, mine], b[:, mine]], 1))
        inner.append(y[:, :own] * y[:, own:])
        layer = engine.layers.RowParallelLinear(
            MLP, HIDDEN, bias=rank == 0, quant_config=found, prefix="model.layers.0.down_proj",
        )  # fmt: skip
        load(layer, down)
        if rank == 0:
            layer.bias.data.copy_(bias)
        total += outputs(layer, inner[-1])
    close(total, (a * b) @ down.dequantize().T + bias)


@pytest.mark.parametrize("ranks", [1, 2])
def test_matrices_that_the_file_fuses_already(engine, matrix, ranks: int) -> None:
    """Phi-3: one qkv_proj and one gate_up_proj on disk; each rank takes runs of rows from it."""
    qkv = matrix((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, "asymmetric", density=0.03)
    gate_up = matrix(2 * MLP, HIDDEN, "codebook", density=0.03)
    found = config(engine, qkv_proj=qkv, gate_up_proj=gate_up)
    found.packed_modules_mapping.update(qkv_proj=["qkv_proj"], gate_up_proj=["gate_up_proj"])
    x = torch.randn(2, HIDDEN)
    q, k, v = (x @ qkv.dequantize().T).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], 1)
    a, b = (x @ gate_up.dequantize().T).chunk(2, 1)
    for rank in range(ranks):
        engine.ranks(rank, ranks)
        layer = attention(engine, found)
        load(layer, qkv)
        close(outputs(layer, x), torch.cat([part.chunk(ranks, 1)[rank] for part in (q, k, v)], 1))
        layer = engine.layers.MergedColumnParallelLinear(
            HIDDEN, [MLP, MLP], bias=False, quant_config=found, prefix="model.layers.0.gate_up_proj"
        )
        load(layer, gate_up)
        close(outputs(layer, x), torch.cat([part.chunk(ranks, 1)[rank] for part in (a, b)], 1))


def test_layers_that_are_not_quantized(engine) -> None:
    found = engine.plugin.RequantConfig({})
    layer = torch.nn.Embedding(2, 2)
    assert (
        found.get_quant_method(layer, "lm_head") is None
    )  # embedding and head are not linear layers to vLLM
    assert found.specs_of("model.layers.0.mlp.gate_up_proj", attention=False) == {}
    assert found.get_supported_act_dtypes() == [torch.float16, torch.bfloat16]
    assert found.get_name() == "requant" and found.get_config_filenames() == []


def test_what_is_refused(engine, matrix) -> None:
    square = matrix(HIDDEN, HIDDEN)
    found = config(engine, q_proj=square, v_proj=square, query_key_value=square)
    with pytest.raises(ModelError, match=r"q_proj, which is quantized, with .*k_proj, which is not"):
        attention(engine, found)
    with pytest.raises(ModelError, match="head by head"):
        found.specs_of("model.layers.0.query_key_value", attention=True)
    with pytest.raises(CheckpointError, match="no quantized modules"):
        engine.plugin.RequantConfig.from_config(
            {"quant_method": "requant", "format_version": 1, "modules": {}}
        )
    with pytest.raises(
        ModelError, match=r"mlp\.experts\.3\.up_proj is a matrix of an expert: the vLLM plugin"
    ):
        config(engine, **{"mlp.experts.3.up_proj": square})


def test_tensors_that_are_missing_or_wrong(engine, matrix) -> None:
    weight = matrix(HIDDEN, HIDDEN)
    found = config(engine, o_proj=weight)

    def layer() -> Any:
        return engine.layers.RowParallelLinear(
            HIDDEN, HIDDEN, bias=False, quant_config=found, prefix="model.layers.0.o_proj"
        )

    with pytest.raises(CheckpointError, match="codes is missing from the weight files"):
        outputs(layer(), torch.zeros(1, HIDDEN))
    fresh = layer()
    with pytest.raises(CheckpointError, match=r"codes is torch.int32 \[1, 6\], but config.json asks for"):
        fresh.codes.weight_loader(fresh.codes, torch.zeros(1, 6, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="part 'q' is not in the table"):
        fresh.codes.weight_loader(fresh.codes, torch.zeros(1, 6, dtype=torch.int32), "q")


def test_values_that_no_writer_makes(engine, matrix) -> None:
    """As `requant.load` refuses them: a kernel would read activations from wherever an index points to."""
    weight = matrix(HIDDEN, HIDDEN, density=0.1)
    layer = engine.layers.RowParallelLinear(
        HIDDEN, HIDDEN, bias=False, quant_config=config(engine, o_proj=weight), prefix="model.layers.0.o_proj"
    )
    pack(weight)[1]["sparse_indices"].fill_(255)
    with pytest.raises(CheckpointError, match=r"o_proj: sparse_indices points past the last of \d+ columns"):
        load(layer, weight)


def test_a_kernel_that_is_wrong_is_not_used(engine, matrix, monkeypatch, caplog) -> None:
    """The kernels are checked as `requant.load` checks them; floats are in their place, and one line says so."""
    weights = {"o_proj": matrix(HIDDEN, HIDDEN), "down_proj": matrix(HIDDEN, HIDDEN, seed=1)}
    found, x = config(engine, **weights), torch.randn(2, HIDDEN)
    monkeypatch.setattr(
        "requant.inference.kernel_layers.multiply", lambda x, layout, bias: x.new_zeros(len(x), layout.n)
    )
    for name, weight in weights.items():
        layer = engine.layers.RowParallelLinear(
            HIDDEN, HIDDEN, bias=False, quant_config=found, prefix=f"model.layers.0.{name}"
        )
        load(layer, weight)
        layer.quant_method.process_weights_after_loading(layer)
        close(layer.quant_method.apply(layer, x), x @ weight.dequantize().T)
    assert len(caplog.records) == 1
    assert "o_proj and matrices like it are held as float32" in caplog.text
    assert "the kernel for 3-bit codebook codes is wrong" in caplog.text


def test_what_no_kernel_takes_is_served_as_floats(engine, random_weight, caplog) -> None:
    weight, x = random_weight(HIDDEN, HIDDEN, kind="asymmetric"), torch.randn(2, HIDDEN)  # groups of 48
    layer = engine.layers.RowParallelLinear(
        HIDDEN, HIDDEN, bias=False, quant_config=config(engine, o_proj=weight), prefix="model.layers.0.o_proj",
    )  # fmt: skip
    load(layer, weight)
    layer.quant_method.process_weights_after_loading(layer)
    close(layer.quant_method.apply(layer, x), x @ weight.dequantize().T)
    assert "held as float32" in caplog.text and "48" in caplog.text


def test_names_that_vllm_changes(engine, matrix) -> None:
    found = config(engine, o_proj=matrix(HIDDEN, HIDDEN))
    mapper = SimpleNamespace(
        apply_dict=lambda table: {f"language_model.{name}": value for name, value in table.items()}
    )
    found.apply_vllm_mapper(mapper)
    assert list(found.modules) == ["language_model.model.layers.0.o_proj"]


def test_registration_is_reentrant(engine) -> None:
    quantization = importlib.import_module(f"{LAYERS}.quantization")
    for _ in range(2):
        engine.plugin.register()
    assert quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG["requant"] is engine.plugin.RequantConfig
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    assert points == {"requant": f"{engine.plugin.__name__}:{engine.plugin.register.__name__}"}


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.peers)], indirect=True)
def test_vllms_own_loader_finds_the_parameters(engine, matrix) -> None:
    """A checkpoint's names through `AutoWeightsLoader` and the renaming of Llama."""
    utils = pytest.importorskip("vllm.model_executor.models.utils", exc_type=ImportError)
    weights = {"o_proj": matrix(HIDDEN, HIDDEN)}
    for i, name in enumerate("qkv"):
        weights[f"{name}_proj"] = matrix(HIDDEN, HIDDEN, seed=i, density=0.03)
    found = config(engine, **weights)
    block = torch.nn.Module()
    block.qkv_proj = engine.layers.QKVParallelLinear(
        HIDDEN, HEAD, HEADS, HEADS, bias=False, quant_config=found, prefix="model.layers.0.qkv_proj"
    )
    block.o_proj = engine.layers.RowParallelLinear(
        HIDDEN, HIDDEN, bias=False, quant_config=found, prefix="model.layers.0.o_proj"
    )
    tree = torch.nn.Module()
    tree.model = torch.nn.Module()
    tree.model.layers = torch.nn.ModuleList([block])
    mapper = utils.WeightsMapper(orig_to_new_stacked={f".{name}_proj": (".qkv_proj", name) for name in "qkv"})
    stored = [
        (f"model.layers.0.{name}.{suffix}", tensor)
        for name, weight in weights.items()
        for suffix, tensor in {**pack(weight)[1], "weight": torch.empty(0, dtype=torch.half)}.items()
    ]
    utils.AutoWeightsLoader(tree).load_weights(iter(stored), mapper=mapper)
    x = torch.randn(2, HIDDEN)
    close(outputs(block.o_proj, x), x @ weights["o_proj"].dequantize().T)
    close(outputs(block.qkv_proj, x), torch.cat([x @ weights[f"{n}_proj"].dequantize().T for n in "qkv"], 1))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["double"], indirect=True)
@pytest.mark.parametrize("kind", ["codebook-int8", "asymmetric", "trellis-int8"])
def test_the_plugin_on_a_gpu(engine, matrix, kind: str) -> None:
    """vLLM builds its layers on the GPU and hands over tensors of the CPU."""
    weights = {
        f"{name}_proj": matrix(HIDDEN, HIDDEN, kind, seed=i, density=0.03) for i, name in enumerate("qkv")
    }
    found = config(engine, **weights)
    with torch.device("cuda"):
        layer = engine.layers.QKVParallelLinear(
            HIDDEN, HEAD, HEADS, HEADS, bias=False, params_dtype=torch.bfloat16, quant_config=found,
            prefix="model.layers.0.qkv_proj",
        )  # fmt: skip
    for shard, weight in zip("qkv", weights.values(), strict=True):
        load(layer, weight, shard)
    for tokens in (1, 40, 300):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        if tokens == 1:
            y = outputs(layer, x)
        else:
            y = layer.quant_method.apply(layer, x, layer.bias)
        expected = torch.cat([x.float() @ weight.dequantize().cuda().T for weight in weights.values()], 1)
        assert y.dtype == torch.bfloat16 and (y - expected).norm() / expected.norm() < 2e-2
