"""Loading a model and its texts, and refusing what cannot work before any long work begins.

What takes no time is checked first: the model's configuration and tokenizer, whether the GPU is large enough
(`outline.py`), and the texts. Then the weights are read and checked, while the texts become tokens. Which training fits the
GPU is decided last.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant import ranks
from requant.calibration.experts import routed_tokens
from requant.finetune.compile_blocks import start_compiler, try_compiler
from requant.models.deterministic import demand_deterministic_gradients
from requant.models.devices import limit_gpu_memory, pick_device, total_memory
from requant.models.targets import QuantTarget
from requant.pipeline.preparation.completion import (
    own_windows_of,
    trained_where_it_fits,
    with_steps,
    within_positions,
)
from requant.pipeline.preparation.hosting import HOSTED, check_trainable, hosted_recipe
from requant.pipeline.preparation.open_model import (
    FoundModel,
    LoadedWeights,
    find_model,
    loaded_weights,
    open_model,
)
from requant.pipeline.preparation.outline import stays_on_host
from requant.pipeline.preparation.texts import (
    Texts,
    calibration_text,
    evaluation_text,
    in_windows,
    sampled_text,
)
from requant.recipe.schema import Recipe
from requant.run.context import RunContext, fingerprint
from requant.run.workspace import Workspace
from requant.text.sources import Text
from requant.text.windows import check_has_rows, spread

logger = logging.getLogger(__name__)
OVERLAP_TOLERATED = 0.01  # fraction of the evaluation text; above it a warning


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model and its texts, checked."""

    model: PreTrainedModel
    recipe: Recipe  # as the model limits and completes it
    tokenizer: PreTrainedTokenizerBase
    source: Path | None  # the model's folder; None for one that was built in memory
    targets: Sequence[QuantTarget]
    loaded: LoadedWeights | None  # None in the outcome of a run, whose model holds other weights
    calibration: Text
    windows: Int64[Tensor, "b t"]  # of the calibration text, for statistics
    train_windows: Int64[Tensor, "p t"]  # that finetuning may train on
    own_windows: int  # how many more the original model is to write
    bytes_to_train: int  # where training does not fit the GPU and is left out: what it would take; else 0
    evaluation: Text
    eval_windows: Int64[Tensor, "e c"]
    why_not_folded: str | None = None  # where the recipe asks for folded rotations
    hosted: bool = False  # whether the matrices stay on the host (`hosting.py`)
    # of a model that was given loaded: keys of its configuration that its folder has otherwise
    changed_config: Mapping[str, Any] = field(default_factory=dict)
    own_tokenizer: bool = False  # which was given beside it


def prepare(
    model: str | PreTrainedModel,
    recipe: Recipe,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    scored: bool = True,
    quiet: bool = True,
) -> Prepared:
    """Load what the run needs and refuse what cannot work; warn of texts that overlap where one of them is `scored`."""
    dtype = str(dtype).removeprefix("torch.")
    found = find_model(model, tokenizer, device=device, dtype=dtype)
    recipe = within_positions(found.config, recipe)
    device = str(model.device) if isinstance(model, PreTrainedModel) else pick_device(device)
    _alike_on_all_ranks(device)
    recipe, hosted = _hosted_where_too_large(found, recipe, device=device, dtype=dtype)
    # what is wrong with a text is said before the weights are read
    evaluation, calibration = evaluation_text(found.source, recipe), calibration_text(found.source, recipe)
    if recipe.finetune.trains and isinstance(model, str) and not hosted:
        start_compiler(device, recipe.finetune.steps)
    by_default = recipe.finetune.steps is None
    cut = partial(in_windows, evaluation=evaluation, tokenizer=found.tokenizer, recipe=recipe, scored=scored)
    with ThreadPoolExecutor(1) as executor:  # tokenizers need neither the weights nor Python's lock
        pending = None if calibration is None else executor.submit(cut, calibration)
        opened = open_model(found, recipe, device=device, dtype=dtype, hosted=hosted)
        recipe = with_steps(opened.model, opened.recipe)
        if pending is None:
            texts = cut(sampled_text(opened.model, found.tokenizer, recipe, quiet=quiet))
        else:
            if recipe.finetune.trains:
                try_compiler(opened.model, recipe.finetune.num_steps)
            texts = pending.result()
    windows, train_windows = _draw_windows(texts, recipe)
    for each in (windows, train_windows, texts.eval_windows):
        check_has_rows(each, opened.model)
    _warn_of_overlap(texts)
    recipe, lacking = _training_that_fits(
        opened.model, opened.targets, recipe, train_windows, by_default, device=device, hosted=hosted
    )
    return Prepared(
        model=opened.model,
        recipe=recipe,
        why_not_folded=opened.why_not_folded,
        tokenizer=found.tokenizer,
        source=found.source,
        targets=opened.targets,
        loaded=opened.loaded,
        calibration=texts.calibration,
        windows=windows,
        train_windows=train_windows,
        own_windows=own_windows_of(opened.model, recipe, opened.targets, train_windows),
        bytes_to_train=lacking,
        evaluation=texts.evaluation,
        eval_windows=texts.eval_windows[: recipe.evaluation.windows],
        hosted=hosted,
        changed_config=found.changed_config,
        own_tokenizer=found.own_tokenizer,
    )


def _alike_on_all_ranks(device: str) -> None:
    """Limit every rank's GPU to the memory of the smallest: the sizes of batches follow from it and must be alike."""
    if ranks.world_size() > 1 and torch.device(device).type == "cuda":
        own = total_memory(torch.device(device))
        if (least := ranks.smallest(own)) < own:
            limit_gpu_memory(least, device)


def _hosted_where_too_large(
    found: FoundModel, recipe: Recipe, *, device: str, dtype: str
) -> tuple[Recipe, bool]:
    """The recipe as matrices on the host limit it, and whether they are there; a loaded model stays where it is."""
    if not isinstance(found.model, str):
        return recipe, False
    if ranks.all_agree(not stays_on_host(str(found.source), recipe, device=device, dtype=dtype)):
        return recipe, False
    recipe = hosted_recipe(recipe)
    training = "it is trained at the end only" if recipe.finetune.trains else "nothing is trained"
    logger.warning("the model is larger than the GPU, or its training is: %s; %s.", HOSTED, training)
    return recipe, True


def _draw_windows(texts: Texts, recipe: Recipe) -> tuple[Int64[Tensor, "b t"], Int64[Tensor, "p t"]]:
    """Windows of the calibration text: for statistics, and those that finetuning may train on."""
    windows = spread(texts.windows, recipe.calibration.num_samples, of=texts.calibration.name)
    num_train = max(len(windows), recipe.finetune.train_windows if recipe.finetune.trains else 0)
    return windows, spread(texts.windows, num_train, of=None)


def _warn_of_overlap(texts: Texts) -> None:
    if texts.overlap > OVERLAP_TOLERATED:
        logger.warning(
            "%.0f%% of the evaluation text %s is also in the calibration text %s: the perplexity will be too "
            "low; give another --eval-text.",
            100 * texts.overlap,
            texts.evaluation.name,
            texts.calibration.name,
        )


def _training_that_fits(
    model: PreTrainedModel,
    targets: Sequence[QuantTarget],
    recipe: Recipe,
    train_windows: Int64[Tensor, "p t"],
    by_default: bool,
    *,
    device: str,
    hosted: bool,
) -> tuple[Recipe, int]:
    """`trained_where_it_fits`, with warnings of what it changes. Raises RecipeError for a model larger than the GPU that
    cannot be trained block by block."""
    in_rounds = recipe.trains_in_rounds
    recipe, lacking = trained_where_it_fits(
        model, targets, recipe, train_windows, by_default, device=device, hosted=hosted
    )
    if lacking:
        logger.warning(
            "training would take about %.1f GiB of a GPU that has %.1f: nothing is trained; give a larger GPU, --gpus, or "
            "--finetune-steps to try all the same.",
            lacking / 2**30,
            total_memory(torch.device(device)) / 2**30,
        )
    if in_rounds and recipe.finetune.trains and not recipe.trains_in_rounds:
        logger.warning(
            "matrices that learn between rounds do not fit the GPU: all are coded first, and training comes at the end only."
        )
    if hosted and recipe.finetune.trains:
        check_trainable(model, train_windows)
    return recipe, lacking


def start(
    prepared: Prepared, recipe: Recipe, *, workspace: Workspace, quiet: bool, reported: bool = True
) -> RunContext:
    """The context of the stages; where nothing is `reported`, without the pass that counts the tokens of each expert. Raises
    ModelError where the recipe demands determinism that the model has not."""
    demand_deterministic_gradients(prepared.model, recipe.deterministic)
    if prepared.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(prepared.model.device)
    loaded = prepared.loaded or loaded_weights(prepared.model, prepared.targets)
    return RunContext(
        model=prepared.model,
        targets=prepared.targets,
        original=loaded.original,
        windows=prepared.windows,
        train_windows=prepared.train_windows,
        recipe=recipe,
        workspace=workspace,
        fingerprint=fingerprint(prepared.model, loaded.digest, prepared.targets, prepared.windows),
        source=prepared.source,
        routed_tokens=routed_tokens(
            prepared.model, prepared.windows, label=None if quiet else "tokens of each expert"
        )
        if reported
        else {},
        quiet=quiet,
    )
