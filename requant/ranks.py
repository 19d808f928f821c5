"""One run as several processes, a rank each (one a GPU): who does what, and every collective operation between them.

Windows of text are split among ranks: batch i is run by rank i mod N. Matrices are split too: each is owned by one rank
(`owners`), which holds its statistics and makes its codes. What a batch has to say about a matrix (its inputs, gradients
at its outputs) is sent to the owner (`Exchange`), who adds it up in the order of the text. So statistics and codes are
those of one process, bit for bit, and a rank holds 1/N of the Hessians. An all-reduce would round differently for every
number of ranks, and leave all Hessians on all of them.

    for tokens in rounds(batches):          batches of this rank, None where others have one more
        forward; in hooks: exchange.give(name, x)
        exchange.deliver()                  on the owner: use(name, x) for every rank's x, in the order of the text

Gradients of training are summed over ranks instead (`sum_over_ranks`), always in the order of ranks, but one process adds
micro-batches in another order: results with training differ in rounding from those of another number of ranks. What trains
block by block is divided too: of a matrix without codes each rank holds a `Part` (ZeRO stage 3, Rajbhandari et al. 2020,
arXiv 1910.02054).

Alone, which is how everything runs that nobody started as several processes, every function here is a plain loop or does
nothing. Numbers and codes travel as safetensors and JSON through gloo on the CPU; activations and gradients by NCCL on
GPUs. Nothing is pickled.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from requant.errors import RequantError, is_out_of_memory

T = TypeVar("T")
BUCKET = 2**24  # elements that are summed over ranks at once
SLOWEST_STAGE = timedelta(hours=12)  # a rank may wait so long for the codes of another
ENDED_WITHIN = 60  # seconds in which a launcher ends the ranks that are left when one died
LAUNCHED = "REQUANT_LAUNCHED"  # set in the environment of processes that `--gpus` started


@runtime_checkable
class _Owned(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...


OwnedT = TypeVar("OwnedT", bound=_Owned)
_store: dist.Store | None = None  # of the run; None: alone


def started() -> int:
    """How many processes torchrun or `--gpus` started; 1: none but this."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Be one rank of the processes that were started, while the context lasts; yields this rank's device.

    Ranks other than 0 print nothing. Where several ranks fail alike the first says why, and the others just end.
    """
    global _store
    if started() == 1:
        yield device
        return
    gpu = device.startswith("cuda")
    local = int(os.environ["LOCAL_RANK"])
    if gpu:
        torch.cuda.set_device(local)
    _store, own, count = next(dist.rendezvous("env://", timeout=SLOWEST_STAGE))
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=_store, rank=own, world_size=count, timeout=SLOWEST_STAGE)
    if gpu:  # NCCL connects in the first operation, which all ranks must take part in; those of `Exchange` may be of some
        dist.all_reduce(torch.zeros(1, device="cuda"))
    if LAUNCHED in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher has it too, and says so
    with ExitStack() as stack:
        if own:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            yield f"cuda:{local}" if gpu else device
        except BaseException as error:
            ended = LAUNCHED in os.environ and isinstance(
                error, KeyboardInterrupt
            )  # by the launcher, which says so
            if ended or not _first_to_fail():
                raise SystemExit(getattr(error, "exit_code", 1)) from None
            raise
        dist.destroy_process_group()
        _store = None


def _first_to_fail() -> bool:
    try:
        return _store is None or _store.add("requant/failed", 1) == 1
    except RuntimeError:  # whoever held the store is gone
        return True


def rank() -> int:
    return 0 if _store is None else dist.get_rank()


def world_size() -> int:
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
    parts = [value for value, _ in _gathered(list(results), {})]
    return [part[i] for i in range(len(parts[0])) for part in parts if i < len(part)]


def merged_tensors(results: Sequence[Tensor]) -> list[Tensor]:
    """`merged` for tensors, which come back on the CPU."""
    parts = [tensors for _, tensors in _gathered(None, {str(i): each for i, each in enumerate(results)})]
    return [part[str(i)] for i in range(len(parts[0])) for part in parts if str(i) in part]


def of_all(targets: Sequence[_Owned], results: Mapping[str, T]) -> dict[str, T]:
    """The results of all targets by name, from those of each rank's own; JSON values."""
    found = {name: each for value, _ in _gathered(dict(results), {}) for name, each in value.items()}
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
    return all(value for value, _ in _gathered(condition, {}))


def smallest(number: int) -> int:
    """The least of all ranks' numbers."""
    return min(value for value, _ in _gathered(number, {}))


def shared(value: Any, tensors: Mapping[str, Tensor], *, source: int = 0) -> tuple[Any, Mapping[str, Tensor]]:
    """What rank `source` holds, on every rank: a JSON value, and tensors, which come back on the CPU elsewhere."""
    if world_size() == 1:
        return value, tensors
    packet = _packed(value, tensors) if rank() == source else torch.empty(0, dtype=torch.uint8)
    with _communicating():
        size = torch.tensor([packet.numel()])
        dist.broadcast(size, source)
        if rank() != source:
            packet = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(packet, source)
    return (value, tensors) if rank() == source else _unpacked(packet)


def copy_from_rank_zero(tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors, on their device, by those of rank 0: what ranks computed alike is then alike to the last bit."""
    if world_size() > 1:
        with _communicating():
            for tensor in tensors:
                dist.broadcast(tensor, 0)


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replace contiguous tensors of one dtype by their sums over ranks, added in the order of ranks.

    Rank i adds up the i-th part of a bucket; each rank sends and receives as much as in a ring all-reduce.
    """
    count = world_size()
    if count == 1:
        return
    for pieces in _buckets([piece for tensor in tensors for piece in tensor.view(-1).split(BUCKET)]):
        used = sum(piece.numel() for piece in pieces)
        flat = pieces[0].new_zeros(-(-used // count) * count)
        torch.cat(pieces, out=flat[:used])
        parts = torch.empty_like(flat)
        with _communicating():
            dist.all_to_all_single(parts, flat)
            dist.all_gather(list(flat.view(count, -1)), _sum_of_rows(parts.view(count, -1)))
        start = 0
        for piece in pieces:
            piece.copy_(flat[start : start + piece.numel()])
            start += piece.numel()


@dataclass(frozen=True)
class Part:
    """Of a tensor that is divided among ranks by its elements in row-major order, equally: those of this rank.

    The last parts are filled with zeros.
    """

    elements: Tensor  # [ceil(numel / ranks)]
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Tensor) -> "Part":
        """Of a tensor that this rank holds whole."""
        return cls(_equal_parts(tensor.detach())[rank()].clone(), tensor.shape)

    @classmethod
    def of_sum(cls, tensor: Tensor) -> "Part":
        """Of the sum of a tensor over ranks, added in the order of ranks."""
        sent = _equal_parts(tensor.detach())
        received = torch.empty_like(sent)
        with _communicating():
            dist.all_to_all_single(received, sent)
        return cls(_sum_of_rows(received), tensor.shape)

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self.shape.numel() * self.elements.element_size()

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, from the parts of all ranks, which are rounded to the dtype before they are sent."""
        elements = self.elements if dtype is None else self.elements.to(dtype)
        found = elements.new_empty(world_size(), elements.numel())
        with _communicating():
            dist.all_gather(list(found), elements)
        return found.view(-1)[: self.shape.numel()].view(self.shape)


class Exchange:
    """Tensors on their way to the owners of matrices.

    `use(name, *tensors)` is called on the owner of matrix `name`, in the order of the text for each matrix, and within a
    batch in the order in which they were given. A tensor that was given for several matrices of one owner is one object
    there too. Alone, `give` calls `use` at once and nothing is kept.
    """

    def __init__(self, targets: Mapping[str, int], use: Callable[..., None]) -> None:
        self.targets, self.use = targets, use
        self.given: list[tuple[str, tuple[Tensor, ...]]] = []

    def give(self, name: str, *tensors: Tensor) -> None:
        """Something that the current batch says about matrix `name`, which must be one of `targets`."""
        if world_size() == 1:
            self.use(name, *tensors)
        else:
            self.given.append((name, tensors))

    def deliver(self) -> None:
        """Send what was given since the last time; every rank calls it after every round, also without a batch."""
        if world_size() == 1:
            return
        given, self.given = self.given, []
        indices: dict[int, int] = {}
        different: list[Tensor] = []
        contents: list[tuple[str, list[int]]] = []  # matrix, and its tensors' places in `different`
        for name, tensors in given:
            for tensor in tensors:
                if id(tensor) not in indices:
                    indices[id(tensor)] = len(different)
                    different.append(tensor.detach())
            contents.append((name, [indices[id(tensor)] for tensor in tensors]))
        described = [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in different]
        letters = [value for value, _ in _gathered((contents, described), {})]
        received = self._transferred(letters, different)
        for source, (names, _) in enumerate(letters):
            for name, parts in names:
                if self.targets[name] == rank():
                    self.use(name, *(received[source, part] for part in parts))

    def _transferred(
        self, letters: Sequence[Any], different: Sequence[Tensor]
    ) -> dict[tuple[int, int], Tensor]:
        """(rank, place) -> what that rank gave, of all tensors that this rank's matrices need."""
        operations: list[dist.P2POp] = []
        received: dict[tuple[int, int], Tensor] = {}
        device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
        for source, (names, described) in enumerate(letters):
            ways = sorted({(part, self.targets[name]) for name, parts in names for part in parts})
            for part, owner in ways:
                if source == owner == rank():
                    received[source, part] = different[part]
                elif source == rank():
                    operations.append(dist.P2POp(dist.isend, different[part].contiguous(), owner, tag=part))
                elif owner == rank():
                    shape, dtype = described[part]
                    buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                    received[source, part] = buffer
                    operations.append(dist.P2POp(dist.irecv, buffer, source, tag=part))
        if operations:
            with _communicating():
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        return received


def _on_gpu() -> bool:
    return "nccl" in str(dist.get_backend_config())


def _equal_parts(tensor: Tensor) -> Tensor:
    """The elements in as many rows as there are ranks; filled with zeros, and a copy, where there are not as many."""
    flat, count = tensor.reshape(-1), world_size()
    missing = -flat.numel() % count
    return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(count, -1)


def _sum_of_rows(rows: Tensor) -> Tensor:
    """In their order; the first row is overwritten."""
    first, *others = rows
    for row in others:
        first += row
    return first


def _buckets(pieces: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The pieces in lists of at most BUCKET elements."""
    bucket: list[Tensor] = []
    for piece in pieces:
        if bucket and sum(each.numel() for each in bucket) + piece.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(piece)
    if bucket:
        yield bucket


def _gathered(value: Any, tensors: Mapping[str, Tensor]) -> list[tuple[Any, Mapping[str, Tensor]]]:
    """What every rank holds, in the order of ranks."""
    if world_size() == 1:
        return [(value, tensors)]
    packet = _packed(value, tensors)
    with _communicating():
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
def _communicating() -> Iterator[None]:
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
