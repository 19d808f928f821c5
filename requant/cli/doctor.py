"""`requant doctor`."""

import dataclasses
import json
import sys
from typing import Any

from requant.cli import options as opt
from requant.cli.common import table


def doctor(
    device: opt.Device = "auto",
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check this machine: GPUs, versions, caches, kernels. Exit code 1 if a kernel is not right."""
    from requant.display import format_bytes
    from requant.inference.machine import examine

    found = examine(device, quiet=quiet)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2, default=str))
    else:
        gpus = [
            f"{gpu['name']}, {format_bytes(gpu['free'])} of {format_bytes(gpu['memory'])} free, "
            f"capability {gpu['capability']}, CUDA {gpu['cuda']}"
            for gpu in found.gpus
        ]
        rows: list[tuple[str, Any]] = [
            ("requant", f"{found.requant}, Python {found.python}, {found.platform}"),
            ("machine", f"{found.cores} cores, {format_bytes(found.memory)}"),
            *(("GPU", gpu) for gpu in gpus or ["none"]),
            *((name, version or "not installed") for name, version in found.packages.items()),
            *((f"extra {extra}", _versions(versions)) for extra, versions in found.extras.items()),
            *(
                (f"cache: {cache.name}", f"{format_bytes(cache.bytes)} in {cache.path}")
                for cache in found.caches
            ),
        ]
        print(table([{"": name, "this machine": value} for name, value in rows]))
        print()
        checked = [
            {
                f"on {found.device}": each.matrix,
                "kernels": ", ".join(each.kernels),
                "": "right" if each.problem is None else "WRONG",
            }
            for each in found.kernels
        ]
        print(table(checked))
        for problem in found.problems:
            print(f"problem: {problem}")
    if found.problems:
        sys.exit(1)


def _versions(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
