"""The plots of the pages: predicted and measured loss, other budgets, size against quality, as SVG.

They are drawn without pyplot, so that no global state of matplotlib is read or changed. An SVG takes its line colour from
the page (`currentColor`), so that it is readable in light and dark mode; the same numbers give the same bytes.
"""

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

INK = "#0b0c0d"  # replaced by `currentColor` in an SVG; no plotted colour uses it
BAR = "#9aa4ae"
CHOSEN = "#d55e00"
LOG_FROM = 5  # times: from there on two ticks at 1, 2 or 5 are sure to be in sight
MARKERS = {  # colours of Okabe and Ito, told apart by the colour-blind, and readable on white and on black
    "pqi": ("PQI", "o", "#0a84d0"),
    "hessian": ("Hessian diagonal", "D", "#e08a00"),
    "gradient": ("gradient", "^", "#009e73"),
    "marginal": ("marginal", "s", "#cc79a7"),
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "requant",
    "font.size": 11,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def plot_width(blocks: int) -> int:
    """Width of the plot in CSS pixels; it grows with the blocks so that they stay apart."""
    return max(480, 26 * blocks + 110)


def sensitivity_plot(
    predicted: Mapping[str, Mapping[int, float]],
    measured: Mapping[int, float],
) -> bytes:
    """SVG: dF of every block: measured as bars, one marker per score. Nats per token.

    `predicted` is score -> block -> signed sum, `measured` block -> dF with that block alone quantized (may
    be empty).
    """
    blocks = sorted({block for values in predicted.values() for block in values} | set(measured))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(plot_width(len(blocks)) / 96, 3.3), dpi=96, layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(0, color=INK, linewidth=0.8)
        if measured:
            axes.bar(list(measured), list(measured.values()), width=0.7, color=BAR, label="measured")
        for score, values in predicted.items():
            label, marker, color = MARKERS.get(score, (score, "x", BAR))
            axes.plot(list(values), list(values.values()), marker, color=color, label=label, markersize=6)
        step = max(1, round(len(blocks) / 24))
        axes.set_xticks(blocks[::step])
        axes.set_xlabel("block")
        axes.set_ylabel("dF, nats per token")
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return _svg(figure)


def alternatives_plot(
    curve: Mapping[int, float], chosen: tuple[int, float], measured: float | None = None
) -> bytes:
    """SVG: the loss that the allocator predicted at other budgets (bytes -> dF) and at the one that was taken.

    `measured`: the loss that was measured there; it includes what training and a sparse part gained.
    """
    points = sorted({**curve, chosen[0]: chosen[1]}.items())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5, 3), dpi=96, layout="constrained")
        axes = figure.add_subplot()
        sizes, losses = [size / 2**20 for size, _ in points], [loss for _, loss in points]
        axes.plot(sizes, losses, "-o", color=MARKERS["pqi"][2], label="predicted, codes alone")
        axes.plot(chosen[0] / 2**20, chosen[1], "D", color=CHOSEN, markersize=9, label="taken")
        if measured is not None:
            axes.plot(chosen[0] / 2**20, measured, "x", color=CHOSEN, markersize=10, label="measured")
        _log_if_wide(axes, losses if measured is None else [*losses, measured])
        axes.set_xlabel("MiB")
        axes.set_ylabel("dF, nats per token")
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
        return _svg(figure)


def quality_plot(
    points: Mapping[str, tuple[int, float, float | None]], *, measure: str, joined: bool = False
) -> bytes:
    """SVG: size against quality, a marker a checkpoint, named in the legend.

    Points are (bytes of the weight files, measure, its standard error or None, drawn as a bar). `joined` draws a line
    through them, by size. Where the measure spans a factor of LOG_FROM its axis is logarithmic, so that one damaged
    checkpoint does not press the others into one line.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5, 3 + 0.22 * len(points)), dpi=96, layout="constrained")
        axes = figure.add_subplot()
        axes.margins(0.15)
        if joined:
            line = sorted((size, value) for size, value, _ in points.values())
            axes.plot(
                [size / 2**20 for size, _ in line], [value for _, value in line], "-", color=BAR, zorder=1
            )
        _, markers, colors = zip(*MARKERS.values(), strict=True)
        named: dict[str, Any] = {}  # given to the legend, which would leave out a label that begins with _
        # four colours and five markers: the twenty first pairs differ
        styles = zip(itertools.cycle([*markers, "v"]), itertools.cycle(colors), strict=False)
        for (name, (size, value, error)), (marker, color) in zip(points.items(), styles, strict=False):
            named[name.replace("$", r"\$")] = axes.plot(  # names are text, not formulas
                size / 2**20, value, marker, color=color, markersize=8
            )[0]
            if error is not None:
                axes.errorbar(size / 2**20, value, yerr=error, color=color, capsize=3, zorder=1.5)
        axes.set_xlabel("weight files, MiB")
        axes.set_ylabel(measure)
        if not _log_if_wide(axes, [value for _, value, _ in points.values()]):
            axes.set_ylim(bottom=0 if measure.startswith("mean KL") else None)
        figure.legend([*named.values()], [*named], loc="outside lower left", frameon=False)
        return _svg(figure)


def _log_if_wide(axes: Axes, values: Sequence[float]) -> bool:
    """Whether the y axis was made logarithmic: the values span a factor of LOG_FROM. Ticks at 1, 2 and 5, as decimals."""
    if not 0 < LOG_FROM * min(values) <= max(values):
        return False
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    return True


def _svg(figure: Figure) -> bytes:
    """The figure as SVG without an XML prologue, so that a page can hold it; the same bytes for the same numbers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue().decode().replace(INK, "currentColor")
    return svg[svg.index("<svg") :].encode()
