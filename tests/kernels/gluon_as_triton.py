"""Import this to run Gluon kernels in Triton's interpreter: layouts are dropped, and only inline PTX uses shared memory."""

import types
from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.runtime import jit

DROPPED = ("layout",)  # arguments that Triton's functions do not have


class Constexpr(tl.constexpr):
    """With the attributes of its value, as the compiler resolves them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


class Shared:
    """An allocation that only inline PTX uses."""

    def __init__(self, *_: Any) -> None:
        pass


class Language(types.ModuleType):
    """`gluon.language` by the functions of `triton.language`, looked up when they are called."""

    def __init__(self, real: Any) -> None:
        super().__init__("language")
        self.real = real
        self.constexpr, self.allocate_shared_memory = Constexpr, Shared

    def __getattr__(self, name: str) -> Any:
        if name == "thread_barrier":
            return lambda: tl.debug_barrier()
        if name == "static_range":
            return lambda *bounds: tl.static_range(*bounds)
        if not hasattr(tl, name) or isinstance(getattr(tl, name), (type, tl.dtype)):
            return getattr(self.real, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(tl, name)(*args, **{key: kwargs[key] for key in kwargs.keys() - set(DROPPED)})

        return call


def arange(start: Any, end: Any, _layout: Any = None) -> Any:
    return tl.arange(start, end)


normalize = jit._normalize_ty


def jit_of(function: Any = None, **options: Any) -> Any:
    """`triton.jit`; the interpreter looks for `tl` in the module of the function."""
    if function is None:
        return lambda later: jit_of(later, **options)
    function.__globals__.setdefault("tl", tl)
    return triton.jit(function, **options)


def without_gl(annotation: Any) -> str:
    return normalize(annotation.removeprefix("gl.") if isinstance(annotation, str) else annotation)


language: Any = Language(gluon.language)
language.arange = arange
gluon.language = language
gluon.jit = jit_of
jit._normalize_ty = without_gl
