"""Kernels compiled on all cores, before the first of them is needed.

Triton compiles a kernel when it is first launched, one after another. `compile_ahead` makes the same launches without
starting their kernels and notes what Triton would compile; processes then compile it, and leave it in Triton's cache on
disk, where the launch in earnest finds it. Threads do not serve: a third of the time of a kernel is Python, of which a
process runs one thread at a time.

The processes are forks, so they have imported everything and know the kernels' constants, and it takes them milliseconds to
begin. They compile and end, without a call to CUDA, as the workers of a DataLoader do. A kernel that does not compile says
nothing here, nor does a process that is killed: the launch in earnest compiles it, or says why not.
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

SILENCE = 60.0  # seconds without a finished kernel, after which processes count as stuck
INDEX_BYTES = 4  # of a job's number, in a pipe
_compiling = False
_under_way: dict[str, "Processes"] = {}  # cache key -> who compiles it


def compiling() -> bool:
    """Whether launches compile their kernel and start nothing."""
    return _compiling


def compile_ahead(calls: Callable[[], object], *, wait: bool = True) -> None:
    """Compile all kernels that `calls()` launches through `launch`; other launches are compiled and run one by one.

    What the calls give is not defined. Without `wait`, the caller goes on; a later `compile_ahead` waits for what it needs.
    """
    if not hasattr(triton, "AsyncCompileMode") or not hasattr(os, "fork"):
        return  # a Triton or a system without it: kernels are compiled as they come
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
    """A kernel to compile; `key` is Triton's, of everything that it is compiled from."""

    key: str
    compile: Callable[[], Any]

    @property
    def is_cached(self) -> bool:
        """Whether the cache on disk has it."""
        manager: Any = get_cache_manager(hashlib.sha256(self.key.encode()).hexdigest())
        folder = getattr(manager, "cache_dir", None)  # a cache of another kind has none
        return folder is not None and any(name.startswith("__grp__") for name in os.listdir(folder))

    def result(self) -> Any:
        """For launches that do not come through `launch`: they want the kernel now."""
        return self.compile()


def _launched(calls: Callable[[], object]) -> dict[str, Job]:
    """What Triton would compile for the calls, in their order."""
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
            pass  # of a launch that is not ours; the same call says so when it is made in earnest
        finally:
            _compiling = False
    return jobs


class Processes:
    """Forks that compile jobs, in their order, and end."""

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
            ):  # of locks that other threads may hold: a compilation takes none of them
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
        """Until a kernel is compiled, or nobody compiles it any more."""
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
        """Collect the processes, which have nothing to do any more, or are stuck."""
        for pid in self.pids:
            with suppress(ProcessLookupError, ChildProcessError):  # somebody else may have collected it
                if stuck:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.pids.clear()
        os.close(self.finished)


def _compile_and_exit(jobs: list[Job], todo: int, done: int, parent: int) -> NoReturn:
    """What a fork does: the next job, as long as there are any and its parent lives."""
    try:
        gc.disable()  # tensors of the parent are not freed here
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # Triton prints a text that does not assemble
            os.dup2(silence, stream)
        while os.getppid() == parent and (index := os.read(todo, INDEX_BYTES)):
            with suppress(Exception):
                jobs[int.from_bytes(index, "little")].compile()
            os.write(done, index)
    finally:
        os._exit(0)


if hasattr(os, "fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # they are the parent's to wait for
