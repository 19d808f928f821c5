"""A model for a run: found, with its configuration and tokenizer, and then opened, with weights that have been checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant import ranks
from requant.errors import ModelError
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
from requant.models.plain_saving import save_plainly
from requant.models.targets import QuantTarget, keep_on_host
from requant.pipeline.preparation.recipe_targets import recipe_targets, warn_of_no_experts
from requant.pipeline.preparation.whole_model_only import with_whole_training
from requant.recipe.schema import Recipe
from requant.run.workspace import model_digest
from requant.sensitivity.path import originals


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """A model's weights before a run changes them."""

    original: Mapping[str, Tensor]  # [n, k], CPU, the source's dtype
    digest: str  # of all tensors of the model


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model of which no weight has been read, or one that was given loaded."""

    model: str | PreTrainedModel
    source: Path | None
    config: Any  # of transformers
    changed_config: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase
    own_tokenizer: bool


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model with its weights, which have been checked."""

    model: PreTrainedModel
    recipe: Recipe  # without what the model cannot do
    targets: Sequence[QuantTarget]
    loaded: LoadedWeights
    why_not_folded: str | None


def find_model(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, device: str, dtype: str
) -> FoundModel:
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
    return FoundModel(
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


def open_model(found: FoundModel, recipe: Recipe, *, device: str, dtype: str, hosted: bool) -> OpenedModel:
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
    return OpenedModel(
        model=model,
        recipe=recipe,
        targets=targets,
        loaded=loaded_weights(model, targets),
        why_not_folded=why_not_folded,
    )


def _with_weights(found: FoundModel, *, device: str, dtype: str, moved: bool) -> PreTrainedModel:
    """The model, frozen and with its experts as linears; on the host where it is not `moved`."""
    model = found.model
    if isinstance(model, str):
        model = load_model(str(found.source), device=device, dtype=dtype, moved=moved)
    unfuse_experts(model)
    save_plainly(model)
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


def loaded_weights(model: PreTrainedModel, targets: Sequence[QuantTarget]) -> LoadedWeights:
    """Copies of the matrices, and a hash of all tensors, for which matrices are not copied from a GPU once more."""
    original = originals(targets)
    copies = {f"{target.name}.weight": target.oriented(original[target.name]) for target in targets}
    return LoadedWeights(original=original, digest=model_digest(model, copies))
