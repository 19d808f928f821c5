"""What a program of the decode kernel keeps in shared memory where its words travel through it (`copies.py`).

    the ring of words | activations, 2 K bytes, where they are staged | residuals of the passes

A program gets no more than it need not ask for. Where all programs run at once it takes as much of a multiprocessor as keeps
more of them away than is its share: with programmatic dependent launch the first programs of a kernel begin where the one
before leaves room, crowd together there, and stay so (8192 x 8192, 2 bits: 12.4 us with room for six programs a
multiprocessor, 9.05 with room for the four that are its share). What a kernel declares itself is at most 48 KB; `shares` of
a setting ask for more at launch (`launching.py`).
"""

from dataclasses import dataclass

import torch

from requant_kernels.common.packing import Layout
from requant_kernels.heuristics import multiprocessors, shared_memory
from requant_kernels.launch_config import DecodeConfig, TrellisConfig
from requant_kernels.scalar.copies import FREE, room_asm, stage_asm
from requant_kernels.scalar.passes import MOST_PASSES, PASS_BYTES, PRODUCTS

MULTIPROCESSOR = 227 << 10  # bytes that the programs of a multiprocessor share, less 1024 each


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Where things begin, and how many bytes there are; `x_at` and `passes` are 0 where there are none."""

    x_at: int
    slots_at: int
    passes: int
    size: int


def room_of(
    layout: Layout, config: DecodeConfig, tokens: int, processors: int, *, staged: bool
) -> Room | None:
    """The room for a ring of `config.unroll` places; None where it is more than a program gets. `staged`: the activations
    of one token too, and residuals where they are 16 bits wide."""
    warps, tiles = config.warps, config.tiles
    ring = config.unroll * warps * tiles * layout.bits * 512
    slots_at = ring + (2 * layout.k if staged else 0)
    passes, sparse = 0, layout.sparse
    if staged and sparse is not None and sparse.values.dtype == torch.float16 and 2 * warps >= tiles:
        chunks = -(-9 * sparse.columns.shape[0] // (8 * layout.packed_codes.shape[0]))  # of most tiles
        passes = min(MOST_PASSES, -(-chunks * tiles // (2 * warps)))
    own = 64 * warps * tiles * tokens  # Triton's: the sum over the warps
    programs = -(-layout.packed_codes.shape[0] // tiles)
    size = room_size(slots_at + passes * PASS_BYTES * warps, own, programs, processors)
    if size is None:
        return None
    return Room(x_at=ring if staged else 0, slots_at=slots_at, passes=passes, size=size)


def room_size(least: int, own: int, programs: int, processors: int) -> int | None:
    """Bytes to declare beside Triton's `own`: `least`, and where there are more, as many as keep programs from crowding."""
    if least + own > FREE:
        return None
    share = MULTIPROCESSOR // -(-programs // processors) - 1024
    return max(least, (min(FREE, share) - own) // 128 * 128)


def shared_room(programs: int, config: DecodeConfig | TrellisConfig, device: torch.device) -> int:
    """Bytes that every program takes so that as many as its launch has for each multiprocessor fit there, or, of two
    `shares`, twice as many: this launch's and the next one's. 0 where that is no matter."""
    if config.shares == 0 or device.type != "cuda":
        return 0
    each = config.shares * -(-programs // multiprocessors(device))
    return max(0, min(shared_memory(device) - 1024, MULTIPROCESSOR // each - 1024))


def room_constants(room: Room | None, config: DecodeConfig, dtype: torch.dtype) -> dict[str, object]:
    """What the kernel is told of it."""
    if room is None:
        words = {"COPIES": 0, "ROOM": None, "STAGE": None, "X_AT": 0}
        return words | {"PASSES": 0, "PRODUCTS": None, "SLOTS_AT": 0}
    words = {"COPIES": config.unroll, "ROOM": room_asm(room.size), "STAGE": stage_asm(config.warps)}
    name = "fp16" if dtype == torch.float16 else "bf16"
    products = PRODUCTS[name] if room.passes else None
    return words | {"X_AT": room.x_at, "PASSES": room.passes, "PRODUCTS": products, "SLOTS_AT": room.slots_at}
