"""Tables of `eval.paper_tables`: what PQI predicts, its quadrature rules, which weights hold it; with the paper's values."""

from pathlib import Path
from typing import Any

from eval.markdown import markdown, read

PAPER_ERRORS = {"plain4": 1.68, "plain8": 0.82, "plain16": 0.38, "plain32": 0.16}  # from its Table 3, % of dF
NODE_NAMES = {
    "midpoint": "midpoint",
    "gauss2": "Gauss 2 (default)",
    "gauss4": "Gauss 4",
    "simpson": "Simpson",
    "plain4": "plain 4",
    "plain8": "plain 8",
    "plain16": "plain 16",
    "plain32": "plain 32 (the paper's)",
}


def widths_of(results: Path, model: str) -> dict[str, Any]:
    """The tables of the paper by number of bits, most bits first."""
    found = read(results, f"paper_tables-{model}").get("bits", {})
    return {bits: found[bits] for bits in sorted(found, key=int, reverse=True)}


def predicted_table(results: Path) -> str:
    """The paper's Table 1 for the whole model, with both scalings of the Hessian diagonal."""
    rows = []
    for model in ("bench-32m", "demo-4m"):
        for bits, tables in widths_of(results, model).items():
            if "predicted" not in tables:
                continue
            sums = tables["predicted"]["model"]
            exact = next(
                (row["half_dHd"] for row in tables.get("interpolation", []) if row["lambda"] == 1), None
            )
            names = ("gradient", "hessian_of_means", "hessian")
            rows.append(
                [
                    f"{model}, {bits} bits",
                    *(f"{sums[name]:.2g}" for name in names),
                    "" if exact is None else f"{exact:.4f}",
                    f"{sums['pqi']:.4f}",
                    f"{sums['measured']:.4f}",
                    f"{100 * (sums['pqi'] / sums['measured'] - 1):+.2f} %",
                ]
            )
    columns = [
        "k-means codes",
        "gradient",
        "Hessian diagonal, the paper's scaling",
        "Hessian diagonal by position",
        "1/2 d'Hd",
        "PQI, 2 nodes",
        "measured dF",
        "PQI's error",
    ]
    return markdown(columns, rows)


def nodes_table(results: Path) -> str:
    """The paper's Table 3: error in % of the measured dF, by rule and number of bits."""
    widths = widths_of(results, "bench-32m")
    tables = {bits: {row["nodes"]: row for row in t["nodes"]} for bits, t in widths.items() if "nodes" in t}
    if not tables:
        return ""
    first = next(iter(tables.values()))
    rows = [
        [
            label,
            str(first[name]["passes"]),
            *(f"{table[name]['error_percent']:+.3f}" for table in tables.values()),
            f"{PAPER_ERRORS[name]:+.2f}" if name in PAPER_ERRORS else "",
        ]
        for name, label in NODE_NAMES.items()
    ]
    return markdown(
        ["nodes", "backward passes", *(f"{bits} bits" for bits in tables), "paper (1B, 4 bits)"], rows
    )


def kinds_table(results: Path) -> str:
    """The paper's Table 4 at 3 bits."""
    table = widths_of(results, "bench-32m").get("3", {}).get("kinds", [])
    if not table:
        return ""
    kinds = [key for key in table[0] if key != "block"]
    rows = [[str(row["block"]), *(f"{row[kind]:.2e}" for kind in kinds)] for row in table]
    return markdown(["block", *(kind.removesuffix("_proj") for kind in kinds)], rows)


def shares_table(results: Path) -> str:
    """The paper's Table 5: share of the sum of |PQI| held by the top weights."""
    widths = widths_of(results, "bench-32m")
    tables = {bits: t["shares"]["top"] for bits, t in widths.items() if "shares" in t}
    paper = {"0.15%": "4.53 %", "0.71%": "11.29 %", "5.25%": "34.06 %"}
    rows = [
        [share, *(f"{100 * table[share]:.1f} %" for table in tables.values()), paper.get(share, "")]
        for share in next(iter(tables.values()), {})
    ]
    return markdown(["top weights", *(f"{bits} bits" for bits in tables), "paper (1B, 4 bits)"], rows)


def ablation_table(results: Path) -> str:
    """The paper's Table 8: perplexity and KL by number of bits."""
    widths = widths_of(results, "bench-32m")
    tables = {
        bits: {row["label"]: row for row in t["ablation"]} for bits, t in widths.items() if "ablation" in t
    }
    if not tables:
        return ""
    rows = []
    for label, row in max(tables.values(), key=len).items():
        cells = [row["outliers"], row["significant"]]
        for table in tables.values():
            other = table.get(label)
            cells.append("" if other is None else f"{other['perplexity']:.2f} / {other['kl']:.4f}")
        rows.append(cells)
    columns = [
        "outliers, 0.45 %",
        "significant, 0.05 %",
        *(f"{bits} bits: perplexity / KL" for bits in tables),
    ]
    return markdown(columns, rows)
