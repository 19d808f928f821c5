"""Bits and bytes as options give them.

No torch is imported here: a command reads them before its imports, which take seconds.
"""

import math
import re
from collections.abc import Sequence

from requant.errors import RecipeError

UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, letter in enumerate("kmg")
}


def parse_bits(bits: int | float | str, *, option: str = "--bits") -> float:
    """`--bits` or `--code-bits` as a number from 1 to 8."""
    try:
        if isinstance(bits, bool | bytes):  # which float takes for numbers
            raise TypeError
        value = float(bits)
    except OverflowError:  # hundreds of digits
        value = math.inf
    except (TypeError, ValueError):
        raise RecipeError(f"{option} {bits} is not a number; give 1 to 8, like 3 or 2.25.") from None
    if not 1 <= value <= 8:  # so neither is NaN
        raise RecipeError(f"{option} {bits} is out of range; give 1 to 8, like 3 or 2.25.")
    return value


def parse_budgets(budgets: Sequence[int | float | str]) -> list[float]:
    """The `--bits` of a sweep, whose checkpoints are named by them: two or more that differ. Raises RecipeError."""
    if not isinstance(budgets, Sequence):
        raise RecipeError(
            f"bits must be a list of budgets, not {type(budgets).__name__}; give two or more, like [2, 3]."
        )
    found = [parse_bits(each) for each in budgets]
    if len({bits_name(each) for each in found}) < max(2, len(found)):
        raise RecipeError("a sweep takes two or more different --bits, such as 2,2.5,3,4.")
    return found


def bits_name(bits: float) -> str:
    """A budget in names of folders: 2.25bit."""
    return f"{bits:g}bit"


def parse_size(size: int | str, option: str = "--size") -> int:
    """What an option gives in bytes: a number with a unit of UNITS, or without."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size), re.IGNORECASE | re.ASCII)
    unit = UNITS.get(found[2].lower()) if found else None
    value = float(found[1]) * unit if found and unit else math.inf  # as are hundreds of digits
    if value == math.inf:
        raise RecipeError(
            f"{option} {size} is not a size; give a number of bytes, or one with KB, MB, GB, KiB, MiB or GiB, like 600MB."
        )
    if round(value) < 1:
        raise RecipeError(f"{option} {size} is nothing; give the bytes that may be taken, like 600MB.")
    return round(value)
