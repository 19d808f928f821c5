"""Seconds by stage and peak memory, to be compared with the targets for speed.

    python -m eval.speed [--model FOLDER] [--data FOLDER] [--out FOLDER] [--num-samples 64] [--nodes] [--large]
    python -m eval.speed --best [--bits 3] [--keep FOLDER] [--deterministic] [--log-file FILE]
    python -m eval.speed --best --shape 1b [--blocks 4] [--share 8] [--gpus 2] [--gpu-memory 24GiB] [--parts] [--steps 100]

`--nodes` compares the time of PQI with 2 Gauss nodes and with 32 plain ones. `--large` adds the 1B shape
(`eval/shapes.py`) in mode `paper`. `--best` runs only mode `best`, at `--bits`. With `--shape`, the model has random weights
of a shape, of its first `--blocks`, or of a `--share` of it that is trained like the whole model, and only time and memory
mean something. A whole run is the command that a user types, in a process of its own (several with `--gpus`), from start to
end. `--parts` runs each part once instead: statistics and codes of one block, and training steps in which no other matrix
has codes yet, the phase that takes the most memory. Peaks are given next to those that the dry run predicts.
"""

import dataclasses
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from eval import options as opt
from eval.common import CALIBRATION, DATA, MODEL, TEST, environment, find, write_json
from eval.markdown import RESULTS
from eval.shapes import build, config_of
from requant.evaluation.bench import timed
from requant.finetune.compile_blocks import MIN_STEPS_TO_COMPILE
from requant.finetune.final import (
    params_in_single_precision,
    split_windows,
    teacher_of,
)
from requant.finetune.loop import single_precision, train
from requant.finetune.reparametrized import reparametrized_weights
from requant.finetune.saved_training import SavedTraining
from requant.finetune.trainables import learning_rate, params_without_codes, trainable_tensors
from requant.formats.quantized_weight import trainable_params
from requant.models.devices import limit_gpu_memory, peak_memory, pick_device
from requant.pipeline.planning.memory import expected_memory
from requant.pipeline.planning.schedule import expected_stages
from requant.pipeline.planning.workload import goes_by_block, training_memory
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.registry import METHODS
from requant.recipe.defaults import GPU_SAMPLES, default_recipe, trellis_code
from requant.recipe.schema import Budget, Calibration, Evaluation, Recipe
from requant.recipe.sizes import parse_size
from requant.recipe.yaml_files import dump_recipe, to_dict
from requant.run.context import RunContext, Weights
from requant.run.quantize_linears import quantize_linears
from requant.run.statistics import gather
from requant.run.workspace import Workspace
from requant.sensitivity.scores import score_weights


def recipe_for(model: Path, data: Path, *, num_samples: int, seq_len: int) -> Recipe:
    """3 bits, k-means, mode `paper`, with its defaults."""
    return Recipe(
        model=str(model),
        quantizer=METHODS["kmeans"].config(bits=3),
        calibration=Calibration(text=(find(data, CALIBRATION),), num_samples=num_samples, seq_len=seq_len),
        evaluation=Evaluation(text=(find(data, TEST),), context=seq_len),
    )


def whole_run(
    recipe: Recipe,
    device: str,
    dtype: str,
    *,
    gpus: int = 1,
    gpu_memory: str | None = None,
    keep: Path | None = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """`requant quantize` from start to end; the checkpoint is kept in `keep`, and progress goes to stderr and `log`."""
    with tempfile.TemporaryDirectory() as parent:
        file = Path(parent) / "recipe.yaml"
        file.write_text(dump_recipe(recipe), encoding="utf-8")
        output = keep or Path(parent) / "checkpoint"
        command = [sys.executable, "-m", "requant", "quantize", "--recipe", file, "--output", output, "--json",
                   "--device", device, "--dtype", dtype, "--gpus", gpus]  # fmt: skip
        if gpu_memory is not None:
            command += ["--gpu-memory", gpu_memory]
        if log is not None:
            command += ["--log-file", log]
        started, worked = time.perf_counter(), _seconds_of_children()
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True, text=True)
        total = time.perf_counter() - started
    numbers = json.loads(done.stdout)
    seconds = numbers["seconds_of"]
    if gpu_memory is not None:  # for the prediction
        limit_gpu_memory(parse_size(gpu_memory, "--gpu-memory"), device)
    outlined = outline(recipe.model, recipe, device=device, dtype=dtype, gpus=gpus)
    return {
        "wall_seconds": total,
        "cpu_seconds": _seconds_of_children() - worked,
        "load_average": os.getloadavg()[0],  # times on a busy machine are not valid
        "gpus": gpus,
        "gpu_memory": gpu_memory,  # the limit; None: all
        "seconds": {**seconds, "start, load, hashes, save": total - sum(seconds.values())},
        "planned_seconds": {
            stage.name: stage.seconds for stage in expected_stages(outlined, outlined.recipe, device)
        },
        "bits_per_weight": numbers["bits_per_weight"]["after"],
        "perplexity": numbers["perplexity"]["after"],
        "kl": numbers["mean_kl"],
        **memory(numbers["peak_memory"], outlined.model),
        "predicted_bytes": expected_memory(outlined, outlined.recipe, device),
        "steps": outlined.recipe.finetune.num_steps,  # per phase; may follow from the model's size
        "recipe": _named(recipe),
    }


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def best_recipe(
    model: Path, data: Path, *, num_samples: int, seq_len: int, bits: float = 2.0, steps: int | None = None
) -> Recipe:
    """Mode `best` with its defaults, but training on at most 8 times `num_samples` windows. `steps` None: by model size."""
    plain = recipe_for(model, data, num_samples=num_samples, seq_len=seq_len)
    best = default_recipe(str(model), None, "best", gpu=True)
    finetune = dataclasses.replace(
        best.finetune,
        steps=steps,
        train_windows=min(best.finetune.train_windows, 8 * num_samples),
    )
    return dataclasses.replace(
        best,
        calibration=plain.calibration,
        evaluation=plain.evaluation,
        quantizer=dataclasses.replace(best.quantizer, code=trellis_code(bits)),
        budget=Budget(bits=bits),
        finetune=finetune,
    )


def trained_as_the_whole(
    recipe: Recipe, shape: str, tokenizer: Path, device: str, *, gpus: int = 1, gpu_memory: str | None = None
) -> Recipe:
    """The recipe of a share with the whole shape's training: its steps, if the recipe does not say how many, in rounds or at
    the end only, block by block or not."""
    if gpu_memory is not None:
        limit_gpu_memory(parse_size(gpu_memory, "--gpu-memory"), device)
    steps = dataclasses.replace(recipe.finetune, steps=None)
    with tempfile.TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
        outlined = outline(
            folder, dataclasses.replace(recipe, finetune=steps), device=device, dtype="bfloat16", gpus=gpus
        )
    complete = dataclasses.replace(
        outlined.recipe.finetune, blockwise=goes_by_block(outlined, outlined.recipe, device)
    )
    if recipe.finetune.steps is not None:
        complete = dataclasses.replace(complete, steps=recipe.finetune.steps)
    return dataclasses.replace(recipe, finetune=complete)


def best_parts(recipe: Recipe, device: str, dtype: str) -> dict[str, Any]:
    """Each part of what mode `best` does on a large model, once."""
    prepared = prepare(recipe.model, recipe, device=device, dtype=dtype)
    run = start(prepared, prepared.recipe, workspace=Workspace(None), quiet=True)
    where, method, settings = prepared.model.device, METHODS[recipe.method], prepared.recipe.finetune
    block = [target for target in run.targets if target.block == 1]
    found: dict[str, Any] = {
        "tokens": prepared.windows.numel(),
        "steps": settings.num_steps,
        "tokens_per_step": settings.tokens_per_step,
        "compiled": settings.num_steps >= MIN_STEPS_TO_COMPILE,
    }
    statistics: dict[str, Any] = {}
    found["statistics of a block"] = timed(lambda: statistics.update(gather(run, block, method.needs)), where)
    weights: Weights = {}

    def quantize_block() -> None:
        for target in block:
            weights[target.name] = method.quantize(
                target.weight(), statistics[target.name], run.config_of(target)
            )

    quantize_block()  # compiles
    found["codes of a block"] = timed(quantize_block, where)
    found["peak_bytes_before_training"] = peak_memory(where)
    statistics.clear()
    run.statistics.clear()
    windows, _ = split_windows(run, settings)
    teachers: list[Any] = []
    found["the original's states"] = timed(lambda: teachers.append(teacher_of(run, settings, windows)), where)
    (teacher,) = teachers
    others = list(params_without_codes(run).values())
    trainable = {name: trainable_params(weight) for name, weight in weights.items()}
    still_open = [target for target in run.targets if target.name not in weights]
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
    with single_precision(params_in_single_precision(run.model, teacher)):
        trainables = trainable_tensors(trainable, still_open, others, learning_rate(run, settings))
        derived = reparametrized_weights(run, weights, trainable)

        def learn() -> None:
            train(run, teacher, trainables, derived, settings, saved=SavedTraining.of(run, "timed"))

        first, again = timed(learn, where), timed(learn, where)
    found |= {"compiling": max(0.0, first - again), "a step": again / settings.num_steps}
    predicted = training_memory(prepared, prepared.recipe, where.type).bytes_of_phase(set(weights))
    return {**found, "predicted_bytes": predicted, **memory(peak_memory(where), prepared.model)}


def integral(recipe: Recipe, device: str, dtype: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Seconds and peak memory of PQI alone, by quadrature rule, over all windows of the recipe."""
    prepared = prepare(recipe.model, recipe, device=device, dtype=dtype)
    run = start(prepared, prepared.recipe, workspace=Workspace(None), quiet=True)
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
    """Peak memory in bytes, and in units of the model's size in bfloat16."""
    parameters = sum(p.numel() for p in model.parameters())
    return {"peak_bytes": peak, "peak_in_bf16_models": peak / (2 * parameters)}


@contextmanager
def shaped_model(shape: str, tokenizer: Path, blocks: int | None = None, share: int = 1) -> Iterator[Path]:
    """A folder with random weights of the shape, for the duration of the context; none of them stay on the GPU."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / f"{shape}-shape"
        build(shape, folder, tokenizer, blocks, share)
        gc.collect()
        torch.cuda.empty_cache()
        yield folder


def _named(recipe: Recipe) -> dict[str, Any]:
    """The recipe with names instead of folders."""
    plain = to_dict(recipe)
    plain["model"] = Path(recipe.model).name
    for section in ("calibration", "evaluation"):
        plain[section]["text"] = [Path(text).name for text in plain[section]["text"]]
    return plain


def main(
    model: opt.Model = MODEL,
    data: opt.Data = DATA,
    out: opt.Out = RESULTS,
    num_samples: Annotated[int, typer.Option(help="Calibration windows of 1024 tokens.")] = 64,
    nodes: Annotated[bool, typer.Option(help="Also compare the time of gauss2 and plain32.")] = False,
    large: Annotated[bool, typer.Option(help="Also measure the 1B shape: 128 x 2048 tokens.")] = False,
    best: Annotated[bool, typer.Option(help="Only mode `best`; needs a GPU.")] = False,
    shape: Annotated[
        str | None, typer.Option(help="With `--best`: random weights of this shape of eval/shapes.py: 8b.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="With `--shape`: only its first blocks.")] = None,
    share: Annotated[int, typer.Option(help="With `--shape`: one of this many equal parts.")] = 1,
    gpus: Annotated[int, typer.Option(help="With `--shape`: number of GPUs of a whole run.")] = 1,
    gpu_memory: Annotated[
        str | None, typer.Option(help="With `--shape`: most memory that a whole run may take of a GPU.")
    ] = None,
    parts: Annotated[
        bool, typer.Option(help="With `--shape`: each part once instead of a whole run.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="With `--best`: training steps per phase.")] = None,
    samples: Annotated[
        int, typer.Option(help="With `--shape`: calibration windows of 2048 tokens.")
    ] = GPU_SAMPLES,
    bits: Annotated[float, typer.Option(help="Bits of mode `best`.")] = 2.0,
    keep: Annotated[
        Path | None, typer.Option(help="Folder in which to keep the checkpoint of mode `best`.")
    ] = None,
    log_file: Annotated[
        Path | None, typer.Option(help="With `--best`: what each stage of the whole run took.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option(help="With `--best`: gradients that are the same in every run.")
    ] = False,
    device: opt.Device = "auto",
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
        if shape is not None:
            name = shape + (f"_{blocks}_blocks" if blocks else "")
            name += f"_share_of_{share}" if share > 1 else ""
            with shaped_model(shape, model, blocks, share) as folder:
                shaped = best_recipe(folder, data, num_samples=samples, seq_len=2048, bits=bits, steps=steps)
                if share > 1:
                    shaped = trained_as_the_whole(
                        shaped, shape, model, where, gpus=gpus, gpu_memory=gpu_memory
                    )
                shaped = dataclasses.replace(shaped, deterministic=deterministic)
                if parts:
                    keep_row(f"parts_{name}", best_parts(shaped, where, "bfloat16"))
                    return
                name += f"_{gpus}_gpus" if gpus > 1 else ""
                name += f"_in_{gpu_memory}" if gpu_memory is not None else ""
                name += "_deterministic" if deterministic else ""
                found = whole_run(
                    shaped, where, "bfloat16", gpus=gpus, gpu_memory=gpu_memory, keep=keep, log=log_file
                )
                keep_row(f"run_{name}", {**found, "shape": shape, "blocks": blocks, "share": share})
            return
        chosen = best_recipe(model, data, num_samples=2 * GPU_SAMPLES, seq_len=1024, bits=bits, steps=steps)
        chosen = dataclasses.replace(chosen, deterministic=deterministic)
        name = "best_run" + (f"_{bits:g}" if bits != 2 else "") + ("_deterministic" if deterministic else "")
        keep_row(name, whole_run(chosen, where, "auto", keep=keep, log=log_file))
        return
    recipe = recipe_for(model, data, num_samples=num_samples, seq_len=1024)
    keep_row("run", whole_run(recipe, where, "float32"))
    if nodes:
        keep_row("nodes", integral(recipe, where, "float32", ("gauss2", "plain32")))
    if large:
        with shaped_model("1b", model) as folder:
            shaped = recipe_for(folder, data, num_samples=128, seq_len=2048)
            keep_row("large_pqi", integral(shaped, where, "bfloat16", ("gauss2",)))
            keep_row("large_run", whole_run(shaped, where, "bfloat16"))


if __name__ == "__main__":
    typer.run(main)
