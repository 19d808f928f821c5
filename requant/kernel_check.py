"""Kernels are asked one question before they answer a user's: the first matrix of every kind, against its own floats.

    |y - x w~'| <= LIMIT |x w~'|        (Frobenius; x Gaussian, for one token and for a prompt)

Kernels are compiled on the user's machine, for its GPU, by whatever compiler is installed there. One that is wrong there
is found while the model loads, its matrices are dequantized at every call instead, and the log says so. Costs one
dequantized matrix and two products a kind: matrices of one format, width and shape run the same program.
"""

from collections.abc import Callable
from typing import Any

import torch
from requant_kernels import Layout, TrellisLayout
from torch import Tensor

from requant.formats import QuantizedWeight

TOKENS = (1, 24)
LIMIT = 2e-2  # bfloat16 rounds to 2e-3; a wrong index is of the order of 1


class KernelCheck:
    """Remembers which kinds of matrices have passed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.passed: set[tuple[Any, ...]] = set()

    def __call__(
        self, multiply: Callable[[Tensor], Tensor], layout: Layout | TrellisLayout, weight: QuantizedWeight
    ) -> None:
        """Raises ValueError where `multiply(x)` is not `x w~'`. No bias may be added."""
        kind = kind_of(layout, weight)
        if kind in self.passed:
            return
        floats = weight.dequantize()
        generator = torch.Generator().manual_seed(0)
        for tokens in TOKENS:
            x = torch.randn(tokens, floats.shape[1], generator=generator).to(floats.device, self.dtype)
            wanted = x.float() @ floats.T
            error = ((multiply(x).float() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
            if not error <= LIMIT:  # NaN is not
                raise ValueError(
                    f"the kernel for {weight.dense.bits:g}-bit {type(weight.dense).__name__.lower()} codes is wrong on this "
                    f"machine (relative error {error:.2g} at {tokens} tokens); please report it with the GPU and the "
                    "versions of torch and triton"
                )
        self.passed.add(kind)


def kind_of(layout: Layout | TrellisLayout, weight: QuantizedWeight) -> tuple[Any, ...]:
    """What decides which program runs."""
    group, code = getattr(layout, "group_size", 0), getattr(layout, "code", "")
    return type(layout), layout.bits, layout.n, layout.k, group, code, weight.sparse is not None
