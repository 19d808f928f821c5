"""Vectors of 8-bit numbers beside one float16, the largest magnitude: levels of a row, output scales of a trellis.

    value = half(magnitude q / 127),   q = -127 .. 127,   magnitude = max |value|

The magnitude is itself one of the values (q = 127 or -127), so numbers and magnitude are found again from the float16
values, and containers hold those alone. `snap` rounds any values onto such a grid, `fits` asks whether they lie on one,
`encode` and `decode` lead to the stored form and back, bit for bit. What is lost is a uniform error of at most
magnitude / 254, before float16 rounds.
"""

import torch
from jaxtyping import Float, Float16, Int8
from torch import Tensor

STEPS = 127
WIDEST_CODE = 6  # bits; beside codes of more, what 8 bits lose would count


def encode(
    values: Float[Tensor, "*n c"], *, nonzero: bool = False
) -> tuple[Int8[Tensor, "*n c"], Float16[Tensor, "*n 1"]]:
    """Nearest numbers, and the magnitude of every row. `nonzero`: only a value of 0 becomes 0."""
    exact = values.float()
    magnitude = exact.abs().amax(-1, keepdim=True).half()
    unit = torch.where(magnitude > 0, magnitude.float(), 1.0)
    numbers = (exact * STEPS / unit).round().clamp(-STEPS, STEPS)
    if nonzero:
        numbers = torch.where(numbers == 0, exact.sign(), numbers)
    return numbers.nan_to_num(0.0).to(torch.int8), magnitude


def decode(numbers: Int8[Tensor, "*n c"], magnitude: Float16[Tensor, "*n 1"]) -> Float16[Tensor, "*n c"]:
    """The values, the same on every device: the divisor is a tensor, for a number would become a reciprocal on a GPU."""
    floats = numbers.float() * magnitude.float() / torch.full_like(magnitude, STEPS, dtype=torch.float32)
    return floats.half() + 0.0  # no negative zero, which has no number of its own


def fake_quantize_int8(values: Float[Tensor, "*n c"], *, nonzero: bool = False) -> Float16[Tensor, "*n c"]:
    """The nearest values that 8 bits hold; those that lie on a grid stay as they are. NaN and infinity stay visible."""
    return decode(*encode(values, nonzero=nonzero))


def fits(values: Float16[Tensor, "*n c"]) -> bool:
    """Whether every row is finite, and what `decode` gives for what `encode` finds, bit for bit."""
    return bool(values.isfinite().all()) and torch.equal(
        fake_quantize_int8(values).view(torch.int16), values.contiguous().view(torch.int16)
    )
