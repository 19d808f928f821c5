"""Doubles of the classes of vLLM 0.26 to 0.33 that the plugin meets: names, signatures and order of calls are vLLM's.

Only what a plugin can see is here: how a layer asks for its method, which sizes it hands over, how the loader finds a
parameter, and what `forward` calls. Attributes are set where vLLM sets them.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

RANK, RANKS = 0, 1
CONFIGS: dict[str, Any] = {}


def get_tensor_model_parallel_rank() -> int:
    return RANK


def get_tensor_model_parallel_world_size() -> int:
    return RANKS


def tensor_model_parallel_all_gather(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    raise AssertionError("a rank alone has nobody to gather from")


def divide(numerator: int, denominator: int) -> int:
    assert numerator % denominator == 0
    return numerator // denominator


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class QuantizeMethodBase:
    def tie_weights(self, layer, embed_tokens):
        layer.weight = embed_tokens.weight
        return layer

    def process_weights_after_loading(self, layer):
        pass


class LinearMethodBase(QuantizeMethodBase):
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, *rest, **attributes):
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


class LinearBase(nn.Module):
    def __init__(self, input_size, output_size, bias, params_dtype, quant_config, prefix):
        super().__init__()
        self.input_size, self.output_size, self.prefix = input_size, output_size, prefix
        self.params_dtype = params_dtype or torch.get_default_dtype()
        method = quant_config.get_quant_method(self, prefix) if quant_config else UnquantizedLinearMethod()
        if method is None:
            raise ValueError("All linear layers should support quant method.")
        self.quant_method = method
        self.tp_rank = get_tensor_model_parallel_rank()
        self.tp_size = get_tensor_model_parallel_world_size()

    def _create(self, columns: int, loader: Any, bias: bool, rows: int) -> None:
        self.quant_method.create_weights(
            layer=self, input_size_per_partition=columns, output_partition_sizes=self.output_partition_sizes,
            input_size=self.input_size, output_size=self.output_size, params_dtype=self.params_dtype,
            weight_loader=loader,
        )  # fmt: skip
        self.bias = (
            nn.Parameter(torch.empty(rows, dtype=self.params_dtype), requires_grad=False) if bias else None
        )

    def weight_loader(self, *arguments: Any) -> None:
        raise AssertionError("the stock loader cannot cut packed codes; the plugin has its own")

    def forward(self, x: torch.Tensor) -> Any:
        return self.quant_method.apply(self, x, self.bias), None


class ReplicatedLinear(LinearBase):
    def __init__(self, input_size, output_size, bias=True, skip_bias_add=False, params_dtype=None,
                 quant_config=None, prefix="", **rest):  # fmt: skip
        self.output_partition_sizes = [output_size]
        super().__init__(input_size, output_size, bias, params_dtype, quant_config, prefix)
        self._create(input_size, self.weight_loader, bias, output_size)


class ColumnParallelLinear(LinearBase):
    def __init__(self, input_size, output_size, bias=True, gather_output=False, skip_bias_add=False,
                 params_dtype=None, quant_config=None, prefix="", **rest):  # fmt: skip
        ranks = get_tensor_model_parallel_world_size()
        self.output_size_per_partition = divide(output_size, ranks)
        self.output_partition_sizes = [self.output_size_per_partition]
        if hasattr(self, "output_sizes"):
            self.output_partition_sizes = [divide(size, ranks) for size in self.output_sizes]
        super().__init__(input_size, output_size, bias, params_dtype, quant_config, prefix)
        self._create(input_size, self.weight_loader, bias, self.output_size_per_partition)


class _Fused:
    def load_weights(self, weights):
        for name, tensor in weights:
            shard = getattr(tensor, "shard_id", None)
            parameter = getattr(self, name, self)
            parameter.weight_loader(parameter, tensor, shard)
            yield name


class MergedColumnParallelLinear(_Fused, ColumnParallelLinear):
    def __init__(self, input_size, output_sizes, bias=True, **rest):
        self.output_sizes = output_sizes
        super().__init__(input_size, sum(output_sizes), bias, **rest)


class QKVParallelLinear(_Fused, ColumnParallelLinear):
    def __init__(self, hidden_size, head_size, total_num_heads, total_num_kv_heads=None, bias=True, **rest):
        ranks = get_tensor_model_parallel_world_size()
        self.head_size = self.v_head_size = head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_kv_heads or total_num_heads
        self.num_heads = divide(total_num_heads, ranks)
        self.num_kv_heads = max(1, self.total_num_kv_heads // ranks)
        widths = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        self.output_sizes = [heads * head_size * ranks for heads in widths]
        super().__init__(hidden_size, sum(self.output_sizes), bias, **rest)


class RowParallelLinear(LinearBase):
    def __init__(self, input_size, output_size, bias=True, input_is_parallel=True, skip_bias_add=False,
                 params_dtype=None, reduce_results=True, quant_config=None, prefix="", **rest):  # fmt: skip
        self.input_size_per_partition = divide(input_size, get_tensor_model_parallel_world_size())
        self.output_partition_sizes = [output_size]
        super().__init__(input_size, output_size, bias, params_dtype, quant_config, prefix)
        self._create(self.input_size_per_partition, self.weight_loader, bias, output_size)


class UnquantizedEmbeddingMethod(QuantizeMethodBase):
    def create_weights(self, layer, columns, rows, *rest, params_dtype=None, **attributes):
        weight = nn.Parameter(torch.empty(sum(rows), columns, dtype=params_dtype), requires_grad=False)
        weight.weight_loader = attributes["weight_loader"]
        layer.register_parameter("weight", weight)

    def apply(self, layer, x, bias=None):
        return nn.functional.linear(x, layer.weight, bias)

    def embedding(self, layer, tokens):
        return nn.functional.embedding(tokens, layer.weight)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, params_dtype=None, quant_config=None, prefix=""):
        super().__init__()
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.tp_size, self.embedding_dim = ranks, embedding_dim
        padded = -(-num_embeddings // 64) * 64
        own = divide(padded, ranks)
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=min(rank * own, num_embeddings),
            org_vocab_end_index=min((rank + 1) * own, num_embeddings),
        )
        self.quant_method = quant_config.get_quant_method(self, prefix) or UnquantizedEmbeddingMethod()
        self.quant_method.create_weights(
            self, embedding_dim, [own], embedding_dim, padded,
            params_dtype=params_dtype or torch.get_default_dtype(), weight_loader=self.weight_loader,
        )  # fmt: skip

    def weight_loader(self, parameter, tensor):
        raise AssertionError("the stock loader cannot read codes")


class ParallelLMHead(VocabParallelEmbedding):
    def tie_weights(self, embedding):
        return self.quant_method.tie_weights(self, embedding)


class BaseModelLoader:
    def load_model(self, vllm_config, model_config, prefix=""):
        raise AssertionError("nothing is loaded here")


def register_quantization_config(quantization: str) -> Any:
    def wrapper(config: type) -> type:
        if not issubclass(config, QuantizationConfig):
            raise ValueError("The quantization config must be a subclass of `QuantizationConfig`.")
        CONFIGS[quantization] = config
        return config

    return wrapper


def modules() -> dict[str, ModuleType]:
    """The doubles under the names of vLLM's modules."""
    layers = "vllm.model_executor.layers"
    made = {
        name: ModuleType(name)
        for name in ("vllm", "vllm.distributed", "vllm.model_executor", layers, f"{layers}.quantization",
                     f"{layers}.quantization.base_config", "vllm.model_executor.model_loader",
                     "vllm.model_executor.model_loader.base_loader")
    }  # fmt: skip
    made[f"{layers}.linear"] = made[f"{layers}.vocab_parallel_embedding"] = sys.modules[__name__]
    made[f"{layers}.quantization"].register_quantization_config = register_quantization_config
    made[f"{layers}.quantization"]._CUSTOMIZED_METHOD_TO_QUANT_CONFIG = CONFIGS
    made[f"{layers}.quantization.base_config"].QuantizationConfig = QuantizationConfig
    made[f"{layers}.quantization.base_config"].QuantizeMethodBase = QuantizeMethodBase
    made["vllm.distributed"].get_tensor_model_parallel_world_size = get_tensor_model_parallel_world_size
    made["vllm.distributed"].tensor_model_parallel_all_gather = tensor_model_parallel_all_gather
    made["vllm.model_executor.model_loader.base_loader"].BaseModelLoader = BaseModelLoader
    return made
