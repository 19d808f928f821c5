"""llama.cpp's blocks of 32 weights that hold a uniform grid exactly.

    w = d q        d float16, q a whole number

| type | q | bytes per block | bits per weight |
| --- | --- | --- | --- |
| `Q4_0` | -8 .. 7 | 2 + 16 | 4.5 |
| `Q5_0` | -16 .. 15 | 2 + 4 + 16 | 5.5 |
| `Q8_0` | -128 .. 127 | 2 + 32 | 8.5 |

A grid's value is `(code - zero_point) scale`, so q is the difference, and a zero point never makes it inexact: it only
widens the range, from 2^bits to 2^(bits + 1) - 1 values. So 2 and 3 bits fit Q4_0 with or without zero points, 4 bits with
zero points need Q5_0, and 8 bits with zero points fit nothing. `Q4_1` and `Q5_1` would store the zero point as a float16
minimum `-zero_point scale`, which is seldom exact in float16; the k-quants quantize their scales. Neither is exact, so
neither is written. Groups of a multiple of 32 columns repeat their scale.
"""

from collections.abc import Callable

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from requant.formats.grid import Grid
from requant.formats.other_programs import BLOCK, BLOCK_BITS


def bytes_of_row(name: str, k: int) -> int:
    """Bytes of k columns in blocks of type `name`, k a multiple of 32: the codes, and a float16 scale per block."""
    return k // BLOCK * BLOCK_BITS[name] * BLOCK // 8 + k // BLOCK * 2


def encode(grid: Grid, name: str) -> UInt8[Tensor, "n b"]:
    """The rows of a grid as bytes of blocks of type `name`; k and the group size are multiples of 32."""
    n, k = grid.shape
    columns = torch.arange(k) // grid.group_size
    if grid.zero_points is None:
        values = grid.codes.int() - (1 << grid.bits - 1)
    else:
        values = grid.codes.int() - grid.zero_points.int()[:, columns]
    scales = grid.scales[:, columns[::BLOCK]].contiguous().view(torch.uint8).view(n, -1, 2)
    packed = ENCODERS[name](values.view(n, -1, BLOCK))
    return torch.cat([scales, packed], dim=2).flatten(1)


def _q4_0(values: Int[Tensor, "n b 32"]) -> UInt8[Tensor, "n b w"]:
    return _nibbles((values + 8).to(torch.uint8))


def _q5_0(values: Int[Tensor, "n b 32"]) -> UInt8[Tensor, "n b w"]:
    shifted = (values + 16).to(torch.uint8)
    fifth = (shifted >> 4).unflatten(2, (4, 8)) << torch.arange(8, dtype=torch.uint8)  # little-endian bits
    return torch.cat([fifth.sum(3, dtype=torch.uint8), _nibbles(shifted & 15)], dim=2)


def _q8_0(values: Int[Tensor, "n b 32"]) -> UInt8[Tensor, "n b w"]:
    return values.to(torch.int8).view(torch.uint8)


def _nibbles(codes: UInt8[Tensor, "n b 32"]) -> UInt8[Tensor, "n b 16"]:
    """Weight j in the low half of byte j, weight 16 + j in its high half."""
    return codes[:, :, :16] | codes[:, :, 16:] << 4


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_0": _q4_0, "Q5_0": _q5_0, "Q8_0": _q8_0}
