"""Embedding and head in trellis codes: every row has its own scale, and the columns are rotated.

    W~ = diag(s) V R diag(c)

QTIP's codes (`quantizers/trellis.py`) with error feedback on one side. A row of the table is looked up alone, so rows are
not mixed: each has a scale, on a grid of 8 bits, and 16 neighbours share tiles. Rotation and feedback see one covariance for
all rows, that of an average row: with variances v_i, and over the uses u of the table,

    H = diag(c) sum_u (sum_i v_i r_ui) C_u diag(c),      loss ~ 1/2 e^2 (1 + WIDENING e^2 g) tr(L^-1 H L^-T)

where H = L D L', and e^2 is the code's error on Gaussians, as in `trellis.predicted_losses`. Compared with grids in groups
of 64 this saves in three ways: scales and zero points take 0.02 bits per weight instead of 0.34, codes of a grid need half
a bit more at 4 bits for the same error, and feedback under H is worth another fifth of a bit (bench-32m).

c holds random signs. If there are several blocks of columns that are rotated together (widths that are not a power of two),
it also holds the spread of each block: an embedding may have columns far larger than others, and then only one block holds
them. All rows share c, so that the input of a head is rotated once.

Rows do not feed back into each other, so pieces of a table can be coded one after the other, or by several processes.

**Bands.** Tokenizers number their tokens by frequency, the earliest merges first, and an error in the row of a common token
costs more. So a large table is divided into four bands, an eighth, an eighth, a quarter and a half of its rows, which get

    bits + tilt (1.5, 0.5, 0, -0.5)

so that the mean is `bits` at any tilt. The tilt is the one with the least predicted loss, where each band has its own H;
a tilt of 0, a single band, is used if tokens are not in such an order. On bench-32m bands are predicted to save 0.37 bits
per weight on the test text and 0.40 on C4, with tilts chosen on neither: the choice depends on sums over thousands of
tokens, not on single counts. Widths for single tokens, sorted by their weights, promise 1.6 bits on the calibration text,
but save 0.24 to 0.5 on other text (`eval/LOG.md`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from requant import ranks
from requant.calibration.stats import Curvature
from requant.formats.bands import Bands, BandsSpec
from requant.formats.hadamard import TILE, block_size, incoherence_process, padded, random_signs
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.trellis import Trellis, TrellisSpec
from requant.formats.trellis_codes import PERIOD
from requant.quantizers import block_ldlq, trellis
from requant.quantizers.method import Bits, Losses
from requant.quantizers.tables import TableMethod, Uses
from requant.quantizers.trellis import MAX_SHIFT, TrellisConfig

FEWEST_BITS = 2  # of a code: rows of 1 bit would be worse than the blocks around them ever are
WEIGHTS_AT_ONCE = 1 << 24  # coded at once: enough tiles for a GPU, and pieces for several
ROWS_AT_ONCE = 1 << 14  # whose squares are summed at once
FEWEST_ROWS = 2048  # of a table with bands
STEEPNESS = (1.5, 0.5, 0.0, -0.5)  # of the bands; the mean over rows is 0
TILTS = (0.0, 0.5, 1.0, 1.5, 2.0)  # all bits are quarters then


@cache
def config_of(bits: Bits) -> TrellisConfig:
    """The settings of a table."""
    return TrellisConfig(bits=bits, two_sided=False, rotate_output=False)


def band_rows(rows: int) -> list[slice]:
    """The bands of a table, of whole tiles but for the last. That is never less than half, so that the mean of the bits is
    at most what was asked for."""
    if rows < FEWEST_ROWS:
        return [slice(0, rows)]
    eighth, quarter = rows // 8 // TILE * TILE, rows // 4 // TILE * TILE
    edges = [0, eighth, 2 * eighth, 2 * eighth + quarter, rows]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def tilted(bits: Bits, bands: int) -> list[tuple[Bits, ...]]:
    """The bits of every band, by tilt; all the same first."""
    if bands == 1:
        return [(bits,)]
    found = [tuple(_plain(bits + tilt * step) for step in STEEPNESS) for tilt in TILTS]
    return [own for own in found if min(own) >= min(FEWEST_BITS, bits) and max(own) <= max(MAX_SHIFT, bits)]


def _plain(bits: float) -> Bits:
    return int(bits) if bits == int(bits) else bits


def packed_spec(shape: tuple[int, int], bits: Bits) -> PackedSpec:
    """The largest that is stored for a table of this shape, whatever the tilt."""
    bands = band_rows(shape[0])
    return max(
        (_spec(shape, bands, widths) for widths in tilted(bits, len(bands))), key=lambda spec: spec.bytes
    )


def _one(shape: tuple[int, int], bits: Bits) -> TrellisSpec:
    dense = trellis.packed_spec(config_of(bits), shape).dense
    assert isinstance(dense, TrellisSpec)
    return dense if _blocks(shape[1]) == 1 else replace(dense, input_signs=False)


def _blocks(width: int) -> int:
    """Hadamard blocks of the columns."""
    return padded(width) // block_size(padded(width))


def _spec(shape: tuple[int, int], bands: Sequence[slice], widths: Sequence[Bits]) -> PackedSpec:
    if len(set(widths)) == 1:
        return PackedSpec(dense=_one(shape, widths[0]))
    parts = [_one((rows.stop - rows.start, shape[1]), bits) for rows, bits in zip(bands, widths, strict=True)]
    return PackedSpec(dense=BandsSpec(parts=tuple(parts)))


def quantize(weight: Float[Tensor, "v d"], uses: Uses, bits: Bits) -> QuantizedWeight:
    """Codes of each band under the covariance of its average row, at the tilt of the least predicted loss."""
    bands, columns = band_rows(weight.shape[0]), column_scales(weight)
    found = [_band(weight, uses, rows, columns) for rows in bands]
    best = min(tilted(bits, len(bands)), key=lambda widths: _loss(found, widths))
    widths: tuple[Bits, ...] = tuple(ranks.shared(list(best), {})[0])  # ranks code pieces of one table
    trellis.compile_ahead(map(config_of, widths), weight.device)
    if len(set(widths)) == 1:
        return QuantizedWeight(dense=_coded(weight, uses, bits, columns), sparse=None)
    parts = [
        _coded(weight[rows], _of_rows(uses, rows), own, columns)
        for rows, own in zip(bands, widths, strict=True)
    ]
    return QuantizedWeight(dense=Bands(parts=tuple(parts)), sparse=None)


def _coded(weight: Float[Tensor, "v d"], uses: Uses, bits: Bits, columns: Float[Tensor, " d"]) -> Trellis:
    config = config_of(bits)
    variances = row_variances(weight, columns)
    stored = trellis.row_scales(variances, config)
    scales = trellis.divisors(stored)
    hessian = average_curvature(variances, uses)
    across = block_ldlq.block_ldl(
        incoherence_process(hessian, rows=columns, columns=columns), damp=config.damp
    )

    def coded(rows: slice) -> Tensor:
        rotated = incoherence_process(weight[rows].float(), rows=None, columns=1 / columns)
        target = rotated / scales[rows][: len(rotated), None]
        return block_ldlq.block_ldlq(target, across, code=config.code, bits=config.bits)

    step = max(1, WEIGHTS_AT_ONCE // (TILE * weight.shape[1])) * TILE
    pieces = [slice(start, start + step) for start in range(0, weight.shape[0], step)]
    codes = torch.empty(len(scales), padded(weight.shape[1]), dtype=torch.uint8, device=weight.device)
    ranks.filled(codes.split(step), lambda piece: coded(pieces[piece]))
    return Trellis(
        codes=codes,
        input_scales=columns.half(),
        output_scales=stored[: weight.shape[0]].half(),
        bits=bits,
        code=config.code,
        rotates_output=False,
    )


def column_scales(weight: Float[Tensor, "v d"]) -> Float[Tensor, " d"]:
    """c, exact in float16."""
    d = weight.shape[1]
    signs = random_signs(d, seed=0).to(weight.device)
    if _blocks(d) == 1:
        return signs
    squares = torch.stack([part.float().square().sum(0) for part in weight.split(ROWS_AT_ONCE)]).sum(0)
    block = torch.arange(d, device=weight.device) // block_size(padded(d))
    spread = (
        squares.new_zeros(_blocks(d)).scatter_reduce(0, block, squares, "mean", include_self=False).sqrt()
    )
    spread = torch.where(spread > 0, spread / spread.amax().clamp(min=1e-30), 1.0).clamp(min=1e-3)
    return signs * spread[block].half().float()


def row_variances(weight: Float[Tensor, "v d"], columns: Float[Tensor, " d"]) -> Float[Tensor, " r"]:
    """The mean square of each row of W / c over its padded width, rows padded to whole tiles."""
    squares = torch.cat([(part.float() / columns).square().sum(1) for part in weight.split(ROWS_AT_ONCE)])
    return torch.nn.functional.pad(squares / padded(weight.shape[1]), (0, -len(squares) % TILE))


def average_curvature(variances: Float[Tensor, " r"], uses: Uses) -> Float[Tensor, "d d"]:
    """`sum_u (sum_i v_i r_ui) C_u`."""
    return torch.stack([(variances[: len(use.rows)] @ use.rows) * use.covariance for use in uses]).sum(0)


def predicted_losses(weight: Float[Tensor, "v d"], uses: Uses, widths: Sequence[Bits]) -> Losses:
    """The closed form of the module's docstring, over all bands at the best tilt."""
    columns = column_scales(weight)
    bands = [_band(weight, uses, rows, columns) for rows in band_rows(weight.shape[0])]
    return {bits: min(_loss(bands, own) for own in tilted(bits, len(bands))) for bits in widths}


@dataclass(frozen=True, kw_only=True)
class _Band:
    """What the loss of a band follows from: `tr(L^-1 H L^-T)`, and how much feedback widens its values."""

    trace: float
    gain: float


def _band(weight: Float[Tensor, "v d"], uses: Uses, rows: slice, columns: Float[Tensor, " d"]) -> _Band:
    config = config_of(FEWEST_BITS)
    hessian = average_curvature(row_variances(weight[rows], columns), _of_rows(uses, rows))
    hessian = incoherence_process(hessian, rows=columns, columns=columns)
    trace, gain = trellis.white_trace(hessian, damp=config.damp)
    return _Band(trace=trace, gain=max(0.0, gain - 1))


def _of_rows(uses: Uses, rows: slice) -> list[Curvature]:
    return [Curvature(rows=use.rows[rows], covariance=use.covariance) for use in uses]


def _loss(bands: Sequence[_Band], widths: Sequence[Bits]) -> float:
    total = 0.0
    for band, bits in zip(bands, widths, strict=True):
        error = trellis.code_error(config_of(bits).code, bits)
        total += 0.5 * band.trace * error * (1 + trellis.WIDENING * band.gain * error)
    return total


TRELLIS = TableMethod(
    name="trellis",
    bits=tuple(_plain(bits / PERIOD) for bits in range(FEWEST_BITS * PERIOD, MAX_SHIFT * PERIOD + 1)),
    packed_spec=packed_spec,
    quantize=quantize,
    predicted_losses=predicted_losses,
    # on a GPU as long as searches for bands of 6.5, 5.5, 5 and 4.5 bits (eval/results/viterbi-h200.json), and a tenth more
    seconds_per_weight={"cpu": trellis.METHOD.seconds_per_weight["cpu"], "cuda": 4e-8},
)
