"""Models that are passed in already loaded: what they must be, and in what they differ from the folder they came from."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant.errors import ModelError
from requant.models.config_checks import check_experts
from requant.models.devices import pick_device
from requant.models.loading import load_config, resolve_source

# keys of a configuration that say how a model was loaded or runs, not what it is
VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def check_in_memory(model: PreTrainedModel, *, device: str, dtype: str) -> None:
    """Raise ModelError for a loaded model that cannot be quantized as it is, or where it is not as the arguments say."""
    check_head(model)
    check_experts(f"this {type(model).__name__}", model.config)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(
            f"this {type(model).__name__} is quantized already; give the original model or, for FP8 and MXFP4, one "
            "that transformers loaded with dequantize=True."
        )
    if missing := [name for name, tensor in model.state_dict().items() if tensor.is_meta]:
        raise ModelError(
            f"{missing[0][:80]} of the loaded model is on the device meta, without its values, as where device_map "
            "offloads layers; give the model's folder or name, or load it without device_map."
        )
    if device != "auto":
        wanted = torch.device(pick_device(device))
        if wanted.type != model.device.type or wanted.index not in (None, model.device.index or 0):
            raise ModelError(
                f"device {device} is not that of the loaded model, {model.device}; move the model."
            )
    own = str(model.dtype).removeprefix("torch.")
    if dtype not in ("auto", own):
        raise ModelError(f"dtype {dtype} is not that of the loaded model, {own}; convert the model.")


def check_head(model: PreTrainedModel) -> None:
    """Raise ModelError for the class of a model without its head, or with one for another task."""
    if model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model).__name__} has no head to predict tokens with; load it by AutoModelForCausalLM."
        )


def forget_dequantization(model: Any) -> None:
    """Drop what transformers dequantized the files by: before 5.24 it stays with the model, and names of tensors in files,
    which are asked for by reverting all that was done to them, end in an error."""
    done = getattr(model, "_weight_conversions", None) or ()
    if any(hasattr(step, "hf_quantizer") for each in done for step in getattr(each, "operations", ())):
        model._weight_conversions = None  # those of the model's class then count


def check_tokenizer(tokenizer: object, *, loaded: bool) -> None:
    """Raise ModelError for a tokenizer that is none, or that is given beside a model which is not `loaded` yet."""
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(
            f"tokenizer must be a tokenizer of transformers, not {type(tokenizer).__name__}; load it by AutoTokenizer."
        )
    if tokenizer is not None and not loaded:
        raise ModelError(
            "tokenizer= goes with a loaded model, and a folder or name has its own; leave it out, or load the model."
        )


def origin(model: PreTrainedModel) -> Path | None:
    """The folder that a loaded model came from; None for one that was built in memory, or whose folder is gone."""
    try:
        return Path(resolve_source(model.name_or_path)) if model.name_or_path else None
    except ModelError:
        return None


def changed_config(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """What a loaded model has otherwise than config.json of its folder: a resized embedding, fewer blocks."""
    stored = load_config(str(folder)).to_dict()
    return {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in VOLATILE and (key not in stored or stored[key] != value)
    }
