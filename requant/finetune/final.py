"""The last finetuning phase: with all codes fixed, train every float to bring the outputs back to the original's.

Trained are the floats stored with the codes (scales of a grid, levels of a codebook, output scales of a trellis, sparse
residuals) and the parameters without codes (norms, biases, and embedding and head unless quantized), by the KL divergence
to the original (`loop.py`). Codes are fixed, so the checkpoint takes the same bytes; a trellis stores only signs on its
input side, for which the norms make up at no cost: KL 0.301 at 2.028 bits where both scale vectors give 0.302 at 2.051
(bench-32m). Every `eval_every` steps the KL on the validation windows is measured, and the best values are restored at
the end: there the finetuned model is never worse than the one it started from.

This is the end-to-end tuning of AQLM and QTIP (Egiazarian et al. 2024, arXiv 2401.06118; Tseng et al. 2024, arXiv
2406.11235), reduced to what a short run on little text allows.
"""

import copy

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant.checkpoint.save import disk_dtype
from requant.errors import RecipeError
from requant.finetune.loop import (
    learning_rate,
    params_without_codes,
    reparametrized_weights,
    single_precision,
    train,
    trainable_tensors,
)
from requant.finetune.teacher import Teacher
from requant.formats.quantized_weight import trainable_params, with_trainable_params
from requant.recipe.schema import Finetune
from requant.run.context import RunContext, Weights


def finetune(run: RunContext, weights: Weights, settings: Finetune) -> Weights:
    """The weights with finetuned floats; the parameters without codes go into `run.finetuned_params`.

    The model is left at the originals. Raises RecipeError for fewer than two calibration windows.
    """
    train_windows, val_windows = split_windows(run, settings)
    teacher = Teacher(original_model(run), train_windows)
    run.apply_quantized_weights(weights)
    trainable = {name: trainable_params(weight) for name, weight in weights.items()}
    other_params = params_without_codes(run)
    before = {name: run.original_param(name, p) for name, p in other_params.items()}
    with single_precision(run.model):
        trainables = trainable_tensors(
            trainable, (), list(other_params.values()), learning_rate(run, settings)
        )
        derived = reparametrized_weights(run, weights, trainable)
        train(run, teacher, trainables, derived, settings, label="finetune", val_windows=val_windows)
    save_finetuned_params(run, before)
    run.apply_original_weights()
    return {name: with_trainable_params(weight, trainable[name]) for name, weight in weights.items()}


def original_model(run: RunContext) -> PreTrainedModel:
    """A frozen copy of the original."""
    run.apply_original_weights()
    return copy.deepcopy(run.model)


def split_windows(run: RunContext, settings: Finetune) -> tuple[Int64[Tensor, "b t"], Int64[Tensor, "h t"]]:
    """Training and validation windows. Raises RecipeError for fewer than two in all."""
    windows = run.train_windows
    if len(windows) < 2:
        raise RecipeError("finetuning needs at least 2 calibration windows; raise --num-samples.")
    held_out = min(settings.val_windows, max(1, len(windows) // 8))
    return windows[:-held_out], windows[-held_out:]


@torch.no_grad()
def save_finetuned_params(run: RunContext, originals: dict[str, Tensor]) -> None:
    """Put the finetuned parameters without codes, rounded to the dtype of their files, into the run with `originals`."""
    for name, parameter in run.model.named_parameters():
        if name in originals:
            stored = disk_dtype(run.model, run.source, parameter)
            finetuned = parameter.detach().to(stored).to(parameter.dtype)
            run.finetuned_params[name] = (originals[name], finetuned.cpu().clone())
