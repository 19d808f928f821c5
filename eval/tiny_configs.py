"""Configurations of tiny models, for any model type of transformers: all that sets a size is made small, the rest kept.

Sizes have names that configurations share, so no architecture needs its own code; OVERRIDES holds the exceptions. A
configuration that names kinds of layers (`layer_types`: full attention, sliding window, state space) gets as many layers as
are needed to have every kind that its default has.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MOST_LAYERS = 12
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
SIZES: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "word_embed_proj_dim", "dim"), 64),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "output_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_inner", "dff", "dim_ff"), 128),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "shared_intermediate_size"), 128),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "dim_head"), 16),
    "rotary_dim": 16,
    "query_pre_attn_scalar": 16,
    # latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim", "index_head_dim"), 16),
    "index_n_heads": 2,
    "index_topk": 16,
    # state spaces and linear attention
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "mamba_state_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    # positions
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "context_length", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention"), 32),
    # image and audio encoders of a text model
    **dict.fromkeys(("image_size", "num_mel_bins"), 32),
    "patch_size": 16,
}  # fmt: skip
# model type -> what its configuration needs besides SIZES; in VARIANTS for further models of a type
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "cohere_compass_text": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
    | {"o_groups": 2, "o_lora_rank": 32, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "falcon_mamba": {"hidden_size": 128, "time_step_rank": 32},
    "gemma3n_text": {
        "vocab_size_per_layer_input": 4096,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 32,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "activation_sparsity_pattern": [0.95] * 5 + [0.0] * 5,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 4096, "hidden_size_per_layer_input": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "num_local_experts": 0},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 16, "qk_head_dim": 32},
    "mamba": {"hidden_size": 128, "time_step_rank": 32},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "zamba2": {"n_mamba_heads": 8, "layers_block_type": ["mamba", "hybrid"] * 3, "num_hidden_layers": 6}
    | {"adapter_rank": 32, "attention_hidden_size": 128, "attention_head_dim": 32},
    "phi4_multimodal": {"num_hidden_layers": 8},
    "phi4_multimodal_audio": {"num_blocks": 1},
    "phi4_multimodal_vision": {"num_hidden_layers": 1},
    "recurrent_gemma": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "xlstm": {"num_blocks": 2, "qk_dim_factor": 1.0},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"hidden_size_per_layer_input": 0},
    ),
    "granitemoehybrid experts": ("granitemoehybrid", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron_h latent experts": ("nemotron_h", {"moe_latent_size": 32}),
    "nemotron_h dense": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "num_hidden_layers": 4},
    ),
}


def tiny_config(name: str, vocabulary: int, **special: int | None) -> PretrainedConfig:
    """A small configuration of a model type or variant; `special` has the ids of its special tokens."""
    kind, own = VARIANTS.get(name, (name, {}))
    return _shrunk(CONFIG_MAPPING[kind], kind, {"vocab_size": vocabulary, **special}, own)


def _shrunk(
    kind_of: Any, kind: str, given: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    default = kind_of()
    stored = default.to_dict()
    known = set(stored) | set(default.attribute_map)
    own = {**OVERRIDES.get(kind, {}), **(own or {})}
    # a size that a configuration leaves open follows from others, or means that a part is missing
    sizes = {
        key: value
        for key, value in SIZES.items()
        if stored.get(default.attribute_map.get(key, key)) is not None
    }
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    changes = {**sizes, **{key: value for key, value in given.items() if key in known}, **own}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            changes[name] = _shrunk(type(part), part.model_type, given if "text" in name else {})
    layers = [key for key in LAYERS if key in known and key not in default.attribute_map]
    kinds = set(getattr(default, "layer_types", None) or ())
    count = 4 if kinds else 2
    while True:
        config = kind_of(**{**dict.fromkeys(layers, count), **changes})
        if count >= MOST_LAYERS or kinds <= set(getattr(config, "layer_types", None) or ()):
            return config
        count += 2
