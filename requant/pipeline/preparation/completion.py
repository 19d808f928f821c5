"""Completing a recipe for its model and machine: lengths of windows, training steps, text written by the model itself."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.errors import RecipeError, TextError
from requant.finetune.final import trains_by_block
from requant.finetune.memory import TrainingMemory, fullest_phase
from requant.inference.static_cache import static_cache
from requant.models.devices import total_memory
from requant.models.loading import context_limit
from requant.models.targets import QuantTarget
from requant.pipeline.preparation.hosting import hosted_recipe
from requant.recipe.defaults import finetune_steps, needed_own_windows
from requant.recipe.schema import Calibration, Evaluation, Recipe
from requant.run.rounds import rounds_of

# of a GPU's memory, that training may take by the plan. 1B shapes were planned at 50.0 and 19.5 GiB, and held 46.6 and 17;
# two blocks of an 8B shape from the host at 19.6, and held 19.3 of 21.1 that torch had taken (`eval/LOG.md`)
FITS_RESIDENT, FITS_HOSTED = 1.1, 0.95


def within_positions(config: Any, recipe: Recipe) -> Recipe:
    """The recipe with windows that a model of this configuration has positions for: the default lengths become all the
    positions of a model that has fewer (GPT-2's 1024). Raises TextError for another length that is too long."""
    limit = context_limit(config)
    if limit is None:
        return recipe
    calibration, evaluation = recipe.calibration, recipe.evaluation
    for option, length, default in (
        ("--seq-len", calibration.seq_len, Calibration.seq_len),
        ("evaluation.context", evaluation.context, Evaluation.context),
    ):
        if length > limit and length != default:
            raise TextError(
                f"{option} {length} is longer than the model's {limit} positions; use {option} {limit}."
            )
    return dataclasses.replace(
        recipe,
        calibration=dataclasses.replace(calibration, seq_len=min(calibration.seq_len, limit)),
        evaluation=dataclasses.replace(evaluation, context=min(evaluation.context, limit)),
    )


def with_steps(model: PreTrainedModel, recipe: Recipe) -> Recipe:
    """The recipe with the training steps of the model's size, where it says none."""
    if recipe.finetune.steps is not None:
        return recipe
    steps = finetune_steps(sum(p.numel() for p in model.parameters()))
    return dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, steps=steps))


def own_windows_of(
    model: PreTrainedModel, recipe: Recipe, targets: Sequence[QuantTarget], windows: Int64[Tensor, "p t"]
) -> int:
    """How many windows the original is to write: as the recipe says, or as many as its training needs beside `windows`.

    By default 0 where decoding cannot use CUDA graphs: without them each of thousands of steps waits for the host.
    """
    if not recipe.finetune.trains:
        return 0
    if recipe.finetune.own_windows is not None:
        return recipe.finetune.own_windows
    count, length = windows.shape
    if static_cache(model, length) is None:
        return 0
    phases = len(rounds_of(targets, recipe.finetune.rounds)) if recipe.trains_in_rounds else 1
    return needed_own_windows(recipe.finetune, phases=phases, windows=count, length=length)


def trained_where_it_fits(
    model: PreTrainedModel,
    targets: Sequence[QuantTarget],
    recipe: Recipe,
    windows: Int64[Tensor, "p t"],
    by_default: bool,
    *,
    device: str,
    hosted: bool = False,
) -> tuple[Recipe, int]:
    """The recipe with training that fits the GPU, and 0; where none fits, without training, and the bytes it would take.

    Tried are the recipe as it is, then as many steps at the end only (`trained_at_the_end`). Training that was asked for
    (not `by_default`) stays as it is. This is decided before the run, because one that runs out of memory in its first
    training has already spent hours on codes. Raises RecipeError where nothing fits and `finetune.own_windows` asks for
    windows to train on.
    """
    gpu = torch.device(device)
    if not by_default or gpu.type != "cuda" or not recipe.finetune.trains:
        return recipe, 0
    memory = ranks.smallest(total_memory(gpu))

    def bytes_of(chosen: Recipe) -> int:
        shape = (windows.shape[0] + own_windows_of(model, chosen, targets, windows), windows.shape[1])
        training = TrainingMemory(
            model=model,
            targets=targets,
            settings=chosen.finetune,
            windows=shape,
            by_block=trains_by_block(model, targets, chosen.finetune, shape, device_memory=memory),
            gpu=True,
            device_memory=memory,
            gpus=ranks.count_owners(targets),
            hosted=hosted,
            group_size=getattr(chosen.quantizer, "group_size", None),
        )
        return fullest_phase(training, chosen)

    ways = [recipe, trained_at_the_end(recipe, targets)] if recipe.trains_in_rounds else [recipe]
    needed = 0
    for way in ways:
        needed = bytes_of(way)
        if needed <= (FITS_HOSTED if hosted else FITS_RESIDENT) * memory:
            return way, 0
    if recipe.finetune.own_windows:
        raise RecipeError(
            f"--own-windows {recipe.finetune.own_windows} are to train on, and training would take about "
            f"{needed / 2**30:.1f} GiB of a GPU that has {memory / 2**30:.1f}; leave it out, give --finetune-steps to try "
            "all the same, or a larger GPU."
        )
    return dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, steps=0)), needed


def trained_at_the_end(recipe: Recipe, targets: Sequence[QuantTarget]) -> Recipe:
    """The recipe with the steps of all rounds in one training at the end, when all matrices have codes: these take 3 bytes
    per weight, matrices without codes 8 (`finetune/blockwise.py`). On bench-32m the KL is 9, 5 and 4 % higher at 2, 3 and
    4 bits (`no-rounds` and `short` of `quality-bench-32m.json`)."""
    rounds = len(rounds_of(targets, recipe.finetune.rounds))
    finetuning = dataclasses.replace(recipe.finetune, steps=recipe.finetune.num_steps * rounds, rounds=0)
    return dataclasses.replace(recipe, finetune=finetuning)


def trains_only_hosted(
    model: PreTrainedModel, targets: Sequence[QuantTarget], recipe: Recipe, device: str
) -> bool:
    """Whether a run of mode `best` is trained by default where its matrices stay on the host, and not where they do not.

    The model may be one of shapes alone. Training at the end only, by the steps of one round, is better than none: a KL of
    0.66 at 2 bits, where codes alone have 0.78 (demo-4m, `eval/LOG.md`).
    """
    if recipe.mode != "best" or recipe.finetune.steps is not None or recipe.finetune.own_windows:
        return False
    try:
        on_host = hosted_recipe(recipe)
    except RecipeError:  # what it asks for needs the whole model
        return False
    count = max(recipe.calibration.num_samples, recipe.finetune.train_windows)
    windows = torch.empty((count, recipe.calibration.seq_len), dtype=torch.int64, device="meta")

    def fits(chosen: Recipe, *, hosted: bool) -> bool:
        chosen = with_steps(model, chosen)
        return not trained_where_it_fits(model, targets, chosen, windows, True, device=device, hosted=hosted)[
            1
        ]

    return not fits(recipe, hosted=False) and fits(on_host, hosted=True)
