"""transformers: `AutoModelForCausalLM.from_pretrained(folder)` and `save_pretrained` for requant's
checkpoints.

transformers calls a quantizer twice while it loads: before the weights, with the model on the meta device,
where we judge the folder and put `QuantLinear` in place of the quantized layers; and after. The buffers of
`QuantLinear` have the names and dtypes of the file, so transformers loads and saves them like any other
tensor.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from requant.checkpoint.header import StoredTensor, read_tensors
from requant.checkpoint.layout import MatrixLayout
from requant.checkpoint.validate import check_all_values, check_matrices, parse_quantization
from requant.errors import CheckpointError
from requant.linear import QuantLinear

METHOD = "requant"


class RequantConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json; every key of the file becomes an attribute and is saved again."""

    def __init__(self, **entries: Any) -> None:
        self.__dict__.update(entries)
        self.quant_method: Any = entries.get("quant_method", METHOD)

    def __repr__(self) -> str:
        modules = getattr(self, "modules", {})
        return (
            f"RequantConfig({len(modules)} modules, format_version={getattr(self, 'format_version', None)})"
        )


class RequantHfQuantizer(HfQuantizer):
    """Loads what is quantized already; it does not quantize on the fly (`requant quantize` does)."""

    requires_calibration = True
    quantization_config: Any

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **kwargs: Any
    ) -> Any:
        modules = parse_quantization(
            self.quantization_config.to_dict(), where=model.config.name_or_path or "the model"
        )
        if checkpoint_files is None:
            insert_layers(model, modules)
            return model
        tensors = read_tensors(map(Path, checkpoint_files))
        check_matrices(modules, tensors)
        insert_layers(model, modules)
        check_architecture(model, tensors)
        check_all_values(modules, tensors)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for layer in model.modules():
            if isinstance(layer, QuantLinear):
                del layer.weight
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, QuantLinear):
                model.set_submodule(name, layer.dequantized(dtype or model.dtype))
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> Any:
        return True

    @property
    def is_trainable(self) -> Any:
        """Adapters can be trained on top: gradients flow through x."""
        return True


def register() -> None:
    """Make transformers know requant; once is enough, more does no harm."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(RequantConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(RequantHfQuantizer)


def insert_layers(model: nn.Module, modules: Mapping[str, MatrixLayout]) -> None:
    """Put an empty `QuantLinear` in place of every quantized layer; raises CheckpointError where none
    fits."""
    for name, layout in modules.items():
        try:
            plain = model.get_submodule(name)
        except AttributeError as error:
            raise CheckpointError(
                f"config.json lists the quantized matrix {name}, but {type(model).__name__} has no such "
                "layer; the checkpoint is damaged, download it again."
            ) from error
        if not isinstance(plain, nn.Linear | Conv1D):
            raise CheckpointError(
                f"{name} is a {type(plain).__name__}, not a linear layer; download the checkpoint again."
            )
        transposed = isinstance(plain, Conv1D)
        shape = tuple(plain.weight.shape)[:: -1 if transposed else 1]
        if shape != layout.shape:
            raise CheckpointError(
                f"{name} has shape {list(layout.shape)} in quantization_config, but {list(shape)} by the "
                "rest of config.json; download the checkpoint again."
            )
        layer = QuantLinear(
            layout,
            bias=plain.bias is not None,
            dtype=plain.weight.dtype,
            device=plain.weight.device,
            transposed=transposed,
        )
        # Some models (GPT-2) initialize the `weight` of certain layers by name; the mark makes them skip it.
        layer.weight = torch.empty(0)
        layer.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        model.set_submodule(name, layer)


def check_architecture(model: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Every tensor of the model is in the files, with its shape, and none besides.

    transformers would fill a missing tensor with random numbers and drop an unknown one, both with a mere
    warning.
    """
    state = model.state_dict()
    stored = {module_name(model, name, state): tensor for name, tensor in tensors.items()}
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    partners = dict(tied) | {source: target for target, source in tied.items()}
    for name, tensor in state.items():
        if name not in stored:
            if partners.get(name) not in stored and not _ignored(model, "missing", name):
                raise CheckpointError(
                    f"{name} is missing from the weight files; download the checkpoint again."
                )
        elif stored[name].shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {list(stored[name].shape)} in {stored[name].file.name}, but "
                f"{list(tensor.shape)} by config.json; download the checkpoint again."
            )
    for name in sorted(stored.keys() - state.keys()):
        if not _ignored(model, "unexpected", name):
            raise CheckpointError(
                f"{stored[name].file.name} holds {name}, which {type(model).__name__} does not have; "
                "download the checkpoint again."
            )


def module_name(model: Any, name: str, state: Mapping[str, Any]) -> str:
    """Where the model looks for a tensor that is called `name` on disk (GPT-NeoX: embed_out is lm_head today)."""
    if name in state:
        return name
    # Imported late: this file is loaded while transformers is still importing its registry of quantizers.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    return rename_source_key(name, renamings, [], model.base_model_prefix, dict(state))[0]


def disk_name(model: Any, name: str, tensor: torch.Tensor) -> str:
    """The inverse: what the checkpoint that `model` was loaded from calls its tensor `name`.

    Newer transformers know the names of older ones, but not the other way round, so this is the name to save.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return name
    names = list(revert_weight_conversion(model, {name: tensor}))
    return names[0] if len(names) == 1 else name


def _ignored(model: Any, kind: str, name: str) -> bool:
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
