"""Launch shapes measured on this machine, on demand: `requant bench --tune`, REQUANT_AUTOTUNE=1, `kernels/bench/tune.py`.

Every candidate of a kernel is timed on copies of one layout with cold caches (`timing.py`); the best is written under
the GPU's name to `heuristics.cache_file()`, from where every later process takes it. It runs when a model is
loaded, never inside a call, and so never inside the capture of a graph.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from requant_kernels import heuristics
from requant_kernels.common.packing import Layout
from requant_kernels.common.timing import cold_time, copies_needed
from requant_kernels.heuristics import DECODE_TOKENS, HOPPER_TOKENS, TALL_TOKENS, setting_name
from requant_kernels.launch_config import (
    AHEAD,
    BYTES,
    GATHERED,
    HALVES,
    MASKED,
    SHARE,
    STAGED,
    TEAM,
    HopperConfig,
    TallConfig,
    decode_setting,
    trellis_setting,
)
from requant_kernels.trellis.layout import CODES, TrellisLayout

Setting = tuple[int, ...]
# warps, tiles, unroll, activations ahead, most registers (0: as many as the compiler wants)
DECODE: list[Setting] = [
    (4, 1, 1, 1, 128), (8, 1, 1, 1, 128), (4, 1, 3, 0, 128), (8, 1, 3, 0, 128), (4, 2, 1, 1, 0), (4, 2, 2, 0, 168),
    (4, 1, 2, 1, 128), (16, 1, 1, 1, 128), (4, 1, 4, 0, 128),
    # one or two warps a tile, where tiles are many: all run at once, and little or nothing is added up at the end
    (1, 1, 3, 0, 128), (1, 1, 2, 1, 128), (1, 1, 4, 0, 128), (2, 1, 3, 0, 128), (2, 1, 2, 1, 128), (2, 1, 4, 0, 128),
    (1, 2, 2, 0, 168), (2, 2, 1, 1, 0), (2, 2, 2, 0, 168),
    # one token of a grid, by `gemv_int8_mma.py`
    (4, 1, 4, BYTES, 0), (2, 2, 4, BYTES, 0), (2, 4, 2, BYTES, 0),
]  # fmt: skip
OF_BYTES: list[Setting] = [
    (*launch, BYTES, 0)
    for launch in (
        (4, 1, 2), (4, 2, 2), (4, 7, 2), (8, 1, 2), (8, 2, 2), (8, 2, 3), (8, 3, 2), (8, 4, 2), (16, 1, 2), (16, 2, 2),
        (16, 4, 2),
    )
]  # fmt: skip
DECODE += OF_BYTES
# up to eight tokens, by `gemv_fp16_mma.py`: one, two or four teams
OF_HALVES: list[Setting] = [
    (*launch, HALVES | team * TEAM | ahead, 0)
    for ahead in (0, AHEAD)
    for team, launches in enumerate((
        ((4, 2, 2), (4, 2, 3), (8, 1, 3), (8, 2, 2), (8, 2, 3), (4, 7, 2), (4, 4, 2), (8, 4, 2)),
        ((4, 1, 3), (4, 2, 2), (4, 2, 3), (4, 4, 2), (4, 7, 2), (8, 1, 2), (8, 1, 3), (8, 2, 2), (8, 2, 3), (8, 4, 2),
         (8, 7, 2), (4, 7, 3), (16, 1, 2), (16, 1, 3), (16, 2, 2)),
        ((8, 1, 2), (8, 1, 3), (8, 2, 2), (8, 2, 3), (16, 1, 2), (16, 1, 3), (16, 2, 2), (16, 2, 3)),
    ))
    for launch in launches
]  # fmt: skip
# those of `gemv_int8_mma.py` with residuals, whose slots are turns of the ring: more of it, and wider programs
OF_SPARSE_BYTES: list[Setting] = [
    *OF_BYTES,
    *((*launch, BYTES, 0) for launch in ((4, 2, 3), (4, 3, 2), (4, 4, 2))),
]
SPARSE: list[Setting] = [
    (4, 1, 1, 1, 128),
    (8, 1, 1, 1, 128),
    (4, 1, 3, 0, 128),
    (8, 1, 3, 0, 128),
    (4, 1, 2, 0, 128),
    (4, 1, 4, 0, 128),
    (2, 1, 2, 0, 128),
    (2, 1, 3, 0, 128),
    # one token, residuals gathered from shared memory
    *((4, 1, unroll, STAGED, 128) for unroll in (2, 3, 4)),
    (2, 1, 2, STAGED, 128),
    (8, 1, 1, AHEAD | STAGED, 128),
    # several, by `gathered.py`
    *((warps, 1, unroll, GATHERED, 128) for warps in (4, 8) for unroll in (1, 2)),
    *OF_SPARSE_BYTES,
]
# warps, splits of the columns, stages
TALL: list[Setting] = [
    (warps, split, stages)
    for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3), (16, 2))
    for split in (1, 2, 4, 8)
]
# tokens, warps and tiles of a program, when words are requested, splits of the columns
HOPPER: list[Setting] = [
    (*program, split)
    for program, splits in (
        ((32, 4, 1, 0), (1, 2, 3, 4, 6, 8)), ((32, 8, 1, 0), (1, 2, 4, 8)), ((64, 4, 1, 0), (1, 2, 3, 4, 6, 8)),
        ((64, 4, 2, 0), (1, 2, 4, 8)), ((64, 8, 1, 0), (1, 2, 3, 4, 6, 8)), ((64, 8, 2, 0), (1, 2, 4)),
        ((128, 4, 2, 2), (1, 2, 4)), ((128, 8, 1, 0), (1, 2, 3, 4)), ((128, 8, 2, 3), (1, 2, 4)),
    )
    for split in splits
]  # fmt: skip
CODE_HOPPER: list[Setting] = [
    (*program, split)
    for program, splits in (
        ((32, 4, 1, 0), (1, 2, 4, 8)), ((32, 8, 1, 0), (1, 2, 4, 8)), ((64, 4, 1, 0), (1, 2, 4, 8)),
        ((64, 4, 2, 0), (1, 2, 4, 8)), ((64, 8, 1, 0), (1, 2, 3, 4, 6, 8)), ((64, 8, 2, 0), (1, 2, 4)),
        ((128, 8, 1, 0), (1, 2, 3, 4)), ((128, 8, 2, 0), (1, 2, 4)), ((256, 8, 1, 2), (1, 2, 4, 8)),
    )
    for split in splits
]  # fmt: skip
# warps, tiles, units of columns at a time, whether the next launch may begin at once
TRELLIS: list[Setting] = [
    (*launch, early)
    for launch in (
        (8, 2, 2), (4, 2, 2), (16, 2, 1), (16, 4, 1), (8, 2, 4), (4, 2, 4), (8, 1, 2), (16, 1, 2), (8, 4, 2), (16, 2, 4),
        (16, 2, 2), (8, 4, 1), (16, 7, 1),
    )
    for early in (0, AHEAD)
]  # fmt: skip
MOST_SHARES = 8  # programs of a multiprocessor, beyond which shared memory need not keep them apart
PROCESSORS = 132  # of an H200; elsewhere a few candidates more or less
AGREE = 3e-3  # relative Frobenius distance of two settings' results
CANDIDATES = {"decode": DECODE + SPARSE, "tall": TALL, "hopper": HOPPER + CODE_HOPPER, "trellis": TRELLIS}


def kernel_of(layout: Layout | TrellisLayout, tokens: int) -> str | None:
    """The kernel that has settings for this many tokens; None where cuBLAS multiplies."""
    if tokens <= DECODE_TOKENS:
        return "trellis" if isinstance(layout, TrellisLayout) else "decode"
    if tokens <= HOPPER_TOKENS and heuristics.runs_on_hopper(layout, layout.packed_codes.device):
        return "hopper"
    return "tall" if not isinstance(layout, TrellisLayout) and tokens <= TALL_TOKENS else None


def kind_of(layout: Layout | TrellisLayout) -> str:
    """The name of a layout in the table."""
    return layout.code if isinstance(layout, TrellisLayout) else heuristics.kind_of(layout)


def width_of(kernel: str, tokens: int) -> int:
    """The number of tokens that a kernel is compiled for, or settings are kept for."""
    if kernel == "hopper":
        return heuristics.hopper_width(tokens)
    if kernel == "tall":
        return max(16, 1 << (tokens - 1).bit_length())
    if tokens == 1:
        return 1
    return 8 if tokens <= 8 else 16


def candidates(kernel: str, kind: str, bits: float, n: int, k: int, width: int) -> list[Setting]:
    """The settings that make sense for a layout and a width."""
    found = CANDIDATES[kernel]
    if kernel == "decode":
        unknown = (STAGED if width > 1 else 0) | (GATHERED if width != 8 else 0)
        unknown |= BYTES if width > 1 or not kind.startswith("grid") else 0
        found = [s for s in (SPARSE if "+" in kind else DECODE) if not s[3] & unknown]
        found += OF_HALVES if kind == "grid" and width <= 8 else []
    if kernel == "hopper":
        found = CODE_HOPPER if kind in CODES else HOPPER
    found = [s for s in found if fits(kernel, n, k, width, s)]
    return [(*s[:3], s[3] + shares * SHARE, *s[4:]) for s in found for shares in _shares(kernel, n, s)]


def rows_of(setting: Setting) -> int:
    """Of a program of the decode or the trellis kernel."""
    return 16 * setting[1] << setting[3] // TEAM % 4


def _shares(kernel: str, n: int, setting: Setting) -> list[int]:
    """The `shares` that make a difference to a launch."""
    each = -(-n // (rows_of(setting) * PROCESSORS))
    apart = kernel in ("decode", "trellis")
    return [shares for shares in (0, 1, 2) if shares == 0 or (apart and shares * each <= MOST_SHARES)]


def fits(kernel: str, n: int, k: int, tokens: int, setting: Setting) -> bool:
    """Whether a setting makes sense for a shape."""
    if kernel == "decode":
        warps, rows = setting[0], rows_of(setting)
        enough = 32 if warps > 2 else 800 // warps  # programs
        return warps * 256 <= max(k, 1024) * rows // (16 * setting[1]) and n // rows >= enough
    if kernel == "tall":
        warps, split, stages = setting
        programs = n // (16 * warps) * split
        return split * 4 <= k // 256 and (stages + 1) * tokens * 512 <= 220_000 and programs <= 1056
    # enough programs to fill an H200, and no more than it holds at once, as long as there are splits
    if kernel == "hopper":
        width, warps, tiles, _, split = setting
        programs, most = (
            -(-n // (16 * warps * tiles)) * -(-tokens // width) * split,
            132 * 16 // (warps * tiles),
        )
        fitting = width == tokens if tokens <= 64 else width >= 64
        return fitting and split * 4 <= max(4, k // 256) and (split == 1 or programs <= 1.1 * most)
    warps, tiles, unroll, _ = setting
    return warps * unroll * 64 <= max(k, 1024) and n // (16 * tiles) >= 32 and tiles * tokens <= 32


def call(kernel: str, x: Tensor, layout: Any, setting: Setting) -> Tensor:
    """One call with a setting."""
    if kernel == "decode":
        from requant_kernels.scalar.gemv import gemv

        config = replace(decode_setting(setting), pdl=heuristics.launches_early(x.device))
        if config.bytes or config.halves:
            from requant_kernels.scalar import gemv_fp16_mma, gemv_int8_mma

            if not (gemv_fp16_mma if config.halves else gemv_int8_mma).supports(x, layout, config):
                raise ValueError("another kernel would be timed")
        return gemv(x, layout, None, config, asm=True)
    if kernel == "tall":
        from requant_kernels.scalar.gemm import gemm

        warps, split, stages = setting
        return gemm(x, layout, None, asm=True, config=TallConfig(warps=warps, split=split, stages=stages))
    if kernel == "hopper":
        names = ("tokens", "warps", "tiles", "ahead", "split")
        config = HopperConfig(**dict(zip(names, setting, strict=True)))
        if not isinstance(layout, TrellisLayout):
            from requant_kernels.scalar.gemm_sm90 import gemm_sm90

            return gemm_sm90(x, layout, None, config)
    else:
        config = trellis_setting(setting)
    from requant_kernels.trellis.matmul import trellis_linear

    return trellis_linear(x, layout, None, asm=True, config=config)


def copies_of(layout: Any) -> list[Any]:
    """The layout and enough copies of it, residuals too, to fill the caches four times."""
    own = [getattr(layout, f.name) for f in fields(layout)]
    stored = sum(t.numel() * t.element_size() for t in own if isinstance(t, Tensor))
    return [layout] + [_copy(layout) for _ in range(copies_needed(stored) - 1)]


def _copy(held: Any) -> Any:
    """A layout, or its residuals, with tensors of its own."""
    copied: dict[str, Any] = {}
    for f in fields(held):
        value = getattr(held, f.name)
        if isinstance(value, Tensor):
            copied[f.name] = value.clone()
        elif is_dataclass(value):
            copied[f.name] = _copy(value)
    return replace(held, **copied)


def times(kernel: str, layout: Any, tokens: int, settings: Sequence[Setting]) -> dict[Setting, float]:
    """Microseconds of every setting that runs, and agrees with the first that does."""
    copies, found = copies_of(layout), {}
    x = torch.randn(tokens, layout.k, device=layout.packed_codes.device, dtype=torch.float16)
    first: Tensor | None = None
    for setting in settings:
        try:
            y = call(kernel, x, layout, setting).float()
            first = y if first is None else first
            if not (y - first).norm() < AGREE * first.norm():
                continue
            calls: list[Callable[[], object]] = [lambda c=c, s=setting: call(kernel, x, c, s) for c in copies]
            found[setting] = cold_time(calls, replays=5).median
        except torch.OutOfMemoryError:
            raise
        except Exception:  # too much shared memory, too many registers: no candidate here
            torch.cuda.synchronize()
    return found


def winners(
    kernel: str, kind: str, bits: float, n: int, k: int, width: int, found: dict[Setting, float]
) -> dict[str, Setting]:
    """What the table should hold of these times: the best, and beside one of `gemv_int8_mma.py` or `gemv_fp16_mma.py` the
    best of the others, for layouts that these do not take."""
    best: dict[str, Setting] = {}
    for setting in sorted(found, key=found.__getitem__):
        masked = kernel == "decode" and setting[3] & MASKED
        name = "masked" if masked else kernel
        if not masked or not best:  # one that is behind another kernel is none
            best.setdefault(setting_name(name, kind, bits, n, k, width), setting)
    return best


def tune(
    layouts: Sequence[Layout | TrellisLayout], tokens: Sequence[int], *, file: Path | None = None
) -> int:
    """Measure what no table has yet for these layouts; returns how many settings were added to `file`."""
    file = file or heuristics.cache_file()
    device = torch.cuda.get_device_name(layouts[0].packed_codes.device) if layouts else ""
    table = heuristics.read_table(file)
    mine, added = table.setdefault(device, {}), 0
    for layout in layouts:
        for m in tokens:
            kernel = kernel_of(layout, m)
            if kernel is None:
                continue
            width = width_of(kernel, m)
            name = setting_name(kernel, kind_of(layout), layout.bits, layout.n, layout.k, width)
            if name in mine or name in heuristics.measured(device):
                continue
            settings = candidates(kernel, kind_of(layout), layout.bits, layout.n, layout.k, width)
            found = times(kernel, layout, m, settings)
            best = winners(kernel, kind_of(layout), layout.bits, layout.n, layout.k, width, found)
            mine |= {own: list(setting) for own, setting in best.items()}
            added += bool(best)
    if added:
        write_table(file, table)
        heuristics.forget()
    return added


def write_table(file: Path, table: dict[str, dict[str, list[int]]]) -> None:
    """One setting a line."""
    blocks = [
        f"{json.dumps(device)}: {{\n"
        + ",\n".join(f" {json.dumps(name)}: {json.dumps(list(mine[name]))}" for name in sorted(mine))
        + "\n}"
        for device, mine in table.items()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".writing")
    aside.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    os.replace(aside, file)
