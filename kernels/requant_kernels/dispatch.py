"""Which kernel multiplies, and how it is launched; nothing else chooses.

`dispatch` asks the kernels of a layout in order (`registry.py`); the first that supports the layout and has a launch for it
wins. A launch comes from the tables (`launch_tables.py`) or from the kernel's rule (`launch_config.py`). Shapes and the
device decide, never timing inside a call.

    | tokens     | kernel       | when                                                                               |
    | 1          | int8_mma     | Hopper; a grid of 2 to 4 bits, K a multiple of 256, groups of 128 or more          |
    | 1 .. 8     | fp16_mma     | the same without residuals                                                         |
    | 1 .. 8     | sparse_mma   | Hopper; residuals, where it was measured the fastest                               |
    | 1 .. 16    | gemv         | any                                                                                |
    | 17 .. 512  | gemm_sm90    | Hopper; all except codebooks of more than 4 bits                                   |
    | 17 .. 128  | gemm         | any                                                                                |
    | any        | dense        | dequantize, then cuBLAS                                                            |
    | 1 .. 16    | trellis_gemv | any trellis; on Hopper up to 8                                                     |
    | 65 .. any, tall matrices 33 | trellis_gemm_int8 | Hopper; up to 3.25 bits, but no head                         |
    |  9 .. 1024 | trellis_gemm_sm90 | Hopper                                                                        |
    | any        | trellis_dense | dequantize, then cuBLAS                                                           |
    | any        | torch_fallback, without a GPU                                                                     |
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from requant_kernels.common import device as device_properties
from requant_kernels.common.packing import Layout
from requant_kernels.launch_config import LaunchConfig, Shape, m_bucket
from requant_kernels.launch_tables import measured
from requant_kernels.registry import Kernel, kernels_of
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig, trellis_group
from requant_kernels.trellis.layout import TrellisLayout


def dispatch(
    layout: Layout | TrellisLayout, num_tokens: int, device: torch.device
) -> tuple[Kernel, LaunchConfig | None]:
    """The kernel that multiplies this many tokens, and its launch. The choice is cached for equal layouts: choosing takes
    longer than launching."""
    key = (_alike(layout), m_bucket(num_tokens), device)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = choose(layout, num_tokens, device)
    return found


def dispatch_group(
    layouts: Sequence[TrellisLayout], num_tokens: int, device: torch.device
) -> list[TrellisGemvConfig] | None:
    """The launches of matrices that `trellis/gemv_group.py` multiplies in one; None if separate kernels are better, because
    there is only one matrix or another kernel applies."""
    kernels = {dispatch(layout, num_tokens, device)[0].name for layout in layouts}
    if len(layouts) == 1 or kernels != {"trellis_gemv"}:
        return None
    return trellis_group([shape_of(layout, num_tokens) for layout in layouts], device)


# Numbers of tokens up to which the same kernel multiplies a trellis, and reads rotated activations in the same form: exact
# bytes, those of `trellis/gemv.py`, float16 of all, float16 of matrices that are not tall, half sums (`pair`),
# `trellis/gemm_sm90.py`. A test asks all kernels.
TRELLIS_BOUNDS = (4, 8, 16, 32, 64, 128, 1024)
_chosen: dict[Any, tuple[Kernel, LaunchConfig | None]] = {}


def _alike(layout: Layout | TrellisLayout) -> tuple[Any, ...]:
    """All that `supports` and `fits` may look at: sizes, types, which tensors exist, and whether a grid's codes are aligned
    for copies of 16 bytes; never values. The environment is as they found it at the first call, or after `forget`."""
    sparse = layout.sparse
    residuals = None if sparse is None else (sparse.values.dtype, sparse.coo is None)
    sizes = layout.format, layout.bits, layout.n, layout.k, residuals
    if isinstance(layout, TrellisLayout):
        return *sizes, layout.input_scales is not None, layout.rotates_output
    aligned = layout.packed_codes.data_ptr() % 16 == 0
    return *sizes, layout.kernel_group, layout.zero_points is None, layout.column_scales is None, aligned


def choose(
    layout: Layout | TrellisLayout, num_tokens: int, device: torch.device
) -> tuple[Kernel, LaunchConfig | None]:
    """`dispatch` without its cache."""
    for kernel in kernels_of(layout):
        if kernel.supports(layout, num_tokens, device):
            if kernel.launch is None:
                return kernel, None
            config = config_of(kernel, shape_of(layout, num_tokens), device)
            if config is not None and kernel.fits(layout, config, device):
                return kernel, config
    raise AssertionError(f"no kernel takes {type(layout).__name__}, though the last one takes all")


def shape_of(layout: Layout | TrellisLayout, num_tokens: int) -> Shape:
    """The key of a layout in the tables."""
    in_launch = layout.sparse is not None and not isinstance(layout, TrellisLayout)  # of residuals
    name = layout.format + "+s" * in_launch
    return Shape(name, layout.bits, layout.n, layout.k, m_bucket(num_tokens))


@cache
def config_of(kernel: Kernel, shape: Shape, device: torch.device) -> LaunchConfig | None:
    """A kernel's launch, measured or by its rule. None if none is known, or if other kernels of few tokens were measured for
    this shape and this one was slower."""
    known: dict[str, LaunchConfig] = {}
    if device.type == "cuda":
        known = measured(torch.cuda.get_device_properties(device).name).get(shape, {})
    if kernel.name in known:
        return known[kernel.name]
    launch = kernel.launch
    if launch is None or launch.rule is None or (known and launch.measured_beside_gemv):
        return None
    return launch.rule(shape, device)


def forget() -> None:
    """Read tables and devices again."""
    measured.cache_clear()
    config_of.cache_clear()
    _chosen.clear()
    device_properties.forget()
