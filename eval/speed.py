"""Seconds by stage and peak memory: the targets of speed, measured.

    python -m eval.speed [--model FOLDER] [--data FOLDER] [--out FOLDER] [--num-samples 64] [--nodes] [--large]
    python -m eval.speed --best [--bits 3] [--keep FOLDER] [--large]

`--nodes` times PQI with 2 Gauss nodes against 32 plain ones. `--large` builds a Llama of the shape of Llama 3.2 1B with
random weights, for time and memory alone: hidden 2048, 16 blocks, intermediate 8192, 32 heads over 8 kv heads,
vocabulary 128256, tied, bfloat16. `--best` runs mode `best` at `--bits` alone; `--best --large` its parts on that shape:
statistics, the codes of one block, training steps, from which a whole run is computed.
"""

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import requant
from eval.common import CALIBRATION, DATA, MODEL, TEST, environment, find, write_json
from eval.markdown import RESULTS
from requant.checkpoint.sizes import byte_table
from requant.evaluation.bench import timed
from requant.finetune.compile_blocks import MIN_STEPS_TO_COMPILE
from requant.finetune.final import original_model, split_windows
from requant.finetune.loop import (
    params_without_codes,
    reparametrized_weights,
    single_precision,
    train,
    trainable_tensors,
)
from requant.finetune.saved_training import SavedTraining
from requant.finetune.teacher import Teacher
from requant.formats.quantized_weight import trainable_params
from requant.models.devices import peak_memory, pick_device
from requant.pipeline.best import rounds_of
from requant.pipeline.prepare import prepare, start
from requant.pipeline.quantize import QuantizedModel, quantize
from requant.quantizers.registry import METHODS
from requant.recipe.defaults import GPU_SAMPLES, default_recipe
from requant.recipe.schema import Budget, Calibration, Evaluation, Recipe
from requant.recipe.yaml_files import to_dict
from requant.run.context import RunContext, Weights
from requant.run.quantize_linears import gather, quantize_linears
from requant.run.workspace import Workspace
from requant.sensitivity.scores import score_weights

LARGE = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def recipe_for(model: Path, data: Path, *, num_samples: int, seq_len: int) -> Recipe:
    """3 bits, k-means, mode `paper`, at its defaults."""
    return Recipe(
        model=str(model),
        quantizer=METHODS["kmeans"].config(bits=3),
        calibration=Calibration(text=(find(data, CALIBRATION),), num_samples=num_samples, seq_len=seq_len),
        evaluation=Evaluation(text=(find(data, TEST),), context=seq_len),
    )


def whole_run(recipe: Recipe, device: str, dtype: str, *, keep: Path | None = None) -> dict[str, Any]:
    """What `requant quantize` does, from loading to the saved checkpoint, which stays in `keep`."""
    started, worked = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder) / "partial")
        result: QuantizedModel = quantize(
            recipe.model, recipe, device=device, dtype=dtype, workspace=workspace
        )
        finished = time.perf_counter()
        saved = requant.save(result, keep or Path(folder) / "checkpoint")
        seconds = {**result.seconds, "save": time.perf_counter() - finished}
        bits = byte_table(saved).bits_per_weight
    total = time.perf_counter() - started
    return {
        "wall_seconds": total,
        "cpu_seconds": time.process_time() - worked,
        "load_average": os.getloadavg()[0],  # a busy machine's seconds are no measurement
        "seconds": {**seconds, "load, hashes and the rest": total - sum(seconds.values())},
        "bits_per_weight": bits,
        "perplexity": result.after.perplexity,
        "kl": result.after.mean_kl,
        **memory(result.peak_memory, result.model),
        "recipe": _named(recipe),
    }


def best_recipe(model: Path, data: Path, *, num_samples: int, seq_len: int, bits: float = 2.0) -> Recipe:
    """Mode `best` at its defaults."""
    plain = recipe_for(model, data, num_samples=num_samples, seq_len=seq_len)
    best = default_recipe(str(model), None, "best", gpu=True)
    return dataclasses.replace(
        best, calibration=plain.calibration, evaluation=plain.evaluation, budget=Budget(bits=bits)
    )


def best_parts(recipe: Recipe, device: str, dtype: str) -> dict[str, Any]:
    """What mode `best` does on a large model, one of each, and what a whole run then comes to."""
    prepared = prepare(recipe.model, recipe, device=device, dtype=dtype)
    run = start(prepared, recipe, workspace=Workspace(None), quiet=True)
    where, method = prepared.model.device, METHODS[recipe.method]
    block = [target for target in run.targets if target.block == 1]
    blocks = len({target.block for target in run.targets})
    found: dict[str, Any] = {"tokens": prepared.windows.numel(), "steps": recipe.finetune.steps}
    found["tokens_per_step"] = recipe.finetune.tokens_per_step
    statistics: dict[str, Any] = {}
    found["statistics"] = timed(lambda: statistics.update(gather(run, block, method.needs)), where)
    weights: Weights = {}

    def quantize_block() -> None:
        for target in block:
            weights[target.name] = method.quantize(
                target.weight(), statistics[target.name], run.config_of(target)
            )

    quantize_block()  # compiles
    found["codes of a block"] = timed(quantize_block, where)
    windows, _ = split_windows(run, recipe.finetune)
    teacher, finetuned_params = (
        Teacher(original_model(run), windows),
        list(params_without_codes(run).values()),
    )
    trainable = {name: trainable_params(weight) for name, weight in weights.items()}
    still_open = [target for target in run.targets if target.name not in weights]
    few = dataclasses.replace(recipe.finetune, steps=MIN_STEPS_TO_COMPILE)
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
    with single_precision(run.model):
        trainables, derived = (
            trainable_tensors(trainable, still_open, finetuned_params, few.lr),
            reparametrized_weights(run, weights, trainable),
        )

        def learn() -> None:
            train(run, teacher, trainables, derived, few, saved=SavedTraining.of(run, "timed"))

        first, again = timed(learn, where), timed(learn, where)
        found |= {"compiling": max(0.0, first - again), "a step": again / few.steps}
        found["the original's states"] = seconds_of_states(teacher)
    rounds = len(rounds_of(run.targets))
    found["whole run, computed"] = (
        found["compiling"]
        + rounds * found["statistics"]
        + blocks * found["codes of a block"]
        + rounds * recipe.finetune.steps * found["a step"]
        + 2 * found["the original's states"]  # once for all rounds, once for the last phase
    )
    return {**found, **memory(peak_memory(where), prepared.model)}


def seconds_of_states(teacher: Teacher) -> float:
    """Of the states of all its windows, by the first 64 (blocks are not compiled here)."""
    few = torch.arange(min(64, len(teacher.windows)))
    if not teacher.caches:
        return 0.0
    teacher.cached[few] = False
    return (
        timed(lambda: teacher.micro_batches(few, None), teacher.model.device)
        * len(teacher.windows)
        / len(few)
    )


def integral(recipe: Recipe, device: str, dtype: str, names: tuple[str, ...]) -> dict[str, Any]:
    """PQI alone, by rule, over all windows of the recipe: seconds and peak memory."""
    prepared = prepare(recipe.model, recipe, device=device, dtype=dtype)
    run = start(prepared, recipe, workspace=Workspace(None), quiet=True)
    weights = quantize_linears(run, None, label="quantize")
    run.statistics.clear()
    pass_once(run, weights, "midpoint")  # compiles and picks kernels
    found: dict[str, Any] = {"tokens": prepared.windows.numel()}
    for name in names:
        if prepared.model.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(lambda name=name: pass_once(run, weights, name), prepared.model.device)
        found[name] = {"seconds": seconds, **memory(peak_memory(prepared.model.device), prepared.model)}
    return found


def pass_once(run: RunContext, weights: Weights, nodes: str) -> None:
    score_weights("pqi", run.path(weights), run.windows, nodes=nodes)


def memory(peak: int, model: torch.nn.Module) -> dict[str, Any]:
    """Peak bytes, and in units of the model in bfloat16."""
    parameters = sum(p.numel() for p in model.parameters())
    return {"peak_bytes": peak, "peak_in_bf16_models": peak / (2 * parameters)}


@contextmanager
def large_model(tokenizer: Path) -> Iterator[Path]:
    """The 1B shape with random weights, on disk, with a tokenizer whose tokens it knows."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "llama-1b-shape"
        build_large(folder, tokenizer)
        yield folder


def build_large(folder: Path, tokenizer: Path) -> None:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LARGE), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def _named(recipe: Recipe) -> dict[str, Any]:
    """The recipe with names in place of folders."""
    plain = to_dict(recipe)
    plain["model"] = Path(recipe.model).name
    for section in ("calibration", "evaluation"):
        plain[section]["text"] = [Path(text).name for text in plain[section]["text"]]
    return plain


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = MODEL,
    data: Annotated[Path, typer.Option(help="Folder with the texts.")] = DATA,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    num_samples: Annotated[int, typer.Option(help="Calibration windows of 1024 tokens.")] = 64,
    nodes: Annotated[bool, typer.Option(help="Time gauss2 against plain32 too.")] = False,
    large: Annotated[bool, typer.Option(help="The 1B shape too: 128 x 2048 tokens.")] = False,
    best: Annotated[bool, typer.Option(help="Mode `best` alone: a GPU is needed.")] = False,
    bits: Annotated[float, typer.Option(help="Of mode `best`.")] = 2.0,
    keep: Annotated[Path | None, typer.Option(help="Where the checkpoint of mode `best` stays.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    where = pick_device(device)
    file = out / f"speed-{where}.json"
    results: dict[str, Any] = environment(torch.device(where))

    def keep_row(name: str, value: Any) -> None:
        results[name] = value
        write_json(file, results)
        print(name, {key: item for key, item in value.items() if key != "recipe"}, flush=True)

    if best:
        results |= json.loads(file.read_text()) if file.is_file() else {}
        if large:
            with large_model(model) as folder:
                shaped = best_recipe(folder, data, num_samples=GPU_SAMPLES, seq_len=2048)
                keep_row("large_best", best_parts(shaped, where, "bfloat16"))
            return
        chosen = best_recipe(model, data, num_samples=2 * GPU_SAMPLES, seq_len=1024, bits=bits)
        keep_row(
            "best_run" if bits == 2 else f"best_run_{bits:g}", whole_run(chosen, where, "auto", keep=keep)
        )
        return
    recipe = recipe_for(model, data, num_samples=num_samples, seq_len=1024)
    keep_row("run", whole_run(recipe, where, "float32"))
    if nodes:
        keep_row("nodes", integral(recipe, where, "float32", ("gauss2", "plain32")))
    if large:
        with large_model(model) as folder:
            shaped = recipe_for(folder, data, num_samples=128, seq_len=2048)
            keep_row("large_pqi", integral(shaped, where, "bfloat16", ("gauss2",)))
            keep_row("large_run", whole_run(shaped, where, "bfloat16"))


if __name__ == "__main__":
    typer.run(main)
