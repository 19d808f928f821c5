"""Launch shapes measured on this machine, on demand: `requant bench --tune`, REQUANT_AUTOTUNE=1, `kernels/bench/tune.py`.

Every candidate of a kernel is timed on copies of one layout with cold caches (`timing.py`); the best is written under the
GPU's name to `tuning.cache_file()`, from where every later process takes it. It runs when a model is loaded, never inside
a call, and so never inside the capture of a graph.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from requant_kernels import tuning
from requant_kernels.layouts import Layout
from requant_kernels.rings import TrellisLayout
from requant_kernels.timing import cold_time, copies_needed
from requant_kernels.tuning import DECODE_TOKENS, TALL_TOKENS, DecodeConfig, TallConfig

Setting = tuple[int, ...]
# warps, tiles, unroll, activations ahead, most registers (0: as many as the compiler wants)
DECODE: list[Setting] = [
    (4, 1, 1, 1, 128), (8, 1, 1, 1, 128), (4, 1, 1, 0, 0), (8, 1, 1, 0, 0), (4, 1, 2, 0, 128), (8, 1, 2, 0, 128),
    (4, 2, 1, 1, 0), (4, 2, 1, 0, 128), (2, 2, 1, 0, 128), (16, 1, 1, 1, 128),
]  # fmt: skip
# warps, splits of the columns, stages
TALL: list[Setting] = [
    (warps, split, stages)
    for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3), (16, 2))
    for split in (1, 2, 4, 8)
]
TRELLIS: list[Setting] = [(4,), (8,), (16,)]  # warps
CANDIDATES = {"decode": DECODE, "tall": TALL, "trellis": TRELLIS}


def kernel_of(layout: Layout | TrellisLayout, tokens: int) -> str | None:
    """The kernel that has settings for this many tokens; None where cuBLAS multiplies."""
    if isinstance(layout, TrellisLayout):
        return "trellis" if tokens <= DECODE_TOKENS else None
    return "decode" if tokens <= DECODE_TOKENS else "tall" if tokens <= TALL_TOKENS else None


def kind_of(layout: Layout | TrellisLayout) -> str:
    """The name of a layout in the table."""
    return layout.code if isinstance(layout, TrellisLayout) else tuning.kind_of(layout)


def width_of(kernel: str, tokens: int) -> int:
    """The number of tokens that a kernel is compiled for."""
    if kernel == "tall":
        return max(16, 1 << (tokens - 1).bit_length())
    if kernel == "decode" and tokens == 1:
        return 1
    return 8 if tokens <= 8 else 16


def fits(kernel: str, n: int, k: int, tokens: int, setting: Setting) -> bool:
    """Whether a setting makes sense for a shape."""
    if kernel == "decode":
        warps, tiles, unroll = setting[:3]
        return warps * unroll * 256 <= max(k, 1024) and n // (16 * tiles) >= 32
    if kernel == "tall":
        warps, split, stages = setting
        programs = n // (16 * warps) * split
        return split * 4 <= k // 256 and (stages + 1) * tokens * 512 <= 220_000 and programs <= 1056
    return setting[0] * 64 <= k


def call(kernel: str, x: Tensor, layout: Any, setting: Setting) -> Tensor:
    """One call with a setting."""
    if kernel == "decode":
        from requant_kernels.decode import decode

        warps, tiles, unroll, ahead, registers = setting
        usual = tuning.decode_config(layout, x.shape[0], x.device)
        config = DecodeConfig(
            warps=warps, tiles=tiles, unroll=unroll, slots=usual.slots, ahead=bool(ahead), pdl=usual.pdl,
            max_registers=registers or None,
        )  # fmt: skip
        return decode(x, layout, None, config, asm=True)
    if kernel == "tall":
        from requant_kernels.tall import tall

        warps, split, stages = setting
        return tall(x, layout, None, asm=True, config=TallConfig(warps=warps, split=split, stages=stages))
    from requant_kernels.trellis import trellis_linear

    return trellis_linear(x, layout, None, asm=True, warps=setting[0])


def copies_of(layout: Any) -> list[Any]:
    """The layout and enough copies of it to fill the caches four times."""
    tensors = {f.name: getattr(layout, f.name) for f in fields(layout)}
    stored = sum(t.numel() * t.element_size() for t in tensors.values() if isinstance(t, Tensor))
    own = [name for name, t in tensors.items() if isinstance(t, Tensor)]
    return [layout] + [
        replace(layout, **{name: tensors[name].clone() for name in own})
        for _ in range(copies_needed(stored) - 1)
    ]


def times(kernel: str, layout: Any, tokens: int, settings: Sequence[Setting]) -> dict[Setting, float]:
    """Microseconds of every setting that runs."""
    copies, found = copies_of(layout), {}
    x = torch.randn(tokens, layout.k, device=layout.words.device, dtype=torch.float16)
    for setting in settings:
        try:
            calls: list[Callable[[], object]] = [lambda c=c, s=setting: call(kernel, x, c, s) for c in copies]
            found[setting] = cold_time(calls, replays=5).median
        except torch.OutOfMemoryError:
            raise
        except Exception:  # too much shared memory, too many registers: no candidate here
            torch.cuda.synchronize()
    return found


def tune(
    layouts: Sequence[Layout | TrellisLayout], tokens: Sequence[int], *, file: Path | None = None
) -> int:
    """Measure what no table has yet for these layouts; returns how many settings were added to `file`."""
    file = file or tuning.cache_file()
    device = torch.cuda.get_device_name(layouts[0].words.device) if layouts else ""
    table = json.loads(file.read_text()) if file.exists() else {}
    mine, added = table.setdefault(device, {}), 0
    for layout in layouts:
        for m in tokens:
            kernel = kernel_of(layout, m)
            if kernel is None:
                continue
            width = width_of(kernel, m)
            name = tuning.setting_name(kernel, kind_of(layout), layout.bits, layout.n, layout.k, width)
            if name in mine or name in tuning.measured(device):
                continue
            settings = [s for s in CANDIDATES[kernel] if fits(kernel, layout.n, layout.k, width, s)]
            if kernel == "decode" and layout.sparse is not None:
                settings = [s for s in settings if s[1] == 1]  # slots of two tiles leave no registers
            found = times(kernel, layout, m, settings)
            if found:
                mine[name], added = list(min(found, key=found.__getitem__)), added + 1
    if added:
        write_table(file, table)
        tuning.forget()
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
    file.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
