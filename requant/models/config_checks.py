"""Values in a model's configuration files that transformers takes as they are, and on which it or a command fails later."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from requant.errors import ModelError
from requant.files import parse_json, read_small_file

FLOATS = ("bfloat16", "float16", "float32", "float64")
_CHOICES = f"{', '.join(FLOATS[:-1])} or {FLOATS[-1]}"
MOST_BLOCKS = 10_000  # the deepest models have some hundred
OTHER_TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
# How a config calls the experts of a layer, and those that a token is sent to; the last two are Gemma 4's and Aria's.
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
CHOSEN = "num_experts_per_tok", "top_k_experts", "moe_topk"


def check_depth(path: str, config: Any) -> None:
    """Raise ModelError for no blocks, or so many that to build them, if only without weights, takes long."""
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(depth, int) and not 1 <= depth <= MOST_BLOCKS:
        raise ModelError(
            f"{path} cannot be loaded (num_hidden_layers in config.json is {depth}, not 1 to {MOST_BLOCKS:,}); download the "
            "model again."
        )


def check_experts(where: str, config: Any) -> None:
    """Raise ModelError for a mixture that sends a token to more experts than it has, at which its router fails."""
    _, experts = _count(config, EXPERTS)
    key, chosen = _count(config, CHOSEN)
    if 1 < experts < chosen:  # Jamba with a single expert is a dense model, whatever else its config says
        raise ModelError(
            f"{where} cannot run ({key} is {chosen}, and a layer has {experts} experts); correct its config.json, or "
            "download the model again."
        )


def _count(config: Any, keys: Sequence[str]) -> tuple[str, int]:
    """The first of the keys that has one number for all layers, and that number; 0 where none has."""
    for key in keys:
        with suppress(RuntimeError):  # transformers', of a key that every layer has for itself
            value = getattr(config.get_text_config(), key, None)
            if isinstance(value, int):
                return key, value
    return "", 0


def check_dtype(path: str, config: Any) -> None:
    """Raise ModelError for a model of floats whose `dtype` is float8 or no float, in which neither its layers nor a
    checkpoint's can be built."""
    name = str(getattr(config.get_text_config(), "dtype", None)).removeprefix("torch.")
    if name not in ("None", *FLOATS):
        remedy = f"write {_CHOICES} there, whichever its weights have"
        if name.startswith("float8"):
            remedy = "if its weights in float8 need no scales, write bfloat16 there"
        raise ModelError(
            f"{path} cannot be loaded (dtype in config.json is {name}, in which no model computes); {remedy}."
        )


def check_causal(path: str, config: Any) -> None:
    """Raise ModelError for a model that AutoModelForCausalLM may load although it is none: half of an encoder-decoder model,
    an encoder, whose every position sees the whole text, or a model with a head for another task."""
    named = config.architectures if isinstance(config.architectures, list) else []
    names = [name for name in named if isinstance(name, str)]
    what = None
    if getattr(config, "is_encoder_decoder", False):
        what = "is an encoder-decoder model"
    elif any(name.endswith("ForMaskedLM") for name in names):
        what = "is an encoder, which reads text in both directions"
    elif any(name.endswith(OTHER_TASKS) for name in names):
        what = "has a head for another task than to predict tokens"
    if what is not None:
        raise ModelError(
            f"{path} {what} ({', '.join(names) or config.model_type}); requant quantizes decoder-only causal LMs."
        )


def check_end_tokens(folder: Path) -> None:
    """Raise ModelError for a generation_config.json whose `eos_token_id` is neither a token nor a list of tokens."""
    file = folder / "generation_config.json"
    try:
        found = parse_json(read_small_file(file))
    except (OSError, ValueError, RecursionError):  # missing, or damaged, which is for transformers to say
        return
    ends = found.get("eos_token_id") if isinstance(found, dict) else None
    if ends is not None and not all(
        type(token) is int for token in (ends if isinstance(ends, list) else [ends])
    ):
        raise ModelError(
            f"{file}: eos_token_id is {repr(ends)[:40]}, neither a token nor a list of tokens; download the model again."
        )


def check_config_json(path: str) -> None:
    """Raise ModelError for what transformers stumbles at: a quantization_config that is not a mapping, a dtype that it does
    not know."""
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads(read_small_file(Path(path) / "config.json"))
        if not isinstance(config, dict):
            return
        if not isinstance(config.get("quantization_config", {}), dict):
            raise ModelError(
                f"{path} cannot be loaded (quantization_config in config.json is not a mapping); download the model again."
            )
        for part in (config, config.get("text_config")):
            dtype = part.get("dtype", part.get("torch_dtype")) if isinstance(part, dict) else None
            if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ModelError(
                    f"{path} cannot be loaded (dtype in config.json is {dtype}); write {_CHOICES} there, "
                    "whichever its weights have."
                )
