"""Where results lie, how they are read, and a Markdown table of them; imports nothing heavy."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results"
PEERS = ROOT / "eval" / "peers.json"


def read(results: Path, name: str) -> dict[str, Any]:
    """A study's results; empty where it has not been run."""
    file = results / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def peers() -> dict[str, Any]:
    """What untrained peers measured on bench-32m: `rows` of the matrices' bits, `files` whole."""
    return json.loads(PEERS.read_text(encoding="utf-8"))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
