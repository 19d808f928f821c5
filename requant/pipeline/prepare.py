"""Loading a model and its texts, and refusing what cannot work before any long work begins."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant import ranks
from requant.calibration.experts import routed_tokens
from requant.errors import ModelError, RecipeError
from requant.finetune.compile_blocks import ask_compiler
from requant.models.deterministic import demand_deterministic_gradients
from requant.models.devices import pick_device, total_memory
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
    empty_model,
    load_model,
    load_tokenizer,
    resolve_source,
)
from requant.models.targets import QuantTarget, divided, find_linears, keep_on_host
from requant.models.weight_files import folder_bytes
from requant.pipeline.by_block import with_whole_training
from requant.pipeline.completion import (
    own_windows_of,
    trained_where_it_fits,
    trains_only_hosted,
    with_steps,
    within_positions,
)
from requant.pipeline.hosting import (
    HOSTED,
    check_trainable,
    hosted_recipe,
    hosts_blocks,
    parameter_bytes,
)
from requant.pipeline.texts import calibration_text, evaluation_text, in_windows, sampled_text
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
class Outline:
    """A model's shape and how much text the recipe takes: all tensors are on the meta device."""

    model: PreTrainedModel
    recipe: Recipe  # as the model limits and completes it
    source: Path | None  # None: a folder without weight files
    targets: Sequence[QuantTarget]
    windows: Int64[Tensor, "b t"]
    train_windows: Int64[Tensor, "p t"]
    own_windows: int
    bytes_to_train: int  # on a GPU that has not so many, so that nothing is trained by default; else 0
    eval_windows: Int64[Tensor, "e c"]
    hosted: bool = False  # whether the matrices would stay on the host (`hosting.py`)


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
    check_tokenizer(tokenizer, loaded=not isinstance(model, str))
    own_tokenizer, changed = tokenizer is not None, {}
    if isinstance(model, str):
        source = Path(resolve_source(model))
        config = check_loadable(str(source), dtype=dtype)
    else:
        check_in_memory(model, device=device, dtype=dtype)
        forget_dequantization(model)
        source, config = origin(model), model.config
        changed = {} if source is None else changed_config(model, source)
    if tokenizer is None:
        tokenizer = _tokenizer(source)
    recipe = within_positions(config, recipe)
    device, hosted = str(model.device) if isinstance(model, PreTrainedModel) else pick_device(device), False
    if isinstance(model, str):
        hosted = not ranks.all_agree(not _hosts(str(source), recipe, device=device, dtype=dtype))
    if hosted:
        recipe = hosted_recipe(recipe)
        training = "it is trained at the end only" if recipe.finetune.trains else "nothing is trained"
        logger.warning("the model is larger than the GPU, or its training is: %s; %s.", HOSTED, training)
    given = [str(t) for t in ([text] if isinstance(text, str | Path) else text or recipe.calibration.text)]
    # what is wrong with a text is said before the weights are read
    evaluation = evaluation_text(source, recipe, given)
    calibration = calibration_text(source, recipe, given)
    with ThreadPoolExecutor(1) as beside:  # tokenizers need neither the weights nor Python's lock
        pending = None
        if calibration is not None:
            pending = beside.submit(in_windows, calibration, evaluation, tokenizer, recipe, scored=scored)
        model = _opened(model, source, device=device, dtype=dtype, moved=not hosted)
        targets = divided(_targets(model, recipe), ranks.world_size())
        _warn_of_no_experts(targets, recipe)
        if hosted:
            targets = keep_on_host(model, targets, device)
        check_finite(model)
        check_runs(model, [target.name for target in targets])
        recipe = with_whole_training(model, recipe, hosted=hosted)
        targets, why_not_folded = _folded(model, targets, recipe)
        loaded = loaded_weights(model, targets)
        by_default = recipe.finetune.steps is None
        recipe = with_steps(model, recipe)
        if pending is None:
            written = sampled_text(model, tokenizer, recipe, quiet=quiet)
            texts = in_windows(written, evaluation, tokenizer, recipe, scored=scored)
        else:
            if recipe.finetune.trains:
                ask_compiler(model, recipe.finetune.num_steps)
            texts = pending.result()
    calibration, evaluation, all_windows = texts.calibration, texts.evaluation, texts.windows
    windows = spread(all_windows, recipe.calibration.num_samples, of=calibration.name)
    num_train = max(len(windows), recipe.finetune.train_windows if recipe.finetune.trains else 0)
    if texts.overlap > OVERLAP_TOLERATED:
        logger.warning(
            "%.0f%% of the evaluation text %s is also in the calibration text %s: the perplexity will be too "
            "low; give another --eval-text.",
            100 * texts.overlap,
            evaluation.name,
            calibration.name,
        )
    train_windows = spread(all_windows, num_train, of=None)
    recipe, lacking = _training_that_fits(
        model, targets, recipe, train_windows, by_default, device=device, hosted=hosted
    )
    return Prepared(
        model=model,
        recipe=recipe,
        why_not_folded=why_not_folded,
        tokenizer=tokenizer,
        source=source,
        targets=targets,
        loaded=loaded,
        calibration=calibration,
        windows=windows,
        train_windows=train_windows,
        own_windows=own_windows_of(model, recipe, targets, train_windows),
        bytes_to_train=lacking,
        evaluation=evaluation,
        eval_windows=texts.eval_windows[: recipe.evaluation.windows],
        hosted=hosted,
        changed_config=changed,
        own_tokenizer=own_tokenizer,
    )


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


def outline(
    model: str, recipe: Recipe, *, device: str = "cpu", dtype: str = "auto", gpus: int = 1
) -> Outline:
    """What can be said of a run on `device` from config.json alone, with the matrices divided among `gpus`.

    Raises RequantError.
    """
    folder = Path(resolve_source(model))
    empty = _shapes(str(folder), dtype=dtype)
    recipe = within_positions(empty.config, recipe)
    hosted = _hosts_shapes(empty, divided(_targets(empty, recipe), gpus), recipe, device)
    recipe = hosted_recipe(recipe) if hosted else recipe
    by_default = recipe.finetune.steps is None
    recipe = with_steps(empty, recipe)
    calibration, evaluation = recipe.calibration, recipe.evaluation
    num_train = max(calibration.num_samples, recipe.finetune.train_windows if recipe.finetune.trains else 0)
    sizes = (
        (calibration.num_samples, calibration.seq_len),
        (num_train, calibration.seq_len),
        (evaluation.windows, evaluation.context),
    )
    windows = [torch.empty(size, dtype=torch.int64, device="meta") for size in sizes]
    targets = divided(_targets(empty, recipe), gpus)
    _warn_of_no_experts(targets, recipe)
    recipe, lacking = trained_where_it_fits(
        empty, targets, recipe, windows[1], by_default, device=device, hosted=hosted
    )
    return Outline(
        model=empty,
        recipe=recipe,
        source=folder if folder_bytes(folder) else None,
        targets=targets,
        windows=windows[0],
        train_windows=windows[1],
        own_windows=own_windows_of(empty, recipe, targets, windows[1]),
        bytes_to_train=lacking,
        eval_windows=windows[2],
        hosted=hosted,
    )


def _hosts(folder: str, recipe: Recipe, *, device: str, dtype: str) -> bool:
    """Whether the matrices of a model stay on the host, from config.json alone."""
    if torch.device(device).type != "cuda":
        return False
    try:
        shapes = _shapes(folder, dtype=dtype)
    except ModelError:  # loading the weights says what is wrong, or nothing is
        return False
    return _hosts_shapes(shapes, divided(_targets(shapes, recipe), ranks.world_size()), recipe, device)


def _hosts_shapes(
    shapes: PreTrainedModel, targets: Sequence[QuantTarget], recipe: Recipe, device: str
) -> bool:
    """Because the model does not fit the GPU, or by default its training only so."""
    return hosts_blocks(shapes, targets, recipe, device) or trains_only_hosted(
        shapes, targets, recipe, device
    )


def _shapes(folder: str, *, dtype: str) -> PreTrainedModel:
    """The model without its weights, its experts as linears."""
    empty = empty_model(folder, dtype=dtype)
    unfuse_experts(empty)
    return empty


def _targets(model: PreTrainedModel, recipe: Recipe) -> list[QuantTarget]:
    """The matrices to quantize; raises RecipeError where patterns of `modules` give one of them what excludes each other."""
    targets = find_linears(model, skip=recipe.skip, options=recipe.modules)
    for target in targets:
        try:
            dataclasses.replace(recipe.quantizer, **target.options)
        except RecipeError as error:
            raise RecipeError(f"modules: {target.name}: {error}") from error
    return targets


def _warn_of_no_experts(targets: Sequence[QuantTarget], recipe: Recipe) -> None:
    if recipe.calibration.all_experts and not any(target.experts for target in targets):
        logger.warning(
            "--all-experts changes nothing here: none of the matrices is an expert's; leave it out."
        )


def start(prepared: Prepared, recipe: Recipe, *, workspace: Workspace, quiet: bool) -> RunContext:
    """The context of the stages. Raises ModelError where the recipe demands determinism that the model has not."""
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
        ),
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


def _tokenizer(source: Path | None) -> PreTrainedTokenizerBase:
    """That of the model's folder."""
    if source is None:
        raise ModelError("a model that was built in memory needs its tokenizer; give tokenizer=.")
    return load_tokenizer(str(source))


def _opened(
    model: str | PreTrainedModel, source: Path | None, *, device: str, dtype: str, moved: bool
) -> PreTrainedModel:
    """The model, frozen and with its experts as linears; on the host where it is not `moved`."""
    if isinstance(model, str):
        model = load_model(str(source), device=device, dtype=dtype, moved=moved)
    unfuse_experts(model)
    return model.requires_grad_(False).eval()


def bytes_before(prepared: Prepared | Outline) -> int:
    """Bytes of the original's weight files, or of its parameters where it was built in memory."""
    if prepared.source is not None:
        return folder_bytes(prepared.source)
    return parameter_bytes(prepared.model)
