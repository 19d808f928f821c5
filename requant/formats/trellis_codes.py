"""Computed codebooks of the trellis: a state of 16 bits becomes one or two weights by a few integer instructions.

A code should look like independent Gaussian draws (although neighbouring states share most of their bits, their values must
not show it) and be cheap for a kernel, since decoding, not memory, limits its speed. All values are exact in float16, so
that a kernel, this table and a saved file agree bit for bit; their standard deviation is near 1, not exactly 1.

| code | weights per step | state s -> value | from |
| --- | --- | --- | --- |
| `mul1` | 1 | h = 0x83DCD12D s; (b0 + b1 + b2 + b3 - 510) / 128, with b the bytes of h | ExLlamaV3 |
| `3inst` | 1 | h = 89226354 s + 64248484; the two float16 in (h & 0x8FFF8FFF) ^ 0x3B603B60, added | arXiv 2406.11235 |
| `pair` | 2 | h = 0x4E6DA66B s + 0x3C6EF35F; (b0 + b1 + b2 + b3 - 510) / 128, (b0 - b1 - b2 + b3) / 128 | ours |

`mul1` has the least error, except at 1 bit, where successive values correlate. `pair` gets two uncorrelated values from
one hash by two byte sums (`dp4a`) and needs half the windows and products of `mul1`; its multiplier is the best of 30.

Mean squared error on independent Gaussians of variance 1, times 4**bits (1 is the bound of any code), at the spreads
below, and that of 65536 true Gaussian draws in their place (1056 tiles, `pair` 200; standard error 0.3 %):

| bits | `mul1` | `3inst` | Gaussian | `pair` | Gaussian pairs |
| --- | --- | --- | --- | --- | --- |
| 1 | 1.095 | 1.073 | 1.070 | 1.066 | 1.071 |
| 2 | 1.099 | 1.106 | 1.098 | 1.127 | 1.104 |
| 3 | 1.117 | 1.138 | 1.121 | 1.226 | 1.148 |
| 4 | 1.140 | 1.179 | 1.148 | 1.399 | 1.218 |
| 5 / 6 / 8 | 1.177 / 1.236 / 1.418 | 1.240 / 1.320 / 1.625 | 1.179 / 1.215 / 1.350 | | |

Weights travel in tiles of 16 by 16, row by row: a tail-biting stream of 256 codes of `bits` bits. A step of `pair` is two
neighbours of a row, the left one in its high bits. The state of a step is the 16 bits of the stream that end with it.

**Quarter bits.** Not every step has to move the window by the same number of bits. At 2.25 bits three steps of
four move it by 2 and the last by 3 (`step_bits`); the state still has 16 bits, so the error falls smoothly with the
average: 1.100, 1.107 and 1.114 at 2.25, 2.5 and 2.75 bits (`mul1`), where a mixture of tiles of 2 and of 3 bits has
1.26, 1.37 and 1.37. So the allocator need not round the bits of a matrix to whole numbers. A step of `pair` moves the
window by the sum of its two weights' bits: alternately 4 and 5 bits at 2.25.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from requant.formats.hadamard import TILE

STATE_BITS = 16
PERIOD = 4  # steps after which the bits of a step repeat
STATES = 1 << STATE_BITS
TILE_WEIGHTS = TILE * TILE


@dataclass(frozen=True, kw_only=True)
class Code:
    """A family of the table above.

    `spreads[bits - 1]` is the standard deviation of its values that suits Gaussians of variance 1 best: below 1 where
    the bits are few and the reconstruction shrinks, above it where many nearby values matter more than likely ones.
    """

    compute: Callable[[], Float[Tensor, "s v"]]
    weights_per_step: int
    spreads: tuple[float, ...]


def _hash(multiplier: int, increment: int) -> Int64[Tensor, " s"]:
    """`multiplier * state + increment` modulo 2**32, for every state."""
    return (torch.arange(STATES) * multiplier + increment) & 0xFFFFFFFF


def _bytes(h: Int64[Tensor, " s"]) -> list[Int64[Tensor, " s"]]:
    """The four bytes, the lowest first."""
    return [(h >> shift) & 0xFF for shift in (0, 8, 16, 24)]


def _as_float16(bits: Int64[Tensor, " s"]) -> Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.float16)


def _byte_sum() -> Float[Tensor, "s v"]:
    total = torch.stack(_bytes(_hash(0x83DCD12D, 0)), dim=1).sum(1, keepdim=True)
    return (total - 510).float() / 128


def _three_instructions() -> Float[Tensor, "s v"]:
    h = (_hash(89226354, 64248484) & 0x8FFF8FFF) ^ 0x3B603B60
    return (_as_float16(h & 0xFFFF) + _as_float16(h >> 16)).float()[:, None]


def _pair() -> Float[Tensor, "s v"]:
    b0, b1, b2, b3 = _bytes(_hash(0x4E6DA66B, 0x3C6EF35F))
    return torch.stack([b0 + b1 + b2 + b3 - 510, b0 - b1 - b2 + b3], dim=1).float() / 128


CODES: dict[str, Code] = {
    "mul1": Code(compute=_byte_sum, weights_per_step=1, spreads=(0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.35)),
    "3inst": Code(
        compute=_three_instructions, weights_per_step=1, spreads=(0.85, 1.0, 1.05, 1.1, 1.2, 1.2, 1.35, 1.5)
    ),
    "pair": Code(compute=_pair, weights_per_step=2, spreads=(0.9, 1.05, 1.2, 1.35)),
}


@cache
def code_values(name: str, device: torch.device | None = None) -> Float[Tensor, "s v"]:
    """What each of the 65536 states stands for, float32, on a device (None: the CPU); a tensor that callers share."""
    with torch.inference_mode(False):  # whoever asks first
        return CODES[name].compute().to(device)


def to_tiles(matrix: Shaped[Tensor, "n k"]) -> Shaped[Tensor, "b 256"]:
    """The tiles of a matrix, row by row of tiles, each a sequence; n and k are multiples of 16."""
    n, k = matrix.shape
    return matrix.reshape(n // TILE, TILE, k // TILE, TILE).transpose(1, 2).reshape(-1, TILE_WEIGHTS)


def from_tiles(tiles: Shaped[Tensor, "b 256"], shape: tuple[int, int]) -> Shaped[Tensor, "n k"]:
    """The inverse of `to_tiles`."""
    n, k = shape
    return tiles.reshape(n // TILE, k // TILE, TILE, TILE).transpose(1, 2).reshape(n, k)


def step_bits(bits: int | float, weights_per_step: int = 1) -> tuple[int, ...]:
    """The bits that each of PERIOD steps moves the window by: as even as whole numbers can be, the larger ones last.

    Raises ValueError where PERIOD steps do not make a whole number of bits.
    """
    if bits * PERIOD % 1:
        raise ValueError(f"{bits} bits per weight are not a multiple of 1/{PERIOD}")
    total = bits * weights_per_step * PERIOD
    return tuple((i + 1) * int(total) // PERIOD - i * int(total) // PERIOD for i in range(PERIOD))


def codes_of_states(
    states: Int64[Tensor, "b t"], *, bits: int | float, weights_per_step: int
) -> UInt8[Tensor, "b 256"]:
    """The bits that each weight shifts in."""
    own = step_bits(bits)
    steps = states.unflatten(1, (-1, PERIOD // weights_per_step))
    codes = torch.empty(*steps.shape[:2], PERIOD, dtype=torch.uint8, device=states.device)
    for i in range(PERIOD):
        step = i // weights_per_step
        after = sum(own[i + 1 : (step + 1) * weights_per_step])  # bits of the weights after it in its step
        codes[..., i] = steps[..., step] >> after & (1 << own[i]) - 1
    return codes.flatten(1)


def states_of_codes(
    codes: UInt8[Tensor, "b 256"], *, bits: int | float, weights_per_step: int
) -> Int64[Tensor, "b t"]:
    """The 16 bits that end with each step, across the stream's end."""
    weights, own = codes.long().unflatten(1, (-1, PERIOD)), step_bits(bits)
    symbols = weights[..., ::weights_per_step]
    for v in range(1, weights_per_step):
        shifts = torch.tensor(own[v::weights_per_step], device=codes.device)
        symbols = symbols << shifts | weights[..., v::weights_per_step]
    symbols = symbols.flatten(1)
    moves = step_bits(bits, weights_per_step)
    states, shifts = symbols.unflatten(1, (-1, PERIOD)), torch.zeros(PERIOD, dtype=torch.int64)
    back = 0
    # `shifts`: bits between the end of a step and that of the one `back` before
    while int(shifts.min()) < STATE_BITS:
        shifts = shifts + torch.tensor([moves[(i - back) % PERIOD] for i in range(PERIOD)])
        back += 1
        earlier = symbols.roll(back, dims=1).unflatten(1, (-1, PERIOD))
        states = states | earlier << shifts.clamp(max=STATE_BITS).to(codes.device)
    return states.flatten(1) & (STATES - 1)
