"""Where results are stored, how they are read, and Markdown tables; imports nothing heavy."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results"
PEERS = ROOT / "eval" / "peers.json"


def read(results: Path, name: str) -> dict[str, Any]:
    """The results of a study; empty if it has not been run."""
    file = results / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def peers() -> dict[str, Any]:
    """Results of untrained peers on bench-32m: `rows` by bits of the matrices, `files` for whole files."""
    return json.loads(PEERS.read_text(encoding="utf-8"))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
