"""Choosing a device, its free memory, and the peak of the memory used."""

import resource
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, TypeVar

import psutil
import torch
from torch import Tensor

from requant.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
H200_MEMORY = 150_000_000_000  # what a plan takes for a GPU where there is none
_most_of_a_gpu = sys.maxsize  # bytes of each that this process may take


def limit_gpu_memory(limit: int, name: str) -> None:
    """Let this process take at most so many bytes of the GPU `name`, beyond which torch says that memory is exhausted.

    What CUDA itself takes, half a GB or so, is not counted. Raises InputError for another device, and for more than it has.
    """
    global _most_of_a_gpu
    device = torch.device(name)
    if device.type != "cuda":
        raise InputError(f"--gpu-memory limits a GPU, and this run is on {device.type}; leave it out.")
    if torch.cuda.is_available():
        total = torch.cuda.mem_get_info(device)[1]
        if limit > total:
            raise InputError(
                f"--gpu-memory {limit / 2**30:.1f} GiB is more than the GPU has, {total / 2**30:.1f}; leave it out."
            )
        torch.cuda.set_per_process_memory_fraction(limit / total, device.index)  # None: the current one
    _most_of_a_gpu = limit


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; on a GPU without waiting for what it still has to do, as a plain copy would."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)  # a copy from a GPU has to wait: whoever reads it would not
    return tensor.pin_memory().to(device, non_blocking=True)


class Pace:
    """Keeps Python at most AHEAD steps before the GPU; call it after every step of a loop.

    Steps are still prepared while the GPU works, but the progress shows what has nearly been done, and few inputs wait in
    pinned memory.
    """

    AHEAD = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.issued: deque[torch.cuda.Event] = deque()

    def __call__(self) -> None:
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self.issued.append(event)
        if len(self.issued) > self.AHEAD:
            self.issued.popleft().synchronize()


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device, and allowed. On a GPU what torch has reserved and does not use is given back first:
    after a phase of training that is nearly all of the GPU, and whoever plans by what is left would find nothing."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return min(torch.cuda.mem_get_info(device)[0], _most_of_a_gpu - torch.cuda.memory_reserved(device))
    return psutil.virtual_memory().available


def available_memory(device: torch.device) -> int:
    """Bytes that are free on a device, or taken by this process's tensors there: all but what others have."""
    taken = (
        torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    )
    return free_memory(device) + taken


def total_memory(device: torch.device) -> int:
    """Bytes of a device that this process may take, free or not; where there is no GPU, an H200's stands for it."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1] if torch.cuda.is_available() else H200_MEMORY
        return min(total, _most_of_a_gpu)
    return psutil.virtual_memory().total


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated by torch on a GPU, else resident in this process.

    On Linux as /proc says: `getrusage` counts whoever started the process too, if that was larger.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with (
        suppress(OSError, StopIteration),
        open("/proc/self/status", encoding="ascii", errors="replace") as status,
    ):
        return 1024 * int(next(line for line in status if line.startswith("VmHWM:")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def used_memory(device: torch.device) -> int:
    """Bytes now: reserved by torch on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return psutil.Process().memory_info().rss


@contextmanager
def current_gpu(device: str | torch.device) -> Iterator[None]:
    """A GPU that is named by its number is the current one while the context lasts, the one that `cuda` stands for: plans
    ask that for its memory, and Triton launches kernels there."""
    index = torch.device(device).index
    if index is None or torch.device(device).type != "cuda":
        yield
        return
    with torch.cuda.device(index):
        yield


@contextmanager
def gradients() -> Iterator[None]:
    """Gradients for what needs them, wherever it is called: under `torch.no_grad`, in inference mode, or in a notebook
    that turned them off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def on_its_gpu(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with the GPU that its argument `device`, `auto` by default, names by its number as the current one.

    It raises InputError for a device that is not there, before anything else.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with current_gpu(pick_device(str(kwargs.get("device", "auto")))):
            return function(*args, **kwargs)

    return called


def pick_device(name: str | torch.device) -> str:
    """A device name that torch takes; `auto` is the GPU where there is one. Raises InputError."""
    if isinstance(name, torch.device):
        name = str(name)
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name) if isinstance(name, str) else None
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {name} is unknown; give auto, cpu, cuda or cuda:NUMBER.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: torch sees {torch.cuda.device_count()} GPUs here; use --device cpu."
        )
    return name
