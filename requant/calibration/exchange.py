"""Statistics of several processes: what a rank's batch says about a matrix goes to the rank that owns the matrix.

A batch has inputs of the matrix, or gradients at its outputs; the owner adds them up in the order of the text. So statistics
and codes are those of one process, bit for bit, and of N ranks each holds 1/N of the Hessians. An all-reduce would round
differently for every number of ranks, and leave all Hessians on all of them.

    for tokens in ranks.rounds(batches):    batches of this rank, None where others have one more
        forward; in hooks: exchange.give(name, x)
        exchange.deliver()                  on the owner: use(name, x) for every rank's x, in the order of the text

What a rank says to another in a round is one message.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from requant import ranks


class Exchange:
    """Tensors on their way to the owners of matrices.

    `use(name, *tensors)` is called on the owner of matrix `name`, in the order of the text for each matrix, and within a
    batch in the order in which they were given. A tensor that was given for several matrices of one owner is one object
    there too. Alone, and where no `owners` are given, `give` calls `use` at once and nothing is kept.
    """

    def __init__(self, owners: Mapping[str, int] | None, use: Callable[..., None]) -> None:
        self.owners = {} if owners is None else owners  # matrix -> rank
        self.use, self.sends = use, owners is not None and ranks.world_size() > 1
        self.given: list[tuple[str, tuple[Tensor, ...]]] = []

    def give(self, name: str, *tensors: Tensor) -> None:
        """Something that the current batch says about matrix `name`, which must have an owner."""
        if self.sends:
            self.given.append((name, tensors))
        else:
            self.use(name, *tensors)

    def deliver(self) -> None:
        """Send what was given since the last time; every rank calls it after every round, also without a batch."""
        if not self.sends:
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
        letters = [value for value, _ in ranks.gathered((contents, described), {})]
        received = self._transferred(letters, different)
        for source, (names, _) in enumerate(letters):
            for name, parts in names:
                if self.owners[name] == ranks.rank():
                    self.use(name, *(received[source, part] for part in parts))

    def _transferred(
        self, letters: Sequence[Any], different: Sequence[Tensor]
    ) -> dict[tuple[int, int], Tensor]:
        """(rank, place) -> what that rank gave, of all tensors that this rank's matrices need."""
        own, operations, messages = ranks.rank(), list[dist.P2POp](), list[_Message]()
        received: dict[tuple[int, int], Tensor] = {}
        device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
        for source, (names, described) in enumerate(letters):
            places: dict[tuple[int, str], list[int]] = {}  # owner, dtype -> what it needs of this source
            for place, owner in sorted(
                {(place, self.owners[name]) for name, parts in names for place in parts}
            ):
                places.setdefault((owner, described[place][1]), []).append(place)
            for tag, ((owner, dtype), wanted) in enumerate(sorted(places.items())):
                if source == owner == own:
                    received |= {(source, place): different[place] for place in wanted}
                elif source == own:
                    sent = torch.cat([different[place].reshape(-1) for place in wanted])
                    operations.append(dist.P2POp(dist.isend, sent, owner, tag=tag))
                elif owner == own:
                    message = _Message.empty(source, wanted, described, getattr(torch, dtype), device)
                    messages.append(message)
                    operations.append(dist.P2POp(dist.irecv, message.content, source, tag=tag))
        if operations:
            with ranks.communicating():
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        for message in messages:
            received |= message.tensors()
        return received


@dataclass(frozen=True)
class _Message:
    """Tensors of one dtype that a rank gave, one after the other: a launch for each would take longer than their bytes."""

    source: int
    shapes: Mapping[int, Sequence[int]]  # of the tensors by their places
    content: Tensor  # [m]

    @classmethod
    def empty(
        cls,
        source: int,
        places: Sequence[int],
        described: Sequence[tuple[Sequence[int], str]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "_Message":
        shapes = {place: described[place][0] for place in places}
        return cls(source, shapes, torch.empty(sum(map(prod, shapes.values())), dtype=dtype, device=device))

    def tensors(self) -> dict[tuple[int, int], Tensor]:
        parts = self.content.split([prod(shape) for shape in self.shapes.values()])
        return {
            (self.source, place): part.view(shape)
            for (place, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def _on_gpu() -> bool:
    return "nccl" in str(dist.get_backend_config())
