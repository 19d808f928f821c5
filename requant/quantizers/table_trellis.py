"""Embedding and head in trellis codes: rows of a scale of their own, in a basis where their columns are rotated.

    W~ = diag(s) V R diag(signs)

QTIP's codes (`quantizers/trellis.py`) with error feedback on one side. A row of the table is looked up alone, so rows are
not mixed: each has a scale, on a grid of 8 bits, and 16 neighbours share tiles. Rotation and feedback see one covariance for
all rows, that of an average row: with variances v_i, and over the uses u of the table,

    H = sum_u (sum_i v_i r_ui) C_u,      loss ~ 1/2 e^2 (1 + WIDENING e^2 g) tr(L^-1 H L^-T)

where H = L D L', and e^2 is the code's error on Gaussians, as `trellis.predicted_losses` has it. Three things are saved
against grids in groups of 64: scales and zero points take 0.34 bits a weight there and 0.02 here, codes of a grid need half
a bit more at 4 bits for the same error, and feedback under H is worth another fifth of a bit (bench-32m).

Bits that follow the frequency of the tokens are not given: on the calibration text the best would save 1.6 bits a weight, on
other text they save 0.35 to 0.5, which would cost a permutation of the vocabulary and a product for each width.
"""

from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from requant.formats.hadamard import TILE, incoherence_process, padded
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.trellis import Trellis
from requant.formats.trellis_codes import PERIOD
from requant.quantizers import trellis
from requant.quantizers.method import Bits, Losses
from requant.quantizers.tables import TableMethod, Uses
from requant.quantizers.trellis import MAX_SHIFT, TrellisConfig

FEWEST_BITS = 2  # of a code: rows of 1 bit would be worse than the blocks around them ever are
WEIGHTS_AT_ONCE = 1 << 26  # coded at once: enough tiles for a GPU, 1 GB of floats


@cache
def config_of(bits: Bits) -> TrellisConfig:
    """The settings of a table."""
    return TrellisConfig(bits=bits, two_sided=False, rotate_output=False)


def packed_spec(shape: tuple[int, int], bits: Bits) -> PackedSpec:
    """What is stored for a table of this shape."""
    return trellis.packed_spec(config_of(bits), shape)


def quantize(weight: Float[Tensor, "v d"], uses: Uses, bits: Bits) -> QuantizedWeight:
    """Codes under the covariance of an average row."""
    config = config_of(bits)
    _, signs = trellis.signs_of(weight, config)
    variances = row_variances(weight)
    scales = trellis.row_scales(variances, config)
    hessian = average_curvature(variances, uses)
    across = trellis.block_ldl(incoherence_process(hessian, rows=signs, columns=signs), damp=config.damp)
    step = max(1, WEIGHTS_AT_ONCE // (TILE * weight.shape[1])) * TILE
    codes = []
    for start in range(0, weight.shape[0], step):
        own = slice(start, start + step)
        rotated = incoherence_process(weight[own].float(), rows=None, columns=signs)
        unit = scales[start : start + rotated.shape[0], None]
        codes.append(trellis.block_ldlq(rotated / unit, across, config))
    dense = Trellis(
        codes=torch.cat(codes),
        input_scales=None if signs is None else signs.half(),
        output_scales=scales[: weight.shape[0]].half(),
        bits=bits,
        code=config.code,
        rotates_output=False,
    )
    return QuantizedWeight(dense=dense, sparse=None)


def row_variances(weight: Float[Tensor, "v d"]) -> Float[Tensor, " r"]:
    """The mean square of each row over its padded width, rows padded to whole tiles."""
    step = max(1, WEIGHTS_AT_ONCE // weight.shape[1])
    squares = torch.cat([part.float().square().sum(1) for part in weight.split(step)])
    return torch.nn.functional.pad(squares / padded(weight.shape[1]), (0, -len(squares) % TILE))


def average_curvature(variances: Float[Tensor, " r"], uses: Uses) -> Float[Tensor, "d d"]:
    """H of rows of these variances, each coded at a scale of its own."""
    return torch.stack([(variances[: len(use.rows)] @ use.rows) * use.covariance for use in uses]).sum(0)


def predicted_losses(weight: Float[Tensor, "v d"], uses: Uses, widths: Sequence[Bits]) -> Losses:
    """The closed form of the module's docstring."""
    config = config_of(FEWEST_BITS)
    _, signs = trellis.signs_of(weight, config)
    hessian = incoherence_process(average_curvature(row_variances(weight), uses), rows=signs, columns=signs)
    trace, gain = trellis.white_trace(hessian, trellis.block_ldl(hessian, damp=config.damp))
    losses: Losses = {}
    for bits in widths:
        error = trellis.code_error(config.code, bits)
        losses[bits] = 0.5 * trace * error * (1 + trellis.WIDENING * max(0.0, gain - 1) * error)
    return losses


TRELLIS = TableMethod(
    name="trellis",
    widths=tuple(
        bits / PERIOD if bits % PERIOD else bits // PERIOD
        for bits in range(FEWEST_BITS * PERIOD, MAX_SHIFT * PERIOD + 1)
    ),
    packed_spec=packed_spec,
    quantize=quantize,
    predicted_losses=predicted_losses,
    seconds_per_weight=trellis.METHOD.seconds_per_weight,
)
