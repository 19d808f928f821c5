"""What the methods of 2:4 sparsity share: their options, and the rounding of the weights that a mask keeps.

The kept weights of a group of `group_size` columns lie on `2^bits` levels without a zero (`formats/semi_structured.py`):

    w ~ (q + 1/2) s,   q = clamp(floor(w / s), -2^(bits-1), 2^(bits-1) - 1)

The step s is the one with the least squared error among CLIPS, fractions of the step that reaches the largest weight. With
16 bits, values are stored in float16 as they are.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from requant.errors import RecipeError
from requant.formats.grid import group_count
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.semi_structured import (
    FLOAT16_BITS,
    MetadataForm,
    SemiStructured,
    SemiStructuredSpec,
    gathered,
)
from requant.quantizers.checks import check_fraction, check_group_size
from requant.sparsity.masks import groups_of_four, pattern_of

BITS = (2, 3, 4, 5, 6, 7, 8, FLOAT16_BITS)
CLIPS = tuple(1 - 0.05 * i for i in range(13))  # at 2 bits the best step clips a third of the range away
SMALLEST_STEP = 2.0**-24  # above 0 in float16: there is no level for zero, so zeros become half a step


@dataclass(frozen=True, kw_only=True)
class SemiStructuredConfig:
    """Options of methods that keep weights as they are."""

    bits: int = FLOAT16_BITS
    """Bits of a kept weight: 2 to 8, or 16."""
    group_size: int = 128
    """Columns that share a scale, a multiple of 4; -1: a whole row. Ignored with 16 bits."""
    metadata: MetadataForm = "packed"
    """How the mask is stored: in 0.75 bits per weight, or in 1 bit as GPUs read it."""

    def __post_init__(self) -> None:
        check_options(self.bits, self.group_size)


@dataclass(frozen=True, kw_only=True)
class CompensatingConfig:
    """Options of methods that compensate errors under the Hessian of the inputs."""

    bits: int = FLOAT16_BITS
    """Bits of a kept weight: 2 to 8, or 16."""
    group_size: int = 128
    """Columns that share a scale, a multiple of 4; -1: a whole row. Ignored with 16 bits."""
    metadata: MetadataForm = "packed"
    """How the mask is stored: in 0.75 bits per weight, or in 1 bit as GPUs read it."""
    damp: float = 0.01
    """Fraction of the mean diagonal of the Hessian that is added to the diagonal."""

    def __post_init__(self) -> None:
        check_options(self.bits, self.group_size)
        check_fraction("damp", self.damp)


Config = SemiStructuredConfig | CompensatingConfig


def check_options(bits: int, group_size: int) -> None:
    """Raise RecipeError for bits or a group that 2:4 values do not take."""
    if bits not in BITS:
        raise RecipeError(f"bits is {bits}, but the values of a 2:4 matrix take 2 to 8 bits, or 16.")
    check_group_size(group_size)
    if group_size != -1 and group_size % 4:
        raise RecipeError(f"group_size is {group_size}, but groups of four columns stay whole: choose 128.")


def on_mask(weight: Float[Tensor, "n k"], mask: Bool[Tensor, "n k"], config: Config) -> QuantizedWeight:
    """The weights that `mask` keeps, rounded to nearest."""
    scales = None if config.bits == FLOAT16_BITS else fit_scales(weight, mask, config)
    return stored(weight, mask, scales, config)


def stored(
    weight: Float[Tensor, "n k"],
    mask: Bool[Tensor, "n k"],
    scales: Float[Tensor, "n g"] | None,
    config: Config,
) -> QuantizedWeight:
    """The container of the weights that `mask` keeps, on the steps `scales`; None with 16 bits."""
    patterns = pattern_of(mask)
    values = gathered(weight.float(), patterns)
    if scales is None:
        codes = values.half()
    else:
        scales = scales.half()
        steps = scales.float().repeat_interleave(columns_of(config, weight.shape[1]) // 2, 1)
        codes = codes_of(values, steps[:, : values.shape[1]], config.bits)
    return QuantizedWeight(
        dense=SemiStructured(
            codes=codes,
            patterns=patterns,
            scales=scales,
            bits=config.bits,
            group_size=columns_of(config, weight.shape[1]),
            metadata=config.metadata,
        ),
        sparse=None,
    )


def codes_of(values: Float[Tensor, "n c"], steps: Float[Tensor, "... #c"], bits: int) -> Tensor:
    """uint8: the level nearest to each value."""
    half = 1 << (bits - 1)
    return ((values / steps).floor().clamp(-half, half - 1) + half).nan_to_num(half).to(torch.uint8)


def rounded(values: Float[Tensor, "n c"], steps: Float[Tensor, "... #c"], bits: int) -> Float[Tensor, "n c"]:
    """The nearest level of each value."""
    return (codes_of(values, steps, bits).float() + 0.5 - (1 << (bits - 1))) * steps


def fit_scales(
    weight: Float[Tensor, "n k"], mask: Bool[Tensor, "n k"], config: Config
) -> Float[Tensor, "n g"]:
    """The step of every group of a row, as float16 holds it, positive; only weights that `mask` keeps count."""
    n, k = weight.shape
    size = columns_of(config, k)
    padding = (0, group_count(k, size) * size - k)
    values = torch.nn.functional.pad(weight.float(), padding).view(n, -1, size)
    counted = torch.nn.functional.pad(mask, padding).view(n, -1, size)
    widest = values.abs().mul(counted).amax(2) / (2 ** (config.bits - 1) - 0.5)
    best_error, best = torch.full_like(widest, torch.inf), widest
    for clip in CLIPS:
        step = (clip * widest).half().float().clamp(min=SMALLEST_STEP)
        error = values - rounded(values.flatten(0, 1), step.view(-1, 1), config.bits).view_as(values)
        error = error.square().mul(counted).sum(2)
        best = torch.where(error < best_error, step, best)
        best_error = torch.minimum(error, best_error)
    return best


def columns_of(config: Config, k: int) -> int:
    """Columns that share a scale."""
    return k if config.group_size == -1 else min(config.group_size, k)


def packed_spec(config: Config, shape: tuple[int, int], *, finetuned: bool = False) -> PackedSpec:
    """A 2:4 matrix; training changes none of its sizes. Raises InputError where the columns are not a multiple of four."""
    groups_of_four(torch.empty(0, shape[1]))
    return PackedSpec(
        dense=SemiStructuredSpec(
            bits=config.bits,
            shape=shape,
            group_size=columns_of(config, shape[1]),
            metadata=config.metadata,
        )
    )
