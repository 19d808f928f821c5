"""Checking kernels while a model loads: the first matrix of every kind, against the same matrix dequantized.

    |y - x w~'| <= LIMIT |x w~'|        (Frobenius; x Gaussian, numbers of tokens of every program up to 2048)

Kernels are compiled on the user's machine, for its GPU, by whatever compiler is installed there. A kernel that is wrong or
does not compile is detected here; its matrices are then dequantized at every call instead, and the log says so. A check
costs one dequantized matrix and eleven products per kind: matrices of one format, bit width and shape run the same programs.
The programs are compiled first, several kernels at once, since compiling takes nearly all of the time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from requant_kernels import Layout, TrellisLayout
from requant_kernels.flat_layout import flatten
from torch import Tensor

from requant.formats.quantized_weight import QuantizedWeight

try:
    from triton.errors import TritonError
except ImportError:  # no Triton, so nothing that it could fail to compile
    TritonError = type("TritonError", (Exception,), {})

# One for each `m_bucket` up to 2048, since kernel and launch are chosen per bucket; larger ones run the last program too.
# Two in the bucket of 2 to 8: a trellis multiplies up to 4 tokens by another program (`requant_kernels/trellis/gemv.py`).
TOKENS = (1, 3, 8, 16, 24, 40, 100, 160, 300, 520, 1040)
LIMIT = 2e-2  # bfloat16 rounds to 2e-3, int8 products to 1.3e-2; a wrong index is of the order of 1


class KernelCheck:
    """Remembers which kinds of matrices have passed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.passed: set[tuple[Any, ...]] = set()

    def __call__(
        self, multiply: Callable[[Tensor], Tensor], layout: Layout | TrellisLayout, weight: QuantizedWeight
    ) -> None:
        """Raises ValueError where `multiply(x)` is not `x w~'`. No bias may be added."""
        self.once(kind_of(layout), multiply, weight, TOKENS)

    def once(
        self,
        kind: tuple[Any, ...],
        multiply: Callable[[Tensor], Tensor],
        weight: QuantizedWeight,
        numbers: Sequence[int],
    ) -> None:
        """The same for any kind of product, at these numbers of tokens."""
        if kind in self.passed:
            return
        floats = weight.dequantize()
        generator = torch.Generator().manual_seed(0)
        inputs = [
            torch.randn(tokens, floats.shape[1], generator=generator).to(floats.device, self.dtype)
            for tokens in numbers
        ]
        if floats.is_cuda:
            from requant_kernels.common.compile_ahead import compile_ahead

            compile_ahead(lambda: [multiply(x) for x in inputs])
        for x in inputs:
            wanted = x.float() @ floats.T
            try:
                y = multiply(x)
            except torch.OutOfMemoryError:
                raise
            except (TritonError, RuntimeError) as problem:  # a launch that is refused is the latter
                raise ValueError(
                    f"the kernel for {name_of(weight)} codes does not compile or start on this machine "
                    f"({type(problem).__name__}); please report it with the GPU and the versions of torch and triton"
                ) from problem
            error = ((y.float() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
            if not error <= LIMIT:  # NaN is not
                raise ValueError(
                    f"the kernel for {name_of(weight)} codes is wrong on this "
                    f"machine (relative error {error:.2g} at {len(x)} tokens); please report it with the GPU and the "
                    "versions of torch and triton"
                )
        self.passed.add(kind)


def kind_of(layout: Layout | TrellisLayout) -> tuple[Any, ...]:
    """What decides which program runs: format, sizes, and which operands there are, by dtype."""
    group, code = getattr(layout, "group_size", 0), getattr(layout, "code", "")
    rotates = getattr(layout, "rotates_output", None), getattr(layout, "parts", ())
    present = tuple(operand.dtype if isinstance(operand, Tensor) else None for operand in flatten(layout))
    return type(layout), layout.bits, layout.n, layout.k, group, code, rotates, present


def name_of(weight: QuantizedWeight) -> str:
    """`2.25-bit trellis`."""
    return f"{weight.dense.bits:g}-bit {type(weight.dense).__name__.lower()}"
