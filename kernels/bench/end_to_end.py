"""Tokens per second of whole models with random weights, quantized and in bf16, by the harness of `requant bench`.

    python kernels/bench/end_to_end.py --out eval/results/end-to-end-h200.json

Speed depends on shapes, not on values, so no checkpoint is needed: a model is built empty, its linears are filled with
random codes (2-bit grids of groups of 128; q/k/v and gate/up as one matrix each; the head a 4-bit grid of groups of 64
with zero points), or with random bf16 numbers. `--compile` puts torch.compile before the step of both.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from requant_kernels import pack_grid
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from requant.evaluation.bench import measure
from requant.inference.convert import FusedLinear, KernelLinear, Sibling
from requant.models.targets import SIBLINGS

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


def build(shape: str, *, bits: int | None, density: float = 0.0, device: str = "cuda", **changes: Any) -> Any:
    """A model of the shape in bf16, its linears of `bits` bits, or bf16 where that is None."""
    sizes: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 8192} | SHAPES[shape] | changes
    config = LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if bits is not None:
        for parent in list(model.modules()):
            _replace_children(parent, bits, density, device)
    for module in model.modules():  # what is left on the meta device
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                value = torch.randn(parameter.shape, device=device, dtype=parameter.dtype) * 0.02
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.eval()


def random_linear(n: int, k: int, *, bits: int, group: int, density: float, device: str) -> KernelLinear:
    """A grid of random codes."""
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device)
    groups = -(-k // group)
    scales = (torch.rand(n, groups, device=device) * 0.01).half()
    zeros = (
        torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8, device=device) if group == 64 else None
    )
    sparse = None
    if density:
        mask = torch.rand(n, k, device=device) < density
        columns = mask.nonzero(as_tuple=True)[1]
        indptr = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        sparse = indptr, columns.int(), torch.randn(len(columns), device=device).half() * 0.02, None
    return KernelLinear(pack_grid(codes, scales, zeros, bits=bits, group_size=group, sparse=sparse))


def _replace_children(parent: nn.Module, bits: int, density: float, device: str) -> None:
    layers = {name: child for name, child in parent.named_children() if isinstance(child, nn.Linear)}
    for names in (*SIBLINGS, *((name,) for name in list(layers))):
        chosen = {name: layers.pop(name) for name in names if name in layers}
        if not chosen:
            continue
        sizes = [layer.out_features for layer in chosen.values()]
        k = next(iter(chosen.values())).in_features
        head = "lm_head" in chosen
        matrix = random_linear(
            sum(sizes), k, bits=4 if head else bits, group=64 if head else 128, density=0.0 if head else density,
            device=device,
        )  # fmt: skip
        if len(sizes) == 1:
            setattr(parent, next(iter(chosen)), matrix)
            continue
        siblings = FusedLinear(matrix, sizes)
        for index, name in enumerate(chosen):
            setattr(parent, name, Sibling(siblings, index))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--bits", type=int, nargs="+", default=[2], help="beside bf16")
    parser.add_argument(
        "--base", type=Path, help="JSON of another run, whose bf16 rows are taken, not timed again"
    )
    parser.add_argument("--density", type=float, default=0.0, help="share of residuals")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-attention", action="store_true", help="torch's attention, in both")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new rows after this long")
    args = parser.parse_args()
    started, rows = time.monotonic(), json.loads(args.base.read_text())["rows"] if args.base else []
    rows = [
        row for row in rows if row["name"] == "bf16" and row["shape"] in args.shapes and "failed" not in row
    ]
    for shape in args.shapes:
        base = {row["batch"]: row["decode_tokens_per_s"] for row in rows if row["shape"] == shape}
        for bits in (*(() if args.base else (None,)), *args.bits):
            name = "bf16" if bits is None else f"{bits}-bit, head 4-bit"
            if bits is not None and args.density:
                name += f", {args.density:.1%} sparse"
            model = build(shape, bits=bits, density=args.density)
            for batch in args.batch:
                if time.monotonic() - started > args.seconds:
                    break
                try:
                    speed = measure(
                        name, model, batch=batch, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens,
                        compiled=args.compile, kernel_attention=not args.no_attention,
                    )  # fmt: skip
                except Exception as error:
                    rows.append(
                        {
                            "shape": shape,
                            "name": name,
                            "batch": batch,
                            "failed": f"{type(error).__name__}: {error}"[:500],
                        }
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
                    continue
                base.setdefault(batch, speed.decode_tokens_per_s)
                row = {
                    "shape": shape,
                    "compiled": args.compile,
                    "attention": "sdpa" if args.no_attention else "kernel",
                } | speed.to_dict()
                row["times_bf16"] = speed.decode_tokens_per_s / base[batch]
                rows.append(row)
                print(
                    f"{shape} {name} batch {batch}: {speed.decode_tokens_per_s:.0f} tokens/s, {speed.ms_per_step:.3f} ms, "
                    f"{row['times_bf16']:.2f} x, prefill {speed.prefill_tokens_per_s:.0f}, graph {speed.graph}", flush=True,
                )  # fmt: skip
                about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
                args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1))
            del model
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
