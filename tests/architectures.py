"""Tiny models of every architecture: type and sizes by the names that tests use, and a random model of each.

torch and transformers are imported by the functions that use them, as in `conftest.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

KNOWS_ALL = "5.17"  # transformers from which on all of the architectures below are known
YOUNG = {
    "nemotron-h",
    "deepseek-v32",
    "deepseek-v4",
    "zaya",
    "granite-moe",
}  # of them what 5.8 has not, or otherwise
VOCABULARY = 264  # 256 bytes, an end token, and rows that no token uses
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "eos_token_id": 256,
    "bos_token_id": 256,
    "pad_token_id": None,
}

# name -> (model type, what differs from SIZES); the names are those of the tests
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES | {"tie_word_embeddings": False}),
    "llama-tied": ("llama", SIZES | {"tie_word_embeddings": True}),
    "llama-bias": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama-520": ("llama", SIZES | {"intermediate_size": 520}),
    "llama-1216": ("llama", SIZES | {"intermediate_size": 1216, "num_hidden_layers": 1}),
    "mistral": ("mistral", SIZES | {"sliding_window": 32}),
    "qwen2": ("qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SIZES),
    "gemma2": ("gemma2", SIZES | {"sliding_window": 32, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", SIZES | {"sliding_window": 32, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", SIZES),
    "opt": (
        "opt",
        {
            "hidden_size": 64,
            "ffn_dim": 172,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 64,
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_inner": 172, "n_layer": 2, "n_head": 4}),
    "gpt-neox": (
        "gpt_neox",
        {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
}
DENSE = tuple(ARCHITECTURES)
# tied and not; rows that are scaled, and norms around a block; joined q, k, v; positions in an embedding; biases
QUICK = ("llama", "llama-tied", "gemma2", "phi3", "gpt2", "opt")


def whole_runs() -> list[Any]:
    """DENSE, for tests that quantize each: all but QUICK are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in DENSE]


ROUTED = SIZES | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS = {
    "mixtral": ("mixtral", ROUTED | {"num_local_experts": 4, "intermediate_size": 32}),
    "qwen3-moe": ("qwen3_moe", ROUTED | {"num_experts": 4}),
    "qwen2-moe": ("qwen2_moe", ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 48}),
    "olmoe": ("olmoe", ROUTED | {"num_experts": 4, "intermediate_size": 32}),
    "deepseek-v3": (  # latent attention, a dense first block, groups of experts, a shared one
        "deepseek_v3",
        ROUTED
        | {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 16}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1}
        | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    ),
    "gpt-oss": (  # transposed, interleaved, with biases
        "gpt_oss",
        ROUTED
        | {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": 32}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
}
BY_ALIAS = {  # families of the aliases that nothing above has
    "olmo2": ("olmo2", SIZES),  # norms behind the blocks' parts, and of whole queries and keys
    "smollm3": ("smollm3", SIZES | {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "phi4-mini": ("phi3", SIZES | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
}
EMBEDDINGS: dict[
    str, tuple[str, dict[str, Any]]
] = {  # families that scale what they look up in other ways than Gemma
    "xglm": ("xglm", {"d_model": 64, "ffn_dim": 172, "num_layers": 2, "attention_heads": 4}),
    "biogpt": (
        "biogpt",
        {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "ctrl": ("ctrl", {"n_embd": 64, "dff": 172, "n_layer": 2, "n_head": 4}),  # in place
}
MORE_EXPERTS = {  # what no mixture above has
    "nemotron-h": (  # experts without gates, in blocks of their own beside those of a state space and of attention
        "nemotron_h",
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention"]}
        | {"ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "chunk_size": 16}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 64},
    ),
    "deepseek-v32": (  # sparse attention, whose indexer chooses 16 tokens
        "deepseek_v32",
        EXPERTS["deepseek-v3"][1] | {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 2},
    ),
    "qwen3.5-moe": (  # linear attention beside full attention
        "qwen3_5_moe_text",
        ROUTED
        | {"num_experts": 4, "shared_expert_intermediate_size": 64}
        | {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    "llama4": (  # experts whose inputs are weighed, a dense block beside them
        "llama4_text",
        SIZES
        | {"intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4}
        | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    ),
    "zaya": (  # a router that is an MLP
        "zaya",
        ROUTED | {"num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 32},
    ),
    "gemma4-moe": (  # experts beside an MLP, fused in the files
        "gemma4_text",
        ROUTED
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "global_head_dim": 32,
        }
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY},
    ),
    "granite-moe": (  # fused in the files, under other names
        "granitemoe",
        ROUTED | {"num_local_experts": 4, "intermediate_size": 32},
    ),
    "deepseek-v4": (  # grouped projections, compressed attention
        "deepseek_v4",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
        | {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
        | {"mlp_layer_types": ["hash_moe", "moe"], "moe_intermediate_size": 32, "hc_mult": 2}
        | {"n_routed_experts": 16, "num_experts_per_tok": 2, "sliding_window": 16}
        | {"q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32}
        | {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 4},
    ),
}
UNKNOWN_EXPERTS = {
    "dbrx": (
        "dbrx",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
        | {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}}
        | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}},
    ),
}


# beside the embedding a table of rows by token, shorter than the vocabulary in one
PER_LAYER = SIZES | {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "head_dim": 16,
}
TOKEN_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (
        "gemma3n_text",
        PER_LAYER
        | {"hidden_size_per_layer_input": 48, "vocab_size_per_layer_input": 257, "laurel_rank": 16}
        | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "altup_num_inputs": 2},
    ),
    "gemma4-per-layer": (
        "gemma4_text",
        PER_LAYER
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY}
        | {"global_head_dim": 16, "num_kv_shared_layers": 0},
    ),
}


def build_model(name: str, *, seed: int = 0) -> Any:
    """A random tiny model in float32, in eval mode, frozen; its biases and norms are random too."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = {
        **(ARCHITECTURES | EXPERTS | MORE_EXPERTS | BY_ALIAS | UNKNOWN_EXPERTS),
        **(TOKEN_TABLES | EMBEDDINGS),
    }[name]
    torch.manual_seed(seed)
    if name in YOUNG and transformers_is_older(KNOWS_ALL):
        pytest.skip(f"{name} is not, or not yet like this, in this transformers")
    config = AutoConfig.for_model(kind, **(COMMON | sizes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def transformers_is_older(version: str) -> bool:
    import transformers
    from packaging.version import Version

    return Version(transformers.__version__) < Version(version)
