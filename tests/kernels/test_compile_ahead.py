"""Kernels compiled by processes of their own, for a GPU that is not there: Triton compiles for sm_90, nothing is started."""

# pyright: reportGeneralTypeIssues=none

import os
import signal
import time

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from requant_kernels.common import compile_ahead as ahead  # noqa: E402
from requant_kernels.common import launch as launching  # noqa: E402
from requant_kernels.common.compile_ahead import compile_ahead, compiling  # noqa: E402
from requant_kernels.common.launch import interned, launch  # noqa: E402
from requant_kernels.viterbi import gpu  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from requant.formats.trellis_codes import code_values  # noqa: E402


@triton.jit
def doubled_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)


@triton.jit
def broken_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 64, "too few")
    tl.store(y_ptr, tl.load(x_ptr))


@triton.jit
def slow_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for _ in tl.static_range(300):
        x = x * 1.5 + 1
    tl.store(y_ptr + at, x)


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
    for kernel in (doubled_kernel, broken_kernel, slow_kernel):
        kernel.device_caches.clear()
    yield
    for kernel in (doubled_kernel, broken_kernel, slow_kernel):
        kernel.device_caches.clear()


def every_block(x: torch.Tensor, y: torch.Tensor) -> None:
    for block in (16, 32, 64):
        launch(doubled_kernel, (1, 1, 1), (x, y), interned(BLOCK=block))
    launch(broken_kernel, (1, 1, 1), (x, y), interned(BLOCK=64))  # the call in earnest says so
    launch(doubled_kernel, (1, 1, 1), (x, y), interned(BLOCK=32))  # again: compiled once


@pytest.fixture
def compiled_here(monkeypatch):
    """Of every kernel that this process asks Triton for: its name, and whether the cache had it."""
    found = []
    monkeypatch.setattr(
        triton.knobs.compilation,
        "listener",
        lambda **told: found.append((told["src"].name, told["cache_hit"])),
    )
    return found


def test_kernels_are_compiled_by_other_processes_and_none_is_started(
    hopper, compiled_here, monkeypatch
) -> None:
    forks = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(fork()) or forks[-1])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    x, y = torch.ones(64), torch.zeros(64)
    before = dict(launching._chosen)
    compile_ahead(lambda: every_block(x, y))
    assert not compiling() and not y.any(), "nothing ran"
    assert launching._chosen == before, "nothing is remembered as launched"
    assert len(forks) == 3 and not compiled_here, "none was compiled here"
    assert not ahead._under_way, "and all processes have been collected"
    for pid in forks:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, 0)
    for block in (16, 32, 64):
        doubled_kernel.warmup(x, y, grid=(1, 1, 1), BLOCK=block)
    assert compiled_here == [("doubled_kernel", True)] * 3
    with pytest.raises(triton.CompilationError, match="too few"):
        broken_kernel.warmup(x, y, grid=(1, 1, 1), BLOCK=64)


def test_the_searches_for_codes_are_compiled_by_other_processes(hopper, compiled_here) -> None:
    def searches() -> None:
        for pinned in (None, torch.zeros(1, dtype=torch.int64)):
            gpu.viterbi_paths(torch.zeros(1, 256, 1), code_values("mul1"), shifts=(2, 2, 2, 3), pinned=pinned)

    kernels = (gpu._forward, gpu._backtrack)
    for kernel in kernels:
        kernel.device_caches.clear()
    compile_ahead(searches)
    jobs = ahead._launched(searches)
    for kernel in kernels:
        kernel.device_caches.clear()
    assert len(jobs) == 3 and all(job.is_cached for job in jobs.values()), "both forward passes, one way back"
    assert not compiled_here


def test_what_the_cache_has_starts_no_process(hopper, monkeypatch) -> None:
    x, y = torch.ones(64), torch.zeros(64)

    def calls() -> None:
        launch(doubled_kernel, (1, 1, 1), (x, y), interned(BLOCK=32))

    compile_ahead(calls)
    doubled_kernel.device_caches.clear()  # as in a new process
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    compile_ahead(calls)


def test_the_caller_goes_on_and_waits_later(hopper, compiled_here) -> None:
    x, y = torch.ones(64), torch.zeros(64)

    def calls() -> None:
        launch(slow_kernel, (1, 1, 1), (x, y), interned(BLOCK=64))
        launch(doubled_kernel, (1, 1, 1), (x, y), interned(BLOCK=64))

    compile_ahead(calls, wait=False)
    (processes,) = set(ahead._under_way.values())
    pids = list(processes.pids)
    compile_ahead(lambda: None)
    assert ahead._under_way, "who needs none of them does not wait"
    compile_ahead(calls)
    assert not ahead._under_way and pids
    slow_kernel.warmup(x, y, grid=(1, 1, 1), BLOCK=64)
    assert compiled_here == [("slow_kernel", True)]


def test_processes_that_are_killed_are_no_loss(hopper, compiled_here) -> None:
    x, y = torch.ones(64), torch.zeros(64)

    def calls() -> None:
        launch(slow_kernel, (1, 1, 1), (x, y), interned(BLOCK=64))

    compile_ahead(calls, wait=False)
    for pid in set(ahead._under_way.values()).pop().pids:
        os.kill(pid, signal.SIGKILL)
    compile_ahead(calls)
    assert not ahead._under_way
    slow_kernel.warmup(x, y, grid=(1, 1, 1), BLOCK=64)
    assert compiled_here == [("slow_kernel", False)]


def test_processes_that_are_stuck_are_ended(hopper, monkeypatch) -> None:
    x, y = torch.ones(64), torch.zeros(64)
    monkeypatch.setattr(ahead, "SILENCE", 0.2)
    monkeypatch.setattr(ahead, "_compile_and_exit", lambda *_: (time.sleep(60), os._exit(0)))
    compile_ahead(lambda: launch(doubled_kernel, (1, 1, 1), (x, y), interned(BLOCK=64)))
    assert not ahead._under_way


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
