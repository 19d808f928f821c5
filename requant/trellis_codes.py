"""Computed codebooks of the trellis: a 16-bit state becomes one or two weights by a few integer instructions.

A code must look like independent Gaussian draws to the trellis (neighbouring states share 16 - bits of their bits, their
values must not correlate) and cost a kernel as little as possible, since decoding, not memory, limits its speed. Every
value below is exact in float16, so a kernel, this table and a saved file agree bit for bit; the spread is not
normalized, `std` says what it is.

| code | weights a step | state -> value | after |
| --- | --- | --- | --- |
| `3inst` | 1 | h = 89226354 s + 64248484; the two float16 in (h & 0x8FFF8FFF) ^ 0x3B603B60, added | Tseng et al. 2024 |
| `mul1` | 1 | h = 0x83DCD12D s; (sum of its four bytes - 510) / 128 | arXiv 2406.11235, ExLlamaV3 |
| `pair` | 2 | h = 89226354 s + 64248484; each 16-bit half: (sum of its two bytes - 255) / 128 | ours |

Weights travel in tiles of 16 by 16, row by row: a ring of 256 codes of `bits` bits, a step of `pair` being two
neighbours of a row, the left one in the high bits. The state of a step is the last 16 bits of the ring up to it.

`pair` halves the hashing and the state windows of a weight. Its values are triangular, not Gaussian, and two bits a weight
are four a step, so fewer states stay in memory: see the measured errors in `tests/requant/quantizers/test_trellis.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from requant.hadamard import TILE

STATE_BITS = 16
STATES = 1 << STATE_BITS


def _hash(multiplier: int, increment: int) -> Int64[Tensor, " s"]:
    """`multiplier * state + increment` modulo 2**32, for every state."""
    return (torch.arange(STATES) * multiplier + increment) & 0xFFFFFFFF


def _as_float16(bits: Int64[Tensor, " s"]) -> Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.float16)


def _three_instructions() -> Float[Tensor, "s v"]:
    h = (_hash(89226354, 64248484) & 0x8FFF8FFF) ^ 0x3B603B60
    return (_as_float16(h & 0xFFFF) + _as_float16(h >> 16)).float()[:, None]


def _byte_sum() -> Float[Tensor, "s v"]:
    h = _hash(0x83DCD12D, 0)
    total = sum((h >> shift) & 0xFF for shift in (0, 8, 16, 24))
    return ((total - 510).float() / 128)[:, None]


def _pair() -> Float[Tensor, "s v"]:
    h = _hash(89226354, 64248484)
    halves = torch.stack([h & 0xFFFF, h >> 16], dim=1)
    return ((halves & 0xFF) + (halves >> 8) - 255).float() / 128


@dataclass(frozen=True, kw_only=True)
class Code:
    """A family of the table above."""

    weights_per_step: int
    compute: Callable[[], Float[Tensor, "s v"]]


CODES: dict[str, Code] = {
    "3inst": Code(weights_per_step=1, compute=_three_instructions),
    "mul1": Code(weights_per_step=1, compute=_byte_sum),
    "pair": Code(weights_per_step=2, compute=_pair),
}


@cache
def _cached(name: str) -> Float[Tensor, "s v"]:
    return CODES[name].compute()


def code_values(name: str) -> Float[Tensor, "s v"]:
    """What each of the 65536 states stands for, float32, exact in float16."""
    return _cached(name).clone()


def to_tiles(matrix: Shaped[Tensor, "n k"]) -> Shaped[Tensor, "tiles 256"]:
    """The tiles of a matrix, row by row of tiles, each a sequence; n and k are multiples of 16."""
    n, k = matrix.shape
    return matrix.view(n // TILE, TILE, k // TILE, TILE).transpose(1, 2).reshape(-1, TILE * TILE)


def from_tiles(tiles: Shaped[Tensor, "tiles 256"], shape: tuple[int, int]) -> Shaped[Tensor, "n k"]:
    """The inverse of `to_tiles`."""
    n, k = shape
    return tiles.view(n // TILE, k // TILE, TILE, TILE).transpose(1, 2).reshape(n, k)


def codes_of_states(
    states: Int64[Tensor, "b t"], *, bits: int, weights_per_step: int
) -> UInt8[Tensor, "b 256"]:
    """The bits that each weight shifts in."""
    lows = [states >> (bits * (weights_per_step - 1 - v)) for v in range(weights_per_step)]
    return (torch.stack(lows, dim=2) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def states_of_codes(
    codes: UInt8[Tensor, "b 256"], *, bits: int, weights_per_step: int
) -> Int64[Tensor, "b t"]:
    """The window of 16 bits that ends with each step, around the ring."""
    steps = codes.long().view(codes.shape[0], -1, weights_per_step)
    symbols = steps[..., 0]
    for v in range(1, weights_per_step):
        symbols = symbols << bits | steps[..., v]
    shift = bits * weights_per_step
    states = symbols
    for back in range(1, -(-STATE_BITS // shift)):
        states = states | symbols.roll(back, dims=1) << (back * shift)
    return states & (STATES - 1)
