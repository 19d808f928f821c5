"""The vLLM plugin over trellis codes: joined, on one rank, divided among ranks with their rotations, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from requant.errors import ModelError

from .vllm_layers import HEAD, HEADS, HIDDEN, KV_HEADS, MLP, attention, close, config, load, outputs


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
