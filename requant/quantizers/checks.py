"""Checks that all quantizers share: bits, groups, weights and statistics."""

from torch import Tensor

from requant.errors import InputError, NumericalError, RecipeError

FLOAT16_MAX = 65504.0  # scales, levels and residuals are stored in float16


def check_bits(bits: int) -> None:
    """Raise RecipeError unless codes of so many bits fit a byte and hold more than a sign."""
    if not 2 <= bits <= 8:
        raise RecipeError(f"bits is {bits}, but codes have 2 to 8 bits: choose a number in that range.")


def check_level_bits(level_bits: int) -> None:
    """Raise RecipeError unless levels take 8 or 16 bits."""
    if level_bits not in (8, 16):
        raise RecipeError(f"level_bits is {level_bits}, but a level takes 8 or 16 bits: choose one of them.")


def check_group_size(group_size: int) -> None:
    """Raise RecipeError unless `group_size` is at least 8, or -1 for one group a row."""
    if group_size != -1 and group_size < 8:
        raise RecipeError(
            f"group_size is {group_size}, but a group has at least 8 columns: choose 8 or more "
            "(128 is usual), or -1 for one group a row."
        )


def check_fraction(name: str, value: float) -> None:
    """Raise RecipeError unless 0 < value < 1."""
    if not 0 < value < 1:
        raise RecipeError(f"{name} is {value}, but it is a fraction between 0 and 1: choose one in between.")


def check_seed(seed: int) -> None:
    """32 bits: torch's generators take 64, and what they get is a multiple of the seed."""
    if not -(1 << 31) <= seed < 1 << 31:
        raise RecipeError(
            f"seed is {seed}; it takes a whole number of 32 bits, {-(1 << 31)} to {(1 << 31) - 1}."
        )


def check_weight(weight: Tensor) -> None:
    """Raise NumericalError if a weight is NaN, infinite or beyond float16."""
    bad = int((~(weight.abs() <= FLOAT16_MAX)).sum())
    if bad:
        raise NumericalError(
            f"{bad} of {weight.numel()} weights are NaN, infinite or larger than {FLOAT16_MAX:.0f}, the "
            "largest float16: the checkpoint is damaged; download it again, or leave this matrix out with --skip."
        )


def statistic(values: Tensor | None, name: str, shape: tuple[int, ...]) -> Tensor:
    """The field `name` of `LinearStats`, float32, once it is there, finite and of the shape of this matrix.

    Raises InputError if it is missing or belongs to another matrix, NumericalError if it is not finite.
    """
    if values is None:
        raise InputError(
            f"stats.{name} is missing: gather it in calibration, as `needs` of this method asks."
        )
    if tuple(values.shape) != shape:
        raise InputError(
            f"stats.{name} has shape {list(values.shape)}, but this matrix needs {list(shape)}: "
            "pass the statistics of the same linear."
        )
    if not values.isfinite().all():
        raise NumericalError(
            f"stats.{name} holds NaN or infinity: calibrate in float32 (--dtype float32) or leave out the "
            "text that overflows."
        )
    return values.float()
