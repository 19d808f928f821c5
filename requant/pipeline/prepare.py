"""Load a model and its texts, and refuse what cannot work before any long work begins."""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant import ranks
from requant.calibration.experts import routed_tokens
from requant.errors import ModelError, RecipeError, TextError
from requant.models.devices import pick_device
from requant.models.experts import unfuse_experts
from requant.models.folding import fold, obstacle, rotated_targets
from requant.models.loading import (
    DEMO,
    check_finite,
    context_limit,
    empty_model,
    folder_bytes,
    load_model,
    load_tokenizer,
    resolve_source,
)
from requant.models.targets import QuantTarget, find_linears
from requant.recipe.defaults import finetune_steps
from requant.recipe.schema import Calibration, Evaluation, Recipe
from requant.run.context import RunContext, fingerprint
from requant.run.workspace import Workspace
from requant.sensitivity.path import originals
from requant.text.sources import SELF, WIKITEXT, Text, read_text
from requant.text.windows import overlap, sample_self, spread, token_windows

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
    eval_windows: Int64[Tensor, "e c"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model and its texts, checked."""

    model: PreTrainedModel
    recipe: Recipe  # as the model limits and completes it
    tokenizer: PreTrainedTokenizerBase
    source: Path | None  # the model's folder; None for one that was built in memory
    targets: Sequence[QuantTarget]
    calibration: Text
    windows: Int64[Tensor, "b t"]  # of the calibration text, for statistics
    train_windows: Int64[Tensor, "p t"]  # that finetuning may train on
    evaluation: Text
    eval_windows: Int64[Tensor, "e c"]
    why_not_folded: str | None = None  # where the recipe asks for folded rotations


def prepare(
    model: str | PreTrainedModel,
    recipe: Recipe,
    text: str | Path | Sequence[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str = "auto",
    scored: bool = True,
    quiet: bool = True,
) -> Prepared:
    """Load what the run needs and refuse what cannot work; warn of texts that overlap where one of them is `scored`."""
    model, tokenizer, source = _opened(model, tokenizer, device=device, dtype=dtype)
    targets = divided(_targets(model, recipe), ranks.world_size())
    check_finite(model)
    why_not_folded = None
    if recipe.rotations == "folded":
        why_not_folded = obstacle(model)
        if why_not_folded is None:
            fold(model, seed=recipe.quantizer.seed)
            targets = rotated_targets(targets)
    recipe = _with_steps(model, _within_positions(model, recipe))
    given = [str(t) for t in ([text] if isinstance(text, str | Path) else text or recipe.calibration.text)]
    calibration, evaluation = _texts(model, tokenizer, source, recipe, given, quiet=quiet)
    all_windows = token_windows(
        calibration, tokenizer, num_samples=None, seq_len=recipe.calibration.seq_len, seed=recipe.seed
    )
    windows = spread(all_windows, recipe.calibration.num_samples, of=calibration.name)
    num_train = max(len(windows), recipe.finetune.train_windows if recipe.finetune.trains else 0)
    eval_windows = token_windows(evaluation, tokenizer, num_samples=None, seq_len=recipe.evaluation.context)
    shared = overlap(calibration, evaluation) if scored else 0.0
    if shared > OVERLAP_TOLERATED:
        logger.warning(
            "%.0f%% of the evaluation text %s is also in the calibration text %s: the perplexity will be too "
            "low; give another --eval-text.",
            100 * shared,
            evaluation.name,
            calibration.name,
        )
    return Prepared(
        model=model,
        recipe=recipe,
        why_not_folded=why_not_folded,
        tokenizer=tokenizer,
        source=source,
        targets=targets,
        calibration=calibration,
        windows=windows,
        train_windows=spread(all_windows, num_train, of=None),
        evaluation=evaluation,
        eval_windows=eval_windows[: recipe.evaluation.windows],
    )


def outline(model: str, recipe: Recipe, *, dtype: str = "auto", gpus: int = 1) -> Outline:
    """What can be said of a run from config.json alone, with the matrices divided among `gpus`."""
    folder = Path(resolve_source(model))
    empty = empty_model(str(folder), dtype=dtype)
    unfuse_experts(empty)
    recipe = _with_steps(empty, _within_positions(empty, recipe))
    calibration, evaluation = recipe.calibration, recipe.evaluation
    num_train = max(calibration.num_samples, recipe.finetune.train_windows if recipe.finetune.trains else 0)
    sizes = (
        (calibration.num_samples, calibration.seq_len),
        (num_train, calibration.seq_len),
        (evaluation.windows, evaluation.context),
    )
    windows = [torch.empty(size, dtype=torch.int64, device="meta") for size in sizes]
    return Outline(
        model=empty,
        recipe=recipe,
        source=folder if folder_bytes(folder) else None,
        targets=divided(_targets(empty, recipe), gpus),
        windows=windows[0],
        train_windows=windows[1],
        eval_windows=windows[2],
    )


def _targets(model: PreTrainedModel, recipe: Recipe) -> list[QuantTarget]:
    """The matrices to quantize; raises RecipeError where patterns of `modules` give one of them what excludes each other."""
    targets = find_linears(model, skip=recipe.skip, options=recipe.modules)
    for target in targets:
        try:
            dataclasses.replace(recipe.quantizer, **target.options)
        except RecipeError as error:
            raise RecipeError(f"modules: {target.name}: {error}") from error
    return targets


def divided(targets: Sequence[QuantTarget], count: int) -> list[QuantTarget]:
    """The targets, each owned by one of `count` ranks; experts of a layer, which share their statistics, by the same."""
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for target in targets:
        unit = target.experts or target.name
        sizes[unit] = sizes.get(unit, 0) + target.size
        kinds[unit] = "experts" if target.experts else target.kind
    found = ranks.owners([(kinds[unit], size) for unit, size in sizes.items()], count)
    owner_of = dict(zip(sizes, found, strict=True))
    return [dataclasses.replace(target, rank=owner_of[target.experts or target.name]) for target in targets]


def start(prepared: Prepared, recipe: Recipe, *, workspace: Workspace, quiet: bool) -> RunContext:
    """The context of the stages."""
    if prepared.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(prepared.model.device)
    return RunContext(
        model=prepared.model,
        targets=prepared.targets,
        original=originals(prepared.targets),
        windows=prepared.windows,
        train_windows=prepared.train_windows,
        recipe=recipe,
        workspace=workspace,
        fingerprint=fingerprint(prepared.model, prepared.targets, prepared.windows),
        source=prepared.source,
        routed_tokens=routed_tokens(
            prepared.model, prepared.windows, label=None if quiet else "tokens of each expert"
        ),
        quiet=quiet,
    )


def diagnosed_windows(prepared: Prepared) -> Int64[Tensor, "d t"]:
    """The calibration windows on which dF is predicted and measured."""
    return prepared.windows[: max(1, DIAGNOSED_TOKENS // prepared.windows.shape[1])]


def _opened(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, device: str, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Path | None]:
    """The model, frozen and with its experts as linears, with its tokenizer and its folder if it has one."""
    if isinstance(model, str):
        folder = resolve_source(model)
        loaded, own = load_model(folder, device=pick_device(device), dtype=dtype)
        unfuse_experts(loaded)
        return loaded, own, Path(folder)
    source = Path(resolve_source(model.name_or_path)) if model.name_or_path else None
    if tokenizer is None and source is None:
        raise ModelError("a model that was built in memory needs its tokenizer; give tokenizer=.")
    found = load_tokenizer(str(source)) if tokenizer is None else tokenizer
    unfuse_experts(model)
    return model.requires_grad_(False).eval(), found, source


def _within_positions(model: PreTrainedModel, recipe: Recipe) -> Recipe:
    """The recipe with windows that the model has positions for: the default lengths become all the positions of a model that
    has fewer (GPT-2's 1024). Raises TextError for another length that is too long."""
    limit = context_limit(model.config)
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


def _with_steps(model: PreTrainedModel, recipe: Recipe) -> Recipe:
    """The recipe with the training steps of the model's size, where it says none."""
    if recipe.finetune.steps is not None:
        return recipe
    steps = finetune_steps(sum(p.numel() for p in model.parameters()))
    return dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, steps=steps))


def _texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | None,
    recipe: Recipe,
    given: Sequence[str],
    *,
    quiet: bool,
) -> tuple[Text, Text]:
    """Calibration and evaluation text; with one text for both, its last tenth is held out and scored."""
    demo = source == DEMO
    sources = given or ["demo" if demo else f"{WIKITEXT}:train"]
    if list(sources) == [SELF]:
        tokens = recipe.calibration.num_samples * recipe.calibration.seq_len
        calibration = sample_self(model, tokenizer, num_tokens=tokens, seed=recipe.seed, progress=not quiet)
    else:
        calibration = read_text(sources, field=recipe.calibration.field)
    scored = recipe.evaluation.text or (("demo-eval",) if demo else () if given else (f"{WIKITEXT}:test",))
    if scored:
        return calibration, read_text(scored, field=recipe.evaluation.field)
    cut = len(calibration.text) * 9 // 10
    return (
        Text.from_documents(calibration.name, [calibration.text[:cut]]),
        Text.from_documents(f"{calibration.name} (last tenth, held out)", [calibration.text[cut:]]),
    )


def bytes_before(prepared: Prepared | Outline) -> int:
    """Bytes of the original's weight files, or of its parameters where it was built in memory."""
    if prepared.source is not None:
        return folder_bytes(prepared.source)
    return sum(p.numel() * p.element_size() for p in prepared.model.parameters())
