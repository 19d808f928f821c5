"""Tokens per second of whole models with random weights, quantized and in bf16, measured as `requant bench` does.

    python -m eval.end_to_end --out eval/results/end-to-end-h200.json
    python -m eval.end_to_end --shapes qwen3-30b-a3b --formats bf16:16 --formats pair:2 --out FILE      # a mixture

Speed depends on shapes and not on values, so no checkpoint is needed: a model is built empty, and its linear layers are
filled with random codes or random bf16 numbers. A format is KIND:BITS. `mul1` and `pair` are trellis codes (`requant
quantize` uses `pair` up to 2 bits and `mul1` above), `grid` has groups of 128. Trellis matrices have the bits that mode
`best` would choose (WIDTHS), so q, k and v can hardly ever be joined; with `--widths equal` all have the same bits, and
q/k/v and gate/up are joined into one matrix each.

In trellis formats, embedding and head are trellis codes too, with the bits that `requant quantize --bits 2`, 3 or 4 gives
those of bench-32m (TABLE_BITS), in bands with a tilt of 1, or less if that would exceed 8 bits; with `--tables trellis` all
rows have the same bits. With `--tables grid`, and in grid formats, the embedding is bf16 and the head a grid of 6, 7 or 8
bits in groups of 64.
"""

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
import typer
from requant_kernels import TrellisLayout, pack_grid
from requant_kernels.random_layouts import random_layout
from requant_kernels.trellis.codes import CODES
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from eval import options as opt
from eval import shapes
from eval.common import environment, write_json
from requant.evaluation.bench import measure
from requant.inference.kernel_layers import BandedLinear, FusedLinear, KernelEmbedding, KernelLinear, Sibling
from requant.models.devices import pick_device
from requant.models.experts import USUAL_NAMES, Experts, unfuse_experts
from requant.models.targets import SIBLINGS
from requant.quantizers.table_trellis import band_rows, tilted

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {"qwen3-30b-a3b": dict(shapes.SHAPES["30b-a3b"])}
# budget -> matrix -> bits in the first, middle and last third of the blocks: what mode `best` with `--method trellis` and
# `--bits 2`, 3 and 4 gives the eight blocks of `../shared/models/bench-32m` on average, in quarters (eight calibration
# windows of 512 tokens). On llama-3.1-8b this comes to 1.997, 3.000 and 3.988 bits per weight.
WIDTHS: dict[float, dict[str, tuple[float, float, float]]] = {
    2: {
        "q_proj": (1.25, 1.5, 1.5), "k_proj": (1.5, 1.75, 2), "v_proj": (2, 2, 2.25), "o_proj": (2, 2, 2),
        "gate_proj": (2, 2, 2), "up_proj": (1.75, 2, 2), "down_proj": (2.25, 2.25, 2.25),
    },
    3: {
        "q_proj": (2, 2.5, 2.5), "k_proj": (2.5, 3, 3.25), "v_proj": (3.5, 3.75, 3.5), "o_proj": (3, 3, 3),
        "gate_proj": (3, 3, 3.25), "up_proj": (2.75, 2.75, 3), "down_proj": (3.25, 3.25, 3.25),
    },
    4: {
        "q_proj": (2.75, 3.5, 3.5), "k_proj": (3.25, 4, 4), "v_proj": (4.25, 4.75, 4.5), "o_proj": (4, 4, 4),
        "gate_proj": (4, 4, 4.25), "up_proj": (3.75, 3.75, 4), "down_proj": (4.25, 4.25, 4.25),
    },
}  # fmt: skip
# the same for the experts of a block in turn, about as in `../shared/models/moe-3m` with `--bits 2`: 1.99 on average
EXPERT_WIDTHS: dict[float, dict[str, tuple[float, ...]]] = {
    2: {
        "gate_proj": (1.25, 1.75, 1.75, 2, 2, 2, 2.25, 2.25), "up_proj": (1.5, 1.5, 1.75, 1.75, 2, 2, 2.25, 2.25),
        "down_proj": (1.75, 2, 2, 2, 2.25, 2.25, 2.5, 2.75),
    },
}  # fmt: skip
TABLE_BITS = {2: 5.0, 3: 6.25, 4: 7.25}
LIKELY_TILTS = 3  # of bands: 0, 0.5, and 1, which is used unless it needs more than 8 bits
Tables = Literal["bands", "trellis", "grid"]
FORMATS = ("bf16:16", "mul1:2", "pair:2", "mul1:3", "mul1:4", "grid:2")
BATCHES = (1, 8, 64)


def build(
    shape: str, kind: str, bits: float, *, density: float = 0.0, device: str = "cuda", widths: str = "equal",
    tables: Tables = "grid", **changes: Any,
) -> Any:  # fmt: skip
    """A model of this shape in bf16, with its linear layers in a format, or in bf16 for `kind` "bf16".

    Args:
        widths: `equal`, or `best` for those of WIDTHS.
        tables: what embedding and head are in trellis formats.
    """
    best = widths == "best" and kind in CODES
    sizes: dict[str, Any] = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192}
    sizes |= (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
        | (SHAPES | MIXTURES)[shape]
        | changes
    )
    config = AutoConfig.for_model(**sizes)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if kind != "bf16":
            unfuse_experts(model)
    if kind != "bf16":
        blocks = model.model.layers
        for index, block in enumerate(blocks):
            own = widths_of_block(bits, index, len(blocks)) if best else {}
            for experts in [module for module in block.modules() if isinstance(module, Experts)]:
                _replace_experts(experts, kind, bits, EXPERT_WIDTHS.get(bits, {}) if best else {}, device)
            for parent in list(block.modules()):
                _replace_children(parent, kind, bits, own, density, device)
        if tables != "grid" and kind in CODES:
            _code_tables(model, bits, device, bands=tables == "bands")
        _replace_children(model, kind, bits, {}, density, device)
    for module in model.modules():  # what is left on the meta device
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                value = torch.randn(parameter.shape, device=device, dtype=parameter.dtype) * 0.02
                # Blocks that add next to nothing to x would hide what is wrong in them, as with norms of 0.02; with norms
                # of 1, 32 random blocks amplify what bfloat16 rounds to more than fused steps may differ.
                value = torch.full_like(value, 0.25) if parameter.dim() == 1 else value
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.eval()
    if kind in CODES and torch.device(device).type == "cuda":
        from requant.inference.experts import group_experts  # needs Triton

        group_experts(model)
    return model


def widths_of_block(bits: float, index: int, blocks: int) -> dict[str, float]:
    """Matrix -> bits in a block by WIDTHS, which has budgets of whole bits; {} for others."""
    return {name: thirds[3 * index // blocks] for name, thirds in WIDTHS.get(bits, {}).items()}


def table_bands(bits: float, n: int) -> list[tuple[int, float]]:
    """Rows and bits of the bands of an embedding or head with n rows, for a budget of the blocks."""
    found = band_rows(n)
    own_bits = tilted(TABLE_BITS[round(bits)], len(found))[:LIKELY_TILTS][-1]
    return [(rows.stop - rows.start, own) for rows, own in zip(found, own_bits, strict=True)]


def random_head(n: int, k: int, bits: int, device: str) -> KernelLinear:
    """A random grid in groups of 64 with zero points."""
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // 64, device=device) * 0.01).half()
    zeros = torch.randint(0, 1 << bits, (n, k // 64), dtype=torch.uint8, device=device)
    return KernelLinear(pack_grid(codes, scales, zeros, bits=bits, group_size=64))


def _code_tables(model: Any, bits: float, device: str, *, bands: bool) -> None:
    """Replace embedding and head by trellis codes, tied if the model's are."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    n, k, tied = *embedding.weight.shape, model.config.tie_word_embeddings

    found = table_bands(bits, n) if bands else [(n, TABLE_BITS[round(bits)])]

    def table() -> KernelLinear | BandedLinear:
        linears, input_scales = [], None
        for rows, own in found:
            layout = random_layout("mul1", own, rows, k, 0.0, device=device)
            assert isinstance(layout, TrellisLayout)
            if input_scales is None:
                input_scales = layout.input_scales  # shared by all bands
            linears.append(KernelLinear(replace(layout, rotates_output=False, input_scales=input_scales)))
        return BandedLinear(linears) if bands else linears[0]

    coded = table()
    plain: Any = SimpleNamespace(
        padding_idx=embedding.padding_idx, dtype=embedding.weight.dtype, scale=None, _parameters={}
    )
    model.set_input_embeddings(KernelEmbedding(coded, plain, tied=tied))
    assert isinstance(head, nn.Linear)
    model.lm_head = coded if tied else table()


def _replace_children(
    parent: nn.Module, kind: str, bits: float, widths: Mapping[str, float], density: float, device: str
) -> None:
    """Replace the linear layers of a module; `widths` has the bits of single matrices that differ from `bits`."""
    layers = {name: child for name, child in parent.named_children() if isinstance(child, nn.Linear)}
    for names in (*SIBLINGS, *((name,) for name in list(layers))):
        for own in dict.fromkeys(widths.get(name, bits) for name in names):
            chosen = {
                name: layers.pop(name) for name in names if name in layers and widths.get(name, bits) == own
            }
            if chosen:
                _replace(parent, chosen, kind, own, density, device)


def _replace_experts(
    experts: Experts, kind: str, bits: float, widths: Mapping[str, Sequence[float]], device: str
) -> None:
    """Replace every linear of every expert by itself; `widths` has the bits of successive experts' in turn."""
    for index, expert in enumerate(experts):
        for name, usual in zip(experts.names, USUAL_NAMES, strict=True):
            own = widths.get(usual, (bits,))
            _replace(expert, {name: expert.get_submodule(name)}, kind, own[index % len(own)], 0.0, device)


def _replace(
    parent: nn.Module, chosen: Mapping[str, Any], kind: str, bits: float, density: float, device: str
) -> None:
    """Replace layers that have the same bits by one matrix."""
    sizes = [layer.out_features for layer in chosen.values()]
    k = next(iter(chosen.values())).in_features
    if "lm_head" in chosen:
        matrix = random_head(sum(sizes), k, round(bits) + 4, device)
    else:
        layout = random_layout(kind, bits, sum(sizes), k, density, device=device)
        if isinstance(layout, TrellisLayout) and len(sizes) > 1:
            layout = replace(layout, parts=tuple(sizes))
        matrix = KernelLinear(layout)
    if len(sizes) == 1:
        setattr(parent, next(iter(chosen)), matrix)
        return
    siblings = FusedLinear(matrix, sizes)
    for index, name in enumerate(chosen):
        setattr(parent, name, Sibling(siblings, index))


def main(
    out: opt.OutFile,
    shapes: Annotated[list[str] | None, typer.Option(help="Repeatable; all by default.")] = None,
    batch: opt.Batch = None,
    formats: Annotated[list[str] | None, typer.Option(help="KIND:BITS, repeatable.")] = None,
    widths: Annotated[
        Literal["best", "equal"],
        typer.Option(help="Bits of trellis matrices: as mode best chooses them, or equal."),
    ] = "best",
    tables: Annotated[Tables, typer.Option(help="What embedding and head are in trellis formats.")] = "bands",
    density: Annotated[float, typer.Option(help="Fraction of weights that have residuals.")] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 128,
    no_fused: Annotated[
        bool, typer.Option("--no-fused", help="Use transformers' own operations in steps.")
    ] = False,
    rotations_apart: Annotated[
        bool, typer.Option("--rotations-apart", help="Launch the rotations of trellis codes separately.")
    ] = False,
    no_prompt_graphs: Annotated[
        bool, typer.Option("--no-prompt-graphs", help="Do not replay short prompts as CUDA graphs.")
    ] = False,
    seconds: opt.Seconds = 1e9,
    device: opt.Device = "auto",
) -> None:
    where = pick_device(device)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    first, *others = formats or FORMATS
    for shape in shapes or SHAPES:
        base: dict[int, dict[str, Any]] = {}  # rows of the first format, by sequences
        for text in (first, *others):
            kind, bits = text.split(":")
            name = "bf16" if kind == "bf16" else f"{kind} {bits}-bit"
            if kind in CODES and widths == "best" and float(bits) in WIDTHS:
                name += ", widths of mode best"
            if kind != "bf16" and density:
                name += f", {density:.1%} sparse"
            if time.monotonic() - started > seconds:
                break
            model = build(
                shape, kind, float(bits), density=density, device=where, widths=widths, tables=tables
            )
            coded = tables if kind in CODES else None
            for count in batch or BATCHES:
                row = {"shape": shape, "name": name, "batch": count, "tables": coded}
                try:
                    row |= measure(
                        name, model, batch=count, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
                        fused=not no_fused, fuses_rotations=not rotations_apart,
                        graphs_prompts=not no_prompt_graphs,
                    ).to_dict()  # fmt: skip
                except (RuntimeError, ValueError) as error:
                    row["failed"] = f"{type(error).__name__}: {error}"[:500]
                    print(row, file=sys.stderr, flush=True)
                else:
                    if text == first:
                        base[count] = row
                    times = []  # as fast as the first format; not said where that failed
                    for number in ("decode_tokens_per_s", "prefill_tokens_per_s"):
                        if count in base:
                            row[f"{number}_ratio"] = row[number] / base[count][number]
                        times.append(f", {row[f'{number}_ratio']:.2f} x" if count in base else "")
                    print(
                        f"{shape} {name} batch {count}: {row['decode_tokens_per_s']:.0f} tokens/s, "
                        f"{row['ms_per_step']:.3f} ms{times[0]}, prefill {row['prefill_tokens_per_s']:.0f}{times[1]}, "
                        f"graph {row['graph']}, fused {row['fused']}, its rotations {row['fused_rotations']}, "
                        f"prompt graph {row['prompt_graph']}", flush=True,
                    )  # fmt: skip
                rows.append(row)
                write_json(out, {"about": environment(torch.device(where)), "rows": rows})
            del model
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
