"""Tables of `eval.quality`: mode `best` by budget, beside the best peer, and with parts left out."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.markdown import PEERS, markdown, read


def best_peer(bits: float) -> tuple[float, str]:
    """KL of the best peer at these bits, by the line through QTIP's three points, straight in log KL; "~" beyond them."""
    rows = json.loads(PEERS.read_text(encoding="utf-8"))["rows"]
    points = sorted(
        (row["bits_per_weight"], math.log(row["kl"])) for row in rows if row["label"] == "QTIP-3INST"
    )
    below = max((i for i, (at, _) in enumerate(points) if at <= bits), default=0)
    (x0, y0), (x1, y1) = points[min(below, len(points) - 2) :][:2]
    beyond = not points[0][0] - 0.1 < bits < points[-1][0] + 0.1
    return math.exp(y0 + (y1 - y0) * (bits - x0) / (x1 - x0)), "~" * beyond


def of_mode_best(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of mode `best`; of a budget where its default was not measured, those of the shorter training."""
    default = {row["bits"] for row in found if row["name"] == "best"}
    return [
        row
        for row in found
        if row["name"] == "best" or (row["name"] == "short" and row["bits"] not in default)
    ]


def quality_table(results: Path) -> str:
    """Mode `best` at every budget beside the best peer at the same bits, and codes alone; * marks the shorter training."""
    found = read(results, "quality-bench-32m").get("rows", [])
    codes = {row["bits"]: row for row in found if row["name"] == "codes"}
    trained_rows = of_mode_best(found)
    rows = []
    for budget in sorted({row["bits"] for row in trained_rows} | codes.keys()):
        seeds = [row for row in trained_rows if row["bits"] == budget]
        alone = codes.get(budget)
        row = min(seeds, key=lambda row: row["seed"], default=alone)
        assert row is not None
        peer, mark = best_peer(row["bits_per_weight"])
        trained = [
            f"{row['perplexity']:.2f}",
            f"{row['kl']:.4f}" + seed_range([seed["kl"] for seed in seeds]),
            f"{row['second']['kl']:.4f}",
        ]
        rows.append(
            [
                f"{budget:g}" + "*" * (row["name"] == "short"),
                f"{row['bits_per_weight']:.3f}",
                *(trained if seeds else ("", "", "")),
                "" if alone is None else f"{alone['perplexity']:.2f} / {alone['kl']:.4f}",
                f"{mark}{peer:.4f}",
                f"{mark}{row['kl'] / peer:.2f}",
            ]
        )
    columns = [
        "`--bits`",
        "real bits",
        "perplexity",
        "KL",
        "KL on C4",
        "codes alone",
        "best peer's KL",
        "ratio",
    ]
    return markdown(columns, rows)


def own_codes_table(results: Path, model: str) -> str:
    """The same on a model for which there are no peers' figures: beside our own codes without training."""
    found = read(results, f"quality-{model}").get("rows", [])
    trained = {row["bits"]: row for row in of_mode_best(found) if row["seed"] == 0}
    alone = {row["bits"]: row for row in found if row["seed"] == 0 and row["name"] == "codes"}
    rows = []
    for bits in sorted({row["bits"] for row in found}):
        best, codes = trained.get(bits), alone.get(bits)
        texts = ["" if row is None else f"{row['perplexity']:.2f} / {row['kl']:.4f}" for row in (best, codes)]
        real = (best or codes or {})["bits_per_weight"]
        gain = "" if best is None or codes is None else f"{best['kl'] / codes['kl']:.2f}"
        name = f"{bits:g}" + "*" * (best is not None and best["name"] == "short")
        rows.append(
            [name, f"{real:.3f}", *texts, "" if best is None else f"{best['second']['kl']:.4f}", gain]
        )
    return markdown(
        ["`--bits`", "real bits", "best", "codes alone", "best, KL on C4", "ratio of the two"], rows
    )


def seed_range(values: Sequence[float]) -> str:
    """` (low to high, n seeds)`, or nothing for one value."""
    return "" if len(values) < 2 else f" ({min(values):.4f} to {max(values):.4f}, {len(values)} seeds)"


def demo_ablation_table(results: Path) -> str:
    """The same for demo-4m."""
    return best_ablation_table(results, "demo-4m")


def best_ablation_table(results: Path, model: str = "bench-32m") -> str:
    """KL of mode `best` with one part left out or changed, by budget; real bits where they are not the budget's."""
    found = [row for row in read(results, f"quality-{model}").get("rows", []) if row["seed"] == 0]
    studied = {row["bits"] for row in found if row["name"] not in ("best", "short", "codes")}
    budgets = sorted(studied or {row["bits"] for row in found})
    labels = {row["name"]: row["label"] for row in found}
    cells = {(row["name"], row["bits"]): row for row in found}

    def cell(name: str, budget: float) -> str:
        row = cells.get((name, budget))
        if row is None:
            return ""
        aside = "" if row["bits_per_weight"] <= budget else f" at {row['bits_per_weight']:.3f}"
        return f"{row['kl']:.4f}{aside}"

    rows = [[label, *(cell(name, budget) for budget in budgets)] for name, label in labels.items()]
    rows.sort(key=lambda row: next((text for text in row[1:] if text), ""))
    return markdown(["KL", *(f"{budget:g} bits" for budget in budgets)], rows)


def bits_table(results: Path) -> str:
    """What a number of bits costs: mode `best`, and k-means codes alone and with ReQuant's sparse part on both models."""
    methods = {"k-means codes": "SqueezeLLM dense", "k-means and ReQuant": "SqueezeLLM + ReQuant (marginal)"}
    best = of_mode_best(read(results, "quality-bench-32m").get("rows", []))
    rows = [
        ["bench-32m", f"{row['bits']:g} bits, mode `best`", *_measured(row)]
        for row in sorted(best, key=lambda row: -row["bits"])
        if row["seed"] == 0
    ]
    for model in ("bench-32m", "demo-4m"):
        found = {
            (row["bits"], row["label"]): row for row in read(results, f"baselines-{model}").get("rows", [])
        }
        for bits in sorted({bits for bits, _ in found}, reverse=True):
            for name, label in methods.items():
                if row := found.get((bits, label)):
                    rows.append([model, f"{bits} bits, {name}", *_measured(row)])
    return markdown(["model", "what", "real bits", "perplexity", "KL"], rows)


def _measured(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['bits_per_weight']:.2f}", f"{row['perplexity']:.1f}", f"{row['kl']:.3f}"]
