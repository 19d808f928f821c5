"""Checkpoints with random grids, whose sizes suit blocks of 32; a tokenizer of another kind."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from requant.checkpoint.save import save_checkpoint
from requant.formats.grid import Grid, group_count
from requant.formats.quantized_weight import QuantizedWeight
from requant.models.targets import find_linears

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 264,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def grid(n: int, k: int, *, bits: int, group_size: int, symmetric: bool, seed: int = 0) -> Grid:
    g = torch.Generator().manual_seed(seed)
    groups = group_count(k, group_size)
    zero_points = torch.randint(0, 1 << bits, (n, groups), generator=g, dtype=torch.uint8)
    return Grid(
        codes=torch.randint(0, 1 << bits, (n, k), generator=g, dtype=torch.uint8),
        scales=(torch.rand(n, groups, generator=g) * 0.1 / (1 << bits)).half(),
        zero_points=None if symmetric else zero_points,
        column_scales=None,
        bits=bits,
        group_size=group_size,
    )


def sentencepiece(text: str, *, size: int = 600) -> PreTrainedTokenizerFast:
    """A BPE with byte fallback, as files converted from SentencePiece have it."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        text.split("\n"), trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    )
    description = json.loads(trained.to_str())
    description["added_tokens"] = description["added_tokens"][:3]  # the bytes are ordinary tokens
    trained = Tokenizer.from_str(json.dumps(description))
    trained.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="session")
def tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """That of all tests, which splits words as GPT-2's does: llama.cpp has a name for that."""
    words = copy.deepcopy(tokenizer)
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return words


@pytest.fixture
def grid_checkpoint(tmp_path: Path, tokenizer: Any) -> Callable[..., Path]:
    """`grid_checkpoint("llama", bits=4, ...)`: the folder; `bits` may be a function of the matrix's name."""

    def make(
        kind: str = "llama",
        *,
        bits: Any = 4,
        group_size: int = 32,
        symmetric: bool = True,
        dtype: torch.dtype = torch.float16,
        embedding_and_head_bits: int | None = None,
        **changes: Any,
    ) -> Path:
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **(SIZES | {"tie_word_embeddings": False} | changes))
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        source = tmp_path / "source"
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        weights = {}
        for seed, target in enumerate(find_linears(model)):
            width = bits(target.name) if callable(bits) else bits
            n, k = target.shape
            size = k if group_size == -1 else group_size
            dense = grid(n, k, bits=width, group_size=size, symmetric=symmetric, seed=seed)
            weights[target.name] = QuantizedWeight(dense=dense, sparse=None)
        embedding_and_head = {}
        if embedding_and_head_bits is not None:
            dense = grid(264, 64, bits=embedding_and_head_bits, group_size=64, symmetric=False, seed=99)
            embedding_and_head["model.embed_tokens"] = QuantizedWeight(dense=dense, sparse=None)
        return save_checkpoint(
            tmp_path / "checkpoint",
            source=source,
            model=model,
            weights=weights,
            embedding_and_head=embedding_and_head,
            manifest={"requant_version": "0.1.0"},
            extra_files={
                "recipe.yaml": "bits: 4\n",
                "README.md": "---\nbase_model: org/Base\nlicense: mit\n---\nours\n",
            },
        )

    return make
