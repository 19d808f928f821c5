"""The largest weight that a checkpoint may describe: float16's maximum, because kernels and other engines compute in it.

No trained model comes near it; a scale in a damaged or hostile file does, and would overflow to infinity far from its cause.
"""

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float16).max


def too_large(suffix: str, largest: Tensor) -> str | None:
    """What is wrong with scales by which weights reach `largest`, or None."""
    if float(largest) <= LARGEST:
        return None
    return f"{suffix} makes weights of up to {float(largest):.3g}, beyond float16's {LARGEST:g}"
