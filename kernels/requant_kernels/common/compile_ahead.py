"""Kernels compiled several at once, before the first of them is needed.

Triton compiles a kernel when it is first launched, and the launches of a product follow one another, so a machine of sixteen
cores compiles on one of them. `compile_ahead` makes the same calls without starting their kernels: `launch` hands each to
Triton's pool of threads and returns, and what the calls give is not defined. A kernel that does not compile says nothing
here: the call that needs it will.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import triton
from triton.errors import TritonError

_compiling = False


def compiling() -> bool:
    """Whether launches compile their kernel and start nothing."""
    return _compiling


def compile_ahead(calls: Callable[[], object]) -> None:
    """Compile all kernels that `calls()` launches through `launch`; other launches are compiled and run one by one."""
    global _compiling
    pool = getattr(triton, "AsyncCompileMode", None)
    if pool is None:  # a Triton without it: they are compiled as they come
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor, pool(executor, ignore_errors=True):
        _compiling = True
        try:
            calls()
        except (TritonError, RuntimeError):
            pass  # of a launch that is not ours; the same call says so when it is made in earnest
        finally:
            _compiling = False
