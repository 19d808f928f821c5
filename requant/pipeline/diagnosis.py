"""Predicted against measured: what each score says the quantization costs, and what it does cost.

    predicted dF = signed sum of a score over a matrix, a block or the model
    measured  dF = F(w~) - F(w) with only that block, or the whole model, quantized

Nats a token, on the calibration text. PQI must agree with the measured total: it is the same integral.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from jaxtyping import Int64
from torch import Tensor
from tqdm import tqdm

from requant.allocation.embedding_and_head import QuantizedEmbeddingAndHead
from requant.calibration.passes import mean_loss
from requant.models.targets import QuantTarget
from requant.run.context import RunContext, Weights, loss
from requant.sensitivity.path import Scores, signed_sum
from requant.sensitivity.pqi import pqi_of_finetuned_params
from requant.sensitivity.scores import score

K = TypeVar("K")
MAPPED_TOKENS = 1024  # on a CPU, a pass over the model for every matrix takes the longest ...
MAPPED_WEIGHTS = 200_000_000  # ... and hours above this size
DISAGREEMENT = 0.02  # of the measured dF: above it the report warns


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Signed sums and differences of F, nats a token."""

    predicted: Mapping[str, Mapping[str, float]]  # score -> matrix -> signed sum
    measured_blocks: Mapping[int, float]  # block -> dF with that block alone quantized
    measured: float
    original_loss: float  # with all matrices original
    tokens: int
    measured_matrices: Mapping[str, float] = field(
        default_factory=dict
    )  # matrix -> dF with it alone quantized
    vocabulary: float = 0.0  # dF of quantizing embedding and head, all matrices original
    beside: float = 0.0  # PQI of the norms, biases and embeddings that tuning changed

    def total(self, name: str) -> float:
        return sum(self.predicted[name].values())

    def block(self, name: str, names_of_block: Sequence[str]) -> float:
        return sum(self.predicted[name][matrix] for matrix in names_of_block)

    @property
    def disagreement(self) -> float | None:
        """|PQI total - measured| over |measured|; None where PQI was not asked for or nothing was lost.

        What training gained may cancel what codes cost: then over the larger of the two.
        """
        scale = max(abs(self.measured), abs(self.beside))
        if "pqi" not in self.predicted or scale < 1e-6:
            return None
        return abs(self.total("pqi") + self.beside - self.measured) / scale


def diagnose(
    run: RunContext,
    weights: Weights,
    windows: Int64[Tensor, "b t"],
    *,
    names: Sequence[str],
    keep: Callable[[str, Scores], None] | None = None,
    vocabulary: QuantizedEmbeddingAndHead | None = None,
    by_matrix: bool = False,
) -> Diagnosis:
    """Every score in `names`, the measured dF of the model and of each block alone; `keep` receives the scores.

    With `vocabulary`, embedding and head are quantized first: the scores are of the step from there, and the dF of
    those two tables is measured for itself. With `by_matrix`, so is that of every matrix alone, on a GPU on all of the
    windows, elsewhere on the first MAPPED_TOKENS of them and only up to MAPPED_WEIGHTS.
    """
    path = run.path(weights)
    predicted: dict[str, dict[str, float]] = {}
    with run.stage("diagnosis"):
        untouched = None
        if vocabulary is not None and vocabulary.weights:
            untouched = loss(run, {}, windows=windows)
            vocabulary.place(quantized=True)
        for name in names:
            values = score(
                name,
                path,
                windows,
                nodes=run.recipe.sensitivity.nodes,
                label=run.label(f"predicted by {name}"),
            )
            predicted[name] = {matrix: signed_sum(tensor) for matrix, tensor in values.items()}
            if keep is not None:
                keep(name, values)
            del values
        beside = (
            pqi_of_finetuned_params(path, windows, nodes=run.recipe.sensitivity.nodes)
            if run.finetuned_params
            else 0.0
        )
        original = loss(run, {}, windows=windows)
        measured = loss(run, weights, windows=windows) - original
        blocks = measured_by_block(run, weights, windows, original)
        matrices = measured_by_matrix(run, weights, windows) if by_matrix else {}
    return Diagnosis(
        predicted=predicted,
        measured_blocks=blocks,
        measured=measured,
        beside=beside,
        vocabulary=0.0 if untouched is None else original - untouched,
        original_loss=original,
        tokens=windows.numel(),
        measured_matrices=matrices,
    )


def measured_by_block(
    run: RunContext, weights: Weights, windows: Int64[Tensor, "b t"], original: float
) -> dict[int, float]:
    """dF with one block quantized and all others original; the model is left at `weights`."""
    groups = {
        block: [s for s in run.targets if s.block == block]
        for block in dict.fromkeys(s.block for s in run.targets)
    }
    return _measured_alone(run, weights, windows, original, groups, label="block")


def measured_by_matrix(run: RunContext, weights: Weights, windows: Int64[Tensor, "b t"]) -> dict[str, float]:
    """dF with one matrix quantized and all others original; the model is left at `weights`."""
    if run.model.device.type != "cuda":
        if run.total_weights > MAPPED_WEIGHTS:
            return {}
        windows = windows[: max(1, MAPPED_TOKENS // windows.shape[1])]
    run.path(weights).place(0.0)
    original = mean_loss(run.model, windows)
    groups = {target.name: [target] for target in run.targets}
    return _measured_alone(run, weights, windows, original, groups, label="matrix")


def _measured_alone(
    run: RunContext,
    weights: Weights,
    windows: Int64[Tensor, "b t"],
    original: float,
    groups: Mapping[K, Sequence[QuantTarget]],
    *,
    label: str,
) -> dict[K, float]:
    """dF with each group of matrices quantized by itself."""
    path = run.path(weights)
    path.place(0.0)
    found: dict[K, float] = {}
    for key, members in tqdm(groups.items(), desc=f"measured by {label}", disable=run.quiet, unit=label):
        for target in members:
            target.set_weight(weights[target.name].dequantize())
        found[key] = mean_loss(run.model, windows) - original
        for target in members:
            target.set_weight(path.start(target))
    path.place(1.0)
    return found
