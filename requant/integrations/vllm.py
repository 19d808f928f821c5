"""vLLM: requant's checkpoints in an engine that knows nothing of them, through the entry point `vllm.general_plugins`.

    pip install requant vllm;  vllm serve CHECKPOINT

vLLM calls `register` in every process. It then finds `quant_method: requant` in config.json, asks `RequantConfig` for the
method of every linear layer, embedding and head, and that method

    create_weights                   registers empty parameters, one for each tensor on disk, whose loader gathers
    process_weights_after_loading    packs the rank's part for the kernels (`vllm_weights`), and checks them on this GPU
    apply, embedding                 multiply with them, look rows up in them

by custom operators, which vLLM's compiler and CUDA graphs take as they are. Layers whose matrices are all trellis codes
are then fused around vLLM's attention (`vllm_block`). Tensor parallelism cuts codes, scales, levels and residuals exactly,
and divides trellis codes whose rotation runs over all ranks (`vllm_trellis`). The stock loaders could not: the sparse part
of a rank has another length on each, and codes are a bitstream.

Tested against doubles of vLLM's documented interface (`tests/requant/integrations/vllm_double.py`), and where vLLM imports
(`pytest -m peers`, no GPU needed; 0.26.0 and 0.33.0) against its own layers, its loader and its Llama; in 0.26.0's engine on
an H200 by `eval/vllm_engine.py`.
"""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from requant.checkpoint.sizes import EMBEDDINGS
from requant.checkpoint.validate import parse_embedding_and_head, parse_quantization, parse_rotation
from requant.errors import ModelError
from requant.formats.hadamard import TILE
from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.inference.convert import BandedLinear, KernelLinear
from requant.inference.kernel_check import KernelCheck
from requant.integrations.vllm_block import fuse
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
from requant.models.rotations import HEAD_SCALES, Rotation

METHOD = "requant"
FUSES = "fuses_layers_of_requant"  # on a loader's method that does
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
        self.conversions: dict[torch.dtype, Conversion] = {}  # by activations, for all layers of this process

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
            return self._vocabulary_method(layer, prefix)
        if not isinstance(layer, LinearBase):
            return None
        specs = self.specs_of(prefix, attention=hasattr(layer, "total_num_kv_heads"))
        return RequantLinearMethod(prefix, specs, self) if specs else UnquantizedLinearMethod()

    def conversion(self, dtype: torch.dtype) -> Conversion:
        """What makes the modules of this process for activations of `dtype`."""
        return self.conversions.setdefault(dtype, Conversion(check=KernelCheck(dtype)))

    def _vocabulary_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of an embedding or a head; None where it is an ordinary one."""
        name = prefix or self._embedding()
        spec = self.embedding_and_head.get(name)
        method = None if spec is None else RequantEmbeddingMethod(name, spec, self)
        if self.rotation is not None:
            plain = method or UnquantizedEmbeddingMethod()
            return RotatedMethod(plain, self.rotation, self.head_scales)
        if method is None and isinstance(layer, ParallelLMHead) and self.embedding_and_head:
            return HeadMethod()  # it may be tied to an embedding that has no floats
        return method

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

    def __init__(self, prefix: str, specs: Mapping[Shard, PackedSpec], config: RequantConfig) -> None:
        self.prefix, self.specs, self.config = prefix, dict(specs), config

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
            self.config.conversion(self.dtype).modules(
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

    def __init__(self, prefix: str, spec: PackedSpec, config: RequantConfig) -> None:
        self.prefix, self.spec, self.config = prefix, spec, config

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
        self.rows = max(
            0, rows[1] - rows[0]
        )  # 0: this rank has nothing but padding, and holds rows that nobody asks for
        part = Part(rows=(rows if self.rows else (0, min(n, TILE)),), columns=(0, k))
        _collect(layer, self.prefix, {None: self.spec}, {None: part})
        layer.register_parameter(GUARD_TENSOR, _placeholder(torch.float16, lambda *_: None))

    def process_weights_after_loading(self, layer: Any) -> None:
        found: list[Share] = _collected(layer, layer.get_parameter(GUARD_TENSOR).device)
        (layer.table,) = self.config.conversion(self.dtype).modules(found, where=self.prefix)

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
    leaves it, scaled as the final norm would. The scales are a parameter of the embedding."""

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

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return self.rotation.stream(self.plain.embedding(layer, input_))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.plain.apply(layer, self.rotation.stream_back(x, self.head_scales[0]), bias)

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


def register() -> None:
    """The entry point; vLLM calls it once or more in every process."""
    register_quantization_config(METHOD)(RequantConfig)
    if not hasattr(BaseModelLoader.load_model, FUSES):
        BaseModelLoader.load_model = _then_fuse(BaseModelLoader.load_model)


def _then_fuse(load_model: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """vLLM's own, after which the layers of a checkpoint of ours may be fused."""

    @wraps(load_model)
    def load_and_fuse(self: Any, vllm_config: Any, *arguments: Any, **named: Any) -> nn.Module:
        model = load_model(self, vllm_config, *arguments, **named)
        if vllm_config.quant_config is not None and vllm_config.quant_config.get_name() == METHOD:
            fuse(model, vllm_config)
        return model

    setattr(load_and_fuse, FUSES, True)
    return load_and_fuse


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
