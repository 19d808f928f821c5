"""The context of one run, and the two things every mode measures with it: scores of the weights, the loss.

A mode (`paper.py`) is a function of a `Run`. Results go through the workspace (`outcomes.py`), matrix by matrix, so an
interrupted run resumes at the matrix where it stopped.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant.calibration.passes import mean_loss
from requant.calibration.stats import LinearStats
from requant.formats.containers import QuantizedWeight
from requant.models.targets import QuantTarget
from requant.recipe.schema import Recipe
from requant.recipe.yaml_files import to_dict
from requant.run.workspace import Workspace, digest, model_digest
from requant.sensitivity.path import QuantizedPath, Scores
from requant.sensitivity.scores import score
from requant.version import VERSION

Weights = dict[str, QuantizedWeight]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What was decided for a run (`allocation.py`): the width of every matrix, and what it is expected to cost."""

    bits: dict[str, int | float]
    bytes: int  # of the matrices, or of the weight files where the budget is a size
    budget: int | None = None  # bytes that it must not exceed; None: no budget
    predicted: float | None = None  # nats a token; None: nothing was predicted
    predictor: str | None = None
    curve: dict[int, float] = field(default_factory=dict)  # other budgets in bytes -> predicted loss
    embedding_bits: int = 16
    head_bits: int = 16

    outlier_fractions: dict[str, float] = field(default_factory=dict)  # of matrices that have outliers

    @property
    def unspent(self) -> float:
        """The fraction of the budget that is left."""
        return 0.0 if self.budget is None else 1 - self.bytes / self.budget


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What every stage needs; `statistics` and `seconds` fill up as the run goes."""

    model: PreTrainedModel
    targets: Sequence[QuantTarget]
    original: Mapping[str, Tensor]  # [n, k], CPU, the source's dtype
    windows: Int64[Tensor, "b t"]
    recipe: Recipe
    workspace: Workspace
    fingerprint: str  # of the model, its matrices to quantize, the windows and the versions
    quiet: bool
    source: Path | None = None  # the model's folder
    # of matrices whose width is not the recipe's
    bits: Mapping[str, int | float] = field(default_factory=dict)
    outlier_fractions: Mapping[str, float] = field(default_factory=dict)  # where allocated
    allocation: Allocation | None = None
    # the windows that training may use, where they are more than `windows`
    pool: Int64[Tensor, "p t"] | None = None
    # parameters that learned: original, learned
    finetuned_params: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    statistics: dict[str, LinearStats] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total_weights(self) -> int:
        return sum(target.size for target in self.targets)

    def config_of(self, target: QuantTarget) -> Any:
        """The quantizer's settings for one matrix."""
        bits = self.bits.get(target.name, self.recipe.quantizer.bits)
        options: dict[str, Any] = {"bits": bits}
        if target.name in self.outlier_fractions:
            options["outlier_fraction"] = self.outlier_fractions[target.name]
        return dataclasses.replace(self.recipe.quantizer, **options)

    def path(self, weights: Weights) -> QuantizedPath:
        return QuantizedPath(
            model=self.model,
            targets=self.targets,
            original=self.original,
            quantized=weights,
            finetuned_params=self.finetuned_params,
        )

    @property
    def training_windows(self) -> Int64[Tensor, "p t"]:
        return self.windows if self.pool is None else self.pool

    def original_of(self, name: str, parameter: Tensor) -> Tensor:
        """A copy, on the CPU, of what a parameter outside of the matrices was before anything learned."""
        if name in self.finetuned_params:
            return self.finetuned_params[name][0]
        return parameter.detach().to("cpu", copy=True)

    def label(self, text: str) -> str | None:
        return None if self.quiet else text

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of the body to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def fingerprint(model: PreTrainedModel, targets: Sequence[QuantTarget], windows: Int64[Tensor, "b t"]) -> str:
    """A hash of what every stage depends on, whatever the recipe."""
    return digest(
        [VERSION, torch.__version__, next(model.parameters()).device.type],
        model.config.to_json_string(),
        model_digest(model),
        [target.name for target in targets],
        windows,
    )


def scores(run: RunContext, name: str, weights: Weights, *, label: str) -> Scores:
    """Signed scores of every weight for the step from the originals to `weights`."""
    with run.stage("sensitivity"):
        return score(
            name, run.path(weights), run.windows, nodes=run.recipe.sensitivity.nodes, label=run.label(label)
        )


def loss(
    run: RunContext,
    weights: Weights,
    *,
    windows: Int64[Tensor, "b t"] | None = None,
    label: str | None = None,
) -> float:
    """F on the calibration windows with `weights` in the model; the originals for an empty dict."""
    with run.stage("loss"):
        run.path(weights).place(1.0 if weights else 0.0)
        return mean_loss(
            run.model, run.windows if windows is None else windows, label=run.label(label) if label else None
        )


def recipe_sections(recipe: Recipe, *names: str) -> dict[str, Any]:
    """The sections of a recipe that a stage depends on, for its key."""
    data = to_dict(recipe)
    return {name: data[name] for name in names}
