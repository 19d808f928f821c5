"""Import this before kernels run in Triton's interpreter.

Loops with run-time bounds: Triton 3.6 and numpy 2.4 disagree about them. And what costs a third of its time for nothing: the
language is patched anew at every call of a device function, sums are computed once more in 64 bits for an assertion that
is off unless Triton's `debug` is on, and the table of numpy's types is built anew at every look into it.
"""

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
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


interpreter._patch_lang_tensor, interpreter._patch_lang = _with_index, _patch_once
interpreter._get_np_dtype = _numpy_of
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
