"""One run as several processes, one rank each (one per GPU): who does what, and how the results come together.

Windows of text are split among ranks: batch i is run by rank i mod N. Matrices are split too: each is owned by one rank
(`owners`), which holds its statistics and makes its codes: what a batch contributes to a matrix is sent to its owner
(`calibration/exchange.py`). Gradients of training are summed over ranks instead, and large models divided among them
(`finetune/divided.py`).

In a single process, which is the default, every function here is a plain loop or does nothing. Numbers and codes travel as
safetensors and JSON through gloo on the CPU; activations and gradients by NCCL on GPUs. Nothing is pickled.
"""

import hashlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from requant.errors import RequantError, is_out_of_memory
from requant.processes import STORE, is_first, started

T = TypeVar("T")
SLOWEST_STAGE = timedelta(hours=12)  # a rank may wait so long for the codes of another
ENDED_WITHIN = 60  # seconds in which a launcher ends the ranks that are left when one died
ACCEPTED = "requant/accepted"  # set by the first rank, which has checked the command


@runtime_checkable
class _Owned(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...


OwnedT = TypeVar("OwnedT", bound=_Owned)
_store: dist.Store | None = None  # of the run; None: alone
_said: list[str] = []  # by the first rank, before it met the others


@contextmanager
def joined(device: str, meanwhile: Callable[[], object] = bool) -> Iterator[str]:
    """Be one rank of the processes that were started, while the context lasts; yields this rank's device.

    All others wait here for the first, which may check the command before: what is wrong with it is said once, and by a
    process that has nothing else to end. `meanwhile` is called while several connect. Ranks other than 0 print nothing.
    Where several ranks fail alike the first says why, and the others just end.
    """
    global _store
    if started() == 1:
        yield device
        return
    # Its functions have for a default the group that there is when they are defined. Imported later, as torch's optimizers
    # do, they would keep the group, and its threads with it: one that frees a tensor as the interpreter ends aborts.
    importlib.import_module("torch.distributed.nn.functional")
    with communicating():
        _store = _met()
    gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    own, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    with ExitStack() as stack:
        if own:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            _connect(own, torch.device("cuda", local) if gpu else None, meanwhile)
            yield f"cuda:{local}" if gpu else "cpu" if device == "auto" else device
        except BaseException as error:
            # by the launcher, which says so
            ended = STORE in os.environ and isinstance(error, KeyboardInterrupt)
            if ended or not _first_to_fail():
                raise SystemExit(getattr(error, "exit_code", 1)) from None
            raise
        dist.destroy_process_group()
        _store = None


def _connect(own: int, gpu: torch.device | None, meanwhile: Callable[[], object]) -> None:
    """Make the group of processes in a thread, and call `meanwhile`.

    The thread waits for others without Python's lock, and imports nothing, so imports are safe beside it.
    """
    if gpu is not None:
        torch.cuda.set_device(gpu)
    tensor = torch.zeros(1, device=gpu)  # CUDA starts here, not in the thread

    def connect() -> None:
        backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=_store, rank=own, world_size=started(), timeout=SLOWEST_STAGE)
        if gpu is None:
            return
        torch.cuda.set_device(gpu)  # of this thread
        # NCCL connects in the first operation, which all ranks must take part in; those of `Exchange` may be of some
        dist.all_reduce(tensor)

    with ThreadPoolExecutor(1) as executor:
        connected = executor.submit(connect)
        meanwhile()
        connected.result()


def _met() -> dist.Store:
    """What the processes share, once the first of them has accepted the command."""
    if STORE in os.environ:
        store: dist.Store = dist.FileStore(os.environ[STORE], started())
        store.set_timeout(SLOWEST_STAGE)
    else:
        store, _, _ = next(dist.rendezvous("env://", timeout=SLOWEST_STAGE))
    if is_first():
        for message in _said:
            store.add(_key_of(message), 1)
        store.set(ACCEPTED, "")
    else:
        store.wait([ACCEPTED], SLOWEST_STAGE)
    return store


def _first_to_fail() -> bool:
    try:
        return _store is None or _store.add("requant/failed", 1) == 1
    except RuntimeError:  # whoever held the store is gone
        return True


def first_to_say(message: str) -> bool:
    """Whether no other rank has said this already; what ranks find alike, such as a warning of the recipe, is said once."""
    if _store is None:
        _said.append(message)
        return True
    try:
        return _store.add(_key_of(message), 1) == 1
    except RuntimeError:  # whoever held the store is gone
        return True


def _key_of(message: str) -> str:
    return f"requant/said/{hashlib.sha256(message.encode(errors='replace')).hexdigest()}"


def rank() -> int:
    """Number of this process among those of the run, from 0."""
    return 0 if _store is None else dist.get_rank()


def world_size() -> int:
    """Processes of the run; 1 where it is not divided."""
    return 1 if _store is None else dist.get_world_size()


def owners(matrices: Sequence[tuple[str, int]], count: int) -> list[int]:
    """Which of `count` ranks owns each matrix, from their kinds and sizes, in the model's order.

    Every kind is divided evenly, for a stage may work on one kind alone; among ranks with as many of a kind, the one with
    the fewest weights so far takes the next. (A quantizer's seconds are proportional to weights.)
    """
    of_kinds: dict[str, list[int]] = {}
    weights = [0] * count
    found = []
    for kind, size in matrices:
        of_kind = of_kinds.setdefault(kind, [0] * count)
        owner = min(range(count), key=lambda each: (of_kind[each], weights[each], each))
        of_kind[owner] += 1
        weights[owner] += size
        found.append(owner)
    return found


def count_owners(targets: Sequence[_Owned]) -> int:
    """Among how many ranks the targets are divided."""
    return 1 + max(target.rank for target in targets)


def owned(targets: Sequence[OwnedT]) -> list[OwnedT]:
    """The targets of this rank."""
    return [target for target in targets if target.rank == rank()]


def mine(items: Sequence[T]) -> Sequence[T]:
    """The items that this rank works on; `merged` puts all ranks' results into the order of the items."""
    return items[rank() :: world_size()]


def rounds(items: Sequence[T]) -> list[T | None]:
    """`mine`, with None at the end where other ranks have one item more: equally long on all ranks."""
    own: list[T | None] = list(mine(items))
    return own + [None] * (-(-len(items) // world_size()) - len(own))


def merged(results: Sequence[Any]) -> list[Any]:
    """The results of all items, from those of `mine` on each rank; JSON values."""
    parts = [value for value, _ in gathered(list(results), {})]
    return [part[i] for i in range(len(parts[0])) for part in parts if i < len(part)]


def merged_tensors(results: Sequence[Tensor]) -> list[Tensor]:
    """`merged` for tensors, which come back on the CPU."""
    parts = [tensors for _, tensors in gathered(None, {str(i): each for i, each in enumerate(results)})]
    return [part[str(i)] for i in range(len(parts[0])) for part in parts if str(i) in part]


def of_all(targets: Sequence[_Owned], results: Mapping[str, T]) -> dict[str, T]:
    """The results of all targets by name, from those of each rank's own; JSON values."""
    found = {name: each for value, _ in gathered(dict(results), {}) for name, each in value.items()}
    return {target.name: found[target.name] for target in targets}


def tensors_of_all(
    targets: Sequence[_Owned], results: Mapping[str, Tensor], *, device: torch.device
) -> dict[str, Tensor]:
    """The tensors of all targets by name, on a device, from those of each rank's own."""
    found: dict[str, Tensor] = {}
    for target in targets:
        own = {"own": results[target.name]} if target.rank == rank() else {}
        found[target.name] = shared(None, own, source=target.rank)[1]["own"].to(device)
    return found


def all_agree(condition: bool) -> bool:
    """Whether the condition holds on every rank."""
    return all(value for value, _ in gathered(condition, {}))


def smallest(number: int) -> int:
    """The least of all ranks' numbers."""
    return min(value for value, _ in gathered(number, {}))


def shared(value: Any, tensors: Mapping[str, Tensor], *, source: int = 0) -> tuple[Any, Mapping[str, Tensor]]:
    """What rank `source` holds, on every rank: a JSON value, and tensors, which come back on the CPU elsewhere."""
    if world_size() == 1:
        return value, tensors
    packet = _packed(value, tensors) if rank() == source else torch.empty(0, dtype=torch.uint8)
    with communicating():
        size = torch.tensor([packet.numel()])
        dist.broadcast(size, source)
        if rank() != source:
            packet = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(packet, source)
    return (value, tensors) if rank() == source else _unpacked(packet)


def copy_from(source: int, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors, on their device, by those of rank `source`."""
    if world_size() > 1:
        with communicating():
            for tensor in tensors:
                dist.broadcast(tensor, source)


def filled(parts: Sequence[Tensor], compute: Callable[[int], Tensor]) -> None:
    """Overwrite each part by `compute(index)`, which one rank calls, and give it to the others, from device to device."""
    for index in mine(range(len(parts))):
        parts[index].copy_(compute(index))
    for index, part in enumerate(parts):
        copy_from(index % world_size(), [part])


def gathered(value: Any, tensors: Mapping[str, Tensor]) -> list[tuple[Any, Mapping[str, Tensor]]]:
    """What every rank holds, in the order of ranks."""
    if world_size() == 1:
        return [(value, tensors)]
    packet = _packed(value, tensors)
    with communicating():
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
        dist.all_gather(sizes, torch.tensor([packet.numel()]))
        largest = max(int(size) for size in sizes)
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: packet.numel()] = packet
        packets = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(packets, padded)
    return [_unpacked(each[: int(size)]) for each, size in zip(packets, sizes, strict=True)]


def _packed(value: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """A JSON value and tensors as bytes: a safetensors file with one more tensor, empty and without a name."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = save({**held, "": torch.empty(0)}, metadata={"value": json.dumps(value)})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(packet: Tensor) -> tuple[Any, Mapping[str, Tensor]]:
    data = packet.numpy().tobytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = load(data)
    del tensors[""]
    return json.loads(header["__metadata__"]["value"]), tensors


@contextmanager
def communicating() -> Iterator[None]:
    """An operation that fails because another rank died: the launcher knows which, says so, and ends this one too."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        time.sleep(ENDED_WITHIN)
        raise RequantError(
            f"another process of this run ended ({type(error).__name__}); run again with --resume."
        ) from error
