"""What a run did and what it cost: one HTML page, and the model card.

The page is one file without scripts or links, light and dark, readable on a phone and offline. Every string
in it may come from a stranger (names of models, of matrices, of files), so the template escapes all of them.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from requant.evaluation import Quality
from requant.plots import plot_width, sensitivity_plot

TEMPLATES = Path(__file__).parent / "templates"
PREFERRED_SCORES = ("pqi", "hessian", "gradient")  # the first one that was computed fills the heat map
SCORE_NAMES = {"pqi": "PQI", "hessian": "Hessian diagonal", "gradient": "gradient", "marginal": "marginal"}


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
    predicted: Mapping[str, float] = field(
        default_factory=dict
    )  # score -> its signed sum: dF in nats a token


@dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """What the statistics were measured on."""

    name: str
    sha256: str
    num_samples: int
    seq_len: int


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Everything the page and the card say, in plain values."""

    model: str  # as asked for: a folder, a hub name, `demo`
    base_model: str | None  # its name on the hub, where it has one
    checkpoint: str  # the folder that was written
    version: str
    method: str
    mode: str
    bits: int | float  # asked for
    bits_per_weight: float  # paid: all bytes of what was quantized, over its weights
    bytes_before: int  # weight files of the model, and of the checkpoint
    bytes_after: int
    sizes: Mapping[str, int]  # part (codes, scales, ..., embedding, head) -> bytes
    matrices: Sequence[MatrixRow]
    calibration: CalibrationText
    recipe: str  # YAML
    before: Quality | None = None
    after: Quality | None = None
    original_loss: float | None = None  # F on the calibration text, nats a token
    measured: float | None = None  # dF of the whole model, there
    measured_blocks: Mapping[int, float] = field(
        default_factory=dict
    )  # block -> dF with that block alone quantized
    seconds: Mapping[str, float] = field(default_factory=dict)  # stage -> wall time
    peak_memory: int = 0  # bytes
    device: str = "cpu"
    warnings: Sequence[str] = ()

    @property
    def scores(self) -> list[str]:
        """The scores that were computed, the trusted one first."""
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
    """Signed sums of one score: a row a block, a column a kind; None where a block lacks it."""

    score: str
    kinds: list[str]
    rows: dict[int, list[float | None]]
    largest: float  # |value|, the full colour


def heat_map(summary: RunSummary) -> HeatMap | None:
    """The heat map of the best score there is; None when no score was computed."""
    if not summary.scores:
        return None
    score = summary.scores[0]
    kinds = list(dict.fromkeys(row.kind for row in summary.matrices))
    sums: dict[tuple[int, str], float] = {}
    for row in summary.matrices:
        place = (row.block, row.kind)
        sums[place] = sums.get(place, 0.0) + row.predicted.get(score, 0.0)
    blocks = sorted({row.block for row in summary.matrices})
    return HeatMap(
        score=score,
        kinds=kinds,
        rows={block: [sums.get((block, kind)) for kind in kinds] for block in blocks},
        largest=max(map(abs, sums.values())) or 1.0,
    )


def render_report(summary: RunSummary) -> str:
    """The page."""
    plot = None
    if summary.scores:
        predicted = {score: summary.predicted_blocks(score) for score in summary.scores}
        plot = Markup(sensitivity_plot(predicted, summary.measured_blocks, format="svg").decode())
    return (
        _environment(escape=True)
        .get_template("report.html")
        .render(
            run=summary,
            heat=heat_map(summary),
            plot=plot,
            plot_width=plot_width(len({row.block for row in summary.matrices})),
            score_names=SCORE_NAMES,
        )
    )


def write_report(summary: RunSummary, path: Path) -> None:
    """`render_report` into a file, in UTF-8."""
    path.write_text(render_report(summary), encoding="utf-8")


def model_card(summary: RunSummary) -> str:
    """README.md of the checkpoint: front matter, results, how to load it, how to make it again."""
    front: dict[str, object] = {"library_name": "requant", "pipeline_tag": "text-generation"}
    if summary.base_model is not None:
        front |= {"base_model": summary.base_model, "base_model_relation": "quantized"}
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
        _environment(escape=False)
        .get_template("model_card.md")
        .render(
            run=summary,
            front_matter=yaml.safe_dump(front, sort_keys=False, allow_unicode=False).strip(),
            command=shlex.join(_one_line(word) for word in command),
        )
    )


def _rank(score: str) -> int:
    return PREFERRED_SCORES.index(score) if score in PREFERRED_SCORES else len(PREFERRED_SCORES)


def _environment(*, escape: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "size": format_bytes,
        "duration": format_seconds,
        "signed": _signed,
        "code": _code,
        "fence": _fence,
        "percent": lambda fraction: f"{100 * fraction:.2f} %",
        "python": lambda text: ascii(_one_line(text)),
    }
    return environment


def format_bytes(count: int | float) -> str:
    """Bytes in binary units: 8397312 -> 8.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: int | float) -> str:
    """3.21 -> 3.2 s; 92 -> 1 min 32 s; 7380 -> 2 h 03 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def _signed(value: int | float) -> str:
    """A difference of losses: a sign, and enough digits to see it."""
    text = f"{value:+.4f}" if abs(value) >= 0.00005 or value == 0 else f"{value:+.0e}"
    return text.replace("-", "−")


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _code(text: str) -> str:
    """A code span of Markdown that nothing in the text can leave, inside a table too."""
    return "`" + _one_line(text).replace("`", "'").replace("|", "¦") + "`"


def _fence(text: str) -> str:
    """A fence of Markdown longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
