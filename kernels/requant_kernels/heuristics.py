"""Launch settings: what was measured on a GPU of this name, and a rule for every other one.

Settings follow from shapes alone and never from timing inside a call, so a captured graph and an eager call run the same
kernel. Looked up in this order: `REQUANT_KERNEL_CACHE` (what `kernels/bench/tune.py` and `requant bench --tune` wrote on
this machine), `measured.json` beside this file, the rule. The rule of the decode kernel: enough bytes in flight, and few
enough registers that 16 warps fit a multiprocessor.
"""

import json
import logging
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from requant_kernels.common.packing import CodebookLayout, GridLayout, Layout
from requant_kernels.launch_config import (
    NUMBERS,
    DecodeConfig,
    HopperConfig,
    TallConfig,
    TrellisConfig,
    decode_setting,
    trellis_setting,
)
from requant_kernels.trellis.layout import CODES, TrellisLayout, k64_per_unit

DECODE_TOKENS = 16  # the decode kernel's most
TALL_TOKENS = 128  # beyond it, dequantize and multiply
HOPPER_TOKENS = 512  # the same, where the tall kernel is the one of Hopper
logger = logging.getLogger(__name__)
TABLE = Path(__file__).with_name("tuned") / "h200.json"
CACHE_VARIABLE = "REQUANT_KERNEL_CACHE"
HOPPER_VARIABLE = "REQUANT_HOPPER"


def cache_file() -> Path:
    """Where settings measured on this machine are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(named) if named else home / "requant" / "kernels.json"


def setting_name(kernel: str, kind: str, bits: float, n: int, k: int, tokens: int) -> str:
    """The key of one setting: `tokens` is the width that the kernel is compiled for."""
    return f"{kernel} {kind} {bits:g} {n}x{k} {tokens}"


@cache
def measured(device_name: str) -> dict[str, list[int]]:
    """Settings by name for a GPU; those of the cache before those of the table."""
    found: dict[str, list[int]] = {}
    for file in (TABLE, cache_file()):
        found |= read_table(file).get(device_name, {})
    return found


def read_table(file: Path) -> dict[str, dict[str, list[int]]]:
    """GPU -> settings by name; nothing, with a warning, where the file is damaged, for it only makes calls faster."""
    if not file.exists():
        return {}
    try:
        table = json.loads(file.read_text())
    except ValueError:
        table = None
    if not isinstance(table, dict) or not all(_holds_settings(mine) for mine in table.values()):
        logger.warning("%s is damaged and not used; delete it, and measure again", file)
        return {}
    return table


def _holds_settings(mine: object) -> bool:
    """Whether these are settings by name, each with as many numbers as its kernel takes."""
    return isinstance(mine, dict) and all(
        isinstance(setting, list)
        and all(isinstance(number, int) for number in setting)
        and len(setting) == NUMBERS.get(name.split(" ")[0])
        for name, setting in mine.items()
    )


def forget() -> None:
    """Read the tables anew: settings were added."""
    for function in (
        measured,
        masked_config,
        launches_early,
        _config,
        tall_config,
        _has_wgmma,
        _hopper_config,
        trellis_config,
    ):
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


def decode_config(layout: Layout, tokens: int, device: torch.device, *, masked: bool = True) -> DecodeConfig:
    """Settings for one to 16 tokens; those of `byte_grid.py` or `half_grid.py` where they may multiply, unless `masked` is
    False."""
    width = 1 if tokens == 1 else 8 if tokens <= 8 else 16
    kind, bits, n, k = kind_of(layout), layout.bits, layout.n, layout.k
    if masked and is_plain(layout, width) and takes_gluon(device):
        found = masked_config(kind, bits, n, k, width, device)
        if found is not None:
            return found
    return _config(kind, bits, n, k, width, device, gathers(layout, width, device))


def is_plain(layout: Layout, width: int) -> bool:
    """Whether `byte_grid.py` (one token) or `half_grid.py` (up to eight) knows how to multiply: a grid of 2 to 4 bits in
    whole blocks, groups of 128 columns or more; for one token residuals of 16 bits, for more none."""
    if width > 8 or not isinstance(layout, GridLayout) or layout.bits > 4 or layout.column_scales is not None:
        return False
    sparse = layout.sparse
    whole = layout.k % 256 == 0 and layout.kernel_group % 128 == 0
    zeros = layout.zero_points is None or layout.kernel_group > 0
    return whole and zeros and (sparse is None or (width == 1 and sparse.values.dtype == torch.float16))


@cache
def masked_config(
    kind: str, bits: int, n: int, k: int, width: int, device: torch.device
) -> DecodeConfig | None:
    """The launch of `byte_grid.py` or `half_grid.py`, measured or by a rule. None: where another kernel was measured and no
    launch of these was ahead; beyond the rules."""
    properties = torch.cuda.get_device_properties(device)
    known = measured(properties.name)
    found = known.get(setting_name("masked", kind, bits, n, k, width))
    if found is not None:
        return replace(decode_setting(found), pdl=True)
    if setting_name("decode", kind, bits, n, k, width) in known:
        return None
    halves = width > 1 or (bits == 4 and "+" not in kind)
    rule = halves_rule if halves else bytes_rule
    return rule(kind, -(-n // 16), k // 256, properties.multi_processor_count)


def bytes_rule(kind: str, tiles: int, blocks: int, processors: int) -> DecodeConfig | None:
    """Two programs a multiprocessor at most, and as many tiles each as that takes."""
    share = next((r for r in (1, 2, 3, 4, 7) if tiles <= 2 * r * processors), None)
    if share is None or ("+" in kind and share > 4):
        return None
    warps = 16 if share <= 2 and blocks > 32 else 8 if share <= 4 and blocks > 8 else 4
    return DecodeConfig(warps=warps, tiles=share, unroll=2, bytes=True, ahead=False, shares=1, pdl=True)


def halves_rule(kind: str, tiles: int, blocks: int, processors: int) -> DecodeConfig | None:
    """One program a multiprocessor, so that activations come there once: of up to seven tiles, or of two teams of seven.
    Eight warps as long as registers last: with four, times differ by a fifth from one GPU to another."""
    share = next((r for r in (1, 2, 3, 4, 7, 14) if tiles <= r * processors), None)
    if share is None or "+" in kind:
        return None
    warps = min(8 if share <= 4 else 4, 1 << blocks.bit_length() - 1)
    teams = 2 if share == 14 and warps > 1 else 1
    return DecodeConfig(
        warps=warps, tiles=share // teams, unroll=3 if share == 1 else 2, halves=True, teams=teams, ahead=share > 4,
        shares=1, pdl=True,
    )  # fmt: skip


def gathers(layout: Layout, width: int, device: torch.device) -> bool:
    """Whether `gathered.py` may multiply: Hopper, residuals that have their second order, a decoder that is assembly.
    HOPPER_VARIABLE=0 keeps all from it."""
    entries = layout.sparse is not None and layout.sparse.coo is not None
    memory = isinstance(layout, CodebookLayout) and layout.bits > 4
    return width <= 8 and entries and not memory and takes_gluon(device)


def distance_of(kind: str, bits: int, width: int) -> tuple[int, bool]:
    """`unroll` and `ahead` of the rule: registers hold either words or activations of further blocks."""
    if kind == "grid" and width == 1 and bits <= 4:
        return (3, False) if bits <= 3 else (2, True)
    if "+" not in kind or (width == 1 and bits <= 3 and kind == "codebook+s"):
        return 1, True
    return (3 if kind.startswith("grid") and bits <= 3 and width <= 8 else 2), False


def least_warps(kind: str, width: int) -> int:
    """The fewest warps a tile of the rule: residuals, levels and more tokens are work for several."""
    return 4 if kind.startswith("codebook") or width > 1 else 2 if "+" in kind else 1


def registers_of(kind: str, bits: int, width: int) -> int:
    """The most registers of the rule's launches, for 16 warps a multiprocessor; 0 where fewer would spill."""
    return 128 if width <= 8 and (bits <= 3 or (bits == 4 and kind.startswith("grid"))) else 0


@cache
def _config(
    kind: str, bits: int, n: int, k: int, width: int, device: torch.device, gathers: bool = False
) -> DecodeConfig:
    blocks, tiles = -(-k // 256), -(-n // 16)
    properties = torch.cuda.get_device_properties(device)
    pdl = launches_early(device)
    registers = (registers_of(kind, bits, width) or None) if torch.version.hip is None else None
    found = measured(properties.name).get(setting_name("decode", kind, bits, n, k, width))
    if found is not None and (gathers or not decode_setting(found).gathered):
        return replace(decode_setting(found), pdl=pdl)
    warps = least_warps(kind, width)  # all run at once, about 16 a multiprocessor
    most = 16 if registers else 8  # 16 warps have 128 registers each
    while warps < most and tiles * warps < 11 * properties.multi_processor_count and 2 * warps <= blocks:
        warps *= 2
    unroll, ahead = distance_of(kind, bits, width)
    return DecodeConfig(warps=warps, unroll=unroll, ahead=ahead, pdl=pdl, max_registers=registers)


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
def _has_wgmma(device: torch.device) -> bool:
    """Whether this is Hopper, and Triton's Gluon is the one that `wgmma.py` is written in."""
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or torch.cuda.get_device_capability(device) != (9, 0)
    ):
        return False
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


def takes_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon are possible, and not turned off."""
    return os.environ.get(HOPPER_VARIABLE) != "0" and _has_wgmma(device)


def runs_on_hopper(layout: Layout | TrellisLayout, device: torch.device) -> bool:
    """Whether more than 16 tokens of a layout go to `hopper.py` (`trellis_hopper.py`): every format whose decoder is
    assembly, and residuals that have their second order (`entries.py`), which are launches of their own beside a trellis.
    HOPPER_VARIABLE=0 keeps all from it."""
    return (
        takes_gluon(device)
        and not (isinstance(layout, CodebookLayout) and layout.bits > 4)
        and (isinstance(layout, TrellisLayout) or layout.sparse is None or layout.sparse.coo is not None)
    )


def hopper_width(tokens: int) -> int:
    """The number of tokens that settings are kept for: 32, 64, .."""
    return max(32, 1 << (tokens - 1).bit_length())


def hopper_config(layout: Layout | TrellisLayout, tokens: int, device: torch.device) -> HopperConfig:
    """Settings for 17 to HOPPER_TOKENS tokens."""
    kind = layout.code if isinstance(layout, TrellisLayout) else kind_of(layout)
    return _hopper_config(kind, layout.bits, layout.n, layout.k, hopper_width(tokens), device)


@cache
def _hopper_config(kind: str, bits: float, n: int, k: int, width: int, device: torch.device) -> HopperConfig:
    many = 132
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = measured(properties.name).get(setting_name("hopper", kind, bits, n, k, width))
        if found is not None:
            tokens, warps, tiles, ahead, split = found
            return HopperConfig(tokens=tokens, warps=warps, tiles=tiles, ahead=ahead, split=split)
        many = properties.multi_processor_count
    blocks = -(-k // 256)
    if kind in CODES:  # the rotation that adds the partial products adds parts of its own too, 8 in all
        tokens, rows = min(256, width), -(-n // 16) * 16
        programs, most = -(-n // 128) * -(-width // tokens), max(1, 8 * 4096 // max(4096, rows & -rows))
        split = max(1, min(most, blocks, round(many * (2 if width <= 64 else 1) / programs)))
        small = width == 64 and bits <= 4 and n < 128 * many  # 4 warps of two tiles, else 8 of one
        return HopperConfig(
            tokens=tokens,
            warps=4 if small else 8,
            tiles=2 if small else 1,
            ahead=2 if tokens == 256 else 0,
            split=split,
        )
    # 16 warps a multiprocessor, one program of 8 where accumulators or residuals take the registers of the others
    if width > 64:
        warps, room = 8, many
    elif "+" in kind:
        warps, room = 16 if bits + (kind == "codebook+s") <= 4 else 8, many
    else:
        warps = 4 if n < 128 * many else 8
        room = many * 16 // warps
    tokens = min(128, width)
    programs = -(-n // (16 * warps)) * -(-width // tokens)
    return HopperConfig(tokens=tokens, warps=warps, split=max(1, min(8, blocks // 4, round(room / programs))))


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; of an H200 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; on an H200 where there is no GPU."""
    most = 227 << 10
    return (
        torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if device.type == "cuda"
        else most
    )


@cache
def trellis_config(code: str, bits: float, n: int, k: int, width: int, device: torch.device) -> TrellisConfig:
    """Settings for one to 16 tokens; a step of all warps stays within a section of 4096 columns."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = measured(name).get(setting_name("trellis", code, bits, n, k, width))
        if found is not None:
            return trellis_setting(found)
    whole = bits == int(bits)  # at quarters of a bit a unit is up to four groups
    if width == 1 and bits <= 4 and code != "3inst":
        return one_token_rule(bits, n, k, multiprocessors(device))
    small = n <= (4096 if k >= 8192 else 2048) and width != 8
    return TrellisConfig(
        warps=16 if small else 8,
        tiles=1 if small or width > 8 or bits > 4 else 2,
        unroll=2 if whole and bits <= 4 else 1,
    )


def one_token_rule(bits: float, n: int, k: int, processors: int) -> TrellisConfig:
    """One token of `mul1` or `pair`, at most 4 bits: one program of 16 warps a multiprocessor as long as one takes its
    tiles, and up to 4096 columns each rotates the token for itself (`one_token.py`); then programs of two tiles."""
    whole = bits == int(bits)
    tiles = next((r for r in (1, 2, 4, 7) if n <= 16 * r * processors), None)
    if tiles is not None and (k <= 4096 or tiles <= 2):
        most = k // (1024 * k64_per_unit(round(4 * bits)))  # units of a warp until some warps have no columns
        if tiles > 2 and not most:
            return TrellisConfig(warps=8, tiles=2, unroll=1)
        long = 4 if k <= 4096 and bits <= 3 else 2 if k > 4096 else 1
        unroll = 1 if not whole or tiles > 2 else 2 if tiles == 1 else long
        return TrellisConfig(warps=16, tiles=tiles, unroll=max(1, min(unroll, most)))
    return TrellisConfig(warps=8 if whole or tiles == 4 else 4, tiles=2, unroll=2)
