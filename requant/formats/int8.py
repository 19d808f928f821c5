"""Vectors in 8 bits per element with one float16 scale: the levels of a row, the output scales of a trellis.

    value = half(magnitude q / 127),   q = -127 .. 127,   magnitude = max |value|

The magnitude is itself one of the values (q = 127 or -127), so numbers and magnitude can be recovered from the float16
values, and containers hold only those. `fake_quantize_int8` rounds any values to such a grid, `fits` tells whether they
lie on one, and `encode` and `decode` convert to the stored form and back, bit for bit. The rounding error is at most
magnitude / 254, before float16 rounds again.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Float16, Int8
from torch import Tensor

STEPS = 127
WIDEST_CODE = 6  # bits; with more bits a code, the error of 8-bit levels or scales is no longer negligible


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
    """The values, the same on every device: a GPU would multiply by the reciprocal of a plain number."""
    floats = numbers.float() * magnitude.float() / torch.full_like(magnitude, STEPS, dtype=torch.float32)
    return floats.half() + 0.0  # int8 cannot store a negative zero


def fake_quantize_int8(values: Float[Tensor, "*n c"], *, nonzero: bool = False) -> Float16[Tensor, "*n c"]:
    """The nearest values on a grid of 8 bits; values on one stay as they are. NaN and infinity stay NaN."""
    return decode(*encode(values, nonzero=nonzero))


def fits(values: Float16[Tensor, "*n c"]) -> bool:
    """Whether every row is finite, and what `decode` gives for what `encode` finds, bit for bit."""
    return bool(values.isfinite().all()) and torch.equal(
        fake_quantize_int8(values).view(torch.int16), values.contiguous().view(torch.int16)
    )


def int8_flaw(suffix: str, tensors: Mapping[str, Tensor]) -> str | None:
    """What is wrong with a stored vector of numbers, or None; one that is stored in float16 is none."""
    stored = tensors.get(suffix)
    if stored is not None and stored.dtype == torch.int8 and (stored == -STEPS - 1).any():
        return f"{suffix} holds -128, but numbers go from -127 to 127"
    return None
