"""What vLLM expects of a layer whose matrices are quantized: its parameters and its products.

    create_weights                   registers empty parameters, one for each tensor on disk, whose loader gathers
    process_weights_after_loading    packs the rank's part for the kernels (`vllm_weights`), and checks them on this GPU
    apply, embedding                 multiply with them, look rows up in them

There is a method for linear layers, one for embeddings and heads, one that wraps those of a rotated residual stream, and
one for tied heads. Their state is kept on the layer, as vLLM requires; `vllm.py` chooses among them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from requant.errors import ModelError
from requant.formats.hadamard import TILE
from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.inference.kernel_layers import BandedLinear, KernelLinear
from requant.integrations.vllm_trellis import Gather
from requant.integrations.vllm_weights import (
    Collector,
    Conversion,
    Part,
    Shard,
    Share,
    fused_runs,
    rank_run,
)
from requant.models.rotations import HEAD_SCALES, Rotation, scaled_hadamard

ConversionFor = Callable[[torch.dtype], Conversion]  # what makes modules for activations of a dtype


class RequantLinearMethod(LinearMethodBase):
    """Loads and multiplies one layer; its state lies on the layer, as vLLM wants it."""

    def __init__(self, prefix: str, specs: Mapping[Shard, PackedSpec], conversion_for: ConversionFor) -> None:
        self.prefix, self.specs, self.conversion_for = prefix, dict(specs), conversion_for

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.dtype = params_dtype
        parts = self._parts(layer, input_size_per_partition, output_partition_sizes, input_size)
        _collect(layer, self.prefix, self.specs, parts)
        layer.register_parameter(GUARD_TENSOR, _placeholder(torch.float16, lambda *_: None))

    def process_weights_after_loading(self, layer: Any) -> None:
        found = _collected(layer, layer.get_parameter(GUARD_TENSOR).device)
        layer.kernels = nn.ModuleList(
            self.conversion_for(self.dtype).modules(
                found, where=self.prefix, ranks=layer.tp_size, gather=self._gather(layer)
            )
        )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x w~' + bias`, in the dtype of x."""
        outputs = [kernel(x) for kernel in layer.kernels]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if bias is None else y + bias

    def _gather(self, layer: Any) -> Gather:
        """The all-gather of the ranks that share this layer."""
        if layer.tp_size not in (1, get_tensor_model_parallel_world_size()):
            raise ModelError(
                f"{self.prefix} is divided among {layer.tp_size} of {get_tensor_model_parallel_world_size()} GPUs, over "
                "which the plugin cannot gather; serve this model with `requant serve`."
            )
        return tensor_model_parallel_all_gather

    def _parts(self, layer: Any, columns_mine: int, rows_mine: list[int], columns: int) -> dict[Shard, Part]:
        """What this rank takes of every matrix."""
        rank, ranks = layer.tp_rank, layer.tp_size
        run = rank_run(columns, columns_mine, rank=rank, ranks=ranks)
        if self.specs.keys() == {None}:
            sizes = _sizes_on_disk(layer, rows_mine, self.specs[None].shape[0])
            return {None: Part(rows=fused_runs(sizes, rows_mine, rank=rank, ranks=ranks), columns=run)}
        parts: dict[Shard, Part] = {}
        for (shard, spec), mine in zip(self.specs.items(), rows_mine, strict=True):
            rows = rank_run(spec.shape[0], mine, rank=rank, ranks=ranks)
            parts[shard] = Part(rows=(rows,), columns=run)
        return parts


class RequantEmbeddingMethod(QuantizeMethodBase):
    """An embedding or a head: rows are looked up in the codes, and multiplied by the kernels; no floats of the table."""

    def __init__(self, prefix: str, spec: PackedSpec, conversion_for: ConversionFor) -> None:
        self.prefix, self.spec, self.conversion_for = prefix, spec, conversion_for

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.dtype, self.rows_padded = params_dtype, sum(output_partition_sizes)
        indices, (n, k) = layer.shard_indices, self.spec.shape
        rows = (indices.org_vocab_start_index, min(indices.org_vocab_end_index, n))
        # 0: this rank has nothing but padding, and holds rows that nobody asks for
        self.rows = max(0, rows[1] - rows[0])
        part = Part(rows=(rows if self.rows else (0, min(n, TILE)),), columns=(0, k))
        _collect(layer, self.prefix, {None: self.spec}, {None: part})
        layer.register_parameter(GUARD_TENSOR, _placeholder(torch.float16, lambda *_: None))

    def process_weights_after_loading(self, layer: Any) -> None:
        found: list[Share] = _collected(layer, layer.get_parameter(GUARD_TENSOR).device)
        (layer.table,) = self.conversion_for(self.dtype).modules(found, where=self.prefix)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        if isinstance(layer.table, KernelLinear | BandedLinear):
            return layer.table.rows(input_, self.dtype)
        return nn.functional.embedding(input_, layer.table.weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of the rank's tokens; 0 for those that only pad its part."""
        y = nn.functional.pad(layer.table(x)[..., : self.rows], (0, self.rows_padded - self.rows))
        return y if bias is None else y + bias

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        return _tied(layer, embed_tokens)


class HeadMethod(UnquantizedEmbeddingMethod):
    """A head of plain floats, unless it is tied to a quantized embedding: then it has none, and asks that for logits."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        if isinstance(embed_tokens.quant_method, RequantEmbeddingMethod):
            return _tied(layer, embed_tokens)
        return super().tie_weights(layer, embed_tokens)


class RotatedMethod(QuantizeMethodBase):
    """Embedding and head of a folded model (`requant.models.rotations`): rows enter the rotated stream, and the head's input
    leaves it, scaled as the final norm would. The scales are a parameter of the embedding, and what a layer multiplies by
    is a buffer of its own: a compiler cannot trace how signs are drawn."""

    def __init__(self, plain: Any, rotation: Rotation, head_scales: list[Tensor]) -> None:
        self.plain, self.rotation, self.head_scales = plain, rotation, head_scales

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        self.plain.create_weights(layer, *arguments, **named)
        if isinstance(layer, ParallelLMHead):
            return

        def take(parameter: nn.Parameter, tensor: Tensor) -> None:
            self.head_scales[:] = [tensor.float().to(parameter.device)]

        layer.register_parameter(HEAD_SCALES, _placeholder(torch.float32, take))

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(layer, HEAD_SCALES):
            delattr(layer, HEAD_SCALES)
        if not self.head_scales:
            raise ModelError(
                f"{HEAD_SCALES} was not loaded with the embedding: this GPU holds the head alone; use tensor parallelism, "
                "not pipeline parallelism, for a model with folded rotations."
            )
        self.plain.process_weights_after_loading(layer)
        scales = self.head_scales[0]
        signs = self.rotation.signs(scales)
        layer.register_buffer("signs_entering", signs, persistent=False)
        layer.register_buffer("scales_leaving", signs * scales, persistent=False)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return scaled_hadamard(self.plain.embedding(layer, input_), before=layer.signs_entering)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.plain.apply(layer, scaled_hadamard(x, after=layer.scales_leaving), bias)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        return _tied(layer, embed_tokens)


class TiedMethod(QuantizeMethodBase):
    """A head without weights: logits are what the embedding's own method computes."""

    def __init__(self, embed_tokens: Any) -> None:
        self.embed_tokens = embed_tokens

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        raise AssertionError("a tied head is made from one that has weights")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.embed_tokens.quant_method.apply(self.embed_tokens, x, bias)


def _tied(layer: Any, embed_tokens: Any) -> Any:
    """A head that holds nothing and asks the embedding."""
    for name, _ in list(layer.named_parameters(recurse=False)):
        if name != "bias":
            delattr(layer, name)
    layer.quant_method = TiedMethod(embed_tokens)
    return layer


def _collect(layer: Any, name: str, specs: Mapping[Shard, PackedSpec], parts: Mapping[Shard, Part]) -> None:
    """Parameters that take what the file has; they hold no data themselves, so that nothing is allocated twice."""
    rank, ranks = getattr(layer, "tp_rank", 0), layer.tp_size
    device = torch.get_default_device()  # where vLLM builds the layer
    collector = Collector(name, specs, parts, rank=rank, ranks=ranks, device=device)
    for suffix, dtype in collector.suffixes().items():

        def take(parameter: nn.Parameter, tensor: Tensor, shard: Shard = None, suffix: str = suffix) -> None:
            collector.add(suffix, tensor, shard)

        layer.register_parameter(suffix, _placeholder(dtype, take))
    layer.collector = collector


def _collected(layer: Any, device: torch.device) -> list[Share]:
    """The rank's shares, once; the parameters that took them are gone then."""
    found = layer.collector.shares(device)
    for suffix in layer.collector.suffixes():
        delattr(layer, suffix)
    del layer.collector
    return found


def _placeholder(dtype: torch.dtype, loader: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
    parameter.weight_loader = loader  # type: ignore[attr-defined]
    return parameter


def _sizes_on_disk(layer: Any, rows_mine: list[int], rows: int) -> list[int]:
    """Rows of the parts of a matrix that is fused on disk already (Phi-3's qkv_proj), or of its only part."""
    if len(rows_mine) == 1:
        return [rows]
    if hasattr(layer, "total_num_kv_heads"):  # its output_sizes count shared heads once a rank
        value = layer.total_num_kv_heads * getattr(layer, "v_head_size", layer.head_size)
        sizes = [
            layer.total_num_heads * layer.head_size,
            layer.total_num_kv_heads * layer.head_size,
            value,
        ]
    else:
        sizes = list(layer.output_sizes)
    if sum(sizes) != rows:
        raise ModelError(
            f"{layer.prefix} has {rows} rows in config.json, but vLLM's layer has {sum(sizes)}; download the checkpoint "
            "again."
        )
    return sizes
