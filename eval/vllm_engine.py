"""vLLM's engine: tokens per second of whole models with random weights, ours next to its bf16 and int4, and our
log-probabilities compared with those of `requant.load`.

    python -m eval.vllm_engine --out eval/results/vllm-h100.json [--formats gptq:4 --formats mul1:2]
    python -m eval.vllm_engine --out eval/results/vllm-check.json --checkpoints CHECKPOINT

Needs vllm, and requant installed with its entry point. Every row runs in a process of its own, whose engine uses CUDA graphs
for decoding steps but no torch.compile, so that it starts in seconds. With `--served` engines run as `vllm serve` has them:
with torch.compile, and in a process of their own, which plans the next step while the GPU computes. Speed depends on shapes.
One of our formats, KIND:BITS as in `end_to_end.py`, is a checkpoint with random codes, written to a temporary folder: with
the widths that mode `best` gives out (for 2, 3 and 4 bits), and embedding and head in bands. bf16, `gptq:4` and `awq:4`
(groups of 128, with the kernels that vLLM picks: Machete for `gptq:4` on Hopper) use vLLM's dummy weights. Only decoding is
timed, as the difference of a long and a short run of like prompts: the median of five, since one may be off by a fifth.

`fused_layers` of a row says whether the plugin fused the decoder layers (`requant/integrations/vllm_block.py`);
`REQUANT_VLLM_FUSE=0` in the environment turns this off.

A checkpoint is checked on a text: the log-probabilities of the prompt, and of the tokens that the engine chose one per step,
are compared with `requant.load` in bfloat16. How far both are from the same model in float32 shows what rounding to expect.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from transformers import AutoTokenizer

import requant
from eval import options as opt
from eval.common import environment, write_json
from eval.end_to_end import BATCHES, SHAPES, table_bands, widths_of_block
from requant.checkpoint.validate import TRELLIS_TABLE_VERSION
from requant.cli.common import sigterm_interrupts
from requant.formats.bands import BandsSpec
from requant.formats.packed_spec import PackedSpec
from requant.formats.trellis import TrellisSpec
from requant.models.devices import pick_device

PROMPT_TOKENS, SHORT, LONG, REPEATS = 32, 16, 144, 5
CHECKED, CHOSEN = 256, 48  # tokens of a prompt and of its continuation
TEXT = Path(__file__).parents[1] / "requant" / "data" / "demo-text"


def random_tensor(suffix: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits for codes and signs, small scales so that nothing overflows.

    Signs of equal length are the same for all matrices, as in checkpoints that requant makes.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if suffix.startswith("input_signs"):
        return random_bits(shape, dtype).clone()  # a file must not have a tensor twice
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device).cpu()
    if dtype == torch.int8:
        return torch.randint(1, 128, shape, dtype=torch.int8, device=device).cpu()
    if suffix.startswith("input_magnitude"):
        return torch.ones(shape, dtype=dtype)
    return torch.full(shape, 0.01, dtype=dtype)


@cache
def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, drawn once per shape and dtype."""
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype)


def write_checkpoint(folder: Path, config: dict[str, Any], kind: str, bits: float) -> None:
    """Write a checkpoint of the shape in `config` with random codes, laid out as `requant quantize` does."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, groups = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {
        "self_attn.q_proj": (heads, d), "self_attn.k_proj": (groups, d), "self_attn.v_proj": (groups, d),
        "self_attn.o_proj": (d, heads), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    }  # fmt: skip

    def trellis(code: str, own: float, shape: tuple[int, int], *, rotates_output: bool = True) -> TrellisSpec:
        own = round(own) if own == round(own) else own
        return TrellisSpec(
            bits=own,
            shape=shape,
            code=code,
            rotates_output=rotates_output,
            input_signs=True,
            output_scales="int8",
        )

    layers, modules = config["num_hidden_layers"], {}
    for layer in range(layers):
        widths = widths_of_block(bits, layer, layers)
        for name, shape in shapes.items():
            own = widths.get(name.split(".")[1], bits)
            modules[f"model.layers.{layer}.{name}"] = PackedSpec(dense=trellis(kind, own, shape))
    bands = [trellis("mul1", own, (rows, d), rotates_output=False) for rows, own in table_bands(bits, v)]
    table = PackedSpec(dense=BandsSpec(parts=tuple(bands)) if len(bands) > 1 else bands[0])
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
    entry = {"quant_method": "requant", "format_version": TRELLIS_TABLE_VERSION, "recipe_hash": "random"}
    entry |= {
        key: {name: spec.to_json() for name, spec in specs.items()}
        for key, specs in (("modules", modules), ("vocabulary", tables))
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))


# vLLM takes the names of GPTQ's matrices from the weight files, which dummy weights lack; without names all stay in bf16.
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PEERS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "gptq:4": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "modules_in_block_to_quantize": MATRICES,
    },
    "awq:4": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}
FORMATS = (*PEERS, "mul1:2", "mul1:3", "mul1:4")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that all rows share."""

    shape: str
    layers: int  # 0: as many as the shape has
    batch: tuple[int, ...]
    tensor_parallel: int
    memory: float
    served: bool


def engine(folder: Path, settings: Settings, *, length: int, **options: Any) -> Any:
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    most = max(settings.batch)
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": sorted({1, *settings.batch})}
    if not settings.served:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return LLM(
        str(folder), dtype="bfloat16", max_model_len=length, max_num_seqs=most, gpu_memory_utilization=settings.memory,
        tensor_parallel_size=settings.tensor_parallel, compilation_config=graphs, enable_prefix_caching=False,
        skip_tokenizer_init=True, **options,
    )  # fmt: skip


def fused_layers(llm: Any, settings: Settings) -> bool | None:
    """Whether the plugin fused the decoder layers; None if the model is in other processes."""
    from requant.integrations.vllm_block import is_fused

    return (
        llm.apply_model(is_fused)[0] if runs_in_process(settings.tensor_parallel, settings.served) else None
    )


def runs_in_process(tensor_parallel: int, served: bool) -> bool:
    """Whether an engine computes in the process that asks it."""
    return tensor_parallel == 1 and not served


def timed(name: str, settings: Settings) -> list[dict[str, Any]]:
    """Measure the rows of one format."""
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
    config |= SHAPES[settings.shape] | ({"num_hidden_layers": settings.layers} if settings.layers else {})
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
        llm = engine(Path(home), settings, length=512, **options)
        started = time.monotonic() - begin
    fused = fused_layers(llm, settings)

    def seconds(batch: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": torch.randint(0, 128000, (PROMPT_TOKENS,)).tolist()} for _ in range(batch)
        ]
        given = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.monotonic()
        llm.generate(prompts, given, use_tqdm=False)
        return time.monotonic() - begin

    rows = []
    for batch in settings.batch:
        seconds(batch, LONG)
        steps = [(seconds(batch, LONG) - seconds(batch, SHORT)) / (LONG - SHORT) for _ in range(REPEATS)]
        step = statistics.median(steps)
        rows.append({
            "shape": settings.shape, "layers": config["num_hidden_layers"], "name": name, "batch": batch,
            "tensor_parallel": settings.tensor_parallel, "ms_per_step": 1e3 * step, "decode_tokens_per_s": batch / step,
            "engine_start_s": started, "fused_layers": fused, "served": settings.served,
            "ms_per_step_from_to": [1e3 * min(steps), 1e3 * max(steps)],
        })  # fmt: skip
    return rows


def checked(folder: str, settings: Settings) -> list[dict[str, Any]]:
    """Compare a checkpoint's log-probabilities in the engine with those of `requant.load`."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    text = "\n".join(path.read_text() for path in sorted(TEXT.glob("*.txt")))
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    prompts = [ids[start : start + CHECKED] for start in range(0, 4 * CHECKED, CHECKED)]
    llm = engine(Path(folder), settings, length=2 * CHECKED)
    fused = fused_layers(llm, settings)
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
        "checkpoint": Path(folder).name, "part": part, "tokens": len(found[part]),
        "tensor_parallel": settings.tensor_parallel, "served": settings.served, "fused_layers": fused,
        "engine_to_load": apart(found, served, part),
        "engine_to_float32": apart(found, exact, part),
        "load_to_float32": apart(served, exact, part),
    } for part in found]  # fmt: skip


def main(
    out: opt.OutFile,
    shape: Annotated[str, typer.Option(help="Shape of the models.")] = "llama-3.1-8b",
    layers: Annotated[int, typer.Option(help="Number of layers, if fewer than the shape has.")] = 0,
    formats: Annotated[
        list[str] | None,
        typer.Option(help="A peer or KIND:BITS, repeatable; all by default, unless checkpoints are given."),
    ] = None,
    checkpoints: Annotated[
        list[str] | None, typer.Option(help="Folder of a checkpoint to check, repeatable.")
    ] = None,
    batch: opt.Batch = None,
    tensor_parallel: Annotated[
        int, typer.Option(help="Number of GPUs among which an engine divides a model.")
    ] = 1,
    memory: Annotated[float, typer.Option(help="Fraction of the GPU's memory that an engine takes.")] = 0.8,
    served: Annotated[
        bool,
        typer.Option(
            "--served", help="Run engines as `vllm serve` does: compiled, in a process of their own."
        ),
    ] = False,
    seconds: opt.Seconds = 1e9,
    row: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    if row is not None:  # measure one row in this process: FORMAT or =CHECKPOINT
        settings = Settings(
            shape=shape, layers=layers, batch=tuple(batch or BATCHES), tensor_parallel=tensor_parallel,
            memory=memory, served=served,
        )  # fmt: skip
        found = checked(row[1:], settings) if row[0] == "=" else timed(row, settings)
        out.write_text(json.dumps(found))
        return
    started, rows = time.monotonic(), []
    names = [f"={folder}" for folder in checkpoints or ()]
    names += formats or (() if checkpoints else FORMATS)
    for name in names:
        if time.monotonic() - started > seconds:
            break
        found = row_of_own_process(name, runs_in_process(tensor_parallel, served))
        rows += found
        for each in found:
            print(json.dumps(each), flush=True)
        about = environment(torch.device(pick_device("auto"))) | {"served": served}
        write_json(out, {"about": about, "rows": rows})


def row_of_own_process(name: str, in_process: bool) -> list[dict[str, Any]]:
    """Run this command again with the same options for one row: an engine frees its memory only when its process ends."""
    environ = os.environ | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_process else {})
    with tempfile.TemporaryDirectory() as home:
        part = Path(home) / "row.json"
        command = [sys.executable, "-m", "eval.vllm_engine", *sys.argv[1:], "--row", name, "--out", str(part)]
        with (
            sigterm_interrupts()
        ):  # so that a timeout of this command also ends the engine, which holds GPU memory
            run = subprocess.run(command, env=environ, stdout=sys.stderr, check=False)
        return json.loads(part.read_text()) if part.exists() else [{"name": name, "failed": run.returncode}]


if __name__ == "__main__":
    typer.run(main)
