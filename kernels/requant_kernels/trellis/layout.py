"""The memory layout of trellis codes: each lane's bits are contiguous and fill whole 32-bit words.

Every 16 x 16 tile of the matrix is a tail-biting bit stream (QTIP, arXiv 2406.11235): 256 codes in row-major order, each
with its highest bit first. Four adjacent weights take T = `quad_bits` bits, an integer in 4 .. 32; with quarter bits, code i
of the four ends floor((i + 1) T / 4) bits after their first bit.

    k64        four adjacent tiles: 16 rows x 64 columns, what a warp decodes at once
    segment    the 8 T bits of rows 2 g and 2 g + 1 of tile t of a k64, held by lane 4 g + t
    unit       k64 whose segments together are whole words: J = 4 / gcd(T, 4) neighbours, T J / 4 words per lane

A lane loads the words of a unit in vectors of v = 1, 2 or 4, the largest that divides their number:

    packed_codes int32 [row tiles, units, T J / 4 / v, lane, v]
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from requant_kernels.common.sparse import Csr, SlicedEll, pack_sparse, padded_row_perm, sort_rows
from requant_kernels.trellis.codes import CODES, MAX_BITS

TILE = 16
K64_TILES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisLayout:
    """w~ = diag(output_scales) H V H diag(input_scales) + sparse; V is padded to tiles. Either H may be absent."""

    packed_codes: Tensor
    input_scales: Tensor | None  # float16 [k]; None: x arrives rotated and unpadded
    output_scales: Tensor  # float16 [n]
    n: int
    k: int
    bits: float  # a multiple of 1/4
    code: str
    rotates_output: bool = True
    parts: tuple[int, ...] = ()  # rows of the joined matrices, each with its own H; (): one matrix
    row_perm: Tensor | None = None  # for `sparse` only: int32 [16 tiles], position -> row; n at padding
    sparse: SlicedEll | None = None

    @property
    def format(self) -> str:
        """The name of the code."""
        return self.code

    @property
    def quad_bits(self) -> int:
        """Bits of four adjacent weights together."""
        return round(4 * self.bits)


def step_bits(quad_bits: int) -> tuple[int, ...]:
    """Bits of each of the codes of four adjacent weights."""
    return tuple((i + 1) * quad_bits // 4 - i * quad_bits // 4 for i in range(4))


def k64_per_unit(quad_bits: int) -> int:
    """How many adjacent k64, with segments of 8 `quad_bits` bits, fill whole words together."""
    return 4 // math.gcd(quad_bits, 4)


def words_per_load(quad_bits: int) -> int:
    """The vector v of a lane's loads."""
    return math.gcd(quad_bits * k64_per_unit(quad_bits) // 4, 4)


def pack_trellis(
    codes: Tensor,
    input_scales: Tensor | None,
    output_scales: Tensor,
    *,
    bits: float,
    code: str,
    rotates_output: bool = True,
    parts: tuple[int, ...] = (),
    sparse: Csr | None = None,
) -> TrellisLayout:
    """Pack codes uint8 [r, c]; r and c are n and k rounded up to multiples of 16. `sparse` as in `pack_grid`. `parts`:
    multiples of 16 whose sum is n.

    Raises ValueError with the remedy.
    """
    n, k = len(output_scales), codes.shape[1] if input_scales is None else len(input_scales)
    quad_bits = round(4 * bits)
    if code not in CODES or not 1 <= bits <= MAX_BITS or quad_bits != 4 * bits:
        supported = ", ".join(f"{name} to {MAX_BITS} bits" for name in CODES)
        raise ValueError(
            f"no trellis kernel decodes {code!r} at {bits} bits; there are {supported}, in quarters"
        )
    if codes.shape != (-(-n // TILE) * TILE, -(-k // TILE) * TILE):
        raise ValueError(
            f"codes have shape {tuple(codes.shape)}; {n} x {k} padded to multiples of {TILE} is expected"
        )
    k64_count = k64_per_unit(quad_bits)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (k64_count * K64_TILES * TILE)))
    # row tile, g, (one of two rows), unit, k64, tile, quad, one of four -> row tile, unit, tile g, k64, a segment in order
    segments = padded.view(codes.shape[0] // TILE, 8, 2, -1, k64_count, K64_TILES, 4, 4).permute(
        0, 3, 1, 5, 4, 2, 6, 7
    )
    stream = torch.cat(
        [
            segments[..., i, None] >> torch.arange(own - 1, -1, -1, device=codes.device, dtype=torch.uint8)
            & 1
            for i, own in enumerate(step_bits(quad_bits))
        ],
        -1,
    )
    # four bytes a word, its first bits in the last; in few launches, for a model has up to 18,000 matrices
    stream = stream.reshape(*segments.shape[:2], 32, quad_bits * k64_count // 4, 4, 8)
    octets = torch.zeros(stream.shape[:-1], dtype=torch.uint8, device=codes.device)
    for i in range(8):
        octets |= stream[..., i] << (7 - i)
    words = octets.flip(-1).view(torch.int32).squeeze(-1)
    if parts and (sum(parts) != n or any(part % TILE for part in parts)):
        raise ValueError(f"parts of {parts} rows are not multiples of {TILE} that make {n}")
    order = None if sparse is None else sort_rows(sparse[0].to(codes.device))
    vector = words_per_load(quad_bits)
    return TrellisLayout(
        packed_codes=words.unflatten(-1, (-1, vector)).transpose(2, 3).contiguous(), input_scales=input_scales,
        output_scales=output_scales, n=n, k=k, bits=float(bits), code=code,
        rotates_output=rotates_output, parts=parts, row_perm=padded_row_perm(order, n),
        sparse=pack_sparse(sparse, order, k),
    )  # fmt: skip


def unpack_trellis(layout: TrellisLayout) -> Tensor:
    """codes uint8 [r, c]: the inverse of `pack_trellis`."""
    tiles, units = layout.packed_codes.shape[:2]
    words = layout.packed_codes.transpose(2, 3).flatten(3)
    stream = torch.stack([(words >> (31 - i)) & 1 for i in range(32)], -1).to(torch.uint8)
    stream = stream.view(tiles, units, 8, K64_TILES, k64_per_unit(layout.quad_bits), 2, 4, layout.quad_bits)
    codes = torch.zeros(*stream.shape[:-1], 4, dtype=torch.uint8, device=words.device)
    position = 0
    for i, own in enumerate(step_bits(layout.quad_bits)):
        for _ in range(own):
            codes[..., i] = codes[..., i] << 1 | stream[..., position]
            position += 1
    whole = codes.permute(0, 2, 5, 1, 4, 3, 6, 7).reshape(tiles * TILE, -1)
    return whole[:, : -(-layout.k // TILE) * TILE]
