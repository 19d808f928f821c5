"""Three axes at once: bytes of the file, KL to the original, and tokens per second; our files and llama.cpp's types.

Files are of bench-32m, with embedding and head quantized as each program does by default (`eval.quality --rows file:2 ...`;
the peers' are in `peers.json`), or with the best split of a size (`--rows size:12.6`, without training `size-codes:12.6`).
Tokens per second are those of one sequence of the 8B shape in the same format (`eval/end_to_end.py`), and are left out where
they were not measured. `python -m eval.figures` draws the figure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.curve_tables import seed_range
from eval.markdown import markdown, peers, read

OURS, PEER = "requant", "llama.cpp"
# name of a row -> how a user asks for the file; for a size, `bits` are megabytes
NAMES = {"file": "--bits {:g}", "size": "--size {:.2f}MB", "size-codes": "--size {:.2f}MB, not trained"}
LARGER = 1.1  # how many times as large a peer's file may be


@dataclass(frozen=True, kw_only=True)
class File:
    """A file made by one program in one of its formats."""

    program: str
    label: str
    megabytes: float
    kl: float
    tokens_per_s: float | None = None

    def dominates(self, other: "File") -> bool:
        """Whether it is better in at least one respect that was measured for both, and worse in none."""
        gains = [other.megabytes - self.megabytes, other.kl - self.kl]
        if self.tokens_per_s is not None and other.tokens_per_s is not None:
            gains.append(self.tokens_per_s - other.tokens_per_s)
        return min(gains) >= 0 and max(gains) > 0


def files(results: Path) -> list[File]:
    """All files of bench-32m, ours first, by size; none if ours were not measured."""
    ours = [
        File(
            program=OURS,
            label=NAMES[row["name"]].format(row["bits"]),
            megabytes=round(row["file_bytes"] / 1e6, 3),
            kl=round(row["kl"], 4),
            tokens_per_s=speed(results, row["bits"], row["recipe"]["quantizer"]["code"]),
        )
        for row in measured(results)
    ]
    theirs = peers()["files"]["rows"] if ours else []
    return ours + [
        File(program=PEER, label=row["label"], megabytes=row["file_mb"], kl=row["kl"]) for row in theirs
    ]


def measured(results: Path) -> list[dict[str, Any]]:
    """Rows for whole files, first seed only, sorted by size, and at equal size by KL, the worst first."""
    rows = read(results, "quality-bench-32m").get("rows", [])
    return sorted(
        (row for row in rows if row["name"] in NAMES and row["seed"] == 0),
        key=lambda row: (round(row["file_bytes"] / 1e6, 2), -row["kl"]),
    )


def kls_of_seeds(results: Path, row: Mapping[str, Any]) -> list[float]:
    """KL of a row and of the same row with other seeds."""
    rows = read(results, "quality-bench-32m").get("rows", [])
    return [
        float(other["kl"]) for other in rows if (other["name"], other["bits"]) == (row["name"], row["bits"])
    ]


def speed(results: Path, bits: float, code: str) -> float | None:
    """Tokens per second of one sequence of the 8B shape with a trellis code; None if not measured."""
    rows: Sequence[Mapping[str, Any]] = read(results, "end-to-end-h200").get("rows", [])
    found = [
        row["decode_tokens_per_s"]
        for row in rows
        if row["shape"] == "llama-3.1-8b"
        and row["name"].startswith(f"{code} {bits:g}-bit")
        and row["batch"] == 1
    ]
    return round(found[0], 1) if found else None


def gathered(results: Path) -> dict[str, list[dict[str, Any]]]:
    """The points of the figure, by program."""
    found = files(results)
    return {
        program: [asdict(file) for file in found if file.program == program] for program in (OURS, PEER)
    } if found else {}  # fmt: skip


def files_table(results: Path) -> str:
    """Our files next to llama.cpp's best that are at most LARGER times as large, or next to its smallest."""
    every = files(results)
    lines = []
    for row, ours in zip(measured(results), every, strict=False):
        theirs = sorted((file for file in every if file.program == PEER), key=lambda file: file.megabytes)
        near = [file for file in theirs if file.megabytes <= LARGER * ours.megabytes] or theirs[:1]
        peer = min(near, key=lambda file: file.kl)
        lines.append(
            [
                "`{}`{}{}".format(*ours.label.partition(",")),
                f"{ours.megabytes:.1f} MB",
                f"{row['bits_per_weight']:.3f}",
                f"{row['perplexity']:.2f}",
                f"{ours.kl:.4f}" + seed_range(kls_of_seeds(results, row)),
                f"{peer.label}, {peer.megabytes:.1f} MB",
                f"{peer.kl:.4f}",
            ]
        )
    original = read(results, "quality-bench-32m").get("original", {})
    if not lines:
        return ""
    size = f"{peers()['files']['original_mb']:.1f} MB"
    lines.insert(0, ["original", size, "16", f"{original['perplexity']:.2f}", "0", "", ""])
    columns = [
        "",
        "file",
        "bits of the matrices",
        "perplexity",
        "KL",
        "llama.cpp's best up to 1.1 times that, or its smallest",
        "its KL",
    ]
    return markdown(columns, lines)
