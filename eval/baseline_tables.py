"""Tables of one-shot codes: methods next to the peers' own, ReQuant's gains, embeddings, trellis codes, accuracies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.markdown import markdown, peers, read


def baselines_table(results: Path) -> str:
    """Our results by number of bits, with the peers' result for the same method, then the peers' best at these bits."""
    found = read(results, "baselines-bench-32m")
    comparable = [peer for peer in peers()["rows"] if peer["calibration"] == "wikitext-like.raw"]
    theirs = {(peer["bits"], peer["label"]): peer for peer in comparable}
    rows: list[list[str]] = []
    for width in dict.fromkeys(row["bits"] for row in found.get("rows", [])):
        for row in (row for row in found["rows"] if row["bits"] == width):
            peer = theirs.get((width, row["label"]))
            rows.append(
                [
                    row["label"],
                    f"{row['bits_per_weight']:.3f}",
                    f"{row['perplexity']:.2f}",
                    f"{row['kl']:.4f}",
                    f"{row['second']['kl']:.4f}",
                    "" if peer is None else f"{peer['perplexity']:.2f}",
                    "" if peer is None else f"{peer['kl']:.4f}",
                ]
            )
        best = min((peer for peer in comparable if peer["bits"] == width), key=lambda peer: peer["kl"])
        name = f"*{best['label']} (peer, {best['bits_per_weight']:.3f} bits)*"
        rows.append([name, "", "", "", "", f"{best['perplexity']:.2f}", f"{best['kl']:.4f}"])
    if not rows:
        return ""
    original = found["original"]
    rows.insert(0, ["original", "16", f"{original['perplexity']:.2f}", "0", "0", "24.35", "0"])
    columns = ["method", "bits", "perplexity", "KL", "KL on C4", "peer's perplexity", "peer's KL"]
    return markdown(columns, rows)


def gains_table(results: Path) -> str:
    """ReQuant compared with SqueezeLLM's own choice of the same number of entries."""
    own = "SqueezeLLM 0.45%+0.05% sparse"
    ours = ("SqueezeLLM + ReQuant (pqi)", "SqueezeLLM + ReQuant (marginal)")
    rows = []
    for model in ("bench-32m", "demo-4m"):
        found = {
            (row["bits"], row["label"]): row for row in read(results, f"baselines-{model}").get("rows", [])
        }
        for bits in dict.fromkeys(bits for bits, label in found if label == ours[-1]):
            base = found[bits, own]
            cells = [f"{base['perplexity']:.2f} / {base['kl']:.4f}"]
            for row in (found[bits, label] for label in ours):
                change = 100 * (row["kl"] / base["kl"] - 1)
                cells.append(f"{row['perplexity']:.2f} / {row['kl']:.4f} ({change:+.1f} %)")
            rows.append([f"{model}, {bits} bits", *cells])
    columns = [
        "perplexity / KL at 0.50 % entries",
        "SqueezeLLM's own",
        "ReQuant, PQI",
        "ReQuant, marginal score",
    ]
    return markdown(columns, rows)


def embedding_table(results: Path) -> str:
    """KL with only embedding and head quantized, by number of bits, on grids and in trellis codes."""
    found = {model: read(results, f"embedding-{model}").get("rows", []) for model in ("bench-32m", "demo-4m")}
    kinds = sorted({(row["bits"], row["method"]) for rows in found.values() for row in rows})
    rows = [
        [
            f"{bits:g}, {method}",
            *(
                cell
                for measured in found.values()
                for cell in next(
                    (_costs(row) for row in measured if (row["bits"], row["method"]) == (bits, method)),
                    ["", "", ""],
                )
            ),
        ]
        for bits, method in kinds
    ]
    columns = [
        "bits of a code",
        *(f"{model}: {what}" for model in found for what in ("real bits", "KL", "predicted")),
    ]
    return markdown(columns, rows) if rows else ""


def _costs(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['bits_per_weight']:.3f}", f"{row['kl']:.5f}", f"{row['predicted']:.5f}"]


def trellis_codes_table(results: Path) -> str:
    """Error of each code by number of bits: on Gaussians, and on the rotated matrices of the model."""
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in read(results, "trellis-codes").get("rows", []):
        found.setdefault((row["code"], row["state_bits"]), {})[row["bits"]] = row
    return markdown(
        ["code", "bits of a state", "hashes a weight", "2 bits", "3 bits", "4 bits"],
        [
            [f"`{code}`", str(state_bits), f"{widths[2]['hashes_per_weight']:g}"]
            + [f"{widths[bits]['gaussian']:.3f} / {widths[bits]['model']:.3f}" for bits in (2, 3, 4)]
            for (code, state_bits), widths in found.items()
        ],
    )


def tasks_table(results: Path) -> str:
    """Accuracy by lm-eval, one column per model, with standard errors; in brackets the paired difference to the first."""
    found = read(results, "tasks-bench-32m").get("rows", [])
    models = list(dict.fromkeys(row["model"] for row in found))
    cells = {
        (row["task"], row["metric"], row["model"]): row for row in found if row["metric"] != "perplexity"
    }
    rows = []
    for task, metric in dict.fromkeys((task, metric) for task, metric, _ in cells):
        values = [cells[task, metric, model] for model in models]
        rows.append([f"{task}, {metric}", *map(_accuracy, values)])
    return markdown([f"{found[0]['documents']} documents each" if found else "", *models], rows)


def _accuracy(row: Mapping[str, Any]) -> str:
    value = f"{row['value']:.3f} ± {row['stderr']:.3f}"
    if row.get("difference") is None:
        return value
    return f"{value} ({row['difference']:+.3f} ± {row['difference_stderr']:.3f})"
