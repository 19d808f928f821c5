"""Trellis codes in a random basis with error feedback on both sides: QTIP's quantizer under a two-sided curvature.

    minimize  tr(G E H E'),   E = W - W~,   W~ = diag(s_o) R V R diag(s_i)

Tseng et al., "QTIP: Quantization with Trellises and Incoherence Processing" (2024, arXiv 2406.11235): random signs s
and Hadamard blocks R (`requant.formats.hadamard`) make weights nearly Gaussian and curvatures incoherent; tiles of 16 by 16
of V are tail-biting paths through a bitshift trellis (`requant.quantizers.viterbi`) whose values are computed from its
states (`requant.formats.trellis_codes`); the error of finished tiles is fed back into the targets of the others, by block
Cholesky factors L of H and M of G (`requant.quantizers.block_ldlq`).

H = mean x x' is the covariance of the inputs and G = mean g g' that of the loss's gradients at the outputs. QTIP has G = I.
G is from Tseng et al. 2025 (YAQA, arXiv 2505.22988) in its simplest form, a mean over tokens: it lowers the KL of
models/bench-32m by 10 to 16 % at 2, 3 and 4 bits. Their estimate from gradients of whole sequences, and weighting the tokens
of one factor by the other, did worse there.

A side whose rotation is folded into the model (`requant/models/rotations.py`) has none here (`rotate_input`,
`rotate_output` False): the identity takes the place of R diag(s). Rows that are not mixed keep their own norms, so each
has its own scale, on a grid of 8 bits; W is divided and G multiplied by them.

The predicted loss (`predicted_losses`) takes errors as white before feedback, so that `tr(G E H E')` becomes

    e^2 (1 + WIDENING e^2 g) tr(M^-1 G M^-T) tr(L^-1 H L^-T),    1 + g = |L^-1|^2 |M^-1|^2 per row

with e^2 the code's squared error on Gaussians and L, M the damped factors: the block-LDL diagonals of QTIP, less the
damping. Feedback widens the values to be coded by `e^2 g`, and the error grows faster than they do (WIDENING). On all
56 matrices of bench-32m, quantized one at a time, KL over prediction has quartiles .83 to 1.05 at 4 bits, .85 to 1.06 at
3 and .92 to 1.15 at 2; at 1 bit 1.2 to 1.7, but 5 to 9 for q and k of the first two blocks, whose errors pass through the
softmax of attention. So a prediction at 1 bit is multiplied by ONE_BIT_FACTOR: 1 bit is used where the budget forces it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.errors import RecipeError
from requant.formats.hadamard import incoherence_process, random_signs
from requant.formats.int8 import WIDEST_CODE, fake_quantize_int8
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, with_residuals
from requant.formats.trellis import Trellis, TrellisSpec
from requant.formats.trellis_codes import CODES, PERIOD, code_values
from requant.quantizers.block_ldlq import block_ldl, block_ldlq, two_sided_block_ldlq, white_trace
from requant.quantizers.checks import check_fraction, check_seed, check_weight, statistic
from requant.quantizers.correction import corrected
from requant.quantizers.method import Bits, Losses, Method
from requant.quantizers.viterbi import compile_searches

MAX_SHIFT = 8  # bits a step: two windows of 16 bits must overlap by as many as a step forgets
MAX_QUARTER_BITS = 5  # quarters of a bit below this: the kernels decode them
# Mean squared error times 4**bits on Gaussians of variance 1, by bits from 1 (`trellis_codes.py`; 7 bits interpolated).
GAUSSIAN_ERROR = {
    "mul1": (1.095, 1.099, 1.117, 1.140, 1.177, 1.236, 1.33, 1.418),
    "3inst": (1.073, 1.106, 1.138, 1.179, 1.240, 1.320, 1.46, 1.625),
    "pair": (1.066, 1.127, 1.226, 1.399),
}
WIDENING = 2.0  # measured: 1.3 to 1.7 on correlated Gaussians, about 3 on bench-32m
ONE_BIT_FACTOR = 2.0  # of the predicted loss at 1 bit; between 1 and 2 bits a power of it


@dataclass(frozen=True, kw_only=True)
class TrellisConfig:
    """Options of `trellis`; without `two_sided`, G = I.

    The allocator gives quarters of a bit too.
    """

    bits: int | float = 2
    """Bits of a code: 1 to 8, in steps of a quarter."""
    code: str = "mul1"
    """How a state becomes weights: `mul1` and `3inst` compute one, `pair` computes two at once."""
    two_sided: bool = True
    """Whether errors are weighted by the curvature of the outputs as well as by that of the inputs."""
    damp: float = 0.01
    """Added to the diagonal of the Hessian of the inputs, as a fraction of its mean."""
    output_damp: float = 0.1
    """Added to the diagonal of the Hessian of the outputs, as a fraction of its mean."""
    rotate_input: bool = True
    """Whether the input is rotated; false is set for the matrices into which rotations are folded."""
    rotate_output: bool = True
    """Whether the output is rotated; where it is not, every row has a scale of its own."""
    seed: int = 0
    """Seed of the random signs of the Hadamard transform."""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise RecipeError(
                f"code is {self.code!r}, but the trellis codes are {', '.join(CODES)}: choose one."
            )
        widest = MAX_SHIFT // CODES[self.code].weights_per_step
        if not 1 <= self.bits <= widest or self.bits * PERIOD % 1:
            raise RecipeError(
                f"bits is {self.bits}, but trellis code {self.code!r} takes 1 to {widest} in quarters: choose one of those."
            )
        check_fraction("damp", self.damp)
        check_fraction("output_damp", self.output_damp)
        check_seed(self.seed)


def quantize(
    weight: Float[Tensor, "n k"],
    stats: LinearStats,
    config: TrellisConfig,
    *,
    detached: Bool[Tensor, "n k"] | None = None,
) -> QuantizedWeight:
    """Code `weight`, corrected for its inputs (`correction.py`), under `stats.hessian` and, if two-sided, `output_hessian`.

    Rotation mixes all weights, so detached ones are zeros in the rotated matrix; their residuals are the sparse part.
    Raises InputError if a statistic is missing, NumericalError if it or the weight is not finite.
    """
    return quantize_batch([weight], [stats], config, detached=[detached])[0]


def quantize_batch(
    weights: Sequence[Float[Tensor, "n k"]],
    stats: Sequence[LinearStats],
    config: TrellisConfig,
    *,
    detached: Sequence[Bool[Tensor, "n k"] | None] | None = None,
) -> list[QuantizedWeight]:
    """`quantize` of several matrices of one shape; where it is two-sided, their tiles are searched together.

    A GPU that searches one tile per SM is busy with an expert's few tiles only in part, and Python with their launches.
    """
    masks = [None] * len(weights) if detached is None else detached
    rotated = [_rotated(*each, config) for each in zip(weights, stats, masks, strict=True)]
    across = [each.across for each in rotated]
    if config.two_sided:
        target = rotated[0].target[None] if len(rotated) == 1 else torch.stack([r.target for r in rotated])
        down = [each.down for each in rotated if each.down is not None]
        codes = two_sided_block_ldlq(target, across, down, code=config.code, bits=config.bits)
    else:
        codes = [block_ldlq(each.target, each.across, code=config.code, bits=config.bits) for each in rotated]
    return [
        with_residuals(each.with_codes(own, config), each.goal, mask)
        for each, own, mask in zip(rotated, codes, masks, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class _Rotated:
    """A matrix in the basis in which it is coded."""

    goal: Float[Tensor, "n k"]  # what the codes should stand for
    target: Float[Tensor, "r c"]  # the same in that basis and in units of the code's values
    across: Float[Tensor, "c c"]  # L - I
    down: Float[Tensor, "r r"] | None  # M - I; None where G = I
    input_scales: Float[Tensor, " k"] | None
    output_scales: Float[Tensor, " n"]

    def with_codes(self, codes: UInt8[Tensor, "r c"], config: TrellisConfig) -> Trellis:
        return Trellis(
            codes=codes,
            input_scales=None if self.input_scales is None else self.input_scales.half(),
            output_scales=self.output_scales.half(),
            bits=config.bits,
            code=config.code,
            rotates_output=config.rotate_output,
        )


def _rotated(
    weight: Float[Tensor, "n k"],
    stats: LinearStats,
    detached: Bool[Tensor, "n k"] | None,
    config: TrellisConfig,
) -> _Rotated:
    check_weight(weight)
    n, k = weight.shape
    hessian = statistic(stats.hessian, "hessian", (k, k))
    rows, columns = signs_of(weight, config)
    goal = corrected(weight, stats)
    kept = goal if detached is None else goal.masked_fill(detached, 0)
    rotated = incoherence_process(kept, rows=rows, columns=columns)
    if rows is None:
        stored = row_scales(rotated.square().mean(1), config)
        scales, output_scales = divisors(stored), stored[:n]
        target = rotated / scales[:, None]
    else:
        scale = scale_of(rotated, config)
        scales, target = None, rotated / (scale or 1.0)
        output_scales = rows * scale if scale else torch.zeros_like(rows)
    down = None
    across = block_ldl(incoherence_process(hessian, rows=columns, columns=columns), damp=config.damp)
    if config.two_sided:
        gradients = statistic(stats.output_hessian, "output_hessian", (n, n))
        gradients = incoherence_process(gradients, rows=rows, columns=rows)
        if scales is not None:
            gradients = scales[:, None] * gradients * scales
        down = block_ldl(gradients, damp=config.output_damp)
    return _Rotated(
        goal=goal, target=target, across=across, down=down, input_scales=columns, output_scales=output_scales
    )


def signs_of(
    weight: Float[Tensor, "n k"], config: TrellisConfig
) -> tuple[Float[Tensor, " n"] | None, Float[Tensor, " k"] | None]:
    """Random signs of the rows and of the columns; None for a side that is not rotated."""
    n, k = weight.shape
    columns = random_signs(k, seed=2 * config.seed).to(weight.device) if config.rotate_input else None
    rows = random_signs(n, seed=2 * config.seed + 1).to(weight.device) if config.rotate_output else None
    return rows, columns


def scale_of(rotated: Float[Tensor, "r c"], config: TrellisConfig) -> float:
    """The scale of the code values, exact in float16; 0 for a matrix of zeros, or of weights too small for any scale."""
    return float((rotated.square().mean().sqrt().cpu() * relative_scale(config)).half())


def row_scales(variances: Float[Tensor, " r"], config: TrellisConfig) -> Float[Tensor, " r"]:
    """A scale for every row of mean square `variances`, in the 8 or 16 bits in which it is stored; 0 for a row of zeros, or
    of weights too small for any scale: no code stands for 0, so their floats would be noise."""
    exact = variances.sqrt() * relative_scale(config)
    in_int8 = config.bits <= WIDEST_CODE
    return (fake_quantize_int8(exact, nonzero=True) if in_int8 else exact.half()).float()


def divisors(scales: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
    """What rows are divided by before they are coded: their scales, and the largest where that is 0."""
    return torch.where(scales > 0, scales, scales.amax() if scales.any() else torch.ones_like(scales))


def relative_scale(config: TrellisConfig) -> float:
    """The scale of the code values for weights of variance 1."""
    spreads = CODES[config.code].spreads
    spread = float(np.interp(config.bits, range(1, len(spreads) + 1), spreads))
    return (spread / code_values(config.code).std()).item()


def compile_ahead(configs: Iterable[TrellisConfig], device: torch.device, *, wait: bool = True) -> None:
    """Compile the searches that matrices of these settings need (`viterbi.py`)."""
    compile_searches({(config.code, config.bits) for config in configs}, device, wait=wait)


def packed_spec(config: TrellisConfig, shape: tuple[int, int], *, finetuned: bool = False) -> PackedSpec:
    """What is stored for a trellis: as quantized, the scales of a rotated side are signs and a magnitude; training makes
    scales of those of the output."""
    scales = finetuned or not config.rotate_output
    return PackedSpec(
        dense=TrellisSpec(
            bits=config.bits,
            shape=shape,
            code=config.code,
            rotates_input=config.rotate_input,
            rotates_output=config.rotate_output,
            input_signs=config.rotate_input,
            output_signs=not scales,
            output_scales="int8" if scales and config.bits <= WIDEST_CODE else "float16",
        )
    )


def code_error(code: str, bits: Bits) -> float:
    """Mean squared error of a code on Gaussians of variance 1."""
    errors = GAUSSIAN_ERROR[code]
    return float(np.interp(bits, range(1, len(errors) + 1), errors)) * 4.0**-bits


def predicted_losses(
    weight: Float[Tensor, "n k"], stats: LinearStats, config: TrellisConfig, widths: Sequence[Bits]
) -> Losses:
    """The closed form of the module's docstring.

    Raises InputError if a statistic is missing, NumericalError if it is not finite.
    """
    n, k = weight.shape
    rows, columns = signs_of(weight, config)
    inputs = incoherence_process(statistic(stats.hessian, "hessian", (k, k)), rows=columns, columns=columns)
    outputs = statistic(stats.output_hessian, "output_hessian", (n, n))
    outputs = incoherence_process(outputs, rows=rows, columns=rows)
    rotated = incoherence_process(weight, rows=rows, columns=columns)
    variance = rotated.square().mean(dtype=torch.float64).item()
    if rows is None and variance:  # every row is coded at its own scale
        scale = (rotated.square().mean(1) / variance).sqrt()
        outputs = scale[:, None] * outputs * scale
    input_trace, input_gain = white_trace(inputs, damp=config.damp)
    output_trace, output_gain = outputs.diagonal().sum(dtype=torch.float64).item(), 1.0
    if config.two_sided:
        output_trace, output_gain = white_trace(outputs, damp=config.output_damp)
    gain = max(0.0, input_gain * output_gain - 1)
    losses: Losses = {}
    for bits in widths:
        error = code_error(config.code, bits)
        losses[bits] = 0.5 * variance * input_trace * output_trace * error * (1 + WIDENING * gain * error)
        if bits < 2:
            losses[bits] *= ONE_BIT_FACTOR ** (2 - bits)
    return losses


METHOD = Method(
    summary="trellis codes in a rotated basis (QTIP); the best at low bits, slow without a GPU",
    config=TrellisConfig,
    quantize=quantize,
    needs=frozenset({"hessian", "output_hessian"}),
    bits=tuple(
        bits / PERIOD if bits % PERIOD else bits // PERIOD
        for bits in range(PERIOD, 8 * PERIOD + 1)
        if bits < MAX_QUARTER_BITS * PERIOD or not bits % PERIOD
    ),
    packed_spec=packed_spec,
    predicted_losses=predicted_losses,
    predictor_needs=frozenset({"hessian", "output_hessian"}),
    side_by_side=True,
    quantize_batch=quantize_batch,
    compile_ahead=compile_ahead,
    seconds_per_weight={"cpu": 3.5e-5, "cuda": 5.5e-8},
    detach={"outlier_fraction": 0.0, "significant_fraction": 0.005},
)
