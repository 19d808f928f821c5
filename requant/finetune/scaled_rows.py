"""A weight whose rows are scaled, as all trellis codes are in training: written, and differentiated, in one pass each.

    W_ij = s_i U_ij          dL/ds_i = sum_j dL/dW_ij U_ij

By autograd a float32 weight costs 40 bytes of traffic in a step, for the product is made twice, copied, and multiplied with
the gradient before the sum; here it costs 16. On a GPU kernels do it (`requant_kernels/training/scaled_rows.py`), elsewhere
torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from requant.kernel_choice import usable_kernel

TOLERANCE = 1e-5  # of a sum, relative to the largest


@dataclass(frozen=True, kw_only=True)
class ScaledRows:
    """Some rows of a matrix: `scales [n]`, a leaf in float32, times `unscaled [n, k]`, which stays."""

    scales: Tensor
    unscaled: Tensor

    @torch.no_grad()
    def write(self, rows: Float[Tensor, "n k"]) -> None:
        """Write the weight into the rows of a parameter, rounded to its dtype."""
        kernels = self._kernels(rows)
        if kernels is None:
            rows.copy_(self.scales[:, None] * self.unscaled)
        else:
            kernels[0](rows, self.scales, self.unscaled)

    @torch.no_grad()
    def add_gradient(self, gradient: Float[Tensor, "n k"]) -> None:
        """Add what the weight's gradient makes of it to that of the scales."""
        kernels = self._kernels(gradient)
        if kernels is None:
            sums = (gradient.float() * self.unscaled).sum(1)
        else:
            sums = kernels[1](gradient, self.unscaled)
        if self.scales.grad is None:
            self.scales.grad = sums
        else:
            self.scales.grad += sums

    def _kernels(self, rows: Tensor) -> "_Kernels | None":
        """None where they are not used, or cannot read the tensors as they lie in memory."""
        tensors = (rows, self.unscaled, self.scales)
        plain = all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)
        return _kernels(rows.device) if plain else None


_Kernels = tuple[Callable[[Tensor, Tensor, Tensor], None], Callable[[Tensor, Tensor], Tensor]]


@cache
def _kernels(device: torch.device) -> _Kernels | None:
    """What writes and what sums, if both agree with torch on this device."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(5, generator=generator).to(device)
    unscaled, gradient = torch.randn(2, 5, 3000, generator=generator).to(device)

    def load_write() -> Callable[[Tensor, Tensor, Tensor], None]:
        from requant_kernels.training.scaled_rows import scale_rows

        return scale_rows

    def load_sum() -> Callable[[Tensor, Tensor], Tensor]:
        from requant_kernels.training.scaled_rows import row_products

        return row_products

    def writes(kernel: Callable[[Tensor, Tensor, Tensor], None]) -> bool:
        found = torch.empty_like(unscaled)
        kernel(found, scales, unscaled)
        return torch.equal(found, scales[:, None] * unscaled)

    def sums(kernel: Callable[[Tensor, Tensor], Tensor]) -> bool:
        expected = (gradient * unscaled).sum(1)
        return bool((kernel(gradient, unscaled) - expected).abs().max() <= TOLERANCE * expected.abs().max())

    write = usable_kernel("scale_rows", device, load_write, writes)
    add = usable_kernel("row_products", device, load_sum, sums)
    return None if write is None or add is None else (write, add)
