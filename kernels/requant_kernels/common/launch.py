"""Launches without Triton's analysis of their arguments, which takes about 50 us of Python each.

Triton specializes a kernel on the types of its arguments, on pointers and numbers that are multiples of 16, on numbers that
are 1, and on constants. `launch` remembers the kernel that Triton chose by just these, constants by identity, and from
the second time on hands the arguments to it directly, tensors as addresses, which the driver is then not asked about. A
short prompt read without a CUDA graph takes most of its time in launches.

Constants are often dataclasses. Before Triton tells a hook of what it compiles it writes them as JSON, which fails, and vLLM
has such a hook, to warn of what is compiled after its start. So nothing of ours is told to hooks (`unreported`).

A launch may take more shared memory than its kernel uses, so that fewer CTAs fit an SM (`occupancy.py`). Triton has no
option for it: a copy of the compiled kernel gets the number that is passed on.
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

OPTIONS = frozenset({"num_warps", "num_stages", "launch_pdl", "maxnreg"})  # are no arguments of a kernel
DEFAULT_SMEM_BYTES = 48 << 10  # that a CTA may have without raising the driver's limit

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
    """`kernel[grid](*args, **constants)`; `constants` are known by identity: from a cached function, or `interned`.

    `smem_bytes`: shared memory that a CTA takes at least.
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
    """Hooks of Triton are not told what is compiled while this lasts; for launches whose constants JSON cannot hold."""
    runtime = knobs.runtime
    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
    try:
        yield
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = hooks


def start(compiled: Any, grid: tuple[int, int, int], stream: int, *operands: Any) -> None:
    """`compiled[grid](*operands)` on a stream, without metadata and hooks for whom nobody asks."""
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *operands)


def watched() -> bool:
    """Whether a profiler hangs on Triton's launches, or one cannot tell; then they are Triton's own."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))


def with_smem_bytes(compiled: Any, smem_bytes: int) -> Any:
    """The compiled kernel, whose CTAs take at least so much shared memory; as it is, where Triton keeps its compiled kernels
    in another way than 3.6: then it is slower, not wrong."""
    try:
        more = smem_bytes - declared(compiled.asm["ptx"])
        if more <= compiled.metadata.shared:
            return compiled
        padded, backend = copy.copy(compiled), make_backend(compiled.metadata.target)
        asked = compiled.metadata._replace(shared=more)
        padded.packed_metadata = backend.pack_metadata(asked)  # pyright: ignore[reportAttributeAccessIssue]
        # loaded anew: Triton raises the driver's limit where a kernel needs more than what is allowed without asking
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
    """Bytes of shared memory that a kernel's text declares, beside what it is given at launch."""
    found = re.findall(r"\.shared\s+(?:\.align\s+\d+\s+)?\.[bfsu](\d+)\s+\w+\[(\d+)\]", ptx)
    return sum(int(width) // 8 * int(count) for width, count in found)


def interned(**constants: Any) -> Mapping[str, Any]:
    """The one mapping that stands for these constants, for `launch`."""
    return _mappings.setdefault(tuple(constants.items()), constants)


def aligned(x: Tensor) -> Tensor:
    """x [m, k], k a multiple of 8 elements of two bytes; a copy where its rows do not begin at multiples of 16 bytes."""
    rows = x.shape[0] == 1 or x.stride(0) % 8 == 0
    return x if rows and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _tag(value: Any) -> Any:
    """What Triton specializes an argument on, and whether a tensor is where a kernel can read it."""
    if isinstance(value, Tensor):
        return value.dtype, value.is_cuda, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return 1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31)
    if value is None or isinstance(value, float):
        return type(value)
    if isinstance(value, tuple):
        return tuple(map(_tag, value))
    return type(value), value.base.dtype, tuple(value.block_shape), value.layout  # a tensor descriptor
