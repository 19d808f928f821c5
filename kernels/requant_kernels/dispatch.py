"""Which kernel multiplies, and how it is launched; nothing else chooses.

`dispatch` asks the kernels of a layout in order; the first that supports the layout and has a launch for it wins. A launch
is a row of the tables (`launch_config.py`) or what the kernel's rule gives (`heuristics.py`). Shapes and the device decide,
never timing inside a call.

A kernel is a module with two functions, and a line in KERNELS:

    supports(layout, num_tokens, device) -> bool      the layout's format, sizes and alignment; not the launch
    NAME(x, layout, bias, config) -> y [m, n]         NAME of the module; x [m, k] with contiguous rows; config as CONFIGS
                                                      names it, or None

and, where shared memory depends on the layout, `fits(layout, config, device) -> bool`; those of a trellis whose product can
be had before its last rotation, `activation_form` and `product` (`trellis/operands.py`). Modules are imported when they are
first asked: those in Gluon need Triton 3.6, and the CPU needs no Triton at all. Every kernel is tested against
`fallback/reference.py`.

    | tokens     | kernel       | when                                                                               |
    | 1          | int8_mma     | Hopper; a grid of 2 to 4 bits, K a multiple of 256, groups of 128 or more          |
    | 1 .. 8     | fp16_mma     | the same without residuals                                                         |
    | 1 .. 8     | sparse_mma   | Hopper; residuals, where it was measured the fastest                               |
    | 1 .. 16    | gemv         | any                                                                                |
    | 17 .. 512  | gemm_sm90    | Hopper; all but codebooks of more than 4 bits                                      |
    | 17 .. 128  | gemm         | any                                                                                |
    | any        | dense        | dequantize, then cuBLAS                                                            |
    | 1 .. 16    | trellis_gemv, beyond it to 1024 trellis_gemm_sm90 on Hopper, and trellis_dense                    |
    | any        | torch_fallback, without a GPU                                                                     |
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from requant_kernels import heuristics, launch_config
from requant_kernels.common import device as device_properties
from requant_kernels.common.device import supports_sm90
from requant_kernels.common.packing import Layout
from requant_kernels.launch_config import LaunchConfig, Shape, TrellisGemvConfig, m_bucket, measured
from requant_kernels.trellis.layout import TrellisLayout

Rule = Callable[[Shape, torch.device], LaunchConfig | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A module of `requant_kernels` that multiplies; `rule` None: it has no launch of its own to choose, or is taken only
    where it was measured the fastest."""

    name: str
    module: str
    rule: Rule | None = None
    gluon: bool = False  # for Hopper alone
    function: str = ""  # that multiplies; named as the module where nothing else is said

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
    Kernel(name="int8_mma", module="scalar.gemv_int8_mma", rule=heuristics.int8_mma, gluon=True),
    Kernel(name="fp16_mma", module="scalar.gemv_fp16_mma", rule=heuristics.fp16_mma, gluon=True),
    Kernel(name="sparse_mma", module="scalar.gemv_sparse_mma", gluon=True),
    Kernel(name="gemv", module="scalar.gemv", rule=heuristics.gemv),
    Kernel(name="gemm_sm90", module="scalar.gemm_sm90", rule=heuristics.gemm_sm90, gluon=True),
    Kernel(name="gemm", module="scalar.gemm", rule=heuristics.gemm),
    Kernel(name="dense", module="scalar.dequantize", function="matmul"),
)
TRELLIS_KERNELS = (
    Kernel(name="torch_fallback", module="fallback.torch_fallback", function="linear"),
    Kernel(name="trellis_gemv", module="trellis.gemv", rule=heuristics.trellis_gemv),
    Kernel(
        name="trellis_gemm_sm90", module="trellis.gemm_sm90", rule=heuristics.trellis_gemm_sm90, gluon=True
    ),
    Kernel(name="trellis_dense", module="trellis.dequantize", function="matmul"),
)


def dispatch(
    layout: Layout | TrellisLayout, num_tokens: int, device: torch.device
) -> tuple[Kernel, LaunchConfig | None]:
    """The kernel that multiplies so many tokens, and its launch. Layouts that are alike are asked about once: choosing takes
    longer than launching."""
    key = (_alike(layout), m_bucket(num_tokens), device)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = choose(layout, num_tokens, device)
    return found


def dispatch_group(
    layouts: Sequence[TrellisLayout], num_tokens: int, device: torch.device
) -> list[TrellisGemvConfig] | None:
    """The launches of matrices that `trellis/gemv_group.py` multiplies in one; None where they are better multiplied each
    by its own kernel, since it is one alone or the kernel another."""
    kernels = {dispatch(layout, num_tokens, device)[0].name for layout in layouts}
    if len(layouts) == 1 or kernels != {"trellis_gemv"}:
        return None
    return heuristics.trellis_group([shape_of(layout, num_tokens) for layout in layouts], device)


_chosen: dict[Any, tuple[Kernel, LaunchConfig | None]] = {}


def _alike(layout: Layout | TrellisLayout) -> tuple[Any, ...]:
    """All that `supports` and `fits` may look at: sizes, types and which tensors there are, never their values."""
    sparse = layout.sparse
    residuals = None if sparse is None else (sparse.values.dtype, sparse.coo is None)
    sizes = layout.format, layout.bits, layout.n, layout.k, residuals
    if isinstance(layout, TrellisLayout):
        return *sizes, layout.input_scales is not None, layout.rotates_output
    return *sizes, layout.kernel_group, layout.zero_points is None, layout.column_scales is None


def choose(
    layout: Layout | TrellisLayout, num_tokens: int, device: torch.device
) -> tuple[Kernel, LaunchConfig | None]:
    """`dispatch` without its memory."""
    for kernel in kernels_of(layout):
        if kernel.supports(layout, num_tokens, device):
            if kernel.name not in launch_config.CONFIGS:
                return kernel, None
            config = config_of(kernel, shape_of(layout, num_tokens), device)
            if config is not None and kernel.fits(layout, config, device):
                return kernel, config
    raise AssertionError(f"no kernel takes {type(layout).__name__}, though the last one takes all")


def kernels_of(layout: Layout | TrellisLayout) -> tuple[Kernel, ...]:
    """The kernels of a class of layouts, in the order in which they are asked."""
    return TRELLIS_KERNELS if isinstance(layout, TrellisLayout) else KERNELS


def shape_of(layout: Layout | TrellisLayout, num_tokens: int) -> Shape:
    """What the tables know a layout by."""
    in_launch = layout.sparse is not None and not isinstance(layout, TrellisLayout)  # of residuals
    name = layout.format + "+s" * in_launch
    return Shape(name, layout.bits, layout.n, layout.k, m_bucket(num_tokens))


@cache
def config_of(kernel: Kernel, shape: Shape, device: torch.device) -> LaunchConfig | None:
    """A kernel's launch, measured or by its rule. None: none is known, or other kernels of few tokens were measured for this
    shape and this one was slower."""
    known: dict[str, LaunchConfig] = {}
    if device.type == "cuda":
        known = measured(torch.cuda.get_device_properties(device).name).get(shape, {})
    if kernel.name in known:
        return known[kernel.name]
    if kernel.rule is None or (known and kernel.name in MEASURED_AGAINST_GEMV):
        return None
    return kernel.rule(shape, device)


MEASURED_AGAINST_GEMV = frozenset({"int8_mma", "fp16_mma", "sparse_mma"})


@cache
def module_of(kernel: Kernel) -> Any:
    return importlib.import_module(f"requant_kernels.{kernel.module}")


@cache
def function_of(kernel: Kernel) -> Callable[..., Tensor]:
    return getattr(module_of(kernel), kernel.function or kernel.module.rpartition(".")[2])


def forget() -> None:
    """Read tables and devices again."""
    measured.cache_clear()
    config_of.cache_clear()
    _chosen.clear()
    device_properties.forget()
