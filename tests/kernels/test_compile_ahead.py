"""Kernels compiled at once, for a GPU that is not there: Triton compiles for sm_90, and nothing is started."""

import threading

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from requant_kernels.common import launch as launching  # noqa: E402
from requant_kernels.common.compile_ahead import compile_ahead, compiling  # noqa: E402
from requant_kernels.common.launch import interned, launch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402


@triton.jit
def doubled_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)


@triton.jit
def broken_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 64, "too few")
    tl.store(y_ptr, tl.load(x_ptr))


class Hopper:
    """Triton's driver, as far as compiling asks it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    for kernel in (doubled_kernel, broken_kernel):
        kernel.device_caches.clear()
    yield
    for kernel in (doubled_kernel, broken_kernel):
        kernel.device_caches.clear()


def test_kernels_are_compiled_at_once_and_none_is_started(hopper, monkeypatch) -> None:
    threads = set()
    compile_kernel = triton.compiler.compile

    def compiles(*arguments, **options):
        threads.add(threading.current_thread().name)
        return compile_kernel(*arguments, **options)

    monkeypatch.setattr(triton.compiler, "compile", compiles)
    x, y = torch.ones(64), torch.zeros(64)

    def calls() -> None:
        assert compiling()
        for block in (16, 32, 64):
            launch(doubled_kernel, (1, 1, 1), (x, y), interned(BLOCK=block))
        launch(broken_kernel, (1, 1, 1), (x, y), interned(BLOCK=64))  # the call in earnest says so
        launch(doubled_kernel, (1, 1, 1), (x, y), interned(BLOCK=32))  # again: compiled once

    before = dict(launching._chosen)
    compile_ahead(calls)
    assert not compiling()
    assert not y.any(), "nothing ran"
    assert launching._chosen == before, "nothing is remembered as launched"
    known = doubled_kernel.device_caches[0][0]
    assert len(known) == 3 and all("cubin" in kernel.asm for kernel in known.values())
    assert threading.current_thread().name not in threads
    assert not broken_kernel.device_caches[0][0]


def test_what_fails_in_between_is_left_to_the_call_in_earnest(hopper) -> None:
    def calls() -> None:
        raise RuntimeError("Triton Error [CUDA]: invalid argument")

    compile_ahead(calls)
    assert not compiling()


def test_other_mistakes_are_not_swallowed(hopper) -> None:
    def calls() -> None:
        raise TypeError("a mistake of ours")

    with pytest.raises(TypeError):
        compile_ahead(calls)
    assert not compiling()
