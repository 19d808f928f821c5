"""Launches without Triton's analysis of their arguments, which takes about 50 us of Python each.

Triton specializes a kernel on the types of its arguments, on pointers and numbers that are multiples of 16, on numbers that
are 1, and on constants. `launch` remembers the kernel that Triton chose by just these, constants by identity, and from
the second time on hands the arguments to it directly. A prompt read without a CUDA graph takes most of its time in launches.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

OPTIONS = frozenset({"num_warps", "num_stages", "launch_pdl", "maxnreg"})  # are no arguments of a kernel

_mappings: dict[tuple[tuple[str, Any], ...], Mapping[str, Any]] = {}
_chosen: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], constants: Mapping[str, Any]
) -> None:
    """`kernel[grid](*args, **constants)`; `constants` are known by identity: from a cached function, or `interned`."""
    if not isinstance(kernel, JITFunction):  # the interpreter's
        kernel[grid](*args, **constants)
        return
    key = (kernel, torch.cuda.current_device(), id(constants), *map(_tag, args))
    found = _chosen.get(key)
    if found is not None:
        compiled, values = found
        compiled[grid](*args, *values)
        return
    compiled = kernel[grid](*args, **constants)
    names = kernel.arg_names[len(args) :]
    assert set(names) == constants.keys() - OPTIONS, "constants come after all other arguments"
    _chosen[key] = compiled, tuple(constants[name] for name in names)


def interned(**constants: Any) -> Mapping[str, Any]:
    """The one mapping that stands for these constants, for `launch`."""
    return _mappings.setdefault(tuple(constants.items()), constants)


def _tag(value: Any) -> Any:
    """What Triton specializes an argument on."""
    if isinstance(value, Tensor):
        return value.dtype if value.data_ptr() % 16 == 0 else (value.dtype,)
    if isinstance(value, int):
        return 1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31)
    if value is None:
        return None
    return type(value), value.base.dtype, tuple(value.block_shape), value.layout  # a tensor descriptor
