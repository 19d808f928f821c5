"""`requant quantize --gpus N`: the command once more in N processes, by torch's elastic launcher.

It is what `torchrun --nproc-per-node N -m requant quantize ...` does; `requant/ranks.py` says who does what. When one
process fails the others are ended, and the run with them.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid

from requant import ranks
from requant.errors import InputError, RequantError
from requant.models.devices import pick_device

RESUMES = "`requant quantize --resume`, with any number of GPUs, continues where it stopped."


def ran_on(gpus: int | None, device: str) -> bool:
    """Run this command in as many processes, one a GPU, and wait for them; False where this process is to do the work.

    On a CPU `gpus` is the number of processes. Raises InputError for more than there are, SystemExit with the code of the
    process that failed.
    """
    started = ranks.started()
    if started > 1 and gpus not in (None, started):
        raise InputError(f"--gpus {gpus} in one of {started} processes of torchrun; leave --gpus out.")
    if gpus in (None, 1) or started > 1:
        return False
    _check(gpus, device)
    _launch(gpus, sys.argv[1:])
    return True


def _check(gpus: int, device: str) -> None:
    import torch

    kind, _, number = pick_device(device).partition(":")
    if number:
        raise InputError(
            f"--gpus {gpus} takes the first GPUs; give --device {kind}, or CUDA_VISIBLE_DEVICES."
        )
    if kind == "cuda" and torch.cuda.device_count() < gpus:
        raise InputError(f"--gpus {gpus}: torch sees {torch.cuda.device_count()} GPUs here; lower it.")


def _launch(count: int, arguments: list[str]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # it reports a failure in thirty lines
    os.environ[ranks.LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    with tempfile.TemporaryDirectory(prefix="requant-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "requant", *arguments)
        except SignalException as ended:
            if ended.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RequantError(f"ended by {ended.sigval.name}; {RESUMES}") from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                raise RequantError(
                    f"process {rank} of {count} was killed by {signal.Signals(-failure.exitcode).name}, which ends "
                    f"the run (SIGKILL: memory may have run out); {RESUMES}"
                ) from None
            sys.exit(failure.exitcode)  # it has said why
