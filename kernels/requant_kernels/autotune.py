"""Launches measured on this machine, on demand: `requant bench --autotune` or REQUANT_AUTOTUNE=1.

Every candidate of a kernel is timed with cold caches on copies of one layout (`common/timing.py`). The best is written under
the GPU's name to `launch_tables.cache_file()`, which every later process reads. Tuning runs when a model is loaded,
never inside a call, and so never during the capture of a graph. `kernels/bench/tune.py` measures shapes without a model by
the same functions, and writes a table of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from requant_kernels.common.device import num_sms
from requant_kernels.common.packing import Layout
from requant_kernels.common.timing import cold_time, copies_needed
from requant_kernels.dispatch import forget, shape_of
from requant_kernels.launch_config import ROWS, LaunchConfig, Shape
from requant_kernels.launch_tables import cache_file, measured, read_table, write_table
from requant_kernels.registry import LAUNCHES, Kernel, kernels_of
from requant_kernels.trellis.layout import TrellisLayout

MAX_CTAS_PER_SM = 8  # with more CTAs per SM a cap makes no difference
RESULT_TOLERANCE = 3e-3  # relative Frobenius distance of two launches' results


class Candidate(NamedTuple):
    """A kernel by name, and its launch config."""

    kernel: str
    config: LaunchConfig


def candidates(kernel: str, shape: Shape, device: torch.device) -> list[LaunchConfig]:
    """The launches of a kernel that make sense for a shape on a device."""
    launch = LAUNCHES[kernel]
    found = [config for config in launch.candidates(shape) if launch.makes_sense(config, shape)]
    return [capped for config in found for capped in _with_caps(config, shape, num_sms(device))]


def _with_caps(config: Any, shape: Shape, sms: int) -> list[LaunchConfig]:
    """The config, also capped at the launch's CTAs per SM and at twice as many, where that makes a difference."""
    if not hasattr(config, "max_ctas_per_sm"):
        return [config]
    ctas = -(-shape.n // (ROWS * config.tiles_per_cta))
    caps = [waves * -(-ctas // sms) for waves in (1, 2)]
    return [config, *(replace(config, max_ctas_per_sm=cap) for cap in caps if cap <= MAX_CTAS_PER_SM)]


def call(candidate: Candidate, x: Tensor, layout: Layout | TrellisLayout) -> Tensor:
    """One call with a given launch. Raises ValueError if the kernel does not support the layout."""
    kernel = _kernel(candidate.kernel, layout)
    if not (
        kernel.supports(layout, x.shape[0], x.device) and kernel.fits(layout, candidate.config, x.device)
    ):
        raise ValueError(f"{candidate.kernel} does not take this layout with {candidate.config}")
    return kernel.linear(x, layout, None, candidate.config)


def _kernel(name: str, layout: Layout | TrellisLayout) -> Kernel:
    return next(kernel for kernel in kernels_of(layout) if kernel.name == name)


def copies_of(layout: Any) -> list[Any]:
    """The layout and enough copies of it, including residuals, to fill the caches four times."""
    own = [getattr(layout, f.name) for f in fields(layout)]
    stored = sum(t.numel() * t.element_size() for t in own if isinstance(t, Tensor))
    return [layout] + [_copy(layout) for _ in range(copies_needed(stored) - 1)]


def _copy(held: Any) -> Any:
    """A copy of a layout, or of its residuals, with its own tensors."""
    copied: dict[str, Any] = {}
    for f in fields(held):
        value = getattr(held, f.name)
        if isinstance(value, Tensor):
            copied[f.name] = value.clone()
        elif is_dataclass(value):
            copied[f.name] = _copy(value)
    return replace(held, **copied)


def times(layout: Any, tokens: int, launches: Sequence[Candidate]) -> dict[Candidate, float]:
    """Microseconds of every launch that runs and agrees with the first that does."""
    copies, found = copies_of(layout), {}
    x = torch.randn(tokens, layout.k, device=layout.packed_codes.device, dtype=torch.float16)
    first: Tensor | None = None
    for launch in launches:
        try:
            y = call(launch, x, layout).float()
            first = y if first is None else first
            if not (y - first).norm() < RESULT_TOLERANCE * first.norm():
                continue
            calls: list[Callable[[], object]] = [
                lambda c=c, launch=launch: call(launch, x, c) for c in copies
            ]
            found[launch] = cold_time(calls, replays=5).median
        except torch.OutOfMemoryError:
            raise
        except Exception:  # too much shared memory, too many registers: not a candidate here
            torch.cuda.synchronize()
    return found


def winners(found: dict[Candidate, float]) -> dict[str, LaunchConfig]:
    """The rows that the table should hold for these times: the best and, if that is `int8_mma` or `fp16_mma`, also the best
    of the others, for layouts of this shape that those do not support."""
    best: dict[str, LaunchConfig] = {}
    for kernel, config in sorted(found, key=found.__getitem__):
        mma = kernel in ("int8_mma", "fp16_mma")
        if not best or (not mma and all(name in ("int8_mma", "fp16_mma") for name in best)):
            best[kernel] = config
    return best


def kernels_to_tune(layout: Layout | TrellisLayout, tokens: int, device: torch.device) -> list[str]:
    """The kernels that compete for this many tokens: up to 16 all that support the layout, above only the first."""
    able = [kernel.name for kernel in kernels_of(layout) if kernel.supports(layout, tokens, device)]
    able = (
        [name for name in able if name in LAUNCHES] if able and (tokens <= 16 or able[0] in LAUNCHES) else []
    )
    return able if tokens <= 16 else able[:1]


def tune(layouts: Sequence[Layout | TrellisLayout], tokens: Sequence[int]) -> int:
    """Measure what is in no table yet for these layouts; returns the number of shapes added to the cache."""
    if not layouts:
        return 0
    file, device = cache_file(), layouts[0].packed_codes.device
    name, table = torch.cuda.get_device_name(device), read_table(file)
    mine, added = table.setdefault(name, {}), 0
    for layout in layouts:
        for m in tokens:
            shape = shape_of(layout, m)
            if shape in mine or shape in measured(name):
                continue
            launches = [
                Candidate(kernel, config)
                for kernel in kernels_to_tune(layout, m, device)
                for config in candidates(kernel, shape, device)
            ]
            best = winners(times(layout, m, launches))
            if best:
                mine[shape] = best
                added += 1
    if added:
        write_table(file, table)
        forget()
    return added
