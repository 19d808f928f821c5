"""What a run did and what it cost: one HTML page, and the model card.

The page is one file without scripts or links, for light and dark mode, readable on a phone and offline. Names of models,
matrices and files are untrusted input, so the template escapes every string.
"""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml
from markupsafe import Markup

from requant.errors import printable
from requant.evaluation.perplexity import Quality
from requant.evaluation.samples import Sample
from requant.pipeline.sparse_verdict import SparseVerdict
from requant.report.pages import (
    QUANTIZED,
    budget_parts,
    environment,
)
from requant.report.plots import alternatives_plot, plot_width, sensitivity_plot
from requant.run.context import Split

__all__ = [
    "CalibrationText",
    "MatrixRow",
    "RunSummary",
    "HeatMap",
    "heat_map",
    "render_report",
    "model_card",
]
PREFERRED_SCORES = ("pqi", "hessian", "gradient")  # the first one that was computed fills the heat map


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """One quantized matrix."""

    name: str  # as in the checkpoint: model.layers.0.self_attn.q_proj
    block: int
    kind: str  # q_proj
    n: int
    k: int
    bits: float  # all its bytes, over its weights
    sparse_fraction: float
    size_bytes: int
    # score -> its signed sum: dF in nats per token
    predicted: Mapping[str, float] = field(default_factory=dict)
    tokens: int | None = None  # of the calibration text that were routed to it, for a matrix of an expert


@dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """What the statistics were measured on."""

    name: str
    sha256: str
    num_samples: int
    seq_len: int


@dataclass(frozen=True, kw_only=True)
class BudgetSummary:
    """The budget, the bytes written, and the loss that the allocation predicted."""

    target: str  # 2.25 bits per weight, 600MB
    bytes: int
    written: int
    predictor: str
    predicted: float | None  # nats per token
    loss_curve: Mapping[int, float]  # bytes of other budgets -> predicted loss
    embedding_bits: int | float
    head_bits: int | float
    token_table_bits: Mapping[str, int | float] = field(default_factory=dict)
    best_split: Split | None = None  # of a file as large


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """All values of the page and the card."""

    model: str  # as asked for: a folder, a hub name, `demo`
    base_model: str | None  # its name on the hub, where it has one
    checkpoint: str  # the folder that was written
    version: str
    method: str
    mode: str
    bits: int | float  # as requested
    bits_per_weight: float  # all bytes of the quantized matrices, over their weights
    whole_bits_per_weight: float  # all bytes of the weight files, over all weights
    bytes_before: int  # weight files of the model, and of the checkpoint
    bytes_after: int
    sizes: Mapping[str, int]  # part (codes, scales, ..., embedding, head) -> bytes
    matrices: Sequence[MatrixRow]
    calibration: CalibrationText
    recipe: str  # YAML
    # of the same text, that a trained run may have seen, and those that the original wrote itself
    training_windows: int = 0
    own_windows: int = 0
    budget: BudgetSummary | None = None
    before: Quality | None = None
    after: Quality | None = None
    original_loss: float | None = None  # F on the calibration text, nats per token
    delta_loss: float | None = None  # measured dF of the whole model, there
    embedding_and_head_delta: float | None = None  # dF of embedding and head, where they were quantized
    # PQI of the finetuned norms, biases and embeddings, a part of `delta_loss`
    other_params_delta: float | None = None
    # block -> dF with that block alone quantized
    block_delta_loss: Mapping[int, float] = field(default_factory=dict)
    # block -> kind -> measured dF with these matrices alone quantized
    kind_delta_loss: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)  # stage -> wall time
    peak_memory: int = 0  # bytes
    device: str = "cpu"
    warnings: Sequence[str] = ()
    samples: Sequence[Sample] = ()
    flip_rates: Sequence[float] = ()  # of 2:4 masks, by update
    verdict: SparseVerdict | None = None  # of a 2:4 run
    auto_class: str = "AutoModelForCausalLM"  # of transformers, that loads the checkpoint
    # licence and languages by the original's model card
    terms: Mapping[str, str | list[str]] = field(default_factory=dict)

    @property
    def spending(self) -> dict[str, int]:
        """What the bytes are spent on."""
        return budget_parts(self.sizes)

    @property
    def weights(self) -> int:
        """Number of weights of all quantized matrices."""
        return sum(row.n * row.k for row in self.matrices)

    @property
    def scores(self) -> list[str]:
        """The scores that were computed, in order of `PREFERRED_SCORES`."""
        found = {name for row in self.matrices for name in row.predicted}
        return sorted(found, key=lambda name: (_rank(name), name))

    def predicted(self, score: str) -> float:
        """dF of the whole model by the signed sum of a score."""
        return sum((row.predicted.get(score, 0.0) for row in self.matrices), 0.0)

    def predicted_blocks(self, score: str) -> dict[int, float]:
        """Block -> dF by the signed sum of a score."""
        blocks = dict.fromkeys(sorted({row.block for row in self.matrices}), 0.0)
        for row in self.matrices:
            blocks[row.block] += row.predicted.get(score, 0.0)
        return blocks

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """dF by block (rows) and kind (columns), None where a block lacks it: signed sums of one score, and measured."""

    score: str
    kinds: list[str]
    rows: dict[int, list[float | None]]
    measured: dict[
        int, list[float | None]
    ]  # with these matrices alone quantized; empty where that was not measured
    alone: dict[str, float]  # matrix -> measured dF, where its block has no other of its kind
    largest: float  # |value| of either, the full colour


def heat_map(summary: RunSummary) -> HeatMap | None:
    """The heat map of the first score in `PREFERRED_SCORES` that was computed; None without any."""
    if not summary.scores:
        return None
    score = summary.scores[0]
    kinds = list(dict.fromkeys(row.kind for row in summary.matrices))
    blocks = sorted({row.block for row in summary.matrices})
    predicted: dict[tuple[int, str], float] = {}
    measured = {
        (block, kind): value
        for block, values in summary.kind_delta_loss.items()
        for kind, value in values.items()
    }
    for row in summary.matrices:
        cell = (row.block, row.kind)
        predicted[cell] = predicted.get(cell, 0.0) + row.predicted.get(score, 0.0)

    members = Counter((row.block, row.kind) for row in summary.matrices)
    alone = {row.name: (row.block, row.kind) for row in summary.matrices if members[row.block, row.kind] == 1}

    def grid(values: Mapping[tuple[int, str], float]) -> dict[int, list[float | None]]:
        return {block: [values.get((block, kind)) for kind in kinds] for block in blocks}

    return HeatMap(
        score=score,
        kinds=kinds,
        rows=grid(predicted),
        measured=grid(measured) if measured else {},
        alone={name: measured[cell] for name, cell in alone.items() if cell in measured},
        largest=max(map(abs, [*predicted.values(), *measured.values()])) or 1.0,
    )


def render_report(summary: RunSummary) -> str:
    """The HTML page."""
    plot = None
    if summary.scores:
        predicted = {score: summary.predicted_blocks(score) for score in summary.scores}
        plot = Markup(sensitivity_plot(predicted, summary.block_delta_loss).decode())
    curve = None
    if summary.budget is not None and summary.budget.loss_curve and summary.budget.predicted is not None:
        chosen = (summary.budget.written, summary.budget.predicted)
        measured = summary.delta_loss
        if measured is not None:
            measured += summary.embedding_and_head_delta or 0.0
        curve = Markup(alternatives_plot(summary.budget.loss_curve, chosen, measured).decode())
    return (
        environment(escape=True)
        .get_template("report.html")
        .render(
            run=summary,
            heat=heat_map(summary),
            plot=plot,
            plot_width=plot_width(len({row.block for row in summary.matrices})),
            curve=curve,
            quantized_parts=QUANTIZED,
        )
    )


def model_card(summary: RunSummary) -> str:
    """README.md of the checkpoint: front matter, results, how to load it, how to make it again."""
    front: dict[str, object] = {"library_name": "requant", "pipeline_tag": "text-generation"}
    if summary.base_model is not None:
        front |= {"base_model": summary.base_model, "base_model_relation": "quantized"}
    front |= summary.terms
    front["tags"] = ["requant", "quantized", f"{summary.bits:g}-bit", summary.method]
    command = [
        "requant",
        "quantize",
        "--model",
        summary.model,
        "--recipe",
        "recipe.yaml",
        "--output",
        summary.checkpoint,
    ]
    return (
        environment(escape=False)
        .get_template("model_card.md")
        .render(
            run=summary,
            front_matter=yaml.safe_dump(front, sort_keys=False, allow_unicode=False).strip(),
            command=shlex.join(printable(word) for word in command),
        )
    )


def _rank(score: str) -> int:
    return PREFERRED_SCORES.index(score) if score in PREFERRED_SCORES else len(PREFERRED_SCORES)
