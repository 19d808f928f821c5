"""Folders of models with a real model's shape and random weights: time and memory depend on shapes, not on values.

    python -m eval.shapes 1b FOLDER [--tokenizer ../shared/models/bench-32m] [--blocks 2] [--share 8]
    requant quantize --model FOLDER --bits 2 --calibration TEXT --eval-text TEXT

Shapes are those of Llama 3.2 1B and 3B, of Llama 3.1 8B and 70B and of Qwen3-30B-A3B (`30b-a3b`), a mixture of 128 experts a
block, in bfloat16 with transformers' initialization. The
tokenizer comes from a smaller model, whose tokens are all within their vocabulary. With `--blocks` the model has only its
first blocks, so that what is done to each block of a large model can be run where the whole does not fit. With `--share 8`
it has an eighth of the blocks and of the rows of embedding and head, so that the proportions of its stages are those of the
whole model.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from eval.common import MODEL

LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "1b": LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "3b": LLAMA
    | {
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "8b": LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "70b": LLAMA
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
    },
}


ROWS = 4096  # the vocabulary of a share is a multiple of this


def config_of(shape: str, blocks: int | None = None, share: int = 1) -> PreTrainedConfig:
    """The configuration with all blocks or the first ones, or with one of `share` equal parts of blocks and vocabulary.

    Raises typer.BadParameter for an unknown shape, more blocks than it has, or a share that does not divide them.
    """
    if shape not in SHAPES:
        raise typer.BadParameter(f"{shape} is not a shape; there are: {', '.join(SHAPES)}.")
    all_blocks = SHAPES[shape]["num_hidden_layers"]
    if blocks is not None and not 1 <= blocks <= all_blocks:
        raise typer.BadParameter(f"{shape} has {all_blocks} blocks, not {blocks}.")
    if blocks is not None and share > 1:
        raise typer.BadParameter("--share divides the blocks too; leave --blocks out.")
    if share < 1 or all_blocks % share:
        raise typer.BadParameter(f"{shape} has {all_blocks} blocks, which {share} does not divide.")
    chosen = {**SHAPES[shape], "num_hidden_layers": blocks or all_blocks // share}
    if share > 1:
        chosen["vocab_size"] = ROWS * ceil(chosen["vocab_size"] / share / ROWS)
    return AutoConfig.for_model(**chosen)


def build(shape: str, folder: Path, tokenizer: Path, blocks: int | None = None, share: int = 1) -> None:
    """Write a model of the shape into a folder."""
    config = config_of(shape, blocks, share)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def main(
    shape: Annotated[str, typer.Argument(help="1b, 3b, 8b, 70b or 30b-a3b.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write the model to.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of a model whose tokenizer to use.")] = MODEL,
    blocks: Annotated[
        int | None, typer.Option(help="Write only this many first blocks; all by default.")
    ] = None,
    share: Annotated[
        int, typer.Option(help="Number of equal parts of blocks and vocabulary, of which to write one.")
    ] = 1,
) -> None:
    build(shape, folder, tokenizer, blocks, share)


if __name__ == "__main__":
    typer.run(main)
