"""Tables of `docs/sparsity.md`: one-shot methods and recovery, its ablation, training from scratch, and 2:4 products."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from eval.markdown import markdown, read


def sparsity_table(results: Path, model: str) -> str:
    """2:4 by method and recovery."""
    found = read(results, f"sparsity-{model}").get("rows", [])
    rows = [
        [
            row["label"],
            f"{row['bits_per_weight']:.3f}",
            f"{row['training_tokens']:,}" if row["training_tokens"] else "",
            f"{row['perplexity']:.2f}",
            f"{row['kl']:.3f}",
            f"{row['second']['kl']:.3f}",
            _range(row["flip_rates"]),
        ]
        for row in found
    ]
    columns = ["method", "bits", "tokens trained", "perplexity", "KL", "KL on C4", "flip rate, first to last"]
    return markdown(columns, rows) + _figure(
        bool(rows) and model == "bench-32m", "sparsity", "KL by real bits"
    )


def sparsity_ablation_table(results: Path) -> str:
    """Moving masks compared with fixed ones, and distillation compared with training on the text alone."""
    rows = {row["label"]: row for row in read(results, "sparsity-bench-32m").get("rows", [])}
    losses = {"KL to the original": "", "cross-entropy of the text": ", not distilled"}
    columns = {"fixed masks": "magnitude, fixed", "adaptive masks (AST)": "magnitude, ast"}
    if not all(base + suffix in rows for base in columns.values() for suffix in losses.values()):
        return ""

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['kl']:.3f} ({row['second']['kl']:.3f})"

    lines = [
        [loss, *(cell(rows[base + suffix]) for base in columns.values())] for loss, suffix in losses.items()
    ]
    return markdown(["trained on", *columns], lines)


def pretraining_table(results: Path) -> str:
    """Validation loss: mean over seeds, range, and excess over dense; flip rates relative to those of dense."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in read(results, "sparse-pretraining").get("rows", []):
        runs.setdefault(row["label"], []).append(row)
    dense = runs.get("dense", [])
    rows: list[list[str]] = []
    for label, found in runs.items() if dense else ():
        losses = [row["val_loss"] for row in found]
        flips = mean(_flips(row) for row in found) / mean(_flips(row) for row in dense)
        above = mean(losses) - mean(row["val_loss"] for row in dense)
        spread = f"{min(losses):.4f} to {max(losses):.4f}"
        rows.append([label, f"{mean(losses):.4f}", spread, f"{above:+.4f}", f"{flips:.2f}"])
    columns = ["trained", "validation loss", "seeds", "above dense", "mean flip rate, dense = 1"]
    return markdown(columns, rows)


def products_table(results: Path) -> str:
    """Time of dense bfloat16 divided by that of 2:4, with the default and with the best algorithm."""
    shapes = products_by_shape(results)
    tokens = sorted({row["tokens"] for rows in shapes.values() for row in rows})
    lines = []
    for shape, rows in shapes.items():
        by_tokens = {row["tokens"]: row for row in rows}
        lines.append([shape, *(_ratios(by_tokens.get(count, {})) for count in tokens)])
    return markdown(["out x in", *map(str, tokens)], lines) + _figure(
        bool(lines), "sparse-products", "Time of dense products over that of 2:4 ones, by tokens"
    )


def products_by_shape(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of `kernels/bench/semi_structured.py`, for the GPU whose file comes last by name."""
    files = sorted(results.glob("semi-structured-*.json"))
    shapes: dict[str, list[dict[str, Any]]] = {}
    for row in read(results, files[-1].stem)["rows"] if files else ():
        shapes.setdefault(f"{row['n']} x {row['k']}", []).append(row)
    return shapes


def _ratios(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{row[key]:.2f}" for key in ("ratio_default", "ratio") if key in row)


def _range(rates: Sequence[float]) -> str:
    return f"{rates[0]:.4f} to {rates[-1]:.4f}" if rates else ""


def _flips(row: Mapping[str, Any]) -> float:
    return mean(row["flip_rates"])


def _figure(drawn: bool, name: str, text: str) -> str:
    return f"\n\n![{text}](figures/{name}.svg)" if drawn else ""
