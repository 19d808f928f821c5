"""What a run has to do, from its texts, its matrices and its recipe: what its planned time and memory both follow from."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from requant import ranks
from requant.finetune.final import trains_by_block
from requant.finetune.memory import TrainingMemory
from requant.models.devices import total_memory
from requant.models.targets import QuantTarget
from requant.pipeline.preparation.outline import Outline
from requant.pipeline.preparation.prepare import Prepared
from requant.recipe.schema import Recipe


def tokens_of_step(prepared: Prepared | Outline, recipe: Recipe) -> int:
    """Tokens of a training step."""
    count, length = prepared.train_windows.shape
    return length * recipe.finetune.windows_of_step(count + prepared.own_windows, length)


def goes_by_block(prepared: Prepared | Outline, recipe: Recipe, device: str) -> bool:
    """Whether training goes block by block."""
    return recipe.mode != "sparse" and trains_by_block(
        prepared.model,
        prepared.targets,
        recipe.finetune,
        windows_to_train(prepared),
        device_memory=total_memory(torch.device(device)) if device == "cuda" else None,
    )


def training_memory(prepared: Prepared | Outline, recipe: Recipe, device: str) -> TrainingMemory:
    """What the run's training holds."""
    return TrainingMemory(
        model=prepared.model,
        targets=prepared.targets,
        settings=recipe.finetune,
        windows=windows_to_train(prepared),
        by_block=goes_by_block(prepared, recipe, device),
        gpu=device == "cuda",
        device_memory=total_memory(torch.device(device)),
        gpus=count_gpus(prepared),
        hosted=bool(prepared.hosted),
        group_size=getattr(recipe.quantizer, "group_size", None),
    )


def windows_to_train(prepared: Prepared | Outline) -> tuple[int, int]:
    """How many windows training may take, with those of the model's own, and their length."""
    count, length = prepared.train_windows.shape
    return count + prepared.own_windows, length


def count_gpus(prepared: Prepared | Outline) -> int:
    """Among how many ranks the matrices are divided."""
    return ranks.count_owners(prepared.targets)


def of_fullest_rank(targets: Sequence[QuantTarget], size: Callable[[QuantTarget], int]) -> int:
    """The sum of `size` over the matrices of the rank that has most."""
    sums: Counter[int] = Counter()
    for target in targets:
        sums[target.rank] += size(target)
    return max(sums.values())
