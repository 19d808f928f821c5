"""`requant quantize --gpus N`: the command once more in N processes, a rank each.

It is what `torchrun --nproc-per-node N -m requant quantize ...` does, without the seconds that its agent takes to start and
to end; `requant/ranks.py` says who does what. Every process leads a session of its own, so that a signal to the group
ends what it started too (compilers). When one fails the others are ended, and the run with them.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from requant.errors import InputError, RequantError
from requant.processes import LAUNCHED, started

RESUMES = "`requant quantize --resume`, with any number of GPUs, continues where it stopped."
LOCALHOST = "127.0.0.1"
BETWEEN_LOOKS = 0.05  # seconds, at processes that may have ended
TO_END = 30.0  # seconds that a process has to end by itself
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # and Ctrl-C, which Python raises itself


def ran_on(gpus: int | None) -> bool:
    """Run this command in as many processes, one a GPU, and wait for them; False where this process is to do the work.

    On a CPU `gpus` is the number of processes. They check what was asked for, for which this one would need torch. Raises
    SystemExit with the code of the process that failed.
    """
    here = started()
    if here > 1 and gpus not in (None, here):
        raise InputError(f"--gpus {gpus} in one of {here} processes of torchrun; leave --gpus out.")
    if gpus in (None, 1) or here > 1:
        return False
    _launch(gpus, sys.argv[1:])
    return True


def check_gpus(gpus: int | None, device: str) -> None:
    """Raise InputError where not so many GPUs can be had; `device` as torch takes it."""
    if gpus in (None, 1):
        return
    import torch

    kind, _, number = device.partition(":")
    if number:
        raise InputError(
            f"--gpus {gpus} takes the first GPUs; give --device {kind}, or CUDA_VISIBLE_DEVICES."
        )
    if kind == "cuda" and torch.cuda.device_count() < gpus:
        raise InputError(f"--gpus {gpus}: torch sees {torch.cuda.device_count()} GPUs here; lower it.")


class _Signalled(Exception):
    """The launcher was told to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def _launch(count: int, arguments: Sequence[str]) -> None:
    """Wait for `count` processes. Raises RequantError where a signal ended one or all, SystemExit with the code of one that
    failed."""
    processes: list[subprocess.Popen[bytes]] = []
    sent = signal.SIGTERM  # to those that are left
    try:
        with _raised(FORWARDED):
            # open before anyone connects: a port that is free now may not be when rank 0 has imported torch
            with socket.create_server((LOCALHOST, 0), backlog=count) as meeting:
                for environment in _environments(count, meeting):
                    command = [sys.executable, "-m", "requant", *arguments]
                    inherited = (meeting.fileno(),) if not processes else ()
                    processes.append(
                        subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=inherited)
                    )
            rank, code = _first_to_fail(processes)
    except KeyboardInterrupt:
        sent = signal.SIGINT
        raise
    except _Signalled as ended:
        sent = ended.signal
        raise RequantError(f"ended by {sent.name}; {RESUMES}") from None
    finally:
        _end(processes, sent)
    if code < 0:
        raise RequantError(
            f"process {rank} of {count} was killed by {signal.Signals(-code).name}, which ends "
            f"the run (SIGKILL: memory may have run out); {RESUMES}"
        )
    if code > 0:
        sys.exit(code)  # it has said why


def _environments(count: int, meeting: socket.socket) -> Iterator[Mapping[str, str]]:
    """Of every process, as `torch.distributed` and `ranks.py` read them."""
    common = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),
        **os.environ,
        LAUNCHED: str(meeting.fileno()),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(meeting.getsockname()[1]),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    for rank in map(str, range(count)):
        yield {**common, "RANK": rank, "LOCAL_RANK": rank}


def _first_to_fail(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Number and code of the first process that fails, or of the last one, and 0, when all have ended well."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank, code
        if None not in codes:
            return len(codes) - 1, 0
        time.sleep(BETWEEN_LOOKS)


def _end(processes: Sequence[subprocess.Popen[bytes]], sent: signal.Signals) -> None:
    """End the processes that are left, and what they started: by the signal, and after TO_END seconds by SIGKILL."""
    left = [process for process in processes if process.poll() is None]
    for number in (sent, signal.SIGKILL):
        for process in left:
            with suppress(ProcessLookupError):  # nobody of the group is left
                os.killpg(process.pid, number)
        until = time.monotonic() + TO_END
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))


@contextmanager
def _raised(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Raise _Signalled where the process gets one of these signals while the context lasts."""

    def receive(number: int, _frame: object) -> None:
        raise _Signalled(number)

    before = {each: signal.signal(each, receive) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
