"""vLLM: requant's checkpoints in an engine that does not know the format, through the entry point `vllm.general_plugins`.

    pip install requant vllm;  vllm serve CHECKPOINT

vLLM calls `register` in every process. It then finds `quant_method: requant` in config.json, and asks `RequantConfig` for
the method of every linear layer, embedding and head (`vllm_methods`). Methods load and pack the rank's part, and multiply
by custom operators, which vLLM's compiler and CUDA graphs accept as they are. Layers whose matrices are all trellis codes
are then fused around vLLM's attention (`vllm_block`). Tensor parallelism cuts codes, scales, levels and residuals exactly,
and divides trellis codes so that their rotation runs over all ranks (`vllm_trellis`). The stock loaders could not do this:
the sparse part has a different length on each rank, and codes are a bitstream.

Tested against doubles of vLLM's documented interface (`tests/requant/integrations/vllm_double.py`), and, where vLLM can be
imported (`pytest -m peers`, no GPU needed; 0.26.0 and 0.33.0), against its own layers, its loader and its Llama; in 0.26.0's
engine on an H200 by `eval/vllm_engine.py`.
"""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from requant.checkpoint.sizes import EMBEDDINGS
from requant.checkpoint.validate import (
    TOKEN_TABLE_VERSION,
    parse_embedding_and_head,
    parse_quantization,
    parse_rotation,
)
from requant.errors import ModelError
from requant.formats.packed_spec import PackedSpec
from requant.inference.kernel_check import KernelCheck
from requant.integrations.vllm_block import fuse
from requant.integrations.vllm_methods import (
    HeadMethod,
    RequantEmbeddingMethod,
    RequantLinearMethod,
    RotatedMethod,
)
from requant.integrations.vllm_weights import Conversion, Shard
from requant.models.rotations import Rotation

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
        """Raises CheckpointError for a table that does not hold together, ModelError for a mixture of experts, and for
        per-layer embeddings in codes."""
        modules = parse_quantization(config, where="config.json")
        expert = next((name for name in modules if re.search(r"\.experts\.\d+\.", name)), None)
        if expert is not None:
            raise ModelError(
                f"{expert[:80]} is a matrix of an expert: the vLLM plugin does not serve mixtures of experts; use "
                "`requant serve` or transformers."
            )
        tables = parse_embedding_and_head(config, modules)
        if config["format_version"] >= TOKEN_TABLE_VERSION:  # which no other entry needs
            raise ModelError(
                f"one of {', '.join(tables)[:160]} is a table of per-layer embeddings in codes, which the vLLM plugin does "
                "not look up; use `requant serve` or transformers, or quantize with --head-bits 16."
            )
        return cls(modules, tables, parse_rotation(config))

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
        return RequantLinearMethod(prefix, specs, self.conversion) if specs else UnquantizedLinearMethod()

    def conversion(self, dtype: torch.dtype) -> Conversion:
        """What makes the modules of this process for activations of `dtype`."""
        return self.conversions.setdefault(dtype, Conversion(check=KernelCheck(dtype)))

    def _vocabulary_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of an embedding or a head; None where it is an ordinary one."""
        name = prefix or self._embedding()
        spec = self.embedding_and_head.get(name)
        method = None if spec is None else RequantEmbeddingMethod(name, spec, self.conversion)
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
