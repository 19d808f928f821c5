"""Layers of vLLM with the plugin: made from a checkpoint's config, filled as vLLM's loader fills them, and run."""

from typing import Any

import torch

from requant.formats.quantized_weight import QuantizedWeight, pack

LAYERS = "vllm.model_executor.layers"
HEADS, KV_HEADS, HEAD = 4, 2, 16
HIDDEN, MLP = 64, 256
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


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
