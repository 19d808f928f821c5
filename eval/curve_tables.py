"""Tables of `eval.quality`: mode `best` by budget, next to the best peer, and with parts left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.markdown import markdown, peers, read

Row = Mapping[str, Any]
UNTRAINED = "QTIP-3INST"  # the best in `peers.json` at 2, 3 and 4 bits
BY_SIZE = ("size", "size-codes")  # rows whose `bits` are the megabytes of the file
# mode `best` with text that the model writes: the default amount (6038 windows), and nearly the same (6144)
WITH_OWN_TEXT = ("best", "own-text")
# earlier versions of mode `best`, newest first: without that text, fewer steps, statistics of inputs in a separate pass,
# hidden states not matched
EARLIER = ("text-only", "300-steps", "two-passes", "no-hidden")
PHASES = {
    "qtip": 4,
    "qtip-1mad": 4,
    "qtip-end": 1,
    "efficient-qat-64": 2,
    "efficient-qat-128": 2,
}  # phases of a block and at the end
SPAN = 0.1  # how many bits beyond its ends a line still counts as measured


@dataclass(frozen=True, kw_only=True)
class Peer:
    """KL of one peer at some number of bits, on the line through its measured points, straight in log KL."""

    name: str
    kl: float
    beyond: bool  # whether the bits lie beyond the measured points

    @property
    def mark(self) -> str:
        return "~" * self.beyond


def best_peer(bits: float, measured: Sequence[Row] = ()) -> Peer:
    """The peer with the lowest KL at these bits, among those that train (in the rows `measured`) and untrained QTIP.

    A peer that was measured on both sides of `bits` is preferred to one whose line must be extended.
    """
    peers = [_peer(name, points, bits) for name, points in peer_points(measured).items() if len(points) > 1]
    return min(peers, key=lambda peer: (peer.beyond, peer.kl))


def peer_points(measured: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Peer -> (bits, KL), ascending; untrained QTIP first, then the peers among the rows, first seed only."""
    untrained = peers()["rows"]
    points = {
        UNTRAINED: [(row["bits_per_weight"], row["kl"]) for row in untrained if row["label"] == UNTRAINED]
    }
    for row in measured:
        if "peer" in row and row["seed"] == 0:
            points.setdefault(row["peer"], []).append((row["bits_per_weight"], row["kl"]))
    return {name: sorted(found) for name, found in points.items()}


def _peer(name: str, points: Sequence[tuple[float, float]], bits: float) -> Peer:
    beyond = not points[0][0] - SPAN < bits < points[-1][0] + SPAN
    return Peer(name=name, kl=on_the_line(points, bits), beyond=beyond)


def on_the_line(points: Sequence[tuple[float, float]], bits: float) -> float:
    """KL at some bits on the line through two or more ascending (bits, KL), straight in log KL, extended beyond its ends."""
    below = max((i for i, (at, _) in enumerate(points) if at <= bits), default=0)
    (x0, y0), (x1, y1) = points[min(below, len(points) - 2) :][:2]
    return y0 * (y1 / y0) ** ((bits - x0) / (x1 - x0))


def of_mode_best(found: Sequence[Row], *, steps: int | None = None, own_text: bool = True) -> list[Row]:
    """The rows of mode `best`; for a budget at which the default was not measured, those of the newest earlier version.

    With `steps`, only rows with this many steps in all phases; without `own_text`, only rows trained on the text alone.
    """
    found = [row for row in found if steps is None or training_steps(row) == steps]
    names: dict[float, str] = {}
    for name in (*(WITH_OWN_TEXT if own_text else ()), *EARLIER):
        names = {row["bits"]: name for row in found if row["name"] == name} | names
    return [row for row in found if names.get(row["bits"]) == row["name"]]


def training_steps(row: Row) -> int:
    """Steps of all phases together, of mode `best` or of a peer; recipes older than `rounds` had four phases."""
    settings = row["recipe"]["finetune"]
    return settings["steps"] * PHASES.get(row["name"], settings.get("rounds", 4))


def quality_table(results: Path) -> str:
    """Mode `best` at every budget next to the best peer at the same bits, and codes alone; * marks rows of EARLIER."""
    found = read(results, "quality-bench-32m").get("rows", [])
    codes = {row["bits"]: row for row in found if row["name"] == "codes"}
    trained_rows = of_mode_best(found)
    rows = []
    for budget in sorted({row["bits"] for row in trained_rows} | codes.keys()):
        seeds = [row for row in trained_rows if row["bits"] == budget]
        alone = codes.get(budget)
        row = min(seeds, key=lambda row: row["seed"], default=alone)
        assert row is not None
        peer = best_peer(row["bits_per_weight"], found)
        trained = [
            f"{row['perplexity']:.2f}",
            f"{row['kl']:.4f}" + seed_range([seed["kl"] for seed in seeds]),
            f"{row['second']['kl']:.4f}",
        ]
        rows.append(
            [
                f"{budget:g}" + "*" * (row["name"] in EARLIER),
                f"{row['bits_per_weight']:.3f}",
                *(trained if seeds else ("", "", "")),
                "" if alone is None else f"{alone['perplexity']:.2f} / {alone['kl']:.4f}",
                peer.name,
                f"{peer.mark}{peer.kl:.4f}",
                f"{peer.mark}{row['kl'] / peer.kl:.2f}",
            ]
        )
    columns = [
        "`--bits`",
        "real bits",
        "perplexity",
        "KL",
        "KL on C4",
        "codes alone",
        "best peer",
        "its KL",
        "ratio",
    ]
    return markdown(columns, rows)


def trained_peers_table(results: Path) -> str:
    """Peers that train on the same text, next to mode `best` with as many steps, on the line through its points if two."""
    rows = []
    for model in ("bench-32m", "demo-4m"):
        found = read(results, f"quality-{model}").get("rows", [])
        for row in sorted((row for row in found if "peer" in row), key=lambda row: row["bits_per_weight"]):
            steps = training_steps(row)
            ours = [other for other in of_mode_best(found, steps=steps, own_text=False) if other["seed"] == 0]
            points = sorted((other["bits_per_weight"], other["kl"]) for other in ours)
            kl = on_the_line(points, row["bits_per_weight"]) if len(points) > 1 else None
            rows.append(
                [
                    model,
                    row["label"],
                    str(steps),
                    f"{row['bits_per_weight']:.3f}",
                    f"{row['perplexity']:.2f}",
                    f"{row['kl']:.4f}",
                    f"{row['second']['kl']:.4f}",
                    *(("", "") if kl is None else (f"{kl:.4f}", f"{kl / row['kl']:.2f}")),
                ]
            )
    columns = ["model", "peer", "steps", "real bits", "perplexity", "KL", "KL on C4", "ours there", "ratio"]
    return markdown(columns, rows)


def own_codes_table(results: Path, model: str) -> str:
    """The same for a model without peers' results: next to our own codes and QTIP's, both untrained."""
    found = [row for row in read(results, f"quality-{model}").get("rows", []) if "peer" not in row]
    trained = {row["bits"]: row for row in of_mode_best(found) if row["seed"] == 0}
    alone = {row["bits"]: row for row in found if row["seed"] == 0 and row["name"] == "codes"}
    qtip = sorted((row["bits_per_weight"], row["kl"]) for row in found if row["name"] == "qtip-codes")
    rows = []
    for bits in sorted(trained.keys() | alone.keys()):
        best, codes = trained.get(bits), alone.get(bits)
        texts = ["" if row is None else f"{row['perplexity']:.2f} / {row['kl']:.4f}" for row in (best, codes)]
        real = (best or codes or {})["bits_per_weight"]
        peer = _peer(UNTRAINED, qtip, real) if len(qtip) > 1 else None
        gains = [
            "" if best is None or kl is None else f"{best['kl'] / kl:.2f}"
            for kl in (None if codes is None else codes["kl"], None if peer is None else peer.kl)
        ]
        rows.append(
            [
                f"{bits:g}" + "*" * (best is not None and best["name"] in EARLIER),
                f"{real:.3f}",
                *texts,
                "" if best is None else f"{best['second']['kl']:.4f}",
                gains[0],
                *(() if peer is None else (f"{peer.mark}{peer.kl:.4f}", gains[1])),
            ]
        )
    columns = ["`--bits`", "real bits", "best", "codes alone", "best, KL on C4", "best to codes"]
    return markdown([*columns, *(("QTIP's codes there", "best to QTIP's") if len(qtip) > 1 else ())], rows)


def seed_range(values: Sequence[float]) -> str:
    """` (low to high, n seeds)`, or an empty text for one value."""
    return "" if len(values) < 2 else f" ({min(values):.4f} to {max(values):.4f}, {len(values)} seeds)"


def demo_ablation_table(results: Path) -> str:
    """The same for demo-4m, in windows of 256 tokens."""
    return best_ablation_table(results, "demo-4m-256")


def best_ablation_table(results: Path, model: str = "bench-32m") -> str:
    """KL of mode `best` with one part left out or changed, by `--bits`; with the real bits where the budget differs."""
    every = read(results, f"quality-{model}").get("rows", [])
    by_bits = [row for row in every if row["name"] not in BY_SIZE]
    found = [row for row in by_bits if row["seed"] == 0 and "peer" not in row]
    studied = {
        row["bits"] for row in found if row["name"] not in (*WITH_OWN_TEXT, *EARLIER, "short", "codes")
    }
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
    """What a number of bits costs: mode `best`, and k-means codes alone and with ReQuant's sparse part, for both models."""
    methods = {"k-means codes": "SqueezeLLM dense", "k-means and ReQuant": "SqueezeLLM + ReQuant (marginal)"}
    best = of_mode_best(read(results, "quality-bench-32m").get("rows", []))
    rows = [
        ["bench-32m", f"{row['bits']:g} bits, mode `best`, {training_steps(row)} steps", *_measured(row)]
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


def _measured(row: Row) -> list[str]:
    return [f"{row['bits_per_weight']:.2f}", f"{row['perplexity']:.1f}", f"{row['kl']:.3f}"]
