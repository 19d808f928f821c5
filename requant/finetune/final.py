"""Tuning: with the codes fixed, the numbers beside them learn to bring the model's outputs back to the original's.

theta (scales of a grid, levels of a codebook, output scales of a trellis, residuals) and the parameters that stay in 16
bits anyway (norms, biases, embedding, head unless quantized) follow the KL divergence to the original (`loop.py`).
Codes stay as they are, so the checkpoint takes the same bytes; a trellis keeps signs on its input side, and the norms do
the work of input scales for nothing: KL 0.301 at 2.028 bits where both scale vectors give 0.302 at 2.051 (bench-32m).
Every `check_every` steps the KL on held-out windows is measured, and the best values win: the tuned model is never
worse than the one it started from, there. The idea is end-to-end tuning of AQLM and QTIP (Egiazarian et al. 2024, arXiv
2401.06118; Tseng et al. 2024, arXiv 2406.11235), reduced to what a short run on little text can bear.
"""

import copy

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant.checkpoint.save import disk_dtype
from requant.errors import RecipeError
from requant.finetune.loop import (
    other_parameters,
    rate_of,
    reparametrized_weights,
    single_precision,
    train,
    trainable_tensors,
)
from requant.finetune.teacher import Teacher
from requant.formats.trainable import trainable_params, with_trainable_params
from requant.recipe.schema import Finetune
from requant.run.context import RunContext, Weights


def tune(run: RunContext, weights: Weights, settings: Finetune) -> Weights:
    """The weights with tuned fields; what else has learned is in `run.others`. The model is left at the originals."""
    windows, judge = split_windows(run, settings)
    teacher = Teacher(original_model(run), windows)
    run.path(weights).place(1.0)
    trainable = {name: trainable_params(weight) for name, weight in weights.items()}
    finetuned_params = other_parameters(run)
    before = {name: run.original_of(name, p) for name, p in finetuned_params.items()}
    with single_precision(run.model):
        trainables = trainable_tensors(trainable, (), list(finetuned_params.values()), rate_of(run, settings))
        derived = reparametrized_weights(run, weights, trainable)
        train(run, teacher, trainables, derived, settings, label="tune", judge=judge)
    keep_others(run, before)
    run.path({}).place(0.0)
    return {name: with_trainable_params(weight, trainable[name]) for name, weight in weights.items()}


def original_model(run: RunContext) -> PreTrainedModel:
    """A frozen copy of the original."""
    run.path({}).place(0.0)
    return copy.deepcopy(run.model)


def split_windows(run: RunContext, settings: Finetune) -> tuple[Int64[Tensor, "b t"], Int64[Tensor, "h t"]]:
    """The windows that train, and those that only judge. Raises RecipeError for fewer than two."""
    pool = run.training_windows
    if len(pool) < 2:
        raise RecipeError("tuning needs at least 2 calibration windows; raise --num-samples.")
    held_out = min(settings.val_windows, max(1, len(pool) // 8))
    return pool[:-held_out], pool[-held_out:]


@torch.no_grad()
def keep_others(run: RunContext, originals: dict[str, Tensor]) -> None:
    """Round what the others learned to the dtype of their files, and keep it with the run beside the originals."""
    for name, parameter in run.model.named_parameters():
        if name in originals:
            stored = disk_dtype(run.model, run.source, parameter)
            learned = parameter.detach().to(stored).to(parameter.dtype)
            run.finetuned_params[name] = (originals[name], learned.cpu().clone())
