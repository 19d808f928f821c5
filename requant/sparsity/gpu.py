"""Masks and projections by Triton on a GPU, provided that the kernels give the results of the formulas in `masks.py`.

The comparison, for a device and a dtype (`requant/kernel_choice.py`), is on values with many ties and zeros.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from requant.kernel_choice import usable_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALE_TOLERANCE = 1e-6  # relative; sums are in another order
Formula = Callable[[Tensor], Tensor]


def fastest(name: str, formula: Formula, values: Tensor) -> Tensor:
    """`formula(values)`, by the kernel `name` where it may be used; a kernel has no gradient."""
    differentiated = values.requires_grad and torch.is_grad_enabled()
    if not values.is_cuda or values.dtype not in DTYPES or differentiated:
        return formula(values)
    return _chosen(name, formula, values.device, values.dtype)(values)


@cache
def _chosen(name: str, formula: Formula, device: torch.device, dtype: torch.dtype) -> Formula:
    """The kernel, if it agrees with the formula on this device; else the formula."""
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    values[::2] = (2 * values[::2]).round() / 2
    values = values.to(device, dtype)

    def load() -> Formula:
        from requant_kernels.sparsity import masks

        return getattr(masks, name)

    def agrees(kernel: Formula) -> bool:
        found, expected = kernel(values).double(), formula(values).double()
        return torch.allclose(found, expected, rtol=SCALE_TOLERANCE, atol=0)

    return usable_kernel(name, device, load, agrees) or formula
