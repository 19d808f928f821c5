"""Launch settings: what was measured on an H200, and a rule for every other GPU.

The decode kernel needs enough bytes in flight and few enough registers that 16 warps fit a multiprocessor; everything
else follows from the shape. Settings are chosen from shapes alone, never by timing inside a call, so a captured graph
and an eager call run the same kernel. `kernels/bench/tune.py` measures launch shapes and prints rows for `MEASURED`.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch

from requant_kernels.layouts import CodebookLayout, Layout

DECODE_TOKENS = 16  # the decode kernel's most
TALL_TOKENS = 128  # beyond it, dequantize and multiply


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """`warps` share the columns of `tiles` x 16 rows, `unroll` blocks at a time; `slots` residual chunks at a time."""

    warps: int
    tiles: int = 1
    unroll: int = 1
    slots: int = 16
    pdl: bool = False
    max_registers: int | None = None  # 128: 16 warps fit a multiprocessor


# (kind, bits, rows, columns) -> (warps, tiles, unroll), one token
MEASURED: dict[str, dict[tuple[str, int, int, int], tuple[int, int, int]]] = {
    "NVIDIA H200": {
        ("grid", 2, 8192, 8192): (4, 1, 1),
        ("codebook", 2, 8192, 8192): (4, 1, 1),
        ("codebook", 3, 8192, 8192): (4, 1, 1),
    }
}


def decode_config(layout: Layout, device: torch.device) -> DecodeConfig:
    """Settings for one to 16 tokens."""
    kind = "codebook" if isinstance(layout, CodebookLayout) else "grid"
    chunks = 0 if layout.sparse is None else layout.sparse.columns.shape[0] / layout.words.shape[0]
    slots = min(16, max(2, 1 << math.ceil(math.log2(max(1.0, 1.2 * chunks)))))
    return _config(kind, layout.bits, layout.n, layout.k, slots, device)


@cache
def _config(kind: str, bits: int, n: int, k: int, slots: int, device: torch.device) -> DecodeConfig:
    blocks, tiles = -(-k // 256), -(-n // 16)
    properties = torch.cuda.get_device_properties(device)
    pdl = (properties.major, properties.minor) >= (9, 0) and torch.version.hip is None
    registers = 128 if torch.version.hip is None else None
    measured = MEASURED.get(properties.name, {}).get((kind, bits, n, k))
    if measured is not None:
        warps, rows, unroll = measured
        return DecodeConfig(
            warps=warps, tiles=rows, unroll=unroll, slots=slots, pdl=pdl, max_registers=registers
        )
    warps = 4  # small matrices: more warps a tile, so that every multiprocessor has some
    while warps < 16 and tiles * warps < 12 * properties.multi_processor_count and 2 * warps <= blocks:
        warps *= 2
    return DecodeConfig(warps=warps, slots=slots, pdl=pdl, max_registers=registers)


@cache
def tall_stages(tokens: int, device: torch.device) -> int:
    """How many blocks of activations the tall kernel keeps under way in shared memory, 512 bytes a token each."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 1
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin // (512 * tokens)
    return min(3, max(1, room - 1))
