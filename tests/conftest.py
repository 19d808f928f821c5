"""Tiny models of every architecture, a byte tokenizer and a text, shared by all tests; folders are made once.

torch and transformers are imported by the functions that use them: the process that hands out the tests runs none, and would
spend five seconds on them while the others wait for it.
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# One thread, whatever the shell says: there is a process of tests a core, and threads of each would wait for the other's, in
# tiny operations for many times what these take.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from requant.text.sources import Text

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `architecture` or `mixture` runs on each of them."""
    for argument, names in (("architecture", DENSE), ("mixture", tuple(EXPERTS))):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, names)


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()


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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end of text. Lines are split, but not words: a text is tokenised in half the time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {
        character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>")


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """`shared("models/bench-32m")`: a file or folder beside the repository; skips the test where there is none.

    REQUANT_SHARED names another folder than `../shared`; empty, it hides the folder.
    """
    folder = os.environ.get("REQUANT_SHARED", str(Path(__file__).parents[2] / "shared"))

    def path_of(name: str) -> Path:
        path = Path(folder, name)
        if not folder or not path.exists():
            pytest.skip(f"needs ../shared/{name}, which is not part of the repository")
        return path

    return path_of


@pytest.fixture(autouse=True)
def one_seed() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def counting_compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Blocks are compiled as on a GPU, but on a CPU and by a compiler that only counts; its `frame_count`."""
    import torch

    from requant.finetune import compile_blocks  # not before jaxtyping's hook, which comes after this file

    counting, compile_with = pytest.importorskip("torch._dynamo.testing").CompileCounter(), torch.compile
    torch._dynamo.reset()  # a function may be compiled eight times, over all tests of a process
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_with(f, backend=counting, dynamic=False))
    monkeypatch.setattr(compile_blocks, "_on_gpus", lambda models: True)
    monkeypatch.setattr(compile_blocks, "_in_training", lambda: True)
    monkeypatch.setattr(compile_blocks, "_compiler_works", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return counting


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """`tiny_model(name, seed=0)`: a fresh model of an architecture."""
    return build_model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_text() -> Text:
    """40,000 characters of English."""
    from requant.text.sources import Text, read_text

    return Text.from_documents("tiny", [read_text("demo").text[:40_000]])


@pytest.fixture(scope="session")
def tiny_text_file(tiny_text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "tiny.txt"
    file.write_text(tiny_text.text)
    return file


@pytest.fixture(scope="session")
def tiny_windows(tiny_text: Text, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Four windows of 32 tokens."""
    from requant.text.windows import token_windows

    return token_windows(tiny_text, tokenizer, num_samples=4, seq_len=32)


@pytest.fixture(scope="session")
def tiny_folder(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`tiny_folder(name)`: the folder of a model, as the hub has it; not to be changed."""
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            model, folder = build_model(name), tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[name] = folder
        return made[name]

    return folder_of


@pytest.fixture(scope="session")
def trained_state(tiny_text: Text, tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    import torch
    from torch.nn import functional

    from requant.text.windows import token_windows

    windows = token_windows(tiny_text, tokenizer, num_samples=None, seq_len=32)
    model = build_model("llama").requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(120):
        tokens = windows[torch.arange(16) * 7 % 97 + step * 8 % (len(windows) - 97)]
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture
def trained_model(trained_state: dict[str, torch.Tensor]) -> Any:
    """A tiny Llama that has learned some English: its loss has the curvature that random weights lack."""
    model = build_model("llama")
    model.load_state_dict(trained_state)
    return model


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`interpreted("script.py", "argument")` runs a script beside the test with Triton's interpreter for its compiler.

    In a process of its own, since Triton reads the choice when it is imported. Asserts that the script ends well.
    """
    pytest.importorskip("triton")
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root / "kernels"), str(root)])

    def run(script: str, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, request.path.with_name(script), *arguments],
            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    return run


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`cli("quantize", "--bits", 3)`: exit code, stdout and stderr of the command line, in this process."""
    from requant.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["requant", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else int(bool(done.code))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
