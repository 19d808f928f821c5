"""Whether a model's matrices stay in the host's memory (`models/hosted.py`), and what a run of such a model leaves out.

They do if the model would not fit the GPU even without training: its floats, a byte per weight for codes, and the largest
of the minimum needs of its stages (`least_memory`); and by default also if its training fits only that way
(`completion.py`). Training then comes once, at the end, when all matrices are codes, and goes block by block: between the
rounds of mode `best`, matrices that still learn would have to be on the host too, along with their moments.
"""

import dataclasses
import logging
from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant.calibration.batches import bytes_of_logits
from requant.errors import RecipeError
from requant.finetune.memory import FITS
from requant.finetune.teacher import why_states_do_not_suffice
from requant.models.devices import total_memory
from requant.models.targets import QuantTarget
from requant.pipeline.preparation.shape_bytes import (
    block_statistics,
    outside_bytes,
    parameter_bytes,
    score_bytes,
    work_bytes,
)
from requant.quantizers.registry import find_method
from requant.recipe.schema import Recipe
from requant.text.sources import SELF

logger = logging.getLogger(__name__)
HOSTED = "matrices in the host's memory, brought to the GPU block by block"
REMEDY = "or give the run a larger GPU"


def hosts_blocks(model: PreTrainedModel, targets: Sequence[QuantTarget], recipe: Recipe, device: str) -> bool:
    """Whether the matrices of a run on `device` stay on the host; the model may be one of shapes alone."""
    if torch.device(device).type != "cuda":
        return False
    return least_memory(model, targets, recipe) > FITS * total_memory(torch.device(device))


def least_memory(model: PreTrainedModel, targets: Sequence[QuantTarget], recipe: Recipe) -> int:
    """Bytes of a GPU that holds the whole model, with its codes and the statistics of one block at a time."""
    whole = parameter_bytes(model)
    needs = find_method(recipe.method).needs
    logits = bytes_of_logits(model, recipe.calibration.num_samples, recipe.calibration.seq_len)
    collecting = block_statistics(targets, needs) + max(logits, work_bytes(targets, needs))
    stage = max(collecting, max(score_bytes(targets), outside_bytes(model, targets)) + logits)
    return whole + sum(target.size for target in targets) + stage


def hosted_recipe(recipe: Recipe) -> Recipe:
    """The recipe of a run whose matrices are on the host. Raises RecipeError for what such a run cannot do."""
    refused = {
        f"mode '{recipe.mode}'": (
            recipe.mode not in ("best", "dense"),
            "run `requant quantize`" if recipe.mode == "sparse" else "give --mode dense",
        ),
        "calibration.inputs 'corrected'": (
            recipe.calibration.inputs == "corrected",
            "give original or quantized",
        ),
        "--rotations folded": (recipe.rotations == "folded", "leave it out"),
        "calibration 'self'": (SELF in recipe.calibration.text, "give a text"),
        f"--own-windows {recipe.finetune.own_windows}": (bool(recipe.finetune.own_windows), "leave it out"),
        "finetune.blockwise false": (
            recipe.finetune.trains and recipe.finetune.blockwise is False,
            "leave it out, or give --finetune-steps 0",
        ),
        f"predictor '{recipe.budget.predictor}'": (
            recipe.budget.predictor in ("measured", "restored"),
            "give curvature",
        ),
    }
    for what, (asked, remedy) in refused.items():
        if asked:
            raise RecipeError(
                f"{what} needs the whole model on the GPU, which is too small for it; {remedy}, {REMEDY}."
            )
    finetuning = dataclasses.replace(recipe.finetune, own_windows=0)
    if finetuning.trains:
        finetuning = dataclasses.replace(finetuning, rounds=0, blockwise=True)
    evaluation = dataclasses.replace(recipe.evaluation, samples=0)
    return dataclasses.replace(recipe, finetune=finetuning, evaluation=evaluation)


def check_trainable(model: PreTrainedModel, windows: Int64[Tensor, "b t"]) -> None:
    """Raise RecipeError for a hosted model that cannot be trained block by block, tried on one window."""
    reason = why_states_do_not_suffice(model, windows[:1].to(model.device))
    if reason is not None:
        raise RecipeError(
            f"a model larger than the GPU is trained block by block, and this one cannot be: {reason}; give "
            f"--finetune-steps 0, {REMEDY}."
        )
