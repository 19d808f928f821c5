"""Which architectures of transformers work with requant: a tiny random model of each is quantized, saved, loaded, continued.

    python -m eval.architectures [--only TYPE] [--device cuda] [--out FILE]

Writes `architectures.json`, one row per model type. The model types are those of `AutoModelForCausalLM`, plus some whose
checkpoints hold a language model next to image or audio encoders; these are saved as published, with the encoders. A row's
`outcome` is one of:

    works       in each of RUNS, the loaded checkpoint computes the run's logits, bit for bit, and continues token by token
    partly      the same, but less than COVERED of the weights in the blocks are quantized
    refused     with one sentence, before any work (`said`)
    fails       a traceback, different logits, steps that forget the text (FORGETS), or not done within SECONDS (`said`)
    not built   transformers, or `tiny_configs.py`, cannot make such a model (`said`)
    no decoder  not tried: an encoder, or half of a sequence-to-sequence model

On a GPU, embedding and head are in codes in every run, and trellis codes are trained for a few steps. The logits of the
dequantized model may differ by ROUNDING, relative to their norm. Those of the kernels in bfloat16 may be KERNELS times as
far from the run's logits as those of the dequantized model in bfloat16, plus ROUNDING.

A random model says nothing about quality, so its KL must not be compared with anything.
"""

import dataclasses
import json
import multiprocessing
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import requant
from eval import options as opt
from eval.common import environment, write_json
from eval.markdown import RESULTS
from eval.parts import marked, with_row
from eval.tiny_configs import VARIANTS, tiny_config
from requant.errors import InputError, ModelError, RecipeError, first_line
from requant.inference.decode import Decoder
from requant.inference.generate import generate_text
from requant.models.loading import DEMO
from requant.models.targets import find_blocks
from requant.pipeline.quantized_model import QuantizedModel
from requant.recipe.options import recipe_from_options

PROCESSES, SECONDS = 2, 240.0  # rows at once, and the limit for a row
ROUNDING, KERNELS = 1e-2, 2.0  # on a GPU, sums are added in another order
FORGETS = 0.5  # relative error of a step's logits: about 1 if the text is forgotten, up to 0.2 with sparse attention
COVERED = 0.95  # least fraction of the weights in the blocks; with less, a model works only partly
LISTED = 0.005  # of the weights outside embedding and head: larger unquantized matrices are listed
VOCABULARY, SPECIAL = (
    4096,
    {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1},
)  # of the demo's tokenizer
RUNS: dict[str, dict[str, Any]] = {
    "gptq-4": {"bits": 4, "method": "gptq", "group_size": 64},
    # the embedding is nine tenths of a tiny model
    "trellis-3": {"bits": 3, "head_bits": 16, "finetune_steps": 0},
}
ON_A_GPU: dict[str, dict[str, Any]] = {
    "gptq-4": {"bits": 4, "method": "gptq", "group_size": 64, "head_bits": 4},
    "trellis-3": {"bits": 3, "head_bits": 4, "finetune_steps": 4, "own_windows": 4},
}
TEXTS = DEMO.with_name("demo-text")
# language models with encoders, not in the list of causal LMs
BESIDE = ("gemma3n", "gemma4", "mistral3", "qwen3_vl")
NO_DECODERS = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small",
    "camembert", "data2vec-text", "electra", "ernie", "git", "marian", "mbart", "megatron-bert", "musicgen",
    "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "reformer", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl",
    "xlnet", "xmod",
}  # fmt: skip
KINDS = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *BESIDE, *VARIANTS})
IDS = torch.arange(48)[None] * 67 % VOCABULARY


def row_of(kind: str, folder: Path, device: str) -> dict[str, Any]:
    """The outcome for one model type, as a row of the results."""
    if kind in NO_DECODERS:
        return {"outcome": "no decoder"}
    try:
        source = tiny_folder(kind, folder / "source")
    except Exception as error:
        said = first_line(error).replace("\\", "")  # from patterns: results contain no Windows paths
        return {"outcome": "not built", "said": f"{type(error).__name__}: {said}"}
    found: dict[str, Any] = {}
    for label, options in runs_on(device).items():
        step = "quantize"
        try:
            result = quantized(source, options, device)
            found |= of_model(result)
            step = "save"
            path = requant.save(result, folder / label)
            step = "load"
            found[label] = {"mean_kl": result.after.mean_kl, **of_checkpoint(path, result, device)}
        except Exception as error:
            refused = step == "quantize" and isinstance(error, ModelError | RecipeError | InputError)
            said = (
                first_line(error)
                if refused
                else f"{label}, {step}: {type(error).__name__}: {first_line(error)}"
            )
            print(f"{kind}: {traceback.format_exc()}", flush=True)
            return {
                "outcome": "refused" if refused else "fails",
                "said": said.replace(str(folder), ""),
                **found,
            }
        if said := wrong(found[label], device):
            return {"outcome": "fails", "said": f"{label}: {said}", **found}
    return {"outcome": "works" if found["covered"] >= COVERED else "partly", **found}


def tiny_folder(kind: str, folder: Path) -> Path:
    """A random model of this type with the demo's tokenizer; norms and biases are random too."""
    torch.manual_seed(0)
    config = tiny_config(kind, VOCABULARY, **SPECIAL)
    with_images = (
        config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        and "text_config" in config.sub_configs
    )
    auto: Any = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def runs_on(device: str) -> dict[str, dict[str, Any]]:
    return RUNS if device == "cpu" else ON_A_GPU


def quantized(source: Path, options: Mapping[str, Any], device: str) -> QuantizedModel:
    """Quantized by `requant.quantize`, with little text."""
    texts = {"calibration": TEXTS / "calibration.txt", "eval_text": TEXTS / "evaluation.txt"}
    recipe = recipe_from_options(model=str(source), num_samples=4, seq_len=64, **texts, **options)
    few = dataclasses.replace(recipe.evaluation, windows=2, samples=1)
    return requant.quantize(recipe=dataclasses.replace(recipe, evaluation=few), device=device)


def of_model(result: QuantizedModel) -> dict[str, Any]:
    """The sizes of the model, and how much of it is quantized."""
    model: Any = result.model
    weights = {f"{name}.weight" for name in result.weights}
    apart = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    apart |= {id(model.get_output_embeddings().weight)}
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in apart}
    path, _ = find_blocks(model)
    inside = sum(size for name, size in matrices.items() if name.startswith(f"{path}."))
    left: dict[str, int] = {}
    for name in sorted(matrices.keys() - weights):
        kind = re.sub(r"\.\d+\.", ".*.", name)
        left[kind] = left.get(kind, 0) + matrices[name]
    total = sum(matrices.values())
    tables = sum(p.numel() for p in model.parameters() if id(p) in apart)
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return {
        "class": type(model).__name__,
        "layer_types": sorted(set(layer_types)),
        "weights": total,
        "tables": tables,
        "covered": sum(size for name, size in matrices.items() if name in weights) / inside,
        "left": {kind: size / total for kind, size in left.items() if size > LISTED * total},
    }


@torch.no_grad()
def of_checkpoint(path: Path, result: QuantizedModel, device: str) -> dict[str, Any]:
    """How far a checkpoint's logits are from the run's, and how it continues a text."""
    expected = logits(result.model)
    dense = requant.load(path, device=device, dequantize=True)
    served = requant.load(path, device=device, dtype="auto" if device == "cpu" else "bfloat16")
    found = {"difference": relative(logits(dense), expected), "steps": relative(*steps_and_whole(served))}
    if device == "cpu":
        found["served"] = relative(logits(served), expected)
    else:
        found["kernels"] = relative(logits(served), expected)
        found["bfloat16"] = relative(logits(dense.to(torch.bfloat16)), expected)
    dtype = "float32" if device == "cpu" else "bfloat16"
    text = generate_text(
        str(path), "The history of", max_new_tokens=8, temperature=0.0, seed=0, device=device, dtype=dtype
    )
    return {**found, "wrote": len(text)}


def wrong(found: Mapping[str, float], device: str) -> str | None:
    """What is wrong with a checkpoint's logits; None if nothing is."""
    difference = max(found["difference"], found.get("served", 0.0))
    if not difference <= (0.0 if device == "cpu" else ROUNDING):
        return f"logits differ by {difference:.1e} after loading"
    if device != "cpu" and not found["kernels"] <= KERNELS * found["bfloat16"] + ROUNDING:
        return f"logits differ by {found['kernels']:.1e} with kernels, by {found['bfloat16']:.1e} without"
    if not found["steps"] <= FORGETS:
        return f"logits of steps differ by {found['steps']:.1e}"
    return None


def steps_and_whole(model: Any) -> tuple[Tensor, Tensor]:
    """Logits of the last tokens: one after the other, as in `requant generate`, and all at once."""
    length, count = IDS.shape[1], 4
    decoder, tokens = Decoder(model, length=length), IDS.to(model.device)
    found = [decoder.prefill(tokens[:, : length - count]).clone()]
    found += [decoder.step(tokens[:, at : at + 1]).clone() for at in range(length - count, length - 1)]
    return torch.stack(found, dim=1), logits(model)[:, length - count - 1 : -1]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


def logits(model: Any) -> Tensor:
    return model(input_ids=IDS.to(model.device)).logits.float()


def in_processes(
    kinds: Sequence[str], seconds: float, device: str, processes: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows as they are finished, each from a process of its own that may take `seconds`."""
    context = multiprocessing.get_context("forkserver")  # imports are shared, and CUDA has not been started
    context.set_forkserver_preload(["eval.architectures"])
    waiting, running = list(kinds), dict[Connection, tuple[str, Any, float]]()
    while waiting or running:
        while waiting and len(running) < processes:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_measure, args=(waiting[0], theirs, device))
            process.start()
            theirs.close()
            running[ours] = waiting.pop(0), process, time.monotonic()
        ready = wait(list(running), timeout=1.0)
        for pipe, (kind, process, started) in list(running.items()):
            if pipe in ready:
                try:
                    row = pipe.recv()
                except EOFError:
                    row = {"outcome": "fails", "said": "the process died"}
            elif time.monotonic() - started > seconds:
                process.kill()
                row = {"outcome": "fails", "said": f"no end within {seconds:.0f} s"}
            else:
                continue
            process.join()
            del running[pipe]
            yield kind, {**row, "seconds": round(time.monotonic() - started, 1)}


def _measure(kind: str, pipe: Connection, device: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pipe.send(row_of(kind, Path(folder), device))


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Model type to try, repeatable; other rows of the file are kept.")
    ] = None,
    out: opt.OutFile = RESULTS / "architectures.json",
    seconds: Annotated[float, typer.Option(help="Most seconds for a model type.")] = SECONDS,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    processes: Annotated[int, typer.Option(help="Model types at once.")] = PROCESSES,
) -> None:
    if unknown := set(only or ()) - set(KINDS):
        raise typer.BadParameter(f"no model type is called {min(unknown)}; there are: {', '.join(KINDS)}.")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    made = environment(torch.device(device))
    header = {key: found[key] for key in made} if only and found else made
    results = {**header, "runs": runs_on(device), "rows": found.get("rows", [])}
    for kind, row in in_processes(only or KINDS, seconds, device, processes):
        row = {"type": kind, **row}
        row = marked(row, results, made)
        results["rows"] = with_row(results["rows"], row, key=itemgetter("type"), order=itemgetter("type"))
        write_json(out, results)
        print(
            f"{kind:24s} {row['outcome']:10s} {row.get('covered', 0):6.1%} {row.get('said', '')}", flush=True
        )


if __name__ == "__main__":
    typer.run(main)
