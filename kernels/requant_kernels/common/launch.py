"""Launches without Triton's analysis of their arguments, which takes about 50 us of Python each.

Triton specializes a kernel on argument types, on pointers and numbers that are multiples of 16, on numbers that are 1, and
on constants. `launch` caches the kernel that Triton chose under exactly these, with constants by identity, and from the
second time on passes the arguments to it directly: tensors as addresses, which skips a query to the driver. Launches
dominate the time of a short prompt without a CUDA graph.

Constants are often dataclasses. Triton serializes them to JSON before it reports a compilation to a hook, which fails, and
vLLM installs such a hook to warn of compilations after startup. So our compilations are not reported to hooks
(`unreported`).

A launch may take more shared memory than its kernel uses, to limit the CTAs per SM (`occupancy.py`). Triton has no
option for that: a copy of the compiled kernel holds the larger number.
"""

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.jit import JITFunction

from requant_kernels.common.compile_ahead import compiling

OPTIONS = frozenset({"num_warps", "num_stages", "launch_pdl", "maxnreg"})  # not arguments of a kernel
DEFAULT_SMEM_BYTES = 48 << 10  # per CTA, without raising the driver's limit

logger = logging.getLogger(__name__)
_mappings: dict[tuple[tuple[str, Any], ...], Mapping[str, Any]] = {}
_chosen: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
    *,
    smem_bytes: int = 0,
) -> None:
    """`kernel[grid](*args, **constants)`; `constants` are compared by identity: from a cached function, or `interned`.

    `smem_bytes`: the least shared memory that a CTA takes.
    """
    if not isinstance(kernel, JITFunction):  # the interpreter's
        kernel[grid](*args, **constants)
        return
    if compiling():
        with unreported():
            kernel.warmup(*args, grid=grid, **constants)
        return
    device = torch.cuda.current_device()
    key = (kernel, device, id(constants), smem_bytes, *map(_tag, args))
    found = _chosen.get(key)
    if found is not None:
        compiled, values = found
        if isinstance(compiled, CompiledKernel) and not watched():
            operands = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
            start(compiled, grid, torch._C._cuda_getCurrentRawStream(device), *operands, *values)
        else:
            compiled[grid](*args, *values)
        return
    if smem_bytes:
        with unreported():
            compiled = kernel.warmup(*args, grid=grid, **constants)
        compiled = with_smem_bytes(compiled, smem_bytes)
        compiled[grid](*args, *(constants[name] for name in kernel.arg_names[len(args) :]))
    else:
        with unreported():
            compiled = kernel[grid](*args, **constants)
    names = kernel.arg_names[len(args) :]
    assert set(names) == constants.keys() - OPTIONS, "constants come after all other arguments"
    _chosen[key] = compiled, tuple(constants[name] for name in names)


@contextmanager
def unreported() -> Iterator[None]:
    """Suppress Triton's compilation hooks; for launches with constants that JSON cannot represent."""
    runtime = knobs.runtime
    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = hooks


def start(compiled: Any, grid: tuple[int, int, int], stream: int, *operands: Any) -> None:
    """`compiled[grid](*operands)` on a stream, without the metadata and hooks that nobody uses."""
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *operands)


def watched() -> bool:
    """Whether a profiler hooks into Triton's launches, or this is unknown; then Triton makes them itself."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))


def with_smem_bytes(compiled: Any, smem_bytes: int) -> Any:
    """The compiled kernel, with at least this much shared memory per CTA; unchanged if Triton stores compiled kernels
    differently from 3.6: then it is slower, not wrong."""
    try:
        more = smem_bytes - declared(compiled.asm["ptx"])
        if more <= compiled.metadata.shared:
            return compiled
        padded, backend = copy.copy(compiled), make_backend(compiled.metadata.target)
        asked = compiled.metadata._replace(shared=more)
        padded.packed_metadata = backend.pack_metadata(asked)  # pyright: ignore[reportAttributeAccessIssue]
        # load it again: Triton raises the driver's limit if a kernel needs more than the default
        padded.metadata = compiled.metadata._replace(shared=max(more, DEFAULT_SMEM_BYTES + 1))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _warn_once(str(error))
        return compiled
    padded.module = padded.function = padded._run = None
    return padded


@cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "launches take no more shared memory than they need, and some are slower for it: %s", reason
    )


def declared(ptx: str) -> int:
    """Bytes of shared memory that a kernel's PTX declares, in addition to those given at launch."""
    found = re.findall(r"\.shared\s+(?:\.align\s+\d+\s+)?\.[bfsu](\d+)\s+\w+\[(\d+)\]", ptx)
    return sum(int(width) // 8 * int(count) for width, count in found)


def interned(**constants: Any) -> Mapping[str, Any]:
    """The one mapping for these constants, for `launch`."""
    return _mappings.setdefault(tuple(constants.items()), constants)


def aligned(x: Tensor) -> Tensor:
    """x [m, k], k a multiple of 8 elements of two bytes; a copy if its rows do not start at multiples of 16 bytes."""
    rows = x.shape[0] == 1 or x.stride(0) % 8 == 0
    return x if rows and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _tag(value: Any) -> Any:
    """What Triton specializes an argument on, and whether a kernel can read a tensor where it is."""
    if isinstance(value, Tensor):
        return value.dtype, value.is_cuda, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return 1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31)
    if value is None or isinstance(value, float):
        return type(value)
    if isinstance(value, tuple):
        return tuple(map(_tag, value))
    return type(value), value.base.dtype, tuple(value.block_shape), value.layout  # a tensor descriptor
