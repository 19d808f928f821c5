"""Launch settings: what was measured on a GPU of this name, and a rule for every other one.

Settings follow from shapes alone and never from timing inside a call, so a captured graph and an eager call run the same
kernel. Looked up in this order: `REQUANT_KERNEL_CACHE` (what `kernels/bench/tune.py` and `requant bench --tune` wrote on
this machine), `measured.json` beside this file, the rule. The rule of the decode kernel: enough bytes in flight, and few
enough registers that 16 warps fit a multiprocessor.
"""

import json
import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from requant_kernels.layouts import CodebookLayout, Layout

DECODE_TOKENS = 16  # the decode kernel's most
TALL_TOKENS = 128  # beyond it, dequantize and multiply
TABLE = Path(__file__).with_name("measured.json")
CACHE_VARIABLE = "REQUANT_KERNEL_CACHE"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """`warps` share the columns of `tiles` x 16 rows, `unroll` blocks at a time; `slots` residual chunks at a time."""

    warps: int
    tiles: int = 1
    unroll: int = 1
    slots: int = 16
    ahead: bool = True  # activations of the next block are requested too; never for more than 8 tokens
    pdl: bool = False
    max_registers: int | None = None


def cache_file() -> Path:
    """Where settings measured on this machine are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(named) if named else home / "requant" / "kernels.json"


def setting_name(kernel: str, kind: str, bits: int, n: int, k: int, tokens: int) -> str:
    """The key of one setting: `tokens` is the width that the kernel is compiled for."""
    return f"{kernel} {kind} {bits} {n}x{k} {tokens}"


@cache
def measured(device_name: str) -> dict[str, list[int]]:
    """Settings by name for a GPU; those of the cache before those of the table."""
    found: dict[str, list[int]] = {}
    for file in (TABLE, cache_file()):
        if file.exists():
            found |= json.loads(file.read_text()).get(device_name, {})
    return found


def forget() -> None:
    """Read the tables anew: settings were added."""
    for function in (measured, launches_early, _config, tall_config, trellis_warps):
        function.cache_clear()


@cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor has ended (programmatic dependent launch)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def kind_of(layout: Layout) -> str:
    """The name of a layout in the tables."""
    return ("codebook" if isinstance(layout, CodebookLayout) else "grid") + ("+s" if layout.sparse else "")


def decode_config(layout: Layout, tokens: int, device: torch.device) -> DecodeConfig:
    """Settings for one to 16 tokens."""
    kind = kind_of(layout)
    chunks = 0 if layout.sparse is None else layout.sparse.columns.shape[0] / layout.words.shape[0]
    slots = min(16, max(2, 1 << math.ceil(math.log2(max(1.0, 1.2 * chunks)))))
    width = 1 if tokens == 1 else 8 if tokens <= 8 else 16
    return _config(kind, layout.bits, layout.n, layout.k, width, slots, device)


def registers_of(kind: str, bits: int, width: int) -> int:
    """The most registers of the rule's launches, for 16 warps a multiprocessor; 0 where fewer would spill."""
    return 128 if width <= 8 and "+" not in kind and (bits <= 3 or (bits == 4 and kind == "grid")) else 0


@cache
def _config(
    kind: str, bits: int, n: int, k: int, width: int, slots: int, device: torch.device
) -> DecodeConfig:
    blocks, tiles = -(-k // 256), -(-n // 16)
    properties = torch.cuda.get_device_properties(device)
    pdl = launches_early(device)
    registers = (registers_of(kind, bits, width) or None) if torch.version.hip is None else None
    found = measured(properties.name).get(setting_name("decode", kind, bits, n, k, width))
    if found is not None:
        warps, rows, unroll, ahead, registers = found
        return DecodeConfig(
            warps=warps, tiles=rows, unroll=unroll, slots=slots, ahead=bool(ahead), pdl=pdl,
            max_registers=registers or None,
        )  # fmt: skip
    warps = 4  # small matrices: more warps a tile, so that every multiprocessor has some
    most = 16 if registers else 8  # 16 warps have 128 registers each
    while warps < most and tiles * warps < 12 * properties.multi_processor_count and 2 * warps <= blocks:
        warps *= 2
    return DecodeConfig(warps=warps, slots=slots, pdl=pdl, max_registers=registers)


@dataclass(frozen=True, kw_only=True, slots=True)
class TallConfig:
    """`warps` x 16 rows a program, the columns among `split` programs, `stages` blocks of activations under way."""

    warps: int = 8
    split: int = 1
    stages: int = 1


@cache
def tall_config(kind: str, bits: int, n: int, k: int, width: int, device: torch.device) -> TallConfig:
    """Settings for 17 to 128 tokens; `width` is their number as a power of two."""
    warps, blocks = 8, -(-k // 256)
    programs, many = -(-n // (16 * warps)), 264
    stages = 1
    if device.type == "cuda" and torch.version.hip is None:
        properties = torch.cuda.get_device_properties(device)
        found = measured(properties.name).get(setting_name("tall", kind, bits, n, k, width))
        if found is not None:
            return TallConfig(warps=found[0], split=found[1], stages=found[2])
        many = 2 * properties.multi_processor_count
        # 512 bytes of shared memory a token and block
        stages = min(3, max(1, properties.shared_memory_per_block_optin // (512 * width) - 1))
    return TallConfig(warps=warps, split=max(1, min(8, blocks, many // programs)), stages=stages)


@cache
def trellis_warps(code: str, bits: int, n: int, k: int, width: int, device: torch.device) -> int:
    """Warps that share the columns of 16 rows."""
    groups = -(-k // 64)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = measured(name).get(setting_name("trellis", code, bits, n, k, width))
        if found is not None:
            return found[0]
    return 8 if groups >= 16 else 4
