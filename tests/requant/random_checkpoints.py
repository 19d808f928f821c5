"""Random quantized matrices of every format, and checkpoints of tiny models that hold them."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from requant.checkpoint.save import save_checkpoint
from requant.formats.bands import Bands
from requant.formats.codebook import Codebook
from requant.formats.grid import Grid, group_count
from requant.formats.hadamard import random_signs
from requant.formats.int8 import fake_quantize_int8
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.semi_structured import SemiStructured
from requant.formats.sparse import Sparse, sparse_residual
from requant.formats.trellis import Trellis
from requant.models.folding import fold, rotated_targets
from requant.models.targets import embedding_and_head_modules, find_linears

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def config_of(name: str) -> PretrainedConfig:
    match name:
        case "llama":
            return LlamaConfig(**LLAMA, tie_word_embeddings=False)
        case "llama-tied":
            return LlamaConfig(**LLAMA, tie_word_embeddings=True)
        case "qwen2":
            return Qwen2Config(**LLAMA, tie_word_embeddings=False)
        case "gpt2":
            return GPT2Config(
                n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=96, bos_token_id=0, eos_token_id=0
            )
        case "gpt-neox":  # its head has one name on disk and another in the module
            return GPTNeoXConfig(**LLAMA)
    raise ValueError(name)


def build_weight(
    n: int,
    k: int,
    *,
    kind: str = "asymmetric",
    bits: int = 3,
    density: float = 0.02,
    int8: bool = False,
    one_scale: bool = False,
    seed: int = 0,
) -> QuantizedWeight:
    """A random matrix of any container, with a share `density` of sparse entries (1: full rows).

    `int8`: residuals in 8 bits, with a scale a row or, with `one_scale`, for the matrix. `codebook-int8` and
    `trellis-int8` have levels and output scales that are stored in 8 bits, the rows of `trellis-rows` are not rotated;
    `semi_structured-16` has no codes, but values.
    """
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n, k), generator=g, dtype=torch.uint8)
    groups = group_count(k, 48)
    match kind:
        case "codebook" | "codebook-int8":
            levels = torch.randn(n, 1 << bits, generator=g).mul(0.05).sort(1).values
            stored = fake_quantize_int8(levels) if kind == "codebook-int8" else levels.half()
            dense = Codebook(codes=codes, levels=stored, bits=bits)
        case "trellis" | "trellis-int8" | "trellis-rows":
            padded = (-(-n // 16) * 16, -(-k // 16) * 16)
            scales = torch.rand(n, generator=g) * 0.1
            dense = Trellis(
                codes=torch.randint(0, 1 << bits, padded, generator=g, dtype=torch.uint8),
                input_scales=random_signs(k, seed=0).half(),  # those of a width are alike, as in a checkpoint
                output_scales=fake_quantize_int8(scales, nonzero=True)
                if kind == "trellis-int8"
                else scales.half(),
                bits=bits,
                code="3inst",
                rotates_output=kind != "trellis-rows",
            )
        case "bands" | "bands-grid":
            n = max(n, 2)
            half = max(n // 2 // 16 * 16, min(16, n - 1))
            own = "trellis-rows" if kind == "bands" else "asymmetric"
            upper = build_weight(half, k, kind=own, bits=bits, density=0, seed=seed + 1)
            lower = build_weight(n - half, k, kind=own, bits=max(1, bits - 1), density=0, seed=seed + 2)
            return QuantizedWeight(dense=Bands(parts=(upper.dense, lower.dense)), sparse=None)
        case "semi_structured" | "semi_structured-hardware" | "semi_structured-16":
            floats = kind == "semi_structured-16"
            values = torch.randn(n, k // 2, generator=g).mul(0.05).half()
            dense = SemiStructured(
                codes=values if floats else codes[:, : k // 2],
                patterns=torch.randint(0, 6, (n, k // 4), generator=g, dtype=torch.uint8),
                scales=None if floats else (torch.rand(n, groups, generator=g) * 0.02).half(),
                bits=16 if floats else bits,
                group_size=48,
                metadata="hardware" if kind == "semi_structured-hardware" else "packed",
            )
        case _:
            zero_points = torch.randint(0, 1 << bits, (n, groups), generator=g, dtype=torch.uint8)
            dense = Grid(
                codes=codes,
                scales=(torch.rand(n, groups, generator=g) * 0.02).half(),
                zero_points=None if kind == "symmetric" else zero_points,
                column_scales=(torch.rand(k, generator=g) + 0.5).half() if kind == "awq" else None,
                bits=bits,
                group_size=48,
            )
    target = torch.randn(n, k, generator=g) * 0.05
    sparse = sparse_residual(target, dense.dequantize(), torch.rand(n, k, generator=g) < density)
    if int8 and sparse is not None:
        sparse = Sparse(
            indptr=sparse.indptr,
            indices=sparse.indices,
            values=torch.randint(-127, 128, sparse.values.shape, generator=g, dtype=torch.int8),
            row_scales=(torch.rand(1 if one_scale else n, generator=g) * 1e-3).half().expand(n).contiguous(),
            shape=(n, k),
        )
    return QuantizedWeight(dense=dense, sparse=sparse)


def build_checkpoint(
    folder: Path,
    name: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "asymmetric",
    table: str | None = None,
    shard: int = 10**9,
    **options: bool,
) -> tuple[Path, nn.Module]:
    """A saved checkpoint, and the plain model that holds the same floats; `table` is the kind of its embedding's codes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype).eval()
    model.save_pretrained(folder / "source")
    (folder / "source" / "tokenizer.json").write_text("{}")
    targets = find_linears(model)
    weights = {
        target.name: build_weight(*target.shape, kind=kind, seed=i, **options)
        for i, target in enumerate(targets)
    }
    tables = {}
    if table is not None:
        ((embedding_name, embedding), _) = embedding_and_head_modules(model)
        tables[embedding_name] = build_weight(*embedding.weight.shape, kind=table, density=0)
    path = save_checkpoint(
        folder / "checkpoint",
        source=folder / "source",
        model=model,
        weights=weights,
        embedding_and_head=tables,
        manifest={"requant_version": "0.1.0", "recipe_hash": "abc"},
        extra_files={"recipe.yaml": "bits: 3\n"},
        max_shard_bytes=shard,
    )
    for target in targets:
        target.set_weight(weights[target.name].dequantize())
    for weight in tables.values():
        model.get_input_embeddings().weight.data.copy_(weight.dequantize())
    return path, model


def build_folded_checkpoint(
    folder: Path,
    name: str = "llama",
    *,
    table: Callable[[nn.Module], dict[str, QuantizedWeight]] = lambda _: {},
    shard: int = 10**9,
) -> tuple[Path, nn.Module]:
    """A saved checkpoint of a model that rotations are folded into, and the model with the floats of its codes.

    `table` gives the codes of embedding and head, by name, of the folded model.
    """
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(folder / "source")
    (folder / "source" / "tokenizer.json").write_text("{}")
    model = AutoModelForCausalLM.from_pretrained(folder / "source").eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    fold(model, seed=5)
    for parameter in model.parameters():  # as training leaves norms and head_scales
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    targets = rotated_targets(find_linears(model))
    weights = {
        target.name: build_trellis(*target.shape, **target.options, seed=i)
        for i, target in enumerate(targets)
    }
    tables = table(model)
    path = save_checkpoint(
        folder / "folded", source=folder / "source", model=model, weights=weights, manifest={},
        embedding_and_head=tables, max_shard_bytes=shard,
    )  # fmt: skip
    for target in targets:
        target.set_weight(weights[target.name].dequantize())
    for weight in tables.values():
        model.get_input_embeddings().weight.copy_(weight.dequantize())
    return path, model


def build_trellis(
    n: int,
    k: int,
    *,
    rotate_input: bool = True,
    rotate_output: bool = True,
    seed: int = 0,
    input_seed: int = 0,
) -> QuantizedWeight:
    """Random trellis codes of 2 bits, with the rotations that are asked for."""
    g = torch.Generator().manual_seed(seed)
    signs = random_signs(k, seed=input_seed).half()
    dense = Trellis(
        codes=torch.randint(0, 4, (-(-n // 16) * 16, -(-k // 16) * 16), generator=g, dtype=torch.uint8),
        input_scales=signs if rotate_input else None,
        output_scales=fake_quantize_int8(torch.rand(n, generator=g) * 0.1 + 0.01),
        bits=2,
        code="mul1",
        rotates_output=rotate_output,
    )
    return QuantizedWeight(dense=dense, sparse=None)
