"""Predicted against measured: what each score says quantization costs, and what it actually costs.

    predicted dF = signed sum of a score over a matrix, a block or the model
    measured  dF = F(w~) - F(w) with only the block's matrices of one kind, the block, or the whole model, quantized

F is the mean cross-entropy on the calibration text, in nats per token. PQI must agree with the measured total: it is the
same integral (`sensitivity/pqi.py`), so a disagreement means too few nodes; but F of a mixture of experts jumps where a
token changes its experts, and the integral leaves the jumps out. In most models a block has one matrix of a kind. Experts of
a layer are measured together: a pass for each of some 18,000 matrices would take longer than their codes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from jaxtyping import Int64
from torch import Tensor

from requant import ranks
from requant.allocation.embedding_and_head import QuantizedEmbeddingAndHead
from requant.calibration.passes import mean_loss
from requant.models.hosted import hosted_blocks
from requant.models.targets import QuantTarget, by_block, by_kind_in_block
from requant.progress import tracked
from requant.run.context import RunContext, Weights, loss
from requant.sensitivity.path import Scores, signed_sum
from requant.sensitivity.pqi import pqi_of_finetuned_params
from requant.sensitivity.scores import score_weights
from requant.sensitivity.sums import score_sums

K = TypeVar("K")
DIAGNOSED_TOKENS = 4096  # PQI equals dF on any text, so a small one serves
KIND_TOKENS_ON_CPU = 1024  # a pass over the model for every kind in every block takes the longest ...
KIND_WEIGHTS_ON_CPU = 200_000_000  # ... and hours for models with more weights than this
DISAGREEMENT = 0.02  # of the measured dF: above it the report warns


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Signed sums of scores, and measured differences of F, nats per token."""

    predicted: Mapping[str, Mapping[str, float]]  # score -> matrix -> signed sum
    delta_loss: float  # measured, with all matrices quantized
    # block -> measured with that block alone quantized; empty where that was not measured
    block_delta_loss: Mapping[int, float]
    original_loss: float  # with all matrices original
    tokens: int
    # block and kind -> measured with these matrices alone quantized; empty where that was not measured
    kind_delta_loss: Mapping[tuple[int, str], float] = field(default_factory=dict)
    embedding_and_head_delta: float = 0.0  # measured for the two tables alone, all matrices original
    other_params_delta: float = 0.0  # PQI of the norms, biases and embeddings that finetuning changed

    def total(self, name: str) -> float:
        """dF of the whole model as the score `name` predicts it."""
        return sum(self.predicted[name].values())

    @property
    def disagreement(self) -> float | None:
        """|PQI total - measured| over |measured|; None where PQI was not asked for or nothing was lost.

        What finetuning gained may cancel what codes cost: then over the larger of the two.
        """
        scale = max(abs(self.delta_loss), abs(self.other_params_delta))
        if "pqi" not in self.predicted or scale < 1e-6:
            return None
        return abs(self.total("pqi") + self.other_params_delta - self.delta_loss) / scale


def diagnosed_windows(windows: Int64[Tensor, "b t"]) -> Int64[Tensor, "d t"]:
    """The first of these windows, on which dF is predicted and measured after a run."""
    return windows[: max(1, DIAGNOSED_TOKENS // windows.shape[1])]


def diagnose(
    run: RunContext,
    weights: Weights,
    windows: Int64[Tensor, "b t"],
    *,
    names: Sequence[str],
    on_scores: Callable[[str, Scores], None] | None = None,
    embedding_and_head: QuantizedEmbeddingAndHead | None = None,
    by_kind: bool = False,
) -> Diagnosis:
    """What every score in `names` predicts, and the measured dF of the whole model and of each block alone; the model
    is left at `weights`.

    `on_scores(name, scores)` is called with the scores of every weight before they are freed; without it only their sums
    are computed, which takes no memory. With `embedding_and_head`, these tables are quantized first and their own dF is
    measured; scores then start from there. With `by_kind`, the dF of every kind of matrix in every block is measured too: on
    a GPU on all windows, on a CPU on their first KIND_TOKENS_ON_CPU tokens, and only for models of up to
    KIND_WEIGHTS_ON_CPU weights. Parts are not measured alone where the model's matrices are on the host.
    """
    path = run.path(weights)
    predicted: dict[str, dict[str, float]] = {}
    with run.stage("diagnosis"):
        unquantized = None
        if embedding_and_head is not None and embedding_and_head.weights:
            unquantized = loss(run, {}, windows=windows)
            embedding_and_head.apply_weights(quantized=True)
        for name in names:
            nodes, label = run.recipe.sensitivity.nodes, run.label(f"predicted by {name}")
            if on_scores is None:
                predicted[name] = score_sums(name, path, windows, nodes=nodes, label=label)
                continue
            values = score_weights(name, path, windows, nodes=nodes, label=label)
            sums = {matrix: signed_sum(tensor) for matrix, tensor in values.items()}
            predicted[name] = ranks.of_all(run.targets, sums)
            on_scores(name, values)
            del values
        other_params_delta = (
            pqi_of_finetuned_params(path, windows, nodes=run.recipe.sensitivity.nodes)
            if run.finetuned_params
            else 0.0
        )
        original = loss(run, {}, windows=windows)
        delta_loss = loss(run, weights, windows=windows) - original
        alone = hosted_blocks(run.model) is None  # else a pass brings the whole model to the GPU
        blocks = measured_by_block(run, weights, windows, original) if alone else {}
        kinds = measured_by_kind(run, weights, windows) if by_kind and alone else {}
        run.apply_quantized_weights(weights)
    return Diagnosis(
        predicted=predicted,
        delta_loss=delta_loss,
        block_delta_loss=blocks,
        kind_delta_loss=kinds,
        embedding_and_head_delta=0.0 if unquantized is None else original - unquantized,
        other_params_delta=other_params_delta,
        original_loss=original,
        tokens=windows.numel(),
    )


def measured_by_block(
    run: RunContext, weights: Weights, windows: Int64[Tensor, "b t"], original: float
) -> dict[int, float]:
    """dF with one block quantized and all others original; the model is left at the originals."""
    groups = {members[0].block: members for members in by_block(run.targets)}
    return _measured_alone(run, weights, windows, original, groups, label="block")


def measured_by_kind(
    run: RunContext, weights: Weights, windows: Int64[Tensor, "b t"]
) -> dict[tuple[int, str], float]:
    """dF with a block's matrices of one kind quantized and all others original; the model is left at the originals where
    that is measured."""
    if run.model.device.type != "cuda":
        if run.total_weights > KIND_WEIGHTS_ON_CPU:
            return {}
        windows = windows[: max(1, KIND_TOKENS_ON_CPU // windows.shape[1])]
    run.apply_original_weights()
    original = mean_loss(run.model, windows, split=False)
    return _measured_alone(run, weights, windows, original, by_kind_in_block(run.targets), label="kind")


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
    run.apply_original_weights()
    found: list[float] = []
    own = ranks.mine(list(groups.values()))
    for members in tracked(own, label=run.label(f"measured by {label}"), unit=""):
        for target in members:
            target.set_weight(weights[target.name].dequantize())
        found.append(mean_loss(run.model, windows, split=False) - original)
        for target in members:
            target.set_weight(path.start(target))
    return dict(zip(groups, ranks.merged(found), strict=True))
