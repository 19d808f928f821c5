"""The architectures exported to GGUF: those that llama.cpp computes as transformers does."""

from typing import Any

from requant.errors import InputError

# model_type of config.json -> llama.cpp's name, and whether it wants the rows of q and k in pairs
ARCHITECTURES: dict[str, tuple[str, bool]] = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}


def check_architecture(config: Any) -> None:
    """Raise InputError for models whose layers llama.cpp would compute differently."""
    if config.model_type not in ARCHITECTURES:
        raise InputError(
            f"GGUF export knows {', '.join(ARCHITECTURES)}, not {str(config.model_type)[:40]}; export --to dense and "
            "convert that folder with llama.cpp's convert_hf_to_gguf.py."
        )
    if config.hidden_act != "silu":
        raise InputError(f"llama.cpp computes silu, not {str(config.hidden_act)[:40]}; export --to dense.")
    if getattr(config, "sliding_window", None) is not None:
        raise InputError(
            f"llama.cpp computes full attention for {config.model_type}, but this model has sliding_window "
            f"{config.sliding_window}; export --to dense."
        )
    kind = rope_parameters(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        raise InputError(f"GGUF export has no rotary embedding of type {str(kind)[:40]}; export --to dense.")


def rope_parameters(config: Any) -> dict[str, Any]:
    """A configuration's rotary embedding, with the defaults of transformers for what it does not say."""
    return {"rope_type": "default", "rope_theta": 10000.0} | dict(
        getattr(config, "rope_parameters", None) or {}
    )
