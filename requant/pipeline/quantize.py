"""The stages of a run in order: model + text -> codes + sparse part -> measured quality.

prepare      load the model and its texts, complete the recipe, refuse what cannot work (preparation/prepare.py)
allocate     bits of every matrix, of embedding and of head, within the budget (allocation/budget.py)
own text     windows that the original writes, to train on as well if the text is too short (inference/own_text.py)
quantize     one of MODES: `best` (rounds of codes and training), `dense` (codes only), `paper` (ReQuant as published),
             `sparse` (2:4, and training after it)
tables       codes of embedding and head (allocation/embedding_and_head.py)
finetune     train all that is not a code to match the original's outputs (finetune/final.py); not in mode `sparse`
diagnose     predicted against measured dF (evaluation/diagnosis.py)
evaluate     perplexity of the original and of the quantized model, and the KL between them
samples      what both write after the same prompts

The checkpoint and its report are written by `requant.save` (report/save.py).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant import progress
from requant.allocation.budget import allocate_bits, has_budget, with_allocation
from requant.allocation.embedding_and_head import QuantizedEmbeddingAndHead, quantize_embedding_and_head
from requant.calibration.stats import LinearStats
from requant.errors import InputError
from requant.evaluation.diagnosis import diagnose, diagnosed_windows
from requant.evaluation.original import OriginalLogits
from requant.evaluation.perplexity import Quality, perplexity_and_kl, warn_of_long_windows
from requant.evaluation.samples import Sample, write_samples
from requant.finetune.final import finetune
from requant.finetune.memory import exhaustion_explained
from requant.inference.own_text import own_windows
from requant.models.attention_masks import one_text_a_row
from requant.models.devices import current_gpu, gradients, peak_memory, pick_device, used_memory
from requant.pipeline.best import best
from requant.pipeline.paper import requant_as_published
from requant.pipeline.planning.quicker import warn_of_a_slow_run
from requant.pipeline.planning.schedule import expected_stages
from requant.pipeline.preparation.prepare import Prepared, prepare, start
from requant.pipeline.preparation.readable import check_readable
from requant.pipeline.quantized_model import QuantizedModel
from requant.pipeline.sparse import sparse
from requant.recipe.options import Options
from requant.recipe.python_call import recipe_for
from requant.recipe.schema import Recipe
from requant.run.context import RunContext, Weights
from requant.run.decoded_once import decoded_once
from requant.run.quantize_linears import quantize_linears
from requant.run.stage_cache import load_stage, save_stage
from requant.run.statistics import share_statistics
from requant.run.workspace import Workspace, digest


def codes(run: RunContext) -> Weights:
    """Mode `dense`."""
    progress.enter("codes")
    return quantize_linears(run, None, label="quantize")


MODES: dict[str, Callable[[RunContext], Weights]] = {
    "best": best,
    "dense": codes,
    "paper": requant_as_published,
    "sparse": sparse,
}


def quantize(
    model: str | Path | PreTrainedModel | None = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    text: str | Path | Sequence[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    workspace: Workspace | None = None,
    statistics: dict[str, LinearStats] | None = None,
    quiet: bool = True,
    **options: Unpack[Options],
) -> QuantizedModel:
    """Quantize a model according to the recipe and the options, and measure what that costs; nothing is written.

        quantize("demo", bits=3)
        quantize("demo", "demo-3bit", method="gptq", group_size=64)
        quantize(recipe="my-recipe.yaml")

    Args:
        model: a source (folder, hub name, alias, `demo`), or a loaded model, whose weights are then overwritten; None: the
            recipe's model, or `demo`, as in the command.
        recipe: a Recipe, its plain data (a dict as YAML holds it), a YAML file, or the name of a recipe that ships with
            requant; None: the defaults, for which `bits` or `size` must be given.
        text: calibration text, the same as the option `calibration`.
        statistics: shared by calls with the same model, method and calibration: the first call fills it, the others read it.
        options: those of the command, under the same names (`recipe/options.py`); they override the recipe.

    Raises RequantError.
    """
    model = str(model) if isinstance(model, Path) else model
    recipe = recipe_for(model, recipe, text, device=device, options=options)
    model = recipe.model if model is None else model
    if (program := options.get("target")) is not None:
        check_readable(recipe, program, config=None if isinstance(model, str) else model.config)
    if not isinstance(workspace, Workspace | None):
        raise InputError(
            f"workspace must be a Workspace of requant.run.workspace, not {type(workspace).__name__}; give one of a folder."
        )
    if not isinstance(statistics, dict | None):
        raise InputError(
            f"statistics must be a dict, not {type(statistics).__name__}; give {{}}, the same one in calls that share it."
        )
    workspace = workspace or Workspace(None)
    where = pick_device(device) if isinstance(model, str) else model.device
    shown = progress.display(shown=not quiet)
    with gradients(), current_gpu(where), workspace.reserved(), shown, one_text_a_row():
        progress.enter("loading")
        prepared = prepare(model, recipe, tokenizer=tokenizer, device=device, dtype=dtype, quiet=quiet)
        recipe = prepared.recipe
        own = prepared.model.device
        progress.expect(expected_stages(prepared, recipe, own.type), memory=lambda: used_memory(own))
        warn_of_a_slow_run(prepared, recipe, own.type)
        run = start(prepared, recipe, workspace=workspace, quiet=quiet)
        warn_of_long_windows(run.model, run.windows, prepared.eval_windows)
        if has_budget(recipe):
            progress.enter("allocation")
        if statistics is not None:
            share_statistics(run, statistics)
        run = with_own_text(with_allocation(run, allocate_bits(run)), prepared.own_windows)
        weights = MODES[recipe.mode](run)
        run.statistics.clear()
        progress.enter("embedding and head")
        embedding_and_head = quantize_embedding_and_head(run)
        if recipe.finetune.trains and recipe.mode != "sparse":
            weights, embedding_and_head = finetuned(run, weights, embedding_and_head)
        progress.enter("diagnosis")
        measured = decoded_once(run, weights)
        diagnosis = diagnose(
            run,
            measured,
            diagnosed_windows(run.windows),
            names=("gradient", "hessian", "pqi"),
            embedding_and_head=embedding_and_head,
            by_kind=True,
        )
        progress.enter("evaluation")
        before, after = evaluate(run, prepared, measured, embedding_and_head)
        progress.enter("samples")
        samples = _samples(run, prepared, measured, embedding_and_head)
        return QuantizedModel(
            prepared=dataclasses.replace(prepared, loaded=None),
            weights=weights,
            embedding_and_head=dict(embedding_and_head.weights),
            allocation=run.allocation,
            recipe=recipe,
            before=before,
            after=after,
            diagnosis=diagnosis,
            samples=samples,
            routed_tokens=run.routed_tokens,
            flip_rates=run.flip_rates,
            seconds=dict(run.seconds),
            peak_memory=peak_memory(own),
        )


def with_own_text(run: RunContext, count: int) -> RunContext:
    """The run with `count` windows that the original writes in front of those of the text, to train on.

    The last windows, by which training is validated, stay those of the text.
    """
    if not count:
        return run
    progress.enter("own text")
    key = digest(run.fingerprint, run.train_windows, count, run.recipe.seed)
    stored = run.workspace.get("own-text", key)
    if stored is None:
        with run.stage("own text"):
            run.apply_original_weights()
            written = own_windows(
                run.model, run.train_windows, count, seed=run.recipe.seed, label=run.label("own text")
            )
        run.workspace.put("own-text", key, tensors={"windows": written})
    else:
        written = stored.tensors["windows"]
    return dataclasses.replace(
        run, train_windows=torch.cat([written, run.train_windows]), last_states=[], state_caches=[]
    )


def finetuned(
    run: RunContext, weights: Weights, embedding_and_head: QuantizedEmbeddingAndHead
) -> tuple[Weights, QuantizedEmbeddingAndHead]:
    """Matrices, embedding and head after the last training, from the workspace where an earlier run finished it."""
    progress.enter("fine-tuning")
    result = load_stage(run, "finetuned", embedding_and_head.parameters)
    if result is None:
        rounds = run.recipe.trains_in_rounds
        with run.stage("finetuning"), exhaustion_explained(in_rounds=rounds):
            result = finetune(run, weights, run.recipe.finetune, embedding_and_head)
        save_stage(run, "finetuned", result)
    run.state_caches.clear()
    tables = {name: result.pop(name) for name in embedding_and_head.weights}
    return result, dataclasses.replace(embedding_and_head, weights=tables)


def evaluate(
    run: RunContext, prepared: Prepared, weights: Weights, embedding_and_head: QuantizedEmbeddingAndHead
) -> tuple[Quality, Quality]:
    """Quality of the original and of the quantized model on the evaluation text; the model is left quantized."""
    with run.stage("evaluation"):
        run.apply_original_weights()
        embedding_and_head.apply_weights(quantized=False)
        original = OriginalLogits(
            prepared.model, prepared.eval_windows, label=run.label("scoring the original")
        )
        run.apply_quantized_weights(weights)
        embedding_and_head.apply_weights(quantized=True)
        after = perplexity_and_kl(
            prepared.model,
            prepared.eval_windows,
            text=prepared.evaluation,
            reference=original,
            progress=not run.quiet,
        )
    assert after.reference_perplexity is not None
    return Quality(protocol=after.protocol, perplexity=after.reference_perplexity), after


def _samples(
    run: RunContext, prepared: Prepared, weights: Weights, embedding_and_head: QuantizedEmbeddingAndHead
) -> list[Sample]:
    """Continuations by the original and by the quantized model; the model is left quantized."""

    def apply_weights(quantized: bool) -> None:
        if quantized:
            run.apply_quantized_weights(weights)
        else:
            run.apply_original_weights()
        embedding_and_head.apply_weights(quantized=quantized)

    with run.stage("samples"):
        count = run.recipe.evaluation.samples
        return write_samples(
            prepared.model, prepared.tokenizer, prepared.eval_windows, apply_weights, count=count
        )
