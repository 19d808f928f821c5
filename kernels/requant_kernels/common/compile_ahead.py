"""Compiles kernels on all cores, before the first of them is needed.

Triton compiles each kernel at its first launch, one after another. `compile_ahead` makes the same launches without starting
the kernels and records what Triton would compile; worker processes then compile it into Triton's cache on disk, where
the real launch finds it. Threads would not help: a third of a kernel's compile time is Python, of which a process runs one
thread at a time.

The workers are forks, so they have imported everything, know the kernels' constants, and start in milliseconds. They compile
and exit without calling CUDA, as DataLoader workers do. A kernel that does not compile reports nothing here, nor does a
worker that is killed: the real launch compiles it or reports the error.
"""

import gc
import hashlib
import os
import select
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import triton
from triton.errors import TritonError
from triton.runtime.cache import get_cache_manager

SILENCE = 60.0  # seconds without a finished kernel after which the processes count as stuck
INDEX_BYTES = 4  # per job number, in a pipe
_compiling = False
_under_way: dict[str, "Processes"] = {}  # cache key -> processes that compile it


def compiling() -> bool:
    """Whether launches only compile their kernel and do not start it."""
    return _compiling


def compile_ahead(calls: Callable[[], object], *, wait: bool = True) -> None:
    """Compile all kernels that `calls()` launches through `launch`; other launches are compiled and run one by one.

    The results of the calls are undefined. Without `wait` it returns at once; a later `compile_ahead` waits for what it
    needs.
    """
    if not hasattr(triton, "AsyncCompileMode") or not hasattr(os, "fork"):
        return  # a Triton or a system without support: kernels are compiled on first use
    jobs = _launched(calls)
    new = {key: job for key, job in jobs.items() if key not in _under_way and not job.is_cached}
    if new:
        processes = Processes(list(new.values()))
        _under_way.update(dict.fromkeys(new, processes))
    if wait:
        for key in jobs.keys() & _under_way.keys():
            _under_way[key].wait(key)
        for key in [key for key, processes in _under_way.items() if processes.ended]:
            del _under_way[key]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A kernel to compile; `key` is Triton's, over everything that it is compiled from."""

    key: str
    compile: Callable[[], Any]

    @property
    def is_cached(self) -> bool:
        """Whether it is in the cache on disk."""
        manager: Any = get_cache_manager(hashlib.sha256(self.key.encode()).hexdigest())
        folder = getattr(manager, "cache_dir", None)  # absent in other kinds of cache
        return folder is not None and any(name.startswith("__grp__") for name in os.listdir(folder))

    def result(self) -> Any:
        """For launches that do not go through `launch`: they need the kernel now."""
        return self.compile()


def _launched(calls: Callable[[], object]) -> dict[str, Job]:
    """What Triton would compile for the calls, in order."""
    global _compiling

    class Noting(triton.AsyncCompileMode):
        def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: object) -> Any:
            return jobs.setdefault(key, Job(key=key, compile=compile_fn))

    jobs: dict[str, Job] = {}
    executor: Any = None
    with Noting(executor):
        _compiling = True
        try:
            calls()
        except (TritonError, RuntimeError):
            pass  # from a launch that is not ours; the real call raises it again
        finally:
            _compiling = False
    return jobs


class Processes:
    """Forks that compile jobs in order, and exit."""

    def __init__(self, jobs: list[Job]) -> None:
        self.keys = [job.key for job in jobs]
        self.left = set(self.keys)
        todo, put = os.pipe()
        self.finished, done = os.pipe()
        os.write(put, b"".join(index.to_bytes(INDEX_BYTES, "little") for index in range(len(jobs))))
        os.close(put)
        self.pids, parent = [], os.getpid()
        for _ in range(min(len(jobs), len(os.sched_getaffinity(0)))):
            with (
                warnings.catch_warnings()
            ):  # about locks that other threads may hold: a compilation takes none of them
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                _compile_and_exit(jobs, todo, done, parent)
            self.pids.append(pid)
        os.close(todo)
        os.close(done)

    @property
    def ended(self) -> bool:
        return not self.pids

    def wait(self, key: str) -> None:
        """Wait until a kernel is compiled, or no process is compiling it any more."""
        while key in self.left and not self.ended:
            ready, _, _ = select.select([self.finished], [], [], SILENCE)
            found = os.read(self.finished, INDEX_BYTES) if ready else b""
            if found:
                self.left.discard(self.keys[int.from_bytes(found, "little")])
            else:
                self.end(stuck=not ready)
        if not self.left and not self.ended:
            self.end()

    def end(self, *, stuck: bool = False) -> None:
        """Collect the processes, which have finished or are stuck."""
        for pid in self.pids:
            with suppress(ProcessLookupError, ChildProcessError):  # someone else may have collected it
                if stuck:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.pids.clear()
        os.close(self.finished)


def _compile_and_exit(jobs: list[Job], todo: int, done: int, parent: int) -> NoReturn:
    """The work of a fork: compile the next job, as long as there are any and its parent lives."""
    try:
        gc.disable()  # do not free tensors of the parent here
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # Triton prints PTX that does not assemble
            os.dup2(silence, stream)
        while os.getppid() == parent and (index := os.read(todo, INDEX_BYTES)):
            with suppress(Exception):
                jobs[int.from_bytes(index, "little")].compile()
            os.write(done, index)
    finally:
        os._exit(0)


if hasattr(os, "fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # only the parent waits for them
