"""Masks and projections by Triton on a GPU, provided that the kernels give the results of the formulas in `masks.py`.

The kernels (`requant_kernels/sparsity/masks.py`) are compiled on the user's machine. Before a kernel is first used, for a
device and a dtype, its result on values with many ties and zeros is compared with the formula's; a kernel that differs, or
does not compile or start there, is not used, and the log says so.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from requant.errors import first_line

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALE_TOLERANCE = 1e-6  # relative; sums are in another order
Formula = Callable[[Tensor], Tensor]
logger = logging.getLogger(__name__)


def fastest(name: str, formula: Formula, values: Tensor) -> Tensor:
    """`formula(values)`, by the kernel `name` where it may be used; a kernel has no gradient."""
    differentiated = values.requires_grad and torch.is_grad_enabled()
    if not values.is_cuda or values.dtype not in DTYPES or differentiated:
        return formula(values)
    return _chosen(name, formula, values.device, values.dtype)(values)


@cache
def _chosen(name: str, formula: Formula, device: torch.device, dtype: torch.dtype) -> Formula:
    """The kernel, on its device, if it agrees with the formula there; else the formula."""
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    values[::2] = (2 * values[::2]).round() / 2
    values = values.to(device, dtype)
    try:
        from requant_kernels.sparsity import masks  # Triton is imported only where it can run

        kernel: Formula = getattr(masks, name)
        with torch.cuda.device(device):
            found, expected = kernel(values).double(), formula(values).double()
        if torch.allclose(found, expected, rtol=SCALE_TOLERANCE, atol=0):
            return _on(device, kernel)
        reason = "it differs from torch"
    except Exception as error:  # Triton, its compiler and the driver raise their own
        reason = first_line(error)
    logger.warning(
        "the kernel `%s` is not used on this machine, where torch takes its place: %s", name, reason
    )
    return formula


def _on(device: torch.device, kernel: Formula) -> Formula:
    """Launched on the device of its operand, whichever is the current one."""

    def launched(values: Tensor) -> Tensor:
        with torch.cuda.device(device):
            return kernel(values)

    return launched
