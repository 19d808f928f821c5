"""Import this before kernels run in Triton's interpreter.

Loops with run-time bounds: Triton 3.6 and numpy 2.4 disagree about them. And what costs two thirds of its time for nothing:
the language is patched anew at every call of a device function, sums are computed once more in 64 bits for an assertion that
is off unless Triton's `debug` is on, the table of numpy's types is built anew at every look into it, and so are a shape, its
product, its constants and their types for every tensor.
"""

import dataclasses
import math
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter

_patch_lang_tensor, _patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang


def _with_index(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_once(function: Any) -> Any:
    """Nothing, where the kernel that calls this function has patched what both see of the language."""
    seen = [
        module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())
    ]
    if seen and not any(tl.core.is_builtin(module.load) for module in seen):
        return interpreter._LangPatchScope()
    return _patch_lang(function)


_numpy_of_scalar = lru_cache(interpreter._get_np_dtype)


def _numpy_of(type: Any) -> np.dtype:
    return np.dtype(np.uint64) if type.scalar.is_ptr() else _numpy_of_scalar(type.scalar)


@lru_cache
def _block_of(sizes: tuple[int, ...]) -> tuple[tl.tuple, int]:
    """The shape of a block, and its elements; raises what Triton does of one that is none."""
    return tl.tuple(sizes), validate_block_shape(sizes)


@lru_cache
def _constants_of(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    """The shape of a tensor, and its elements."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(_unwrap(size) for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel = _block_of(sizes)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constants_of(tuple(type.shape.values) if type.is_block() else ())


def _unwrap(value: Any) -> Any:
    """`_unwrap_if_constexpr`, which would copy a shape without constants too."""
    own = type(value)
    if (
        own is int
        or own is tl.tensor
        or (own is tl.tuple and all(type(size) is int for size in value.values))
    ):
        return value
    return _unwrap_if_constexpr(value)


def _equal_tuples(self: Any, other: Any) -> Any:
    values = other.values if type(other) is tl.tuple else other
    return tl.constexpr(self.values == [_unwrap(value) for value in values])


_unwrap_if_constexpr, core._unwrap_if_constexpr = core._unwrap_if_constexpr, _unwrap
core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__ = (
    _init_block_type,
    _init_tensor,
    _equal_tuples,
)
core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
interpreter._patch_lang_tensor, interpreter._patch_lang = _with_index, _patch_once
interpreter._get_np_dtype = _numpy_of
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
