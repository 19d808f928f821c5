"""Launches without Triton's analysis of their arguments, which takes about 50 us of Python each.

Triton specializes a kernel on the types of its arguments, on pointers and numbers that are multiples of 16, on numbers that
are 1, and on constants. `launch` remembers the kernel that Triton chose by just these, constants by identity, and from
the second time on hands the arguments to it directly. A prompt read without a CUDA graph takes most of its time in launches.

A launch may take more shared memory than its kernel uses, so that no more programs than it says find room on a
multiprocessor (`rooms.py`). Triton has no word for it: a copy of the compiled kernel gets the number that is passed on.
"""

import copy
import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction

OPTIONS = frozenset({"num_warps", "num_stages", "launch_pdl", "maxnreg"})  # are no arguments of a kernel
FREELY = 48 << 10  # bytes of shared memory, declared and given at launch, that need no leave

logger = logging.getLogger(__name__)
_mappings: dict[tuple[tuple[str, Any], ...], Mapping[str, Any]] = {}
_chosen: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
    *,
    room: int = 0,
) -> None:
    """`kernel[grid](*args, **constants)`; `constants` are known by identity: from a cached function, or `interned`.

    `room`: bytes of shared memory that a program takes at least.
    """
    if not isinstance(kernel, JITFunction):  # the interpreter's
        kernel[grid](*args, **constants)
        return
    key = (kernel, torch.cuda.current_device(), id(constants), room, *map(_tag, args))
    found = _chosen.get(key)
    if found is not None:
        compiled, values = found
        compiled[grid](*args, *values)
        return
    if room:
        compiled = with_room(kernel.warmup(*args, grid=grid, **constants), room)
        compiled[grid](*args, *(constants[name] for name in kernel.arg_names[len(args) :]))
    else:
        compiled = kernel[grid](*args, **constants)
    names = kernel.arg_names[len(args) :]
    assert set(names) == constants.keys() - OPTIONS, "constants come after all other arguments"
    _chosen[key] = compiled, tuple(constants[name] for name in names)


def with_room(compiled: Any, room: int) -> Any:
    """The compiled kernel, whose programs take at least `room` bytes of shared memory; as it is, where Triton keeps its
    compiled kernels in another way than 3.6: then it is slower, not wrong."""
    try:
        more = room - declared(compiled.asm["ptx"])
        if more <= compiled.metadata.shared:
            return compiled
        roomy, backend = copy.copy(compiled), make_backend(compiled.metadata.target)
        asked = compiled.metadata._replace(shared=more)
        roomy.packed_metadata = backend.pack_metadata(asked)  # pyright: ignore[reportAttributeAccessIssue]
        # loaded anew, with leave for as much: Triton asks for it where it sees more than what needs no leave
        roomy.metadata = compiled.metadata._replace(shared=max(more, FREELY + 1))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _warn_of_room(str(error))
        return compiled
    roomy.module = roomy.function = roomy._run = None
    return roomy


@cache
def _warn_of_room(reason: str) -> None:
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


def _tag(value: Any) -> Any:
    """What Triton specializes an argument on."""
    if isinstance(value, Tensor):
        return value.dtype if value.data_ptr() % 16 == 0 else (value.dtype,)
    if isinstance(value, int):
        return 1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31)
    if value is None:
        return None
    return type(value), value.base.dtype, tuple(value.block_shape), value.layout  # a tensor descriptor
