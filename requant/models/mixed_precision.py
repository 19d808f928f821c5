"""Products of float32 matrices computed in bfloat16 on a GPU, wherever gradients are taken: training and output Hessians."""

import torch
from torch import Tensor

PRODUCTS = {"cuda": torch.bfloat16}  # device -> dtype of matrix products; elsewhere that of the weights


def mixed_precision(tensor: Tensor, *, keeps_casts: bool = True) -> torch.autocast:
    """Autocast on the tensor's device; `keeps_casts`: of weights that are trained, until it ends."""
    kind = tensor.device.type
    return torch.autocast(kind, dtype=PRODUCTS.get(kind), enabled=kind in PRODUCTS, cache_enabled=keeps_casts)
