"""vLLM's engine: tokens a second of whole models with random weights, ours beside its bf16 and int4, and our
log-probabilities beside `requant.load`.

    python kernels/bench/vllm_engine.py --out eval/results/vllm-h100.json --formats bf16 gptq:4 mul1:2 mul1:3 mul1:4
    python kernels/bench/vllm_engine.py --out eval/results/vllm-check.json --formats --checkpoints CHECKPOINT ...

Needs vllm, and requant with its entry point. Every row is a process of its own, whose engine starts with CUDA graphs of
decoding steps and, unless `--compile` is given, without torch.compile, so that it starts in seconds; all rows alike.
Speed depends on shapes: a format of ours, KIND:BITS as in `end_to_end.py`, is a checkpoint of random codes (embedding and
head grids of four bits more in groups of 64), written to a temporary folder; bf16, `gptq:4` and `awq:4` (Marlin, groups of
128) are vLLM's dummy weights. Decoding alone is timed, as the difference of a long and a short run of the same prompts.

A checkpoint is checked on a text: log-probabilities of the prompt, and of tokens that the engine chose, one a step, against
`requant.load` in bfloat16; beside them what the same model in float32 differs by, which is the rounding to expect.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

PROMPT_TOKENS, SHORT, LONG = 32, 16, 144
CHECKED, CHOSEN = 256, 48  # tokens of a prompt, and of its continuation
TEXT = Path(__file__).parents[2] / "requant" / "data" / "demo-text"


def random_tensor(suffix: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Codes and signs are random bits; scales small, so that nothing overflows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device).cpu()
    if dtype == torch.int8:
        return torch.randint(1, 128, shape, dtype=torch.int8, device=device).cpu()
    if suffix == "input_magnitude":
        return torch.ones(shape, dtype=dtype)
    return torch.full(shape, 0.01, dtype=dtype)


def write_checkpoint(folder: Path, config: dict[str, Any], kind: str, bits: float) -> None:
    """A checkpoint of the shape of `config` with random codes, as `requant quantize` lays it out."""
    from safetensors.torch import save_file

    from requant.formats.grid import GridSpec
    from requant.formats.packed_spec import PackedSpec
    from requant.formats.trellis import TrellisSpec

    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, groups = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {
        "self_attn.q_proj": (heads, d), "self_attn.k_proj": (groups, d), "self_attn.v_proj": (groups, d),
        "self_attn.o_proj": (d, heads), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    }  # fmt: skip
    table = PackedSpec(dense=GridSpec(bits=round(bits) + 4, shape=(v, d), group_size=64, zero_points=True))
    modules = {
        f"model.layers.{layer}.{name}": PackedSpec(
            dense=TrellisSpec(bits=bits, shape=shape, code=kind, input_signs=True, output_scales="int8")
        )
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    tables = {"model.embed_tokens": table, "lm_head": table}
    tensors: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(d, dtype=torch.bfloat16)}
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(d, dtype=torch.bfloat16)
    for name, spec in (modules | tables).items():
        tensors[f"{name}.weight"] = torch.empty(0, dtype=torch.half)
        for suffix, tensor in spec.tensors().items():
            tensors[f"{name}.{suffix}"] = random_tensor(suffix, tensor.shape, tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    entry = {"quant_method": "requant", "format_version": 3, "recipe_hash": "random"}
    entry |= {
        key: {name: spec.to_json() for name, spec in specs.items()}
        for key, specs in (("modules", modules), ("vocabulary", tables))
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))


PEERS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "gptq:4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq:4": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}


def engine(folder: Path, args: argparse.Namespace, *, length: int, **options: Any) -> Any:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    most = max(args.batch)
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": sorted({1, *args.batch})}
    if not args.compile:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return LLM(
        str(folder), dtype="bfloat16", max_model_len=length, max_num_seqs=most, gpu_memory_utilization=args.memory,
        tensor_parallel_size=args.tensor_parallel, compilation_config=graphs, enable_prefix_caching=False,
        skip_tokenizer_init=True, **options,
    )  # fmt: skip


def timed(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one format."""
    from end_to_end import SHAPES  # pyright: ignore[reportMissingImports]
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
    }
    config |= {
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "dtype": "bfloat16",
    }
    config |= SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    with tempfile.TemporaryDirectory() as home:
        options: dict[str, Any] = {}
        if name in PEERS:
            quantized = {} if PEERS[name] is None else {"quantization_config": PEERS[name]}
            (Path(home) / "config.json").write_text(json.dumps(config | quantized))
            options["load_format"] = "dummy"
        else:
            kind, bits = name.split(":")
            write_checkpoint(Path(home), config, kind, float(bits) if "." in bits else int(bits))
        begin = time.monotonic()
        llm = engine(Path(home), args, length=512, **options)
        started = time.monotonic() - begin

    def seconds(batch: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": torch.randint(0, 128000, (PROMPT_TOKENS,)).tolist()} for _ in range(batch)
        ]
        given = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.monotonic()
        llm.generate(prompts, given, use_tqdm=False)
        return time.monotonic() - begin

    rows = []
    for batch in args.batch:
        seconds(batch, SHORT)
        step = (seconds(batch, LONG) - seconds(batch, SHORT)) / (LONG - SHORT)
        rows.append({
            "shape": args.shape, "layers": config["num_hidden_layers"], "name": name, "batch": batch,
            "tensor_parallel": args.tensor_parallel, "ms_per_step": 1e3 * step, "decode_tokens_per_s": batch / step,
            "engine_start_s": started,
        })  # fmt: skip
    return rows


def checked(folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Log-probabilities of a checkpoint."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    import requant

    text = "\n".join(path.read_text() for path in sorted(TEXT.glob("*.txt")))
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    prompts = [ids[start : start + CHECKED] for start in range(0, 4 * CHECKED, CHECKED)]
    llm = engine(Path(folder), args, length=2 * CHECKED)
    given = SamplingParams(
        temperature=0, max_tokens=CHOSEN, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], given, use_tqdm=False)
    found: dict[str, list[float]] = {"prompt": [], "decoded": []}
    whole = []
    for prompt, output in zip(prompts, outputs, strict=True):
        chosen = list(output.outputs[0].token_ids)
        whole.append(prompt + chosen)
        for part, tokens, entries in (
            ("prompt", prompt[1:], output.prompt_logprobs[1:]),
            ("decoded", chosen, output.outputs[0].logprobs),
        ):
            found[part] += [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]

    def reference(**how: Any) -> dict[str, list[float]]:
        model, values = requant.load(folder, device="cuda", **how), {"prompt": [], "decoded": []}
        for sequence in whole:
            with torch.no_grad():
                logits = model(torch.tensor([sequence], device="cuda")).logits[0, :-1].float()
            own = (
                logits.log_softmax(-1)
                .gather(1, torch.tensor(sequence[1:], device="cuda")[:, None])[:, 0]
                .tolist()
            )
            values["prompt"] += own[: CHECKED - 1]
            values["decoded"] += own[CHECKED - 1 :]
        return values

    served, exact = reference(dtype="bfloat16"), reference(dtype="float32", dequantize=True)

    def apart(left: dict[str, list[float]], right: dict[str, list[float]], part: str) -> dict[str, float]:
        off = (torch.tensor(left[part]) - torch.tensor(right[part])).abs()
        return {"mean": off.mean().item(), "worst": off.max().item()}

    return [{
        "checkpoint": Path(folder).name, "part": part, "tokens": len(found[part]), "tensor_parallel": args.tensor_parallel,
        "engine_to_load": apart(found, served, part), "engine_to_float32": apart(found, exact, part),
        "load_to_float32": apart(served, exact, part),
    } for part in found]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has")
    parser.add_argument("--formats", nargs="*", default=[*PEERS, "mul1:2", "mul1:3", "mul1:4"])
    parser.add_argument("--checkpoints", nargs="*", default=[])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--memory", type=float, default=0.8, help="share of the GPU's memory that an engine takes"
    )
    parser.add_argument(
        "--compile", action="store_true", help="with torch.compile, as `vllm serve` does by default"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new rows after this long")
    parser.add_argument("--row", help=argparse.SUPPRESS)  # one row, in this process: FORMAT or =CHECKPOINT
    args = parser.parse_args()
    if args.row is not None:
        found = checked(args.row[1:], args) if args.row[0] == "=" else timed(args.row, args)
        args.out.write_text(json.dumps(found))
        return
    started, rows = time.monotonic(), []
    own = [*sys.argv[1:], "--row"]
    environment = os.environ | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if args.tensor_parallel == 1 else {})
    for row in [f"={folder}" for folder in args.checkpoints] + args.formats:
        if time.monotonic() - started > args.seconds:
            break
        with tempfile.TemporaryDirectory() as home:
            part = Path(home) / "row.json"
            run = subprocess.run(
                [sys.executable, __file__, *own, row, "--out", str(part)],
                env=environment,
                stdout=sys.stderr,
                check=False,
            )
            found = (
                json.loads(part.read_text()) if part.exists() else [{"name": row, "failed": run.returncode}]
            )
        rows += found
        for each in found:
            print(json.dumps(each), flush=True)
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "compile": args.compile}
        args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
