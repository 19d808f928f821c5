"""vLLM: requant's checkpoints in an engine that knows nothing of them, through the entry point `vllm.general_plugins`.

    pip install requant vllm;  vllm serve CHECKPOINT

vLLM calls `register` in every process. It then finds `quant_method: requant` in config.json, asks `RequantConfig` for the
method of every linear layer, and that method

    create_weights                   registers empty parameters, one for each tensor on disk, whose loader gathers
    process_weights_after_loading    packs the rank's part for the kernels (`vllm_weights`), and checks them on this GPU
    apply                            multiplies with them

Tensor parallelism cuts codes, scales, levels and residuals exactly. The stock loaders cannot: the sparse part of a rank
has another length on each, and codes are a bitstream.

Tested against doubles of vLLM's documented interface (`tests/requant/integrations/vllm_double.py`), and where vLLM 0.33
imports (`pytest -m peers`, no GPU needed) against its own layers, its loader and its Llama; not yet in the CUDA engine.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from requant.checkpoint.sizes import EMBEDDINGS
from requant.checkpoint.validate import parse_embedding_and_head, parse_quantization, parse_rotation
from requant.errors import ModelError
from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.formats.quantized_weight import QuantizedWeight
from requant.inference.kernel_check import KernelCheck
from requant.integrations.vllm_weights import Collector, Part, Shard, fused_runs, kernel_modules, rank_run
from requant.models.rotations import HEAD_SCALES, Rotation

METHOD = "requant"
QKV: tuple[Shard, ...] = ("q", "k", "v")
INTERLEAVED = ("query_key_value",)  # of GPT-NeoX, BLOOM and Falcon


class RequantConfig(QuantizationConfig):
    """`quantization_config` of config.json: which matrices are quantized, and how."""

    def __init__(
        self,
        modules: Mapping[str, PackedSpec],
        embedding_and_head: Mapping[str, PackedSpec] | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        super().__init__()
        self.modules = dict(modules)
        self.embedding_and_head = dict(embedding_and_head or {})
        self.rotation = rotation
        self.head_scales: list[Tensor] = []  # one, once the embedding is loaded
        self.checks: dict[torch.dtype, KernelCheck] = {}  # by activations, for all layers of this process

    def __repr__(self) -> str:
        return f"RequantConfig({len(self.modules)} modules)"

    def get_name(self) -> Any:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # Ampere: the oldest that the kernels are written for

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json says it all

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "RequantConfig":
        """Raises CheckpointError for a table that does not hold together, ModelError for a mixture of experts."""
        modules = parse_quantization(config, where="config.json")
        expert = next((name for name in modules if re.search(r"\.experts\.\d+\.", name)), None)
        if expert is not None:
            raise ModelError(
                f"{expert[:80]} is a matrix of an expert: the vLLM plugin does not serve mixtures of experts; use "
                "`requant serve` or transformers."
            )
        return cls(modules, parse_embedding_and_head(config, modules), parse_rotation(config))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Some models have other names for their modules in vLLM than in transformers."""
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)
        self.embedding_and_head = hf_to_vllm_mapper.apply_dict(self.embedding_and_head)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a linear layer, embedding or head; None leaves anything else as it is."""
        if isinstance(layer, VocabParallelEmbedding):  # ParallelLMHead is one too
            name = prefix or self._embedding()
            spec = self.embedding_and_head.get(name)
            method = None if spec is None else RequantEmbeddingMethod(name, spec)
            if self.rotation is None:
                return method
            plain = method or UnquantizedEmbeddingMethod()
            if isinstance(layer, ParallelLMHead):
                return RotatedHeadMethod(plain, self.rotation, self.head_scales)
            return RotatedEmbeddingMethod(plain, self.rotation, self.head_scales)
        if not isinstance(layer, LinearBase):
            return None
        specs = self.specs_of(prefix, attention=hasattr(layer, "total_num_kv_heads"))
        return RequantLinearMethod(prefix, specs, self.checks) if specs else UnquantizedLinearMethod()

    def _embedding(self) -> str:
        """The name of the quantized embedding; vLLM's Llama gives its own none."""
        return next((name for name in self.embedding_and_head if name.rpartition(".")[2] in EMBEDDINGS), "")

    def specs_of(self, prefix: str, *, attention: bool) -> dict[Shard, PackedSpec]:
        """The matrices of a layer, by the names under which vLLM loads them; empty for one that is not quantized."""
        parent, _, name = prefix.rpartition(".")
        if prefix in self.modules:
            if name in INTERLEAVED:
                raise ModelError(
                    f"{prefix} holds q, k and v head by head, which vLLM reorders while it loads, and packed codes cannot "
                    "be reordered; serve this model with `requant serve`."
                )
            return {None: self.modules[prefix]}
        parts = self.packed_modules_mapping.get(name, [])
        names = [f"{parent}.{part}" if parent else part for part in parts]
        present = [part for part in names if part in self.modules]
        if not present:
            return {}
        if len(present) < len(names):
            absent = next(part for part in names if part not in self.modules)
            raise ModelError(
                f"{prefix} joins {present[0]}, which is quantized, with {absent}, which is not; vLLM loads them as one "
                "matrix: quantize again with all of them skipped, or none."
            )
        shards: Any = QKV if attention else range(len(names))
        return dict(zip(shards, (self.modules[part] for part in names), strict=True))


class RequantLinearMethod(LinearMethodBase):
    """Loads and multiplies one layer; its state lies on the layer, as vLLM wants it."""

    def __init__(
        self, prefix: str, specs: Mapping[Shard, PackedSpec], checks: dict[torch.dtype, KernelCheck]
    ) -> None:
        self.prefix = prefix
        self.specs = dict(specs)
        self.checks = checks

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
        self.check = self.checks.setdefault(params_dtype, KernelCheck(params_dtype))
        parts = self._parts(layer, input_size_per_partition, output_partition_sizes, input_size)
        _collect(layer, Collector(self.prefix, self.specs, parts))
        layer.register_parameter(GUARD_TENSOR, _placeholder(torch.float16, lambda *_: None))

    def process_weights_after_loading(self, layer: Any) -> None:
        weights = _collected(layer, layer.get_parameter(GUARD_TENSOR).device)
        layer.kernels = nn.ModuleList(kernel_modules(weights, self.check, where=self.prefix))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x w~' + bias`, in the dtype of x."""
        outputs = [kernel(x) for kernel in layer.kernels]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if bias is None else y + bias

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


class RequantEmbeddingMethod(UnquantizedEmbeddingMethod):
    """An embedding or a head: its rows become floats at load, since vLLM looks rows up and shares tables as tensors."""

    def __init__(self, prefix: str, spec: PackedSpec) -> None:
        self.prefix = prefix
        self.spec = spec

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        super().create_weights(layer, *arguments, **named)
        layer.weight.weight_loader = lambda *_: None  # what the file calls so is empty
        indices, (n, k) = layer.shard_indices, self.spec.shape
        rows = (indices.org_vocab_start_index, min(indices.org_vocab_end_index, n))
        self.rows = max(0, rows[1] - rows[0])  # 0: this rank has nothing but padding
        part = Part(rows=(rows if self.rows else (0, 1),), columns=(0, k))
        _collect(layer, Collector(self.prefix, {None: self.spec}, {None: part}))

    def process_weights_after_loading(self, layer: Any) -> None:
        (weight,) = _collected(layer, layer.weight.device)
        with torch.no_grad():
            layer.weight.zero_()
            layer.weight[: self.rows] = weight.dequantize()[: self.rows].to(layer.weight.dtype)
        super().process_weights_after_loading(layer)


class RotatedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """An embedding whose rows enter the rotated stream (`requant.models.rotations`); it also takes the head's scales."""

    def __init__(self, plain: Any, rotation: Rotation, head_scales: list[Tensor]) -> None:
        self.plain, self.rotation, self.head_scales = plain, rotation, head_scales

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        self.plain.create_weights(layer, *arguments, **named)

        def take(parameter: nn.Parameter, tensor: Tensor) -> None:
            self.head_scales[:] = [tensor.float().to(layer.weight.device)]

        layer.register_parameter(HEAD_SCALES, _placeholder(torch.float32, take))

    def process_weights_after_loading(self, layer: Any) -> None:
        delattr(layer, HEAD_SCALES)
        self.plain.process_weights_after_loading(layer)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return self.rotation.stream(self.plain.embedding(layer, input_))


class RotatedHeadMethod(UnquantizedEmbeddingMethod):
    """A head whose input leaves the rotated stream, and is scaled as the final norm would."""

    def __init__(self, plain: Any, rotation: Rotation, head_scales: list[Tensor]) -> None:
        self.plain, self.rotation, self.head_scales = plain, rotation, head_scales

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        self.plain.create_weights(layer, *arguments, **named)

    def process_weights_after_loading(self, layer: Any) -> None:
        if not self.head_scales:
            raise ModelError(
                f"{HEAD_SCALES} was not loaded with the embedding: this GPU holds the head alone; use tensor parallelism, "
                "not pipeline parallelism, for a model with folded rotations."
            )
        self.plain.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.plain.apply(layer, self.rotation.stream_back(x, self.head_scales[0]), bias)


def register() -> None:
    """The entry point; vLLM calls it once or more in every process."""
    register_quantization_config(METHOD)(RequantConfig)


def _collect(layer: Any, collector: Collector) -> None:
    """Parameters that take what the file has; they hold no data themselves, so that nothing is allocated twice."""
    for suffix, dtype in collector.suffixes().items():

        def take(parameter: nn.Parameter, tensor: Tensor, shard: Shard = None, suffix: str = suffix) -> None:
            collector.add(suffix, tensor, shard)

        layer.register_parameter(suffix, _placeholder(dtype, take))
    layer.collector = collector


def _collected(layer: Any, device: torch.device) -> list[QuantizedWeight]:
    """The rank's matrices, once; the parameters that took them are gone then."""
    weights = layer.collector.weights(device)
    for suffix in layer.collector.suffixes():
        delattr(layer, suffix)
    del layer.collector
    return weights


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
