"""8-bit floats, simulated: values are rounded to e4m3 or e5m2 with one scale per tensor, and returned in their own dtype.

    round(x s) / s,    s = MAX / max |x|        MAX: 448 of e4m3, 57344 of e5m2

S-STE (Hu et al. 2024, arXiv 2409.09099) trains this way, forward in e4m3 and backward in e5m2; its authors simulate it too.
"""

import torch
from jaxtyping import Float
from torch import Tensor

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_SCALE = torch.finfo(torch.float32).max


def simulate(values: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """The nearest values that `dtype` has on the tensor's scale."""
    largest = values.detach().abs().amax().float()
    # finite, so that values near the smallest of float32 stay numbers
    scale = torch.where(largest > 0, torch.finfo(dtype).max / largest, 1.0).clamp(max=LARGEST_SCALE)
    return ((values.float() * scale).to(dtype).float() / scale).to(values.dtype)
