"""transformers: `AutoModelForCausalLM.from_pretrained(folder)` and `save_pretrained` for requant's checkpoints.

transformers calls a quantizer twice while it loads: before the weights, with the model on the meta device, where we check
the folder and put `QuantLinear` in place of the quantized layers; and after. The buffers of `QuantLinear` have the names and
dtypes of the file, so transformers loads and saves them like any other tensor.
"""

import re
from collections.abc import Mapping
from functools import partial
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

from requant.checkpoint.read import VERIFY_CHECKSUMS, provenance
from requant.checkpoint.validate import (
    FORMAT_VERSION,
    TOKEN_TABLE_VERSION,
    check_all_values,
    check_matrices,
    parse_embedding_and_head,
    parse_quantization,
    parse_rotation,
)
from requant.errors import CheckpointError
from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.inference.quant_embedding import QuantEmbedding, keep_dtype, show_rows, tied_head
from requant.inference.quant_linear import QuantLinear
from requant.integrations.resize import guard_resizing
from requant.models.experts import fuses_experts, unfuse_experts
from requant.models.file_names import disk_names, module_names
from requant.models.named_outputs import with_named_outputs
from requant.models.rotations import Rotation, add_head_scales, rotate_stream, stream_kept
from requant.models.safetensors_header import StoredTensor, read_tensors

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
    provenance = "unverified"  # what the checksums said of the weight files
    rotation: Rotation | None = None  # that is folded into the model
    saves_original_format = True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **kwargs: Any
    ) -> Any:
        # late: this file is loaded in the midst of transformers
        from requant.models.in_memory import check_head

        check_head(model)
        self.dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        verified = self.quantization_config.__dict__.pop(VERIFY_CHECKSUMS, True)  # of this loading: not saved
        entry = self.quantization_config.to_dict()
        modules = parse_quantization(entry, where=model.config.name_or_path or "the model")
        embedding_and_head = parse_embedding_and_head(entry, modules)
        unfuse_experts(model)
        files = [Path(file) for file in checkpoint_files or ()]
        tensors = None
        if files:
            tensors = read_tensors(files)
            check_matrices({**modules, **embedding_and_head}, tensors)
        insert_layers(model, modules)
        insert_embedding_and_head(model, embedding_and_head, version=entry["format_version"])
        self.rotation = parse_rotation(entry)
        insert_head_scales(model, self.rotation)
        if tensors is not None:
            check_architecture(model, tensors)
            if verified:
                self.provenance = provenance(files[0].parent, files)
            check_all_values({**modules, **embedding_and_head}, tensors)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        cast_renamed(model, self.dtypes)
        keep_dtype(model)
        for layer in model.modules():
            if isinstance(layer, QuantLinear | QuantEmbedding):
                # a view of no bytes has the address of the tensor that follows in the file, and torch.save refuses both;
                # some models (Mamba) cast a layer's input to the dtype of its `weight`
                guard = layer.get_buffer(GUARD_TENSOR)
                guard.data = torch.empty_like(guard, dtype=model.dtype)
            if isinstance(layer, QuantEmbedding):
                show_rows(layer)
        tie_head(model)
        guard_resizing(model)
        # no bound method: pickled, that would become the method of the class
        model.save_pretrained = partial(save_pretrained, model)
        if self.rotation is not None:
            rotate_stream(model, self.rotation)
        return with_named_outputs(model)

    def update_weight_conversions(self, weight_conversions: Any, model: Any = None) -> Any:
        """transformers' conversions, but those that fuse experts: here every expert keeps its own tensors."""
        return [entry for entry in weight_conversions if not fuses_experts(entry)]

    def get_state_dict_and_metadata(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Called before a model is saved: the tables get the names that the files will have."""
        config = model.config.quantization_config
        for table in ("modules", "vocabulary"):
            if hasattr(config, table):
                entries = named_as_saved(model, getattr(config, table), renamed=self.saves_original_format)
                setattr(config, table, entries)
        return super().get_state_dict_and_metadata(model, *args, **kwargs)

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None, **kwargs: Any) -> Any:
        # late: this file is loaded in the midst of transformers
        from requant.models.plain_saving import save_plainly

        # save_pretrained leaves a name in the config, from which transformers takes it
        wanted: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or model.dtype
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = isinstance(embedding, QuantEmbedding) and head._buffers is embedding._buffers
        with stream_kept(model):
            for name, layer in list(model.named_modules()):
                if isinstance(layer, QuantLinear | QuantEmbedding):
                    model.set_submodule(name, layer.dequantized(wanted))
        if tied:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
            model.__dict__.pop("_tied_weights_keys")
            model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
        save_plainly(model)
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


def save_pretrained(model: Any, *arguments: Any, save_original_format: bool = True, **options: Any) -> None:
    """transformers' method of that name, which does not say by which names it saves when it asks for the tables."""
    model.hf_quantizer.saves_original_format = save_original_format
    type(model).save_pretrained(model, *arguments, save_original_format=save_original_format, **options)


def named_as_saved(model: nn.Module, table: Mapping[str, Any], *, renamed: bool) -> dict[str, Any]:
    """A table of matrices by the names that transformers gives them in files: where they are `renamed`, those of a source,
    else the model's own. requant itself keeps the model's name for an embedding, and a source's for all else."""
    paths = module_names(model, [f"{name}.weight" for name in table], model.state_dict())
    saved = {path: path for path in paths.values()}
    if renamed:
        saved = disk_names(model, dict.fromkeys(saved, torch.empty(0)))
    return {saved[paths[f"{name}.weight"]].removesuffix(".weight"): entry for name, entry in table.items()}


def insert_layers(model: nn.Module, modules: Mapping[str, PackedSpec]) -> None:
    """Put an empty `QuantLinear` in place of every quantized layer; raises CheckpointError where none
    fits."""
    state = model.state_dict()
    paths = module_names(model, [f"{name}.weight" for name in modules], state)
    for name, spec in modules.items():
        path = paths[f"{name}.weight"].removesuffix(".weight")
        try:
            plain = model.get_submodule(path)
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
        if shape != spec.shape:
            raise CheckpointError(
                f"{name} has shape {list(spec.shape)} in quantization_config, but {list(shape)} by the "
                "rest of config.json; download the checkpoint again."
            )
        layer = QuantLinear(
            spec,
            bias=plain.bias is not None,
            dtype=plain.weight.dtype,
            device=plain.weight.device,
            transposed=transposed,
        )
        # Some models (GPT-2) initialize the `weight` of certain layers by name; the mark makes them skip it.
        layer.get_buffer(GUARD_TENSOR)._is_hf_initialized = True  # type: ignore[attr-defined]
        model.set_submodule(path, layer)


def insert_embedding_and_head(
    model: Any, embedding_and_head: Mapping[str, PackedSpec], *, version: int = FORMAT_VERSION
) -> None:
    """Empty modules in place of a quantized embedding, head and token tables; a head that shares its codes follows in
    `tie_head`."""
    if not embedding_and_head:
        return
    # late: this file is loaded in the midst of transformers
    from requant.models.targets import embedding_and_head_modules
    from requant.models.token_tables import long_tables

    paths = module_names(model, [f"{name}.weight" for name in embedding_and_head], model.state_dict())
    embedding_and_head = {
        paths[f"{name}.weight"].removesuffix(".weight"): spec for name, spec in embedding_and_head.items()
    }
    (embedding_name, _), (head_name, head) = embedding_and_head_modules(model)
    tables = long_tables(model) if version >= TOKEN_TABLE_VERSION else {}
    for name in embedding_and_head:
        if name not in (embedding_name, head_name, *tables):
            raise CheckpointError(
                f"config.json lists {name} in vocabulary, but the embedding of {type(model).__name__} is "
                f"{embedding_name} and its head {head_name or 'missing'}"
                + (f", and it has {', '.join(tables)}" if tables else "")
                + "; download the checkpoint again."
            )
    pair = f"{head_name}.weight", f"{embedding_name}.weight"
    ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    tied = ties.get(pair[0]) == pair[1]
    if tied and embedding_and_head.keys() - tables and embedding_and_head.keys() - tables != {embedding_name}:
        raise CheckpointError(
            f"config.json ties {head_name} to {embedding_name}, but vocabulary does not list the embedding "
            "alone; download the checkpoint again."
        )
    if head_name in embedding_and_head:
        insert_layers(model, {head_name: embedding_and_head[head_name]})
    for name in (embedding_name, *tables):
        if name in embedding_and_head:
            _insert_embedding(model, name, embedding_and_head[name])
    # transformers ties parameters by name, and these have none
    if tied and embedding_name in embedding_and_head:
        model._tied_weights_keys = {
            target: source
            for target, source in (model._tied_weights_keys or {}).items()
            if (target, source) != pair
        }
        model.all_tied_weights_keys = {
            target: source for target, source in ties.items() if (target, source) != pair
        }
        model.set_submodule(head_name, UntiedYet(head))


def _insert_embedding(model: Any, name: str, spec: PackedSpec) -> None:
    plain = model.get_submodule(name)
    if not isinstance(plain, nn.Embedding) or tuple(plain.weight.shape) != spec.shape:
        raise CheckpointError(
            f"{name} has shape {list(spec.shape)} in vocabulary, but by the rest of config.json it is "
            f"a {type(plain).__name__} of {list(plain.weight.shape)}; download the checkpoint again."
        )
    embedding = QuantEmbedding(spec, plain)
    embedding.get_buffer(GUARD_TENSOR)._is_hf_initialized = True  # type: ignore[attr-defined]
    model.set_submodule(name, embedding)


def insert_head_scales(model: Any, rotation: Rotation | None) -> None:
    """An empty parameter for what the file of a model with folded rotations has."""
    if rotation is None:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise CheckpointError(
            f"config.json lists a rotation, but {type(model).__name__} has no head; download the checkpoint again."
        )
    size = model.config.get_text_config().hidden_size
    with torch.device("meta"):
        add_head_scales(model, torch.empty(size, dtype=model.dtype))


class UntiedYet(nn.Module):
    """Holds the place of a tied head while weights are loaded: only a bias is left for transformers to look after."""

    plain: nn.Linear

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.__dict__["plain"] = plain
        self.bias = plain.bias
        initialized = torch.empty(0)  # ModernBERT's model initializes its head's weight by name
        initialized._is_hf_initialized = True  # type: ignore[attr-defined]
        self.__dict__["weight"] = initialized


def tie_head(model: Any) -> None:
    """Give a head that waits for it the codes of the embedding."""
    from requant.models.targets import embedding_and_head_modules

    head: Any
    _, (name, head) = embedding_and_head_modules(model)
    if isinstance(head, UntiedYet):
        head.plain.bias = head.bias
        model.set_submodule(name, tied_head(model.get_input_embeddings(), head.plain))


def cast_renamed(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Parameters in the dtypes of the model that was built.

    Some releases of transformers (5.17) leave what they rename, like Mixtral's router, in the dtype of the file.
    """
    in_float32 = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, parameter in model.named_parameters():
        if name in dtypes and not any(part in name for part in in_float32):
            parameter.data = parameter.data.to(dtypes[name])


def check_architecture(model: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Every tensor of the model is in the files, with its shape, and none besides.

    transformers would fill a missing tensor with random numbers and drop an unknown one, both with a mere
    warning.
    """
    state = model.state_dict()
    names = module_names(model, tensors, state)
    stored = {names[name]: tensor for name, tensor in tensors.items()}
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    partners = dict(tied) | {source: target for target, source in tied.items()}
    for name, tensor in state.items():
        if name not in stored:
            if tensor.numel() and partners.get(name) not in stored and not _ignored(model, "missing", name):
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


def _ignored(model: Any, kind: str, name: str) -> bool:
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


register()
