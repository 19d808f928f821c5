"""Loading a model and its texts, and refusing what cannot work before any long work begins.

What takes no time is checked first: the model's configuration and tokenizer, whether the GPU is large enough
(`outline.py`), and the texts. Then the weights are read and checked, while the texts become tokens. Which training the GPU
has room for is decided last.
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
from requant.errors import ModelError
from requant.finetune.compile_blocks import ask_compiler
from requant.models.deterministic import demand_deterministic_gradients
from requant.models.devices import limit_gpu_memory, pick_device, total_memory
from requant.models.experts import unfuse_experts
from requant.models.folding import fold, obstacle, rotated_targets
from requant.models.in_memory import (
    changed_config,
    check_in_memory,
    check_tokenizer,
    forget_dequantization,
    origin,
)
from requant.models.loading import (
    check_finite,
    check_loadable,
    check_runs,
    load_model,
    load_tokenizer,
    resolve_source,
)
from requant.models.targets import QuantTarget, keep_on_host
from requant.models.weight_files import folder_bytes
from requant.pipeline.by_block import with_whole_training
from requant.pipeline.completion import own_windows_of, trained_where_it_fits, with_steps, within_positions
from requant.pipeline.hosting import HOSTED, check_trainable, hosted_recipe
from requant.pipeline.outline import Outline, stays_on_host
from requant.pipeline.shape_bytes import parameter_bytes
from requant.pipeline.targets import recipe_targets, warn_of_no_experts
from requant.pipeline.texts import Texts, calibration_text, evaluation_text, in_windows, sampled_text
from requant.recipe.schema import Recipe
from requant.run.context import RunContext, fingerprint
from requant.run.workspace import Workspace, model_digest
from requant.sensitivity.path import originals
from requant.text.sources import Text
from requant.text.windows import spread

logger = logging.getLogger(__name__)
OVERLAP_TOLERATED = 0.01  # fraction of the evaluation text; above it a warning
DIAGNOSED_TOKENS = 4096  # PQI equals dF on any text, so a small one serves


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """A model's weights before a run changes them."""

    original: Mapping[str, Tensor]  # [n, k], CPU, the source's dtype
    digest: str  # of all tensors of the model


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
    own_windows: int  # that the original has to write beside them
    bytes_to_train: int  # on a GPU that has not so many, so that nothing is trained by default; else 0
    evaluation: Text
    eval_windows: Int64[Tensor, "e c"]
    why_not_folded: str | None = None  # where the recipe asks for folded rotations
    hosted: bool = False  # whether the matrices stay on the host (`hosting.py`)
    # of a model that was given loaded: keys of its configuration that its folder has otherwise
    changed_config: Mapping[str, Any] = field(default_factory=dict)
    own_tokenizer: bool = False  # which was given beside it


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A model of which no weight has been read, or one that was given loaded."""

    model: str | PreTrainedModel
    source: Path | None
    config: Any  # of transformers
    changed_config: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase
    own_tokenizer: bool


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A model with its weights, which have been checked."""

    model: PreTrainedModel
    recipe: Recipe  # without what the model cannot do
    targets: Sequence[QuantTarget]
    loaded: LoadedWeights
    why_not_folded: str | None


def prepare(
    model: str | PreTrainedModel,
    recipe: Recipe,
    text: str | Path | Sequence[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    scored: bool = True,
    quiet: bool = True,
) -> Prepared:
    """Load what the run needs and refuse what cannot work; warn of texts that overlap where one of them is `scored`."""
    dtype = str(dtype).removeprefix("torch.")
    found = _find_model(model, tokenizer, device=device, dtype=dtype)
    recipe = within_positions(found.config, recipe)
    device = str(model.device) if isinstance(model, PreTrainedModel) else pick_device(device)
    _alike_on_all_ranks(device)
    recipe, hosted = _hosted_where_too_large(found, recipe, device=device, dtype=dtype)
    # what is wrong with a text is said before the weights are read
    calibration, evaluation = _read_texts(found.source, recipe, text)
    by_default = recipe.finetune.steps is None
    cut = partial(in_windows, evaluation=evaluation, tokenizer=found.tokenizer, recipe=recipe, scored=scored)
    with ThreadPoolExecutor(1) as beside:  # tokenizers need neither the weights nor Python's lock
        pending = None if calibration is None else beside.submit(cut, calibration)
        opened = _open_model(found, recipe, device=device, dtype=dtype, hosted=hosted)
        recipe = with_steps(opened.model, opened.recipe)
        if pending is None:
            texts = cut(sampled_text(opened.model, found.tokenizer, recipe, quiet=quiet))
        else:
            if recipe.finetune.trains:
                ask_compiler(opened.model, recipe.finetune.num_steps)
            texts = pending.result()
    windows, train_windows = _draw_windows(texts, recipe)
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
    """Take of every GPU what the smallest has: batches follow from that, and are the same on all ranks."""
    if ranks.world_size() > 1 and torch.device(device).type == "cuda":
        own = total_memory(torch.device(device))
        if (least := ranks.smallest(own)) < own:
            limit_gpu_memory(least, device)


def _find_model(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, device: str, dtype: str
) -> _Found:
    """Where the model comes from, its configuration and its tokenizer; refuse what cannot be quantized."""
    check_tokenizer(tokenizer, loaded=not isinstance(model, str))
    changed = {}
    if isinstance(model, str):
        source = Path(resolve_source(model))
        config = check_loadable(str(source), dtype=dtype)
    else:
        check_in_memory(model, device=device, dtype=dtype)
        forget_dequantization(model)
        source, config = origin(model), model.config
        changed = {} if source is None else changed_config(model, source)
    return _Found(
        model=model,
        source=source,
        config=config,
        changed_config=changed,
        tokenizer=_tokenizer(source) if tokenizer is None else tokenizer,
        own_tokenizer=tokenizer is not None,
    )


def _tokenizer(source: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model's folder."""
    if source is None:
        raise ModelError("a model that was built in memory needs its tokenizer; give tokenizer=.")
    return load_tokenizer(str(source))


def _hosted_where_too_large(found: _Found, recipe: Recipe, *, device: str, dtype: str) -> tuple[Recipe, bool]:
    """The recipe as matrices on the host limit it, and whether they are there; a loaded model stays where it is."""
    if not isinstance(found.model, str):
        return recipe, False
    if ranks.all_agree(not stays_on_host(str(found.source), recipe, device=device, dtype=dtype)):
        return recipe, False
    recipe = hosted_recipe(recipe)
    training = "it is trained at the end only" if recipe.finetune.trains else "nothing is trained"
    logger.warning("the model is larger than the GPU, or its training is: %s; %s.", HOSTED, training)
    return recipe, True


def _read_texts(
    source: Path | None, recipe: Recipe, text: str | Path | Sequence[str] | None
) -> tuple[Text | None, Text | None]:
    """The text for calibration, None where the model is to write it, and for evaluation, None where a part is held out."""
    given = [str(t) for t in ([text] if isinstance(text, str | Path) else text or recipe.calibration.text)]
    evaluation = evaluation_text(source, recipe, given)
    return calibration_text(source, recipe, given), evaluation


def _open_model(found: _Found, recipe: Recipe, *, device: str, dtype: str, hosted: bool) -> _Opened:
    """Read the weights; refuse values that are not finite, and a model that cannot run as the recipe needs."""
    model = _with_weights(found, device=device, dtype=dtype, moved=not hosted)
    targets = recipe_targets(model, recipe, processes=ranks.world_size())
    warn_of_no_experts(targets, recipe)
    if hosted:
        targets = keep_on_host(model, targets, device)
    check_finite(model)
    check_runs(model, [target.name for target in targets])
    recipe = with_whole_training(model, recipe, hosted=hosted)
    targets, why_not_folded = _folded(model, targets, recipe)
    return _Opened(
        model=model,
        recipe=recipe,
        targets=targets,
        loaded=loaded_weights(model, targets),
        why_not_folded=why_not_folded,
    )


def _with_weights(found: _Found, *, device: str, dtype: str, moved: bool) -> PreTrainedModel:
    """The model, frozen and with its experts as linears; on the host where it is not `moved`."""
    model = found.model
    if isinstance(model, str):
        model = load_model(str(found.source), device=device, dtype=dtype, moved=moved)
    unfuse_experts(model)
    return model.requires_grad_(False).eval()


def _folded(
    model: PreTrainedModel, targets: list[QuantTarget], recipe: Recipe
) -> tuple[list[QuantTarget], str | None]:
    """Fold rotations into the model where the recipe asks for that; the targets, and why it was not done."""
    if recipe.rotations != "folded":
        return targets, None
    if (reason := obstacle(model)) is not None:
        return targets, reason
    fold(model, seed=recipe.quantizer.seed)
    return rotated_targets(targets), None


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
    """`trained_where_it_fits`, which says what it changes; refuse what the host has no room for."""
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


def loaded_weights(model: PreTrainedModel, targets: Sequence[QuantTarget]) -> LoadedWeights:
    """Copies of the matrices, and a hash of all tensors, for which matrices are not copied from a GPU once more."""
    original = originals(targets)
    copies = {f"{target.name}.weight": target.oriented(original[target.name]) for target in targets}
    return LoadedWeights(original=original, digest=model_digest(model, copies))


def diagnosed_windows(prepared: Prepared) -> Int64[Tensor, "d t"]:
    """The calibration windows on which dF is predicted and measured."""
    return prepared.windows[: max(1, DIAGNOSED_TOKENS // prepared.windows.shape[1])]


def bytes_before(prepared: Prepared | Outline) -> int:
    """Bytes of the original's weight files, or of its parameters where it was built in memory."""
    if prepared.source is not None:
        return folder_bytes(prepared.source)
    return parameter_bytes(prepared.model)
