"""Trellis codes with incoherence and error feedback: one of 65536 values a weight, for `bits` bits a weight.

    minimize  tr(G (W~ - W) H (W~ - W)'),   W~ = S_o R V R S_i

Tseng et al., "QTIP: Quantization with Trellises and Incoherence Processing" (2024, arXiv 2406.11235). Random signs and
Hadamard blocks R make weights and Hessians incoherent; tiles of 16 by 16 are rings through the bitshift trellis
(`requant.quantizers.viterbi`), whose values are computed from the state (`requant.trellis_codes`); errors of finished
tiles are fed back into the targets of the rest.

H = mean x x' is the covariance of the inputs. With H = L D L', L lower block-triangular with unit diagonal,

    tr(E H E') = tr((E L) D (E L)'),   (E L)_j = E_j + sum_{l > j} E_l L_lj

so column blocks are coded from the last to the first, each to W_j + sum_l E_l L_lj with E = W - V (block LDLQ).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from requant.calibration import LinearStats
from requant.errors import NumericalError, RecipeError
from requant.formats import QuantizedWeight, Trellis, sparse_residual
from requant.hadamard import TILE, random_signs, rotate_both, rotate_columns
from requant.quantizers.checks import check_fraction, check_weight, statistic
from requant.quantizers.viterbi import tail_biting_states
from requant.trellis_codes import CODES, code_values, codes_of_states, from_tiles, to_tiles

NEEDS: frozenset[str] = frozenset({"hessian"})


@dataclass(frozen=True, kw_only=True)
class TrellisConfig:
    """`damp` is a fraction of the mean diagonal of H; `spread` multiplies the scale that suits Gaussian weights."""

    bits: int = 2
    code: str = "3inst"
    damp: float = 0.01
    output_damp: float = 0.01
    spread: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise RecipeError(f"code is {self.code!r}, but the trellis codes are {', '.join(CODES)}: choose one.")
        if not 1 <= self.bits * CODES[self.code].weights_per_step <= 8:
            most = 8 // CODES[self.code].weights_per_step
            raise RecipeError(
                f"bits is {self.bits}, but code {self.code!r} takes 1 to {most}: choose a width in that range."
            )
        check_fraction("damp", self.damp)


def quantize(
    weight: Float[Tensor, "n k"],
    stats: LinearStats,
    config: TrellisConfig,
    *,
    detached: Bool[Tensor, "n k"] | None = None,
) -> QuantizedWeight:
    """Code `weight` on the trellis with error feedback under `stats.hessian`.

    Detached places count as zeros in the rotated matrix. Raises InputError without `stats.hessian`, NumericalError if
    it or the weight is not finite, or if H is not positive definite after damping.
    """
    check_weight(weight)
    n, k = weight.shape
    hessian = statistic(stats.hessian, "hessian", (k, k))
    device = weight.device
    columns = random_signs(k, seed=2 * config.seed).to(device)
    rows = random_signs(n, seed=2 * config.seed + 1).to(device)
    kept = weight.float() if detached is None else weight.float().masked_fill(detached, 0)
    rotated = rotate_both(kept, rows=rows, columns=columns)
    scale = _scale(rotated, n * k, config)
    feedback = unit_lower(rotate_both(hessian, rows=columns, columns=columns), damp=config.damp)
    gradient = getattr(stats, "output_hessian", None)
    if gradient is None:
        codes = code_columns(rotated / scale, feedback, bits=config.bits, code=config.code)
    else:
        output = rotate_both(gradient.float(), rows=rows, columns=rows)
        codes = code_wavefront(
            rotated / scale, feedback, unit_lower(output, damp=config.output_damp), bits=config.bits, code=config.code
        )
    dense = Trellis(
        codes=codes,
        input_scales=columns.half(),
        output_scales=(rows * scale).half(),
        bits=config.bits,
        code=config.code,
    )
    sparse = None if detached is None else sparse_residual(weight.float(), dense.dequantize(), detached)
    return QuantizedWeight(dense=dense, sparse=sparse)


def _scale(rotated: Float[Tensor, "r c"], count: int, config: TrellisConfig) -> float:
    """What one unit of the code stands for, a float16."""
    rms = math.sqrt(float(rotated.square().sum()) / count)
    scale = config.spread * rms / float(code_values(config.code).std())
    return float(torch.tensor(scale).half()) or 1.0


def unit_lower(hessian: Float[Tensor, "k k"], *, damp: float) -> Float[Tensor, "k k"]:
    """L of H + damp mean(diag H) I = L D L', lower triangular in blocks of TILE, minus the identity."""
    k = hessian.shape[0]
    mean = hessian.diagonal().mean()
    damped = hessian + damp * torch.where(mean > 0, mean, 1.0) * torch.eye(k, device=hessian.device)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        raise NumericalError(
            f"The Hessian is not positive definite at damp {damp:g}: raise damp, calibrate with more tokens "
            "(--num-samples) or in float32 (--dtype float32)."
        )
    blocks = lower.view(k, k // TILE, TILE).transpose(0, 1)
    diagonal = torch.stack([lower[i : i + TILE, i : i + TILE] for i in range(0, k, TILE)])
    unit = torch.linalg.solve_triangular(diagonal, blocks, upper=False, left=False)
    strictly = unit.transpose(0, 1).reshape(k, k)
    block = torch.arange(k, device=hessian.device) // TILE
    return strictly * (block[:, None] > block[None, :])


def code_columns(
    target: Float[Tensor, "r c"], lower: Float[Tensor, "c c"], *, bits: int, code: str
) -> UInt8[Tensor, "r c"]:
    """Column blocks from the last to the first, all rows at once."""
    codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    error = torch.zeros_like(target)
    values = code_values(code).to(target.device)
    for start in range(target.shape[1] - TILE, -1, -TILE):
        here, later = slice(start, start + TILE), slice(start + TILE, None)
        wanted = target[:, here] + error[:, later] @ lower[later, here]
        new, found = _code_tiles(to_tiles(wanted.contiguous()), values, bits, code)
        codes[:, here] = from_tiles(new, tuple(wanted.shape))
        error[:, here] = target[:, here] - from_tiles(found, tuple(wanted.shape))
    return codes


def _code_tiles(
    tiles: Float[Tensor, "b 256"], values: Float[Tensor, "s v"], bits: int, code: str
) -> tuple[UInt8[Tensor, "b 256"], Float[Tensor, "b 256"]]:
    vector = CODES[code].weights_per_step
    states = tail_biting_states(tiles.view(tiles.shape[0], -1, vector), values, bits=bits)
    return codes_of_states(states, bits=bits, weights_per_step=vector), values[states].flatten(1)


def code_wavefront(
    target: Float[Tensor, "r c"],
    lower: Float[Tensor, "c c"],
    output_lower: Float[Tensor, "r r"],
    *,
    bits: int,
    code: str,
) -> UInt8[Tensor, "r c"]:
    """Tiles along anti-diagonals from the last corner, with feedback on both sides.

    With G = M C M', the objective is the norm of M' E L under C and D. The tile (i, j) is coded to
    W_ij + A_ij + B_ij, A = sum_{l > j} E_il L_lj and B = sum_{m > i} M_mi' (E + A)_mj.
    """
    r, c = target.shape[0] // TILE, target.shape[1] // TILE
    device = target.device
    values = code_values(code).to(device)
    left = target.view(r, TILE, c, TILE).permute(0, 2, 1, 3).contiguous()  # tiles [r, c, 16, 16]
    across = torch.zeros(r, TILE, c * TILE, device=device)  # A
    down = torch.zeros(c, r * TILE, TILE, device=device)  # B
    lower_rows = lower.view(c, TILE, c * TILE)
    output_rows = output_lower.view(r, TILE, r * TILE)
    codes = torch.empty(r, c, TILE * TILE, dtype=torch.uint8, device=device)
    for wave in range(r + c - 2, -1, -1):
        i = torch.arange(max(0, wave - c + 1), min(r - 1, wave) + 1, device=device)
        j = wave - i
        a = across.view(r, TILE, c, TILE)[i, :, j]
        b = down.view(c, r, TILE, TILE)[j, i]
        tiles = left[i, j] + a + b
        new, found = _code_tiles(tiles.reshape(-1, TILE * TILE), values, bits, code)
        codes[i, j] = new
        error = left[i, j] - found.view(-1, TILE, TILE)
        across[i] += error @ lower_rows[j]
        down[j] += output_rows[i].mT @ (error + a)
    return codes.view(r, c, TILE, TILE).transpose(1, 2).reshape(r * TILE, c * TILE)
