"""Sizes of the attention of every block, from the configuration: most models have one size; some have other sizes in
blocks with full attention (Gemma 4), or no attention at all (Mamba). Reading such a size for the whole model is an error
in transformers.
"""

from typing import Any, NamedTuple


class AttentionSizes(NamedTuple):
    """Heads of queries, heads of keys and values, and their dimension, of one block."""

    heads: int
    key_heads: int
    head_dim: int


def attention_sizes(config: Any) -> list[AttentionSizes]:
    """The sizes of every block that may have attention; empty for a model without heads."""
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return [size for block in text.per_layer_config for size in _sizes(block)]
    return _sizes(text) * text.num_hidden_layers


def _sizes(config: Any) -> list[AttentionSizes]:
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return []
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return [
        AttentionSizes(heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads)
    ]
