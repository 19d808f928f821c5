"""The vLLM plugin over every layer class, rank by rank: what the ranks compute together is the whole matrix.

Runs against doubles of vLLM's classes, and with `-m peers` against vLLM's own where they import (no GPU needed).
"""

import importlib
import sys
import threading
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from requant.errors import CheckpointError, ModelError
from requant.formats.quantized_weight import QuantizedWeight, pack
from requant.models.rotations import Rotation

from . import vllm_double

LAYERS = "vllm.model_executor.layers"
HEADS, KV_HEADS, HEAD = 4, 2, 16
HIDDEN, MLP = 64, 256
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(params=["double", pytest.param("vllm", marks=pytest.mark.peers)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin, vLLM's layers, and `ranks(r, of)`, which makes the process rank r."""
    monkeypatch.delitem(sys.modules, "requant.integrations.vllm", raising=False)
    if request.param == "double":
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in vllm_double.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        pytest.importorskip(f"{LAYERS}.linear", exc_type=ImportError)
    linear = importlib.import_module(f"{LAYERS}.linear")
    embedding = importlib.import_module(f"{LAYERS}.vocab_parallel_embedding")
    plugin = importlib.import_module("requant.integrations.vllm")

    def ranks(rank: int, of: int) -> None:
        for module in (linear, embedding):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: of)
        monkeypatch.setattr(plugin, "get_tensor_model_parallel_world_size", lambda: of)

    ranks(0, 1)
    gather = Gathering()
    monkeypatch.setattr(plugin, "tensor_model_parallel_all_gather", gather)
    yield SimpleNamespace(
        plugin=plugin, layers=linear, embedding=embedding, ranks=ranks, at_once=gather.at_once
    )
    sys.modules.pop("requant.integrations.vllm", None)


class Gathering:
    """vLLM's all-gather among threads, one a rank."""

    def __init__(self) -> None:
        self.rank = threading.local()

    def __call__(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.given[self.rank.number] = x
        self.barrier.wait(timeout=60)
        whole = torch.cat(self.given, dim)
        self.barrier.wait(timeout=60)
        return whole

    def at_once(self, calls: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """What every rank returns."""
        self.given: list[Any] = [None] * len(calls)
        self.barrier = threading.Barrier(len(calls))

        def run(rank: int) -> torch.Tensor:
            self.rank.number = rank
            return calls[rank]()

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(run, range(len(calls))))


@pytest.fixture
def matrix(random_weight):
    """A random matrix whose groups the kernels take."""

    def make(
        n: int, k: int, kind: str = "codebook", bits: int = 3, seed: int = 0, **options
    ) -> QuantizedWeight:
        weight = random_weight(n, k, kind=kind, bits=bits, seed=seed, **options)
        if kind.startswith(("codebook", "trellis")):
            return weight
        g = torch.Generator().manual_seed(seed)
        scales = (torch.rand(n, -(-k // 32), generator=g) * 0.02).half()
        zeros = torch.randint(0, 1 << bits, scales.shape, generator=g, dtype=torch.uint8)
        zero_points = None if weight.dense.zero_points is None else zeros
        dense = replace(weight.dense, scales=scales, zero_points=zero_points, group_size=32)
        return QuantizedWeight(dense=dense, sparse=weight.sparse)

    return make


def config(engine: Any, **weights: QuantizedWeight) -> Any:
    """The plugin's config of a checkpoint with these matrices in `model.layers.0`."""
    modules = {f"model.layers.0.{name}": pack(weight)[0].to_json() for name, weight in weights.items()}
    found = engine.plugin.RequantConfig.from_config(
        {"quant_method": "requant", "format_version": 5, "modules": modules, "recipe_hash": "abc"}
    )
    found.packed_modules_mapping.update(PACKED)
    return found


def load(layer: Any, weight: QuantizedWeight, shard: Any = None) -> None:
    """As vLLM's loader does: whole tensors, by name, marked with the part of a fused layer; the empty one too."""
    tensors = {**pack(weight)[1], "weight": torch.empty(0, dtype=torch.half)}
    for name, tensor in tensors.items():
        if hasattr(layer, "load_weights"):
            if shard is not None:
                tensor.shard_id = shard
            assert list(layer.load_weights([(name, tensor)])) == [name]
        else:
            parameter = dict(layer.named_parameters())[name]
            parameter.weight_loader(parameter, tensor)


def outputs(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.quant_method.process_weights_after_loading(layer)
    assert not [name for name, _ in layer.named_parameters(recurse=False) if name not in ("weight", "bias")]
    return layer.quant_method.apply(layer, x, layer.bias)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert (found - expected).norm() / expected.norm() < 1e-5


def attention(engine: Any, found: Any) -> Any:
    return engine.layers.QKVParallelLinear(
        HIDDEN, HEAD, HEADS, KV_HEADS, bias=False, quant_config=found, prefix="model.layers.0.qkv_proj"
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


def test_a_fused_trellis_on_one_rank(engine, matrix) -> None:
    """Phi-3 at 2 bits: nothing is cut, so nothing is refused."""
    weight = matrix((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, "trellis", density=0.03)
    found = config(engine, qkv_proj=weight)
    found.packed_modules_mapping.update(qkv_proj=["qkv_proj"])
    x = torch.randn(2, HIDDEN)
    layer = attention(engine, found)
    load(layer, weight)
    close(outputs(layer, x), x @ weight.dequantize().T)
    engine.ranks(0, 2)
    layer = attention(engine, found)
    with pytest.raises(
        ModelError, match=r"qkv_proj: trellis codes with residuals are not divided among GPUs"
    ):
        load(layer, weight)


def test_trellis_on_one_rank_and_replicated(engine, matrix) -> None:
    weights = {name: matrix(32, HIDDEN, "trellis", seed=i, density=0) for i, name in enumerate("qkv")}
    found = config(
        engine, **{f"{name}_proj": weight for name, weight in weights.items()}, o_proj=weights["q"]
    )
    layer = engine.layers.QKVParallelLinear(
        HIDDEN, 16, 2, 2, bias=False, quant_config=found, prefix="model.layers.0.qkv_proj"
    )
    for shard, weight in weights.items():
        load(layer, weight, shard)
    x = torch.randn(3, HIDDEN)
    expected = torch.cat([x @ weight.dequantize().T for weight in weights.values()], 1)
    close(outputs(layer, x), expected)
    assert len(layer.kernels) == 1, "one product, rotated back part by part"
    engine.ranks(1, 2)
    layer = engine.layers.ReplicatedLinear(
        HIDDEN, 32, bias=False, quant_config=found, prefix="model.layers.0.o_proj"
    )
    load(layer, weights["q"])
    close(outputs(layer, x), x @ weights["q"].dequantize().T)


@pytest.mark.parametrize("prefix", ["model.embed_tokens", ""])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_quantized_vocabulary(engine, matrix, ranks: int, prefix: str) -> None:
    """Every rank looks its tokens' rows up in codes, and a tied head multiplies with the same; no floats are held."""
    table = matrix(70, HIDDEN, "asymmetric", bits=6, density=0)
    found = vocabulary_config(engine, matrix, {"model.embed_tokens": table})
    floats = torch.nn.functional.pad(table.dequantize(), (0, 0, 0, 128 - 70))  # to a multiple of 64
    own, x = 128 // ranks, torch.randn(3, HIDDEN)
    for rank in range(ranks):
        engine.ranks(rank, ranks)
        layer = engine.embedding.VocabParallelEmbedding(70, HIDDEN, quant_config=found, prefix=prefix)
        head = engine.embedding.ParallelLMHead(70, HIDDEN, quant_config=found, prefix="lm_head")
        head = head.tie_weights(layer)
        load(layer, table)
        layer.quant_method.process_weights_after_loading(layer)
        head.quant_method.process_weights_after_loading(head)
        for module in (layer, head):
            assert not [name for name, tensor in module.named_parameters() if tensor.numel()]
        mine = floats[rank * own : (rank + 1) * own]
        tokens = torch.tensor([1, min(5, own - 1)])
        if rank * own < 70 - 5:
            assert torch.equal(layer.quant_method.embedding(layer, tokens), mine[tokens])
        for module in (layer, head):  # some models take the embedding itself as head
            close(module.quant_method.apply(module, x), x @ mine.T) if mine.any() else None
            assert module.quant_method.apply(module, x).shape == (3, own)


def vocabulary_config(engine, matrix, tables: dict[str, QuantizedWeight], **more: Any) -> Any:
    block = {"model.layers.0.o_proj": pack(matrix(HIDDEN, HIDDEN))[0].to_json()}
    specs = {name: pack(table)[0].to_json() for name, table in tables.items()}
    entry = {"quant_method": "requant", "format_version": 5, "modules": block} | more
    return engine.plugin.RequantConfig.from_config(entry | ({"vocabulary": specs} if specs else {}))


def test_head_and_embedding_quantized_apart(engine, matrix) -> None:
    """Untied: each has its own codes; a head that is not in the table keeps its floats."""
    tables = {
        name: matrix(64, HIDDEN, "asymmetric", bits=bits, density=0, seed=bits)
        for name, bits in (("model.embed_tokens", 4), ("lm_head", 6))
    }
    found, x = vocabulary_config(engine, matrix, tables), torch.randn(2, HIDDEN)
    head = engine.embedding.ParallelLMHead(64, HIDDEN, quant_config=found, prefix="lm_head")
    load(head, tables["lm_head"])
    head.quant_method.process_weights_after_loading(head)
    close(head.quant_method.apply(head, x), x @ tables["lm_head"].dequantize().T)
    found = vocabulary_config(engine, matrix, {"model.embed_tokens": tables["model.embed_tokens"]})
    head = engine.embedding.ParallelLMHead(64, HIDDEN, quant_config=found, prefix="lm_head")
    head.weight.data.copy_(tables["lm_head"].dequantize())
    head.quant_method.process_weights_after_loading(head)
    close(head.quant_method.apply(head, x), x @ tables["lm_head"].dequantize().T)


def test_tables_whose_kernel_is_wrong_are_floats(engine, matrix, monkeypatch, caplog) -> None:
    table = matrix(64, HIDDEN, "asymmetric", bits=6, density=0)
    found, x = vocabulary_config(engine, matrix, {"model.embed_tokens": table}), torch.randn(2, HIDDEN)
    monkeypatch.setattr(
        "requant.inference.convert.multiply", lambda x, layout, bias: x.new_zeros(len(x), layout.n)
    )
    layer = engine.embedding.VocabParallelEmbedding(
        64, HIDDEN, quant_config=found, prefix="model.embed_tokens"
    )
    load(layer, table)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.quant_method.embedding(layer, torch.tensor([3])), table.dequantize()[[3]])
    close(layer.quant_method.apply(layer, x), x @ table.dequantize().T)
    assert "model.embed_tokens and matrices like it are held as float32, 16 bits" in caplog.text


@pytest.mark.parametrize("quantized", [False, True])
def test_a_folded_stream_enters_and_leaves(engine, matrix, quantized: bool) -> None:
    """The embedding's rows are rotated, the head's input is rotated back and scaled; tied, as Llama and Qwen have them."""
    table, scales = matrix(70, HIDDEN, "asymmetric", bits=6, density=0), torch.rand(HIDDEN) + 0.5
    tables = {"model.embed_tokens": table} if quantized else {}
    found, floats = vocabulary_config(engine, matrix, tables, rotation={"seed": 3}), table.dequantize()
    layer = engine.embedding.VocabParallelEmbedding(
        70, HIDDEN, quant_config=found, prefix="model.embed_tokens"
    )
    head = engine.embedding.ParallelLMHead(70, HIDDEN, quant_config=found, prefix="lm_head")
    if not quantized:
        with pytest.raises(ModelError, match="not pipeline parallelism"):
            head.quant_method.process_weights_after_loading(head)
    head = head.tie_weights(layer)
    if quantized:
        load(layer, table)
    else:
        layer.weight.data[:70] = floats
    parameter = dict(layer.named_parameters())["head_scales"]
    parameter.weight_loader(parameter, scales)
    for each in (layer, head):
        each.quant_method.process_weights_after_loading(each)
    assert "head_scales" not in dict(layer.named_parameters())
    rotation, tokens, x = Rotation(seed=3), torch.tensor([1, 69]), torch.randn(2, HIDDEN)
    close(layer.quant_method.embedding(layer, tokens), rotation.stream(floats[tokens]))
    expected = rotation.stream_back(x) * scales @ floats.T
    for each in (layer, head):
        close(each.quant_method.apply(each, x)[:, :70], expected)


def test_layers_that_are_not_quantized(engine) -> None:
    found = engine.plugin.RequantConfig({})
    layer = torch.nn.Embedding(2, 2)
    assert found.get_quant_method(layer, "lm_head") is None  # embedding and head are no linear layers to vLLM
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_trellis_divided_among_ranks(engine, random_trellis, ranks: int) -> None:
    """Column-parallel into row-parallel: V is divided, rotations run over all ranks; together they are the whole product."""
    rows = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "gate_proj": MLP, "up_proj": MLP}
    weights = {name: random_trellis(n, HIDDEN, seed=i) for i, (name, n) in enumerate(rows.items())}
    weights["down_proj"] = random_trellis(HIDDEN, MLP, seed=9)
    found, x = config(engine, **weights), torch.randn(5, HIDDEN)
    q, k, v, gate, up = (x @ weights[name].dequantize().T for name in rows)
    layers: list[list[Any]] = []
    for rank in range(ranks):
        engine.ranks(rank, ranks)
        qkv = engine.layers.QKVParallelLinear(
            HIDDEN, 32, 4, 2, bias=False, quant_config=found, prefix="model.layers.0.qkv_proj"
        )
        gate_up = engine.layers.MergedColumnParallelLinear(
            HIDDEN, [MLP, MLP], bias=False, quant_config=found, prefix="model.layers.0.gate_up_proj"
        )
        down = engine.layers.RowParallelLinear(
            MLP, HIDDEN, bias=False, quant_config=found, prefix="model.layers.0.down_proj"
        )
        for layer, names, shards in (
            (qkv, ("q_proj", "k_proj", "v_proj"), "qkv"), (gate_up, ("gate_proj", "up_proj"), (0, 1)),
            (down, ("down_proj",), (None,)),
        ):  # fmt: skip
            for name, shard in zip(names, shards, strict=True):
                load(layer, weights[name], shard)
            layer.quant_method.process_weights_after_loading(layer)
            codes = sum(
                each.packed_codes.numel() for each in layer.modules() if hasattr(each, "packed_codes")
            )
            whole = sum(weights[name].dense.kernel_layout(None).packed_codes.numel() for name in names)
            assert codes * ranks == whole, "every rank holds its part of the codes, and no more"
            assert len(layer.kernels) == 1, "one product for q, k and v, and one for gate and up"
        layers.append([qkv, gate_up, down])

    def rank_of(rank: int) -> Callable[[], Any]:
        qkv, gate_up, down = layers[rank]

        def run() -> Any:
            a, b = gate_up.quant_method.apply(gate_up, x).chunk(2, 1)
            return qkv.quant_method.apply(qkv, x), torch.cat([a, b], 1), down.quant_method.apply(down, a * b)

        return run

    found_by_rank: list[Any] = engine.at_once([rank_of(rank) for rank in range(ranks)])
    own_q, own_kv, own = 128 // ranks, max(1, 2 // ranks) * 32, MLP // ranks
    for rank, (heads, gated, _) in enumerate(found_by_rank):
        kv = rank * 2 // ranks * 32 if ranks > 2 else rank * own_kv
        expected = [q[:, rank * own_q :][:, :own_q], k[:, kv : kv + own_kv], v[:, kv : kv + own_kv]]
        close(heads, torch.cat(expected, 1))
        close(gated, torch.cat([each[:, rank * own :][:, :own] for each in (gate, up)], 1))
    close(sum(each[2] for each in found_by_rank), (gate * up) @ weights["down_proj"].dequantize().T)


def test_trellises_that_are_not_divided(engine, matrix, random_trellis) -> None:
    narrow, sparse = random_trellis(HIDDEN, 96), matrix(HIDDEN, HIDDEN, "trellis", density=0.1)
    found = config(engine, o_proj=narrow, down_proj=sparse)
    engine.ranks(0, 4)
    layer = engine.layers.RowParallelLinear(
        96, HIDDEN, bias=False, quant_config=found, prefix="model.layers.0.o_proj"
    )
    with pytest.raises(
        ModelError, match=r"o_proj: 96 columns of trellis codes, in tiles of 16, do not divide"
    ):
        load(layer, narrow)
    layer = engine.layers.RowParallelLinear(
        HIDDEN, HIDDEN, bias=False, quant_config=found, prefix="model.layers.0.down_proj"
    )
    with pytest.raises(ModelError, match=r"down_proj: trellis codes with residuals .*without outliers"):
        load(layer, sparse)


@pytest.mark.parametrize(("rotate_input", "rotate_output"), [(True, False), (False, False)])
def test_a_trellis_without_a_rotation_is_cut(
    engine, random_trellis, rotate_input: bool, rotate_output: bool
) -> None:
    """Folded rotations: no rank waits for another's outputs."""
    sides = {"rotate_input": rotate_input, "rotate_output": rotate_output}
    gate, up = (random_trellis(MLP, HIDDEN, **sides, seed=seed) for seed in (0, 1))
    found, x = config(engine, gate_proj=gate, up_proj=up), torch.randn(2, HIDDEN)
    engine.ranks(1, 2)
    layer = engine.layers.MergedColumnParallelLinear(
        HIDDEN, [MLP, MLP], bias=False, quant_config=found, prefix="model.layers.0.gate_up_proj"
    )
    load(layer, gate, 0)
    load(layer, up, 1)
    own = slice(MLP // 2, MLP)
    close(outputs(layer, x), torch.cat([x @ each.dequantize()[own].T for each in (gate, up)], 1))
    assert [type(kernel).__name__ for kernel in layer.kernels] == ["KernelLinear"]


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


def test_a_kernel_that_is_wrong_is_not_used(engine, matrix, monkeypatch, caplog) -> None:
    """The kernels are checked as `requant.load` checks them; floats are in their place, and one line says so."""
    weights = {"o_proj": matrix(HIDDEN, HIDDEN), "down_proj": matrix(HIDDEN, HIDDEN, seed=1)}
    found, x = config(engine, **weights), torch.randn(2, HIDDEN)
    monkeypatch.setattr(
        "requant.inference.convert.multiply", lambda x, layout, bias: x.new_zeros(len(x), layout.n)
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
