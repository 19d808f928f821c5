"""Measured launches.

A table is JSON: GPU name -> rows, each with a shape (`format`, `bits`, `n`, `k`, `m_bucket`), a `kernel`, and the fields of
that kernel's configuration (`launch_config.py`).

Two files are read: `tuned/h200.json` beside this file, which `kernels/bench/tune.py` wrote, and the user's cache, which
`requant bench --autotune` writes. If both have a shape, the cache's rows win.
"""

import json
import logging
import os
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from requant_kernels.launch_config import LaunchConfig, Shape
from requant_kernels.registry import LAUNCHES

logger = logging.getLogger(__name__)
TABLE = Path(__file__).with_name("tuned") / "h200.json"
CACHE_VARIABLE = "REQUANT_KERNEL_CACHE"

Rows = dict[Shape, dict[str, LaunchConfig]]  # shape -> configuration by kernel


def cache_file() -> Path:
    """The file for configurations measured on this machine."""
    named = os.environ.get(CACHE_VARIABLE)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(named) if named else home / "requant" / "kernels.json"


@cache
def measured(device_name: str) -> Rows:
    """The configurations of a GPU; the cache's override the table's."""
    found: Rows = {}
    for file in (TABLE, cache_file()):
        found |= read_table(file).get(device_name, {})
    return found


def read_table(file: Path) -> dict[str, Rows]:
    """GPU -> rows; empty, with a warning, where it cannot be used: it only makes calls faster."""
    try:
        return {device: _rows(rows) for device, rows in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("%s cannot be read, and is not used: %s", file, error)
        return {}
    except (ValueError, TypeError, KeyError, AttributeError):
        logger.warning("%s is damaged, or of an older form, and not used; delete it, and measure again", file)
        return {}


def write_table(file: Path, table: dict[str, Rows]) -> None:
    """One configuration per line. Of several processes that write at once, the last one's table stays."""
    devices = []
    for device, rows in table.items():
        lines = [
            json.dumps(shape._asdict() | {"bits": _number(shape.bits), "kernel": kernel} | asdict(config))
            for shape, configs in sorted(rows.items())
            for kernel, config in sorted(configs.items())
        ]
        devices.append(f"{json.dumps(device)}: [\n" + ",\n".join(lines) + "\n]")
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.{uuid4().hex}.writing")
    try:
        aside.write_text("{\n" + ",\n".join(devices) + "\n}\n")
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


def _number(bits: float) -> float:
    return int(bits) if bits == int(bits) else bits


def _rows(rows: list[dict[str, Any]]) -> Rows:
    """Rows from a file's form; ValueError, TypeError or KeyError if they are not configurations."""
    found: Rows = {}
    if not isinstance(rows, list):
        raise TypeError("rows are a list")
    for row in rows:
        own = dict(row)
        shape = Shape(**{name: own.pop(name) for name in Shape._fields})
        kernel = own.pop("kernel")
        config = LAUNCHES[kernel].config(**own)
        for field in fields(config):
            if not isinstance(getattr(config, field.name), field.type):  # pyright: ignore[reportArgumentType]
                raise TypeError(f"{field.name} of {row}")
        found.setdefault(shape, {})[kernel] = config
    return found
