"""`requant quantize --gpus N`: run the same command again in N processes, one per GPU.

This does what `torchrun --nproc-per-node N -m requant quantize ...` does, but without importing torch, for which the
processes would have to wait. They meet through a file, which outlives them all; `requant/ranks.py` says who does what.
When one process fails, the others are stopped, and the run with them.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from requant.errors import InputError, RequantError
from requant.processes import STORE, is_first, started

RESUMES = "`requant quantize --resume`, with any number of GPUs, continues where it stopped."
BETWEEN_LOOKS = 0.05  # seconds
MOST_GPUS = 1024  # of one host, or planned for; far below the processes that would exhaust it
ENDS_WITHIN = 30.0  # seconds that a process has, when it is told to end, before it is killed
# they end the processes with this one
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def ran_on(gpus: int | None, device: str) -> bool:
    """Run this command in as many processes, one a GPU, and wait for them; False where this process is to do the work.

    On a CPU `gpus` is the number of processes. The first of them checks the rest of the command (`check_gpus`). Raises
    InputError for one that this process can refuse, SystemExit with the code of the process that failed.
    """
    if started() > 1:
        if gpus not in (None, started()) and is_first():  # the others wait for it
            raise InputError(f"--gpus {gpus} in one of {started()} processes of torchrun; leave --gpus out.")
        return False
    if gpus in (None, 1):
        return False
    kind, _, number = device.partition(":")
    if number:
        raise InputError(
            f"--gpus {gpus} takes the first GPUs; give --device {kind}, or CUDA_VISIBLE_DEVICES."
        )
    _launch(gpus, sys.argv[1:])
    return True


def check_gpus(count: int, device: str, *, gpus: int | None = None, asked: str = "auto") -> None:
    """Raise InputError where so many processes have no GPU each; `device` is what was picked for the one that was asked for.

    `gpus`: of the option. A run of several processes on a CPU is one that asks for the CPU.
    """
    import torch

    if (gpus or 1) > 1 and (asked, device) == ("auto", "cpu"):
        raise InputError(
            f"--gpus {gpus}: torch sees 0 GPUs here; leave it out, or give --device cpu for as many processes on the CPU."
        )
    if device.startswith("cuda") and torch.cuda.device_count() < count:
        raise InputError(f"--gpus {count}: torch sees {torch.cuda.device_count()} GPUs here; lower it.")


def _launch(count: int, arguments: Sequence[str]) -> None:
    with _noted_signals() as noted, tempfile.TemporaryDirectory(prefix="requant-") as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            _start(count, arguments, Path(folder) / "store", processes)
            rank, code = _first_failure(processes, noted)
        finally:  # nobody waits for Ctrl-C's end; of any other a run takes care
            _end(processes, signal.SIGKILL if signal.SIGINT in noted else signal.SIGTERM)
    if noted:
        if signal.SIGINT in noted:
            raise KeyboardInterrupt
        raise RequantError(f"ended by {noted[0].name}; {RESUMES}")
    if code < 0:
        raise RequantError(
            f"process {rank} of {count} was killed by {signal.Signals(-code).name}, which ends "
            f"the run (SIGKILL: memory may have run out); {RESUMES}"
        )
    if code:
        sys.exit(code)  # it has said why


def _start(
    count: int, arguments: Sequence[str], store: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Start the processes, each with its children in a session of its own, so that they end together."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # torchrun's
    }
    for rank in map(str, range(count)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(count), STORE: str(store)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "requant", *arguments],
                env={**defaults, **os.environ, **own},
                start_new_session=True,
            )
        )


def _first_failure(
    processes: Sequence[subprocess.Popen[bytes]], noted: Sequence[signal.Signals]
) -> tuple[int, int]:
    """Wait for the processes, or a signal: which failed first, and its exit code, where a signal's number is negative.

    Code 0: none failed.
    """
    while not noted:
        codes = [process.poll() for process in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            return failed[0]
        if None not in codes:
            break
        time.sleep(BETWEEN_LOOKS)
    return 0, 0


def _end(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Send a signal to those that are left, and to what they started; kill them if that does not end them."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    until = time.monotonic() + ENDS_WITHIN
    for process in left:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _noted_signals() -> Iterator[list[signal.Signals]]:
    """While the context lasts, SIGNALS that come are noted here, and of no other effect; what nohup ignores stays so."""
    noted: list[signal.Signals] = []
    before = {
        each: signal.signal(each, lambda number, _frame: noted.append(signal.Signals(number)))
        for each in SIGNALS
        if signal.getsignal(each) is not signal.SIG_IGN
    }
    try:
        yield noted
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
