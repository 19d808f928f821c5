"""Predicted against measured: what each score says the quantization costs, and what it does cost.

    predicted dF = signed sum of a score over a matrix, a block or the model
    measured  dF = F(w~) - F(w) with only that block, or the whole model, quantized

Nats a token, on the calibration text. PQI must agree with the measured total: it is the same integral.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Int64
from torch import Tensor
from tqdm import tqdm

from requant.calibration.passes import mean_loss
from requant.run import Run, Weights, loss
from requant.sensitivity import Scores, signed_sum
from requant.sensitivity.scores import score

DISAGREEMENT = 0.02  # of the measured dF: above it the report warns


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Signed sums and differences of F, nats a token."""

    predicted: Mapping[str, Mapping[str, float]]  # score -> matrix -> signed sum
    measured_blocks: Mapping[int, float]  # block -> dF with that block alone quantized
    measured: float
    original_loss: float
    tokens: int

    def total(self, name: str) -> float:
        return sum(self.predicted[name].values())

    def block(self, name: str, names_of_block: Sequence[str]) -> float:
        return sum(self.predicted[name][matrix] for matrix in names_of_block)

    @property
    def disagreement(self) -> float | None:
        """|PQI total - measured| over |measured|; None where PQI was not asked for or nothing was lost."""
        if "pqi" not in self.predicted or abs(self.measured) < 1e-6:
            return None
        return abs(self.total("pqi") - self.measured) / abs(self.measured)


def diagnose(
    run: Run,
    weights: Weights,
    windows: Int64[Tensor, "b t"],
    *,
    names: Sequence[str],
    keep: Callable[[str, Scores], None] | None = None,
) -> Diagnosis:
    """Every score in `names`, the measured dF of the model and of each block alone; `keep` receives the scores."""
    path = run.path(weights)
    predicted: dict[str, dict[str, float]] = {}
    with run.stage("diagnosis"):
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
        original = loss(run, {}, windows=windows)
        measured = loss(run, weights, windows=windows) - original
        blocks = measured_by_block(run, weights, windows, original)
    return Diagnosis(
        predicted=predicted,
        measured_blocks=blocks,
        measured=measured,
        original_loss=original,
        tokens=windows.numel(),
    )


def measured_by_block(
    run: Run, weights: Weights, windows: Int64[Tensor, "b t"], original: float
) -> dict[int, float]:
    """dF with one block quantized and all others original; the model is left at `weights`."""
    path = run.path(weights)
    path.place(0.0)
    found: dict[int, float] = {}
    for block in tqdm(
        dict.fromkeys(site.block for site in run.sites),
        desc="measured by block",
        disable=run.quiet,
        unit="block",
    ):
        members = [site for site in run.sites if site.block == block]
        for site in members:
            site.set_weight(weights[site.name].dequantize())
        found[block] = mean_loss(run.model, windows) - original
        for site in members:
            site.set_weight(path.start(site))
    path.place(1.0)
    return found
