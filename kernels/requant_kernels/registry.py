"""The kernels that multiply by a packed layout, in the order in which `dispatch.py` asks them.

A kernel is a module with two functions, its launches beside it, and a line here:

    MODULE.py           supports(layout, num_tokens, device) -> bool      by the layout's format, sizes and alignment, not
                                                                          the launch
                        NAME(x, layout, bias, config) -> y [m, n]         NAME of the module; x [m, k] with contiguous rows
    MODULE_launch.py    LAUNCH (`launch_config.py`); absent if there is nothing to choose: then config is None

and, if shared memory depends on the layout, `fits(layout, config, device) -> bool`. Trellis kernels that can return the
product before its last rotation also have `activation_form` and `product` (`trellis/operands.py`), and `quantize` where a
product first does that to its activations, which several layers may share. Modules are imported when
they are first asked: those in Gluon need Triton 3.6, and the CPU needs no Triton at all. Every kernel is tested against
`fallback/reference.py`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from requant_kernels.common.device import supports_sm90
from requant_kernels.common.packing import Layout
from requant_kernels.launch_config import Launch, LaunchConfig
from requant_kernels.scalar import (
    gemm_launch,
    gemm_sm90_launch,
    gemv_fp16_mma_launch,
    gemv_int8_mma_launch,
    gemv_launch,
    gemv_sparse_mma_launch,
)
from requant_kernels.trellis import gemm_int8_launch
from requant_kernels.trellis import gemm_sm90_launch as trellis_gemm_sm90_launch
from requant_kernels.trellis import gemv_launch as trellis_gemv_launch
from requant_kernels.trellis.layout import TrellisLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A module of `requant_kernels` that multiplies; `name` is its name in the launch tables."""

    name: str
    module: str
    launch: Launch | None = None
    gluon: bool = False  # Hopper only
    overlaps: bool = False  # `product` takes a `PdlPosition` (`trellis/gemm_sm90_launch.py`)
    function: str = ""  # the function that multiplies; named like the module by default

    def supports(self, layout: Layout | TrellisLayout, num_tokens: int, device: torch.device) -> bool:
        if self.gluon and not supports_sm90(device):
            return False
        return module_of(self).supports(layout, num_tokens, device)

    def fits(self, layout: Layout | TrellisLayout, config: LaunchConfig, device: torch.device) -> bool:
        fits = getattr(module_of(self), "fits", None)
        return fits is None or fits(layout, config, device)

    def linear(
        self, x: Tensor, layout: Layout | TrellisLayout, bias: Tensor | None, config: LaunchConfig | None
    ) -> Tensor:
        """`x @ weight^T + bias` [m, n] of x [m, k], rows contiguous."""
        return function_of(self)(x, layout, bias, config)


KERNELS = (  # in the order in which they are asked
    Kernel(name="torch_fallback", module="fallback.torch_fallback", function="linear"),
    Kernel(name="int8_mma", module="scalar.gemv_int8_mma", launch=gemv_int8_mma_launch.LAUNCH, gluon=True),
    Kernel(name="fp16_mma", module="scalar.gemv_fp16_mma", launch=gemv_fp16_mma_launch.LAUNCH, gluon=True),
    Kernel(
        name="sparse_mma", module="scalar.gemv_sparse_mma", launch=gemv_sparse_mma_launch.LAUNCH, gluon=True
    ),
    Kernel(name="gemv", module="scalar.gemv", launch=gemv_launch.LAUNCH),
    Kernel(name="gemm_sm90", module="scalar.gemm_sm90", launch=gemm_sm90_launch.LAUNCH, gluon=True),
    Kernel(name="gemm", module="scalar.gemm", launch=gemm_launch.LAUNCH),
    Kernel(name="dense", module="scalar.dequantize", function="matmul"),
)
TRELLIS_KERNELS = (
    Kernel(name="torch_fallback", module="fallback.torch_fallback", function="linear"),
    Kernel(name="trellis_gemv", module="trellis.gemv", launch=trellis_gemv_launch.LAUNCH),
    Kernel(
        name="trellis_gemm_int8",
        module="trellis.gemm_int8",
        launch=gemm_int8_launch.LAUNCH,
        gluon=True,
        overlaps=True,
    ),
    Kernel(
        name="trellis_gemm_sm90",
        module="trellis.gemm_sm90",
        launch=trellis_gemm_sm90_launch.LAUNCH,
        gluon=True,
        overlaps=True,
    ),
    Kernel(name="trellis_dense", module="trellis.dequantize", function="matmul"),
)
LAUNCHES = {k.name: k.launch for k in (*KERNELS, *TRELLIS_KERNELS) if k.launch is not None}


def kernels_of(layout: Layout | TrellisLayout) -> tuple[Kernel, ...]:
    """The kernels of a class of layouts, in the order in which they are asked."""
    return TRELLIS_KERNELS if isinstance(layout, TrellisLayout) else KERNELS


@cache
def module_of(kernel: Kernel) -> Any:
    return importlib.import_module(f"requant_kernels.{kernel.module}")


@cache
def function_of(kernel: Kernel) -> Callable[..., Tensor]:
    return getattr(module_of(kernel), kernel.function or kernel.module.rpartition(".")[2])
