"""Rows of results that are measured again, or by several processes or machines: each writes a part next to the whole file,
and `merge` joins them.

    FILE.json, FILE-part0.json, FILE-part1.json, ..   ->   FILE.json

A row that was made by other code, on another device or with another torch than its file's header says has an `environment`
of its own, so that one file can hold rows of several runs.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from eval.common import write_json

Row = Mapping[str, Any]
ENVIRONMENT = ("requant", "commit", "sources", "torch", "transformers", "device", "date")  # of a header
MAKES_A_DIFFERENCE = ("sources", "device", "torch")


def part_file(file: Path, part: int | None) -> Path:
    """The file of part number `part`; for None the whole file."""
    return file if part is None else file.with_name(f"{file.stem}-part{part}.json")


def with_row(
    rows: Sequence[Row], row: Row, *, key: Callable[[Row], Hashable], order: Callable[[Row], Any]
) -> list[Row]:
    """The rows, with this one replacing the one with the same key, sorted by `order`."""
    return sorted([*(other for other in rows if key(other) != key(row)), row], key=order)


def marked(row: Row, header: Row, made: Row) -> dict[str, Any]:
    """`row`, with the environment `made` in which it was measured if that differs from the header's."""
    same = "environment" in row or all(header[key] == made[key] for key in MAKES_A_DIFFERENCE)
    return {**row} if same else {**row, "environment": {**made}}


def merge(
    file: Path, *, same: Sequence[str], key: Callable[[Row], Hashable], order: Callable[[Row], Any]
) -> None:
    """Join the parts of `file` into it, sorted by `order`, and delete them; for rows with the same key the last part wins.

    Raises typer.BadParameter if there is no part, or if a part differs from the first file in an entry of `same`.
    """
    parts = sorted(file.parent.glob(f"{file.stem}-part*.json"))
    if not parts:
        raise typer.BadParameter(f"{file.parent} has no parts of {file.name}: measure some with --part.")
    found = {path: json.loads(path.read_text(encoding="utf-8")) for path in (file, *parts) if path.is_file()}
    header, rows = next(iter(found.values())), {}
    for path, part in found.items():
        if any(part[name] != header[name] for name in same):
            raise typer.BadParameter(f"{path.name} has another {' or '.join(same)}: delete it.")
        made = {name: part[name] for name in ENVIRONMENT}
        rows |= {key(row): marked(row, header, made) for row in part["rows"]}
    write_json(file, {**header, "rows": sorted(rows.values(), key=order)})
    for path in parts:
        path.unlink()
