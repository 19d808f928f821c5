"""`requant compare`: sizes and quality of several checkpoints, from their own files, as a table and an HTML page.

Bytes come from the headers of the weight files, everything else from the `report.json` that `requant quantize` wrote.
Nothing is measured, unless `compare_checkpoints(..., reference=...)` scores all checkpoints again on one text; numbers
scored on different windows are distinguished by their protocol. The files are untrusted: a value of the wrong type counts
as absent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from requant.checkpoint.header import read_json
from requant.checkpoint.sizes import byte_table
from requant.checkpoint.validate import read_header
from requant.errors import CheckpointError, InputError, printable
from requant.evaluation.compare import evaluate_all
from requant.evaluation.perplexity import Quality, mean_difference, standard_error
from requant.models.loading import resolve_source
from requant.report.pages import budget_parts, environment
from requant.report.plots import quality_plot

REPORT = "report.json"
LARGEST = 1e300  # a larger number counts as absent, so that sums of numbers of a report are finite


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint; None for what its files do not record."""

    name: str
    bytes: int  # of the weight files
    bits_per_weight: float
    spending: Mapping[str, int]  # bytes by what they are spent on
    kinds: Mapping[str, float]  # bits per weight by kind of matrix
    whole_bits_per_weight: float | None = None  # of the weight files
    model: str | None = None
    method: str | None = None
    mode: str | None = None
    original_perplexity: float | None = None
    perplexity: float | None = None
    mean_kl: float | None = None
    p99_kl: float | None = None
    top1_agreement: float | None = None
    window_kl: tuple[float, ...] = ()  # mean KL of each window
    protocol: str | None = None  # of perplexity and KL
    calibration: str | None = None
    delta_loss: float | None = None  # measured dF on the calibration text
    # block -> measured with it alone quantized
    block_delta_loss: Mapping[int, float] = field(default_factory=dict)

    @property
    def kl_error(self) -> float | None:
        """Standard error of the mean KL."""
        return standard_error(self.window_kl)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kl_error": self.kl_error}

    def cells(self) -> dict[str, object]:
        """The row of the terminal's table."""
        return {
            "checkpoint": self.name,
            "method": self.method,
            "bits/weight": self.bits_per_weight,
            "of the file": self.whole_bits_per_weight,
            "MiB": self.bytes / 2**20,
            "perplexity": self.perplexity,
            "mean KL": self.mean_kl,
            "± KL": self.kl_error,
            "p99 KL": self.p99_kl,
            "top-1": self.top1_agreement,
        }


def compare_checkpoints(
    checkpoints: Sequence[str],
    *,
    reference: str | None = None,
    text: Sequence[str] | None = None,
    context: int | None = None,
    windows: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quiet: bool = True,
) -> list[Entry]:
    """One entry per checkpoint, in order; with a `reference`, the original model, their quality is measured again.

    Raises CheckpointError for a folder that is damaged or was not written by requant.
    """
    if reference is None and (text or context or windows):
        raise InputError(
            "--text, --context and --windows measure again; give --reference MODEL, the original, too."
        )
    entries = [read_entry(name) for name in checkpoints]
    if reference is None:
        return entries
    rows = evaluate_all(
        checkpoints,
        text=text,
        context=context,
        windows=windows,
        reference=reference,
        device=device,
        dtype=dtype,
        quiet=quiet,
    )
    return [_with_quality(entry, row.quality) for entry, row in zip(entries, rows, strict=True)]


def read_entry(name: str) -> Entry:
    """What the files of a checkpoint record. Raises CheckpointError for a model in ordinary weights, such as a dense export,
    and for the report of an older version."""
    folder = Path(resolve_source(name))
    if read_json(folder / "config.json").get("quantization_config") is None:
        raise CheckpointError(
            f"{name} is not quantized, and `requant compare` reads what a checkpoint of requant says of itself; "
            "`requant eval MODEL CHECKPOINT --reference ORIGINAL` measures both."
        )
    header = read_header(folder, trust_remote_code=True)  # no code is run here
    table = byte_table(header)
    weights: dict[str, list[int]] = {}
    for matrix, stored in table.matrices.items():
        sums = weights.setdefault(matrix.rpartition(".")[2], [0, 0])
        sums[0] += 8 * stored.bytes
        sums[1] += stored.weights
    entry = Entry(
        name=name,
        bytes=table.bytes,
        bits_per_weight=table.bits_per_weight,
        spending=budget_parts(table.spent),
        kinds={kind: bits / count for kind, (bits, count) in weights.items()},
    )
    try:
        said = read_json(folder / REPORT)
    except CheckpointError:  # missing or damaged
        return entry
    if "measured_blocks" in said:
        raise CheckpointError(
            f"{folder / REPORT} was written by an older requant; quantize again, or delete it."
        )
    before, after, text = (_table(said, key) for key in ("before", "after", "calibration"))
    protocol = _table(after, "protocol")
    return replace(
        entry,
        model=_string(said, "model"),
        method=_string(said, "method"),
        mode=_string(said, "mode"),
        whole_bits_per_weight=_number(said, "whole_bits_per_weight"),
        original_perplexity=_number(before, "perplexity"),
        perplexity=_number(after, "perplexity"),
        mean_kl=_number(after, "mean_kl"),
        p99_kl=_number(after, "p99_kl"),
        top1_agreement=_number(after, "top1_agreement"),
        window_kl=_numbers(after, "window_kl"),
        protocol=_protocol(protocol),
        calibration=_string(text, "name"),
        delta_loss=_number(said, "delta_loss"),
        block_delta_loss=_blocks(_table(said, "block_delta_loss")),
    )


def kl_above_first(entries: Sequence[Entry]) -> list[tuple[float, float] | None]:
    """For each entry its mean KL less that of the first, with the standard error of that difference, paired by window."""
    first, *others = entries
    found: list[tuple[float, float] | None] = [None]
    for entry in others:
        same = entry.protocol is not None and entry.protocol == first.protocol
        found.append(mean_difference(entry.window_kl, first.window_kl) if same else None)
    return found


def same_text(entries: Sequence[Entry]) -> bool:
    """Whether the qualities may be compared: one protocol, and every entry has it."""
    return len({entry.protocol for entry in entries}) == 1 and entries[0].protocol is not None


def render_comparison(entries: Sequence[Entry], *, answer: str | None = None) -> str:
    """The HTML page: one file without scripts or links.

    With an `answer`, the entries are a sweep over one model's budgets: the text stands on top, and a line joins them.
    """
    labels = _labels([entry.name for entry in entries])
    measure = "mean_kl" if all(entry.mean_kl is not None for entry in entries) else "perplexity"
    points = {
        label: (entry.bytes, value, entry.kl_error if measure == "mean_kl" else None)
        for label, entry in zip(labels, entries, strict=True)
        if (value := getattr(entry, measure)) is not None
    }
    plot = None
    if len(points) > 1:
        axis = "mean KL, nats per token" if measure == "mean_kl" else "perplexity"
        plot = Markup(quality_plot(points, measure=axis, joined=answer is not None).decode())
    kinds = list(dict.fromkeys(kind for entry in entries for kind in entry.kinds))
    blocks = sorted({block for entry in entries for block in entry.block_delta_loss})
    rows = {block: [entry.block_delta_loss.get(block) for entry in entries] for block in blocks}
    values = [abs(value) for row in rows.values() for value in row if value is not None]
    return (
        environment(escape=True)
        .get_template("compare.html")
        .render(
            entries=entries,
            answer=answer,
            labels=labels,
            plot=plot,
            kinds=kinds,
            blocks=rows,
            largest=max(values, default=0.0) or 1.0,
            same_text=same_text(entries),
            above=kl_above_first(entries),
            parts={part for entry in entries for part in entry.spending},
            largest_bytes=max(entry.bytes for entry in entries),
        )
    )


def note(entries: Sequence[Entry]) -> str:
    """The line below the table: what the numbers were scored on."""
    if same_text(entries):
        return f"scored on {entries[0].protocol}"
    return "not all scored, or not on the same windows of one text: --reference MODEL measures all of them on one."


def _labels(names: Sequence[str]) -> list[str]:
    """The last part of each path, or the whole where that is not enough to tell them apart."""
    short = [printable(Path(name).name or name) for name in names]
    return short if len(set(short)) == len(short) else [printable(name) for name in names]


def _with_quality(entry: Entry, quality: Quality) -> Entry:
    return replace(
        entry,
        original_perplexity=quality.reference_perplexity,
        perplexity=quality.perplexity,
        mean_kl=quality.mean_kl,
        p99_kl=quality.p99_kl,
        top1_agreement=quality.top1_agreement,
        window_kl=quality.window_kl,
        protocol=_protocol(asdict(quality.protocol)),
    )


def _table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _numbers(values: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """A list of finite numbers; empty where it is none."""
    found = values.get(key)
    if not isinstance(found, list) or not all(type(each) in (int, float) for each in found):
        return ()
    return tuple(map(float, found)) if all(abs(each) < LARGEST for each in found) else ()


def _string(values: Mapping[str, Any], key: str) -> str | None:
    found = values.get(key)
    return found[:200] if isinstance(found, str) else None


def _number(values: Mapping[str, Any], key: str) -> float | None:
    found = values.get(key)
    # not `math.isfinite`, which raises for a whole number that no float holds
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < LARGEST:
        return None
    return float(found)


def _blocks(values: Mapping[str, Any]) -> dict[int, float]:
    numbers = {key: _number(values, key) for key in values if key.isdecimal() and len(key) < 6}
    return {int(key): value for key, value in numbers.items() if value is not None}


def _protocol(values: Mapping[str, Any]) -> str | None:
    """Text, hash and windows in one line: equal lines are equal protocols."""
    text, digest = _string(values, "text"), _string(values, "sha256")
    windows, context = _number(values, "windows"), _number(values, "context")
    if text is None or digest is None or windows is None or context is None:
        return None
    return f"{text} (sha256 {digest[:12]}), {windows:.0f} x {context:.0f} tokens"
