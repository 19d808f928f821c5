"""The context of one run, and the two things that every mode measures with it: scores of the weights, and the loss.

A mode (`pipeline/best.py`, `pipeline/paper.py`) is a function of a `RunContext`. Results go through the workspace
matrix by matrix (`stage_cache.py`), so an interrupted run resumes at the matrix where it stopped.
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
from requant.calibration.stats import Curvature, LinearStats
from requant.formats.quantized_weight import QuantizedWeight
from requant.models.targets import QuantTarget
from requant.recipe.schema import Recipe
from requant.recipe.yaml_files import to_dict
from requant.run.workspace import Workspace, digest
from requant.sensitivity.path import QuantizedPath, Scores
from requant.sensitivity.scores import score_weights
from requant.version import VERSION

Weights = dict[str, QuantizedWeight]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Another way to spend the bytes of a file on matrices and on embedding and head, as `--size` would."""

    size: int  # of the weight files, bytes
    predicted: float  # nats per token
    bits: float  # a weight of the matrices, everything stored counted
    embedding_bits: int | float
    head_bits: int | float
    token_table_bits: dict[str, int | float] = field(default_factory=dict)  # name -> bits

    def __str__(self) -> str:
        tables = "".join(f", {name} at {bits:g}" for name, bits in self.token_table_bits.items())
        return f"embedding at {self.embedding_bits:g} bits{tables}, matrices at {self.bits:.2f}"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What was decided for a run (`allocation/budget.py`): bits of every matrix, and what they are expected to cost."""

    bits: dict[str, int | float]
    bytes: int  # of the matrices, or of the weight files where the budget is a size
    budget: int | None = None  # bytes that it must not exceed; None: no budget
    predicted: float | None = None  # nats per token; None: nothing was predicted
    predictor: str | None = None
    loss_curve: dict[int, float] = field(default_factory=dict)  # other budgets in bytes -> predicted loss
    embedding_bits: int | float = 16
    head_bits: int | float = 16
    token_table_bits: dict[str, int | float] = field(default_factory=dict)  # name -> bits
    outlier_fractions: dict[str, float] = field(default_factory=dict)  # of matrices that have outliers
    best_split: Split | None = None  # of the same file, where it is predicted to lose clearly less

    @property
    def bits_of_tables(self) -> dict[str, int | float]:
        """Role -> bits, of embedding, head and token tables."""
        return {"embedding": self.embedding_bits, "head": self.head_bits, **self.token_table_bits}

    @property
    def unspent(self) -> float:
        """The fraction of the budget that is left."""
        return 0.0 if self.budget is None else 1 - self.bytes / self.budget


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What every stage needs; its dicts and lists fill up as the run goes."""

    model: PreTrainedModel
    targets: Sequence[QuantTarget]
    original: Mapping[str, Tensor]  # [n, k], CPU, the source's dtype
    windows: Int64[Tensor, "b t"]  # calibration tokens for statistics, scores and losses
    train_windows: Int64[Tensor, "p t"]  # calibration tokens that finetuning may train on
    recipe: Recipe
    workspace: Workspace
    fingerprint: str  # of the model, its matrices to quantize, the windows and the versions
    quiet: bool
    source: Path | None = None  # the model's folder
    # expert -> those of `windows` that it sees
    routed_tokens: Mapping[str, int] = field(default_factory=dict)

    allocation: Allocation | None = None
    # matrix -> bits, and fraction of sparse outliers, where they are not the recipe's
    bits: Mapping[str, int | float] = field(default_factory=dict)
    outlier_fractions: Mapping[str, float] = field(default_factory=dict)
    # name -> (original, finetuned) of parameters without codes
    finetuned_params: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    statistics: dict[str, LinearStats] = field(default_factory=dict)
    curvature: dict[str, list[Curvature]] = field(default_factory=dict)  # of embedding, head, token tables
    # once training block by block has asked for them: the class of the original's base model's output, and its last hidden
    # states on `train_windows`, on the host
    last_states: list[tuple[type, Tensor]] = field(default_factory=list)
    # the states that training as a whole has computed, for the next one (`finetune/teacher.py`), on the model's device
    state_caches: list[Any] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> wall time
    # share of the 2:4 masks that each update during training moved
    flip_rates: list[float] = field(default_factory=list)

    @property
    def total_weights(self) -> int:
        return sum(target.size for target in self.targets)

    def config_of(self, target: QuantTarget) -> Any:
        """The quantizer's settings for one matrix."""
        bits = self.bits.get(target.name, self.recipe.quantizer.bits)
        options: dict[str, Any] = {"bits": bits, **target.options}
        if target.name in self.outlier_fractions:
            options["outlier_fraction"] = self.outlier_fractions[target.name]
        return dataclasses.replace(self.recipe.quantizer, **options)

    def path(self, weights: Weights) -> QuantizedPath:
        """The line from the originals to `weights` and to the finetuned parameters."""
        return QuantizedPath(
            model=self.model,
            targets=self.targets,
            original=self.original,
            quantized=weights,
            finetuned_params=self.finetuned_params,
        )

    def apply_original_weights(self) -> None:
        """Write the original matrices and parameters into the model."""
        self.path({}).apply_weights(0.0)

    def apply_quantized_weights(self, weights: Weights) -> None:
        """Write the dequantized `weights` and the finetuned parameters into the model."""
        self.path(weights).apply_weights(1.0)

    def apply_finetuned_params(self) -> None:
        """Write the finetuned parameters into the model, whose matrices stay as they are."""
        self.path({}).apply_finetuned_params(1.0)

    def original_param(self, name: str, parameter: Tensor) -> Tensor:
        """A copy, on the CPU, of a parameter without codes as it was before any finetuning."""
        if name in self.finetuned_params:
            return self.finetuned_params[name][0]
        return parameter.detach().to("cpu", copy=True)

    def label(self, text: str) -> str | None:
        """A progress bar's label, or None for a quiet run."""
        return None if self.quiet else text

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the wall time of the body to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def fingerprint(
    model: PreTrainedModel, weights: str, targets: Sequence[QuantTarget], windows: Int64[Tensor, "b t"]
) -> str:
    """A hash of what every stage depends on, whatever the recipe; `weights` is the model's (`model_digest`)."""
    return digest(
        [VERSION, torch.__version__, next(model.parameters()).device.type],
        model.config.to_json_string(),
        weights,
        [[target.name, dict(target.options)] for target in targets],
        windows,
    )


def scores(run: RunContext, name: str, weights: Weights, *, label: str) -> Scores:
    """Signed scores of every weight for the step from the originals to `weights`."""
    with run.stage("sensitivity"):
        return score_weights(
            name, run.path(weights), run.windows, nodes=run.recipe.sensitivity.nodes, label=run.label(label)
        )


def loss(
    run: RunContext,
    weights: Weights,
    *,
    windows: Int64[Tensor, "b t"] | None = None,
    label: str | None = None,
) -> float:
    """F on the calibration windows, or on `windows`, with `weights` in the model; an empty dict: the original weights."""
    with run.stage("loss"):
        if weights:
            run.apply_quantized_weights(weights)
        else:
            run.apply_original_weights()
        return mean_loss(
            run.model, run.windows if windows is None else windows, label=run.label(label) if label else None
        )


def recipe_sections(recipe: Recipe, *names: str) -> dict[str, Any]:
    """The sections of a recipe that a stage depends on, for its key."""
    data = to_dict(recipe)
    return {name: data[name] for name in names}
