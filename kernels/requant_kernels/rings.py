"""The layout of trellis codes: every 16 x 16 tile a ring of bits, four tiles side by side.

A ring is 256 codes of `bits` bits in row order, first code first, as a stream from the highest bit of word 0 down:
`8 bits` words of 32. words int32 [row tiles, groups of 4 column tiles, 8 bits, 4].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from requant_kernels.layouts import Csr, SparseSlots, pack_sparse, row_order, stored_rows

GROUP_TILES = 4
TILE = 16
CODES = {"mul1": 5, "3inst": 5, "pair": 8}  # code -> most bits: four steps' windows lie within 32 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisLayout:
    """w~ = diag(output_scales) H V H diag(input_scales) + sparse; V padded to tiles."""

    words: Tensor
    input_scales: Tensor  # float16 [k]
    output_scales: Tensor  # float16 [n]
    n: int
    k: int
    bits: int
    code: str
    rows: Tensor | None = None  # of `sparse` alone: int32 [16 tiles], position -> row; padding has n
    sparse: SparseSlots | None = None


def pack_trellis(
    codes: Tensor,
    input_scales: Tensor,
    output_scales: Tensor,
    *,
    bits: int,
    code: str,
    sparse: Csr | None = None,
) -> TrellisLayout:
    """codes uint8 [r, c], r and c the multiples of 16 at or above n and k; `sparse` as in `pack_grid`.

    Raises ValueError with the remedy.
    """
    n, k = len(output_scales), len(input_scales)
    if code not in CODES or not 1 <= bits <= CODES[code]:
        held = ", ".join(f"{name} to {most} bits" for name, most in CODES.items())
        raise ValueError(f"no trellis kernel decodes {code!r} at {bits} bits; there are {held}")
    if codes.shape != (-(-n // TILE) * TILE, -(-k // TILE) * TILE):
        raise ValueError(
            f"codes have shape {tuple(codes.shape)}; {n} x {k} padded to multiples of {TILE} is expected"
        )
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (GROUP_TILES * TILE)))
    tiles = padded.view(codes.shape[0] // TILE, TILE, -1, GROUP_TILES, TILE).permute(0, 2, 3, 1, 4)
    shifts = torch.arange(bits - 1, -1, -1, device=codes.device, dtype=torch.uint8)
    stream = (tiles.reshape(*tiles.shape[:3], 256, 1) >> shifts & 1).reshape(*tiles.shape[:3], 8 * bits, 32)
    words = torch.zeros(stream.shape[:-1], dtype=torch.int32, device=codes.device)
    for i in range(32):
        words |= stream[..., i].int() << (31 - i)
    order = None if sparse is None else row_order(sparse[0].to(codes.device))
    return TrellisLayout(
        words=words.transpose(2, 3).contiguous(), input_scales=input_scales, output_scales=output_scales, n=n, k=k,
        bits=bits, code=code, rows=stored_rows(order, n), sparse=pack_sparse(sparse, order, k),
    )  # fmt: skip


def unpack_trellis(layout: TrellisLayout) -> Tensor:
    """codes uint8 [r, c]: the inverse of `pack_trellis`."""
    words = layout.words.transpose(2, 3)
    stream = torch.stack([(words >> (31 - i)) & 1 for i in range(32)], -1).to(torch.uint8)
    bits = stream.reshape(*words.shape[:3], 256, layout.bits)
    codes = torch.zeros(bits.shape[:-1], dtype=torch.uint8, device=words.device)
    for i in range(layout.bits):
        codes = codes << 1 | bits[..., i]
    tiles = codes.view(*words.shape[:3], TILE, TILE).permute(0, 3, 1, 2, 4)
    return tiles.reshape(words.shape[0] * TILE, -1)[:, : -(-layout.k // TILE) * TILE]
