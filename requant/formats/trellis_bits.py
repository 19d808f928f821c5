"""Tiles of trellis codes as bits in 32-bit words, for any number of bits per code that is a multiple of a quarter.

The bits that all codes of a tile have are stored first, then, in the same order, the highest bit of the longer codes.
"""

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from requant.formats.bits import pack_bits, unpack_bits, word_count
from requant.formats.trellis_codes import PERIOD, TILE_WEIGHTS, step_bits


def pack_tiles(tiles: UInt8[Tensor, "b 256"], *, bits: int | float) -> Int32[Tensor, "b w"]:
    """Tiles at `bits` bits per weight, a quarter or whole."""
    whole, longer = _longer_codes(bits)
    rows = pack_bits(tiles & ((1 << whole) - 1), bits=whole)
    if not longer:
        return rows
    highest = tiles.unflatten(1, (-1, PERIOD))[:, :, longer].flatten(1) >> whole
    return torch.cat([rows, pack_bits(highest, bits=1)], dim=1)


def unpack_tiles(packed: Int32[Tensor, "b w"], *, bits: int | float) -> UInt8[Tensor, "b 256"]:
    """The inverse of `pack_tiles`."""
    whole, longer = _longer_codes(bits)
    split = word_count(TILE_WEIGHTS, whole)
    tiles = unpack_bits(packed[:, :split], bits=whole, k=TILE_WEIGHTS)
    if longer:
        highest = unpack_bits(packed[:, split:], bits=1, k=TILE_WEIGHTS // PERIOD * len(longer))
        tiles.unflatten(1, (-1, PERIOD))[:, :, longer] |= highest.unflatten(1, (-1, len(longer))) << whole
    return tiles


def _longer_codes(bits: int | float) -> tuple[int, list[int]]:
    """The bits that every code has, and which of PERIOD codes have one more."""
    whole = int(bits)
    return whole, [] if bits == whole else [i for i, own in enumerate(step_bits(bits)) if own > whole]
