"""Draws the figures of `docs/` from `eval/results/*.json`.

    python -m eval.figures          # rewrites docs/figures/*.svg

A figure contains a digest of its numbers, by which a test can tell whether it is up to date: the bytes of an SVG differ
between versions of matplotlib.
"""

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from eval.curve_tables import of_mode_best
from eval.markdown import RESULTS, ROOT, peers, read
from eval.pareto import OURS, PEER, gathered
from eval.pqi_tables import NODE_NAMES, PAPER_ERRORS, widths_of
from eval.sparsity_tables import products_by_shape
from requant.report.plots import BAR, MARKERS, STYLE

FIGURES = ROOT / "docs" / "figures"
GREY = "#808890"  # readable on white and on black: an image cannot take its text colour from the page
MODELS = ("bench-32m", "demo-4m")
SCORES = {
    "gradient": MARKERS["gradient"],
    "hessian": ("Hessian diagonal", *MARKERS["hessian"][1:]),
    "second_order": ("1/2 d'Hd", "s", "#cc79a7"),
    "pqi": ("PQI, 2 nodes", *MARKERS["pqi"][1:]),
}
OTHER = "#e08a00"
# stage in the seconds of a report -> label
STAGE_NAMES = {
    "statistics": "statistics",
    "quantize": "codes",
    "finetuning": "training",
    "diagnosis": "diagnosis",
    "start, load, hashes, save": "start, loading, files",
}

# Results file and keys of each run
WHOLE_RUNS = {
    "1B, one GPU": ("speed-1b-h200", "gradients_overwritten", "one GPU"),
    "1B, two GPUs": ("speed-1b-h200", "gradients_overwritten", "two GPUs"),
    "8B, two GPUs": ("speed-8b-h200", "run_8b_2_gpus"),
}

Points = Mapping[str, Any]


def totals(results: Path) -> Points:
    """Predicted dF of the whole model divided by the measured dF, by score, model and number of bits."""
    found: dict[str, dict[str, float]] = {}
    for model in MODELS:
        for bits, tables in widths_of(results, model).items():
            row = dict(tables["predicted"]["model"])
            whole = [line for line in tables.get("interpolation", []) if line["lambda"] == 1]
            if whole:
                row["second_order"] = whole[0]["half_dHd"]
            found[f"{model}\n{bits} bits"] = {
                score: row[score] / row["measured"] for score in SCORES if score in row
            }
    return found


def blocks(results: Path) -> Points:
    """PQI, Hessian diagonal and measured dF for every block of bench-32m at 3 bits."""
    rows = widths_of(results, "bench-32m").get("3", {}).get("predicted", {}).get("blocks", [])
    return {name: [row[name] for row in rows] for name in ("hessian", "pqi", "measured")} if rows else {}


def nodes(results: Path) -> Points:
    """Backward passes and error (% of dF) of every quadrature rule, by number of bits."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    for bits, tables in widths_of(results, "bench-32m").items():
        rows = [row for row in tables.get("nodes", []) if row["nodes"] in NODE_NAMES]
        if rows:
            found[bits] = [(row["nodes"], row["passes"], row["error_percent"]) for row in rows]
    return found


def curve(results: Path) -> Points:
    """Real bits and KL on bench-32m: mode `best`, codes alone, every peer, and our codebooks without training."""
    rows = read(results, "quality-bench-32m").get("rows", [])
    lines = {"mode best": of_mode_best(rows), "codes alone": [row for row in rows if row["name"] == "codes"]}
    found = {
        label: [(row["bits_per_weight"], row["kl"]) for row in line if row["seed"] == 0]
        for label, line in lines.items()
    }
    for row in peers()["rows"] if rows else ():
        label = "QTIP (best peer)" if row["label"] == "QTIP-3INST" else "other peers"
        found.setdefault(label, []).append((row["bits_per_weight"], row["kl"]))
    return {label: sorted(points) for label, points in found.items() if points}


def sparsity(results: Path) -> Points:
    """Real bits and KL on bench-32m: one-shot 2:4, 2:4 after training, and mode `best`."""
    rows = read(results, "sparsity-bench-32m").get("rows", [])
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        label = "2:4, trained" if row["training_tokens"] else "2:4, one shot"
        found.setdefault(label, []).append((row["bits_per_weight"], row["kl"]))
    plain = curve(results).get("mode best", []) if rows else []
    return {label: sorted(line) for label, line in {**found, "plain codes, mode best": plain}.items() if line}


def sparse_products(results: Path) -> Points:
    """Number of tokens and time of dense bfloat16 divided by that of the best 2:4 product, by shape."""
    return {
        shape: [(row["tokens"], row["ratio"]) for row in rows if "ratio" in row]
        for shape, rows in products_by_shape(results).items()
    }


def stages(results: Path) -> Points:
    """Run -> seconds by stage, for the latest whole runs of mode `best`."""
    found: dict[str, dict[str, float]] = {}
    for name, (file, *keys) in WHOLE_RUNS.items():
        row = read(results, file)
        for key in keys:
            row = row.get(key, {})
        run: dict[str, float] = {}
        for stage, seconds in row.get("seconds", {}).items():
            label = STAGE_NAMES.get(stage, "all else")
            run[label] = run.get(label, 0.0) + seconds
        if run:
            found[name] = run
    return found


def draw_stages(points: Points, figure: Figure) -> None:
    axes = figure.add_subplot()
    labels = sorted({label: None for run in points.values() for label in run}, key="all else".__eq__)
    colors = (OTHER, MARKERS["gradient"][2], MARKERS["pqi"][2], "#cc79a7", BAR, GREY)
    start = [0.0] * len(points)
    for label, color in zip(labels, colors, strict=False):
        seconds = [run.get(label, 0.0) for run in points.values()]
        axes.barh(list(points), seconds, left=start, color=color, label=label, height=0.6)
        start = [each + more for each, more in zip(start, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    figure.legend(loc="outside upper left", ncols=4, frameon=False)


def draw_sparsity(points: Points, figure: Figure) -> None:
    looks = {"2:4, one shot": ("x", GREY), "2:4, trained": ("s", OTHER),
             "plain codes, mode best": ("o-", MARKERS["pqi"][2])}  # fmt: skip
    _draw_kl_by_bits(points, figure, looks, bits="real bits a weight, metadata in hardware order")


def draw_curve(points: Points, figure: Figure) -> None:
    looks = {"mode best": ("o-", MARKERS["pqi"][2]), "codes alone": ("s-", MARKERS["gradient"][2]),
             "QTIP (best peer)": ("x-", OTHER), "other peers": ("x", GREY)}  # fmt: skip
    _draw_kl_by_bits(points, figure, looks, bits="real bits a weight")


def _draw_kl_by_bits(
    points: Points, figure: Figure, looks: Mapping[str, tuple[str, str]], *, bits: str
) -> None:
    axes = figure.add_subplot()
    for label, (marker, color) in looks.items():
        if label in points:
            axes.plot(*zip(*points[label], strict=True), marker, color=color, label=label, markersize=6)
    axes.set_yscale("log")
    axes.set_xlabel(bits)
    axes.set_ylabel("KL to the original, nats")
    figure.legend(loc="outside upper left", ncols=len(looks), frameon=False)


def draw_sparse_products(points: Points, figure: Figure) -> None:
    axes = figure.add_subplot()
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle="--")
    colors = (MARKERS["pqi"][2], OTHER, MARKERS["gradient"][2], GREY)
    for index, (shape, line) in enumerate(points.items()):
        axes.plot(*zip(*line, strict=True), "o-", color=colors[index % 4], label=shape, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("dense time / 2:4 time")
    figure.legend(loc="outside upper left", ncols=4, frameon=False)


def draw_pareto(points: Points, figure: Figure) -> None:
    """Files as points; for each program, a line through those that none of its other files dominates."""
    axes = figure.add_subplot()
    for program, marker, color in ((PEER, "x", GREY), (OURS, "o", MARKERS["pqi"][2])):
        rows = sorted(points[program], key=lambda row: (row["megabytes"], row["kl"]))
        front = [row for i, row in enumerate(rows) if row["kl"] < min([r["kl"] for r in rows[:i]], default=9)]
        axes.plot(
            [row["megabytes"] for row in rows],
            [row["kl"] for row in rows],
            marker,
            color=color,
            label=program,
        )
        axes.plot(
            [row["megabytes"] for row in front], [row["kl"] for row in front], "-", color=color, linewidth=0.8
        )
        for row in rows:
            speed = "" if row["tokens_per_s"] is None else f"\n{row['tokens_per_s']:.0f} tokens/s at 8B"
            below = program == OURS and row in front
            axes.annotate(row["label"] + speed, (row["megabytes"], row["kl"]), xytext=(0, -6 if below else 5),
                          textcoords="offset points", fontsize=7, color=color, va="top" if below else "bottom",
                          ha="right" if program == OURS else "left")  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlim(7, 30)
    axes.set_ylim(1e-3, 3)
    axes.set_xlabel("file of bench-32m, MB (64 at 16 bits)")
    axes.set_ylabel("KL to the original, nats")
    figure.legend(loc="outside upper left", ncols=2, frameon=False)


def draw_totals(points: Points, figure: Figure) -> None:
    axes = figure.add_subplot()
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle="--")
    axes.axhline(0, color=GREY, linewidth=0.8)
    places = list(points)
    for index, (score, (label, marker, color)) in enumerate(SCORES.items()):
        shown = [(place + (index - 1.5) * 0.12, points[name][score])
                 for place, name in enumerate(places) if score in points[name]]  # fmt: skip
        axes.plot(
            [x for x, _ in shown], [y for _, y in shown], marker, color=color, label=label, markersize=7
        )
    axes.set_xticks(range(len(places)), places)
    axes.set_ylabel("predicted dF / measured dF")
    figure.legend(loc="outside upper left", ncols=4, frameon=False)


def draw_blocks(points: Points, figure: Figure) -> None:
    axes = figure.add_subplot()
    axes.bar(range(len(points["measured"])), points["measured"], width=0.7, color=BAR, label="measured")
    for score in ("pqi", "hessian"):
        label, marker, color = MARKERS[score]
        axes.plot(range(len(points[score])), points[score], marker, color=color, label=label, markersize=7)
    axes.set_xlabel("block")
    axes.set_ylabel("dF, nats a token")
    figure.legend(loc="outside upper left", ncols=3, frameon=False)


def draw_nodes(points: Points, figure: Figure) -> None:
    axes = figure.add_subplot()
    for bits, color in zip(points, (MARKERS["pqi"][2], OTHER, MARKERS["gradient"][2]), strict=False):
        for plain, marker in ((True, "x"), (False, "o")):
            rows = sorted((row for row in points[bits] if (row[0] in PAPER_ERRORS) == plain), key=_passes)
            rule = "equal steps, as in the paper" if plain else "midpoint, Gauss, Simpson"
            axes.plot(
                [passes for _, passes, _ in rows],
                [abs(error) for _, _, error in rows],
                marker + ("-" if plain else ""),
                color=color,
                label=f"{bits} bits, {rule}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set_xlabel("backward passes")
    axes.set_ylabel("error of the integral, % of dF")
    figure.legend(loc="outside upper left", ncols=2, frameon=False)


def _passes(row: tuple[str, int, float]) -> int:
    return row[1]


DRAWN: dict[str, tuple[Callable[[Path], Points], Callable[[Points, Figure], None]]] = {
    "pareto": (gathered, draw_pareto),
    "curve": (curve, draw_curve),
    "totals": (totals, draw_totals),
    "blocks": (blocks, draw_blocks),
    "nodes": (nodes, draw_nodes),
    "stages": (stages, draw_stages),
    "sparsity": (sparsity, draw_sparsity),
    "sparse-products": (sparse_products, draw_sparse_products),
}


def digest(points: Points) -> str:
    """The digest that an up-to-date figure contains."""
    return hashlib.sha256(json.dumps(points, sort_keys=True).encode()).hexdigest()[:16]


def svg(name: str, results: Path = RESULTS) -> str:
    """The figure as an SVG; empty if its results do not exist."""
    gather, draw = DRAWN[name]
    points = gather(results)
    if not points:
        return ""
    ink = {key: GREY for key, value in STYLE.items() if value == STYLE["text.color"]}
    with matplotlib.rc_context({**STYLE, **ink}):
        figure = Figure(figsize=(7, 3.6), dpi=96, layout="constrained")
        draw(points, figure)
        buffer = io.StringIO()
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Description": f"numbers {digest(points)}"},
        )
    return buffer.getvalue()


if __name__ == "__main__":
    FIGURES.mkdir(parents=True, exist_ok=True)
    for figure_name in DRAWN:
        text = svg(figure_name)
        if text:
            (FIGURES / f"{figure_name}.svg").write_text(text, encoding="utf-8")
            print(FIGURES / f"{figure_name}.svg")
