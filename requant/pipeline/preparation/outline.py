"""What can be said of a run from config.json alone: its matrices, how much text it takes, and whether it fits the GPU. Where
the tokenizer and the text are there too, how much that holds is counted.

The model has all its modules, on the meta device, and no weights. A dry run for other GPUs (`--gpus`) plans with such an
`Outline`, a sweep takes the completed recipe from it, and `prepare` asks, before it reads weights, where they are to stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.errors import ModelError
from requant.models.experts import unfuse_experts
from requant.models.loading import empty_model, resolve_source
from requant.models.targets import QuantTarget
from requant.models.weight_files import folder_bytes
from requant.pipeline.preparation.completion import (
    own_windows_of,
    trained_where_it_fits,
    trains_only_hosted,
    with_steps,
    within_positions,
)
from requant.pipeline.preparation.hosting import hosted_recipe, hosts_blocks
from requant.pipeline.preparation.recipe_targets import recipe_targets, warn_of_no_experts
from requant.pipeline.preparation.texts import windows_there
from requant.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A model's shape and how much text the recipe takes: all tensors are on the meta device."""

    model: PreTrainedModel  # in the dtype that the run computes in
    stored: PreTrainedModel  # the same, in the dtype of the weight files
    recipe: Recipe  # as the model limits and completes it
    folder: Path
    source: Path | None  # the same; None: it has no weight files
    targets: Sequence[QuantTarget]
    windows: Int64[Tensor, "b t"]
    train_windows: Int64[Tensor, "p t"]
    own_windows: int
    bytes_to_train: int  # where training does not fit the GPU and is left out: what it would take; else 0
    eval_windows: Int64[Tensor, "e c"]
    hosted: bool = False  # whether the matrices would stay on the host (`hosting.py`)


def outline(
    model: str, recipe: Recipe, *, device: str = "cpu", dtype: str = "auto", gpus: int = 1
) -> Outline:
    """What can be said of a run on `device` from config.json alone, with the matrices divided among `gpus`.

    Raises RequantError.
    """
    folder = Path(resolve_source(model))
    stored = _shapes(str(folder), dtype="auto")
    wanted = "float32" if dtype == "auto" and torch.device(device).type == "cpu" else dtype  # as it is loaded
    shapes = stored if wanted == "auto" else _shapes(str(folder), dtype=wanted)
    recipe = within_positions(shapes.config, recipe)
    targets = recipe_targets(shapes, recipe, processes=gpus)
    hosted = _hosts_shapes(shapes, targets, recipe, device)
    recipe = hosted_recipe(recipe) if hosted else recipe
    by_default = recipe.finetune.steps is None
    recipe = with_steps(shapes, recipe)
    windows, train_windows, eval_windows = _empty_windows(folder, recipe)
    warn_of_no_experts(targets, recipe)
    recipe, lacking = trained_where_it_fits(
        shapes, targets, recipe, train_windows, by_default, device=device, hosted=hosted
    )
    return Outline(
        model=shapes,
        stored=stored,
        recipe=recipe,
        folder=folder,
        source=folder if folder_bytes(folder) else None,
        targets=targets,
        windows=windows,
        train_windows=train_windows,
        own_windows=own_windows_of(shapes, recipe, targets, train_windows),
        bytes_to_train=lacking,
        eval_windows=eval_windows,
        hosted=hosted,
    )


def stays_on_host(folder: str, recipe: Recipe, *, device: str, dtype: str) -> bool:
    """Whether a run of all processes leaves the matrices of the model in `folder` on the host."""
    if torch.device(device).type != "cuda":
        return False
    try:
        shapes = _shapes(folder, dtype=dtype)
    except ModelError:  # loading the weights says what is wrong, or nothing is
        return False
    targets = recipe_targets(shapes, recipe, processes=ranks.world_size())
    return _hosts_shapes(shapes, targets, recipe, device)


def _shapes(folder: str, *, dtype: str) -> PreTrainedModel:
    """The model without its weights, its experts as linears."""
    empty = empty_model(folder, dtype=dtype)
    unfuse_experts(empty)
    return empty


def _hosts_shapes(
    shapes: PreTrainedModel, targets: Sequence[QuantTarget], recipe: Recipe, device: str
) -> bool:
    """Whether matrices stay on the host because the model, or by default its training, does not fit the GPU otherwise."""
    return hosts_blocks(shapes, targets, recipe, device) or trains_only_hosted(
        shapes, targets, recipe, device
    )


def _empty_windows(
    folder: Path, recipe: Recipe
) -> tuple[Int64[Tensor, "b t"], Int64[Tensor, "p t"], Int64[Tensor, "e c"]]:
    """Windows for statistics, for training and for evaluation: as many as the recipe asks for and the texts hold."""
    calibration, evaluation = recipe.calibration, recipe.evaluation
    num_train = max(calibration.num_samples, recipe.finetune.train_windows if recipe.finetune.trains else 0)
    there, eval_there = windows_there(folder, recipe)

    def empty(count: float, length: int) -> Int64[Tensor, "b t"]:
        return torch.empty((max(1, int(count)), length), dtype=torch.int64, device="meta")

    return (
        empty(min(calibration.num_samples, there), calibration.seq_len),
        empty(min(num_train, there), calibration.seq_len),
        empty(min(evaluation.windows, eval_there), evaluation.context),
    )
