"""Metadata of a GGUF file other than the tokenizer: architecture and rotary embedding.

Keys and conventions are those of llama.cpp's own converter.
"""

import math
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from requant.models.llama_cpp import rope_parameters


def add_architecture(writer: Any, config: Any, *, name: str) -> None:
    """Sizes of the model and its rotary embedding. Raises InputError for what llama.cpp has no key for."""
    rope = rope_parameters(config)
    heads = config.num_attention_heads
    width = head_width(config)
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def head_width(config: Any) -> int:
    """Columns of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_factors(config: Any) -> Float32[Tensor, " f"] | None:
    """Llama 3's division of each rotary frequency (`rope_freqs.weight`); None for other models.

    Wavelengths above `old / low_freq_factor` are stretched by `factor`, those below `old / high_freq_factor` stay, and
    between them the two are blended.
    """
    rope = rope_parameters(config)
    if rope["rope_type"] != "llama3":
        return None
    width = head_width(config)
    old, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
    smooth = ((old / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()
