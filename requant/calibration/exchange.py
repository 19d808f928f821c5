"""Statistics of several processes: what a rank's batch contributes to a matrix is sent to the rank that owns the matrix.

A batch contributes inputs of the matrix, or gradients at its outputs; the owner adds them up in the order of the text. So
statistics and codes are bit for bit those of one process, and each of N ranks holds 1/N of the Hessians. An all-reduce would
round differently for every number of ranks, and leave all Hessians on all of them.

    for tokens in ranks.rounds(batches):    batches of this rank, None where others have one more
        forward; in hooks: exchange.give(name, x)
        exchange.deliver()                  on the owner: use(name, x) for every rank's x, in the order of the text

One message from rank to rank covers several matrices, up to AT_ONCE bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.experts import share_of_experts
from requant.calibration.stats import GRADIENT_STATISTICS, INPUT_STATISTICS
from requant.models.mixed_precision import PRODUCTS
from requant.models.targets import QuantTarget, siblings

# bytes of all ranks that are sent together; what is sent and received takes as many beside what was given
AT_ONCE = 2**30


def exchanged_bytes(
    model: PreTrainedModel,
    targets: Sequence[QuantTarget],
    tokens: int,
    needs: frozenset[str],
    *,
    kind: str,
    by_block: bool = False,
) -> int:
    """What a batch of so many tokens says about all matrices, in bytes on a device of a `kind`.

    Inputs (once for matrices that read the same one) and gradients at outputs, of the whole batch or `by_block`, as a model
    larger than its GPU is computed. They have the model's dtype, but of a float32 one, where gradients are taken, that of
    products in training. AT_ONCE is sent, and received.
    """
    gradients = needs & GRADIENT_STATISTICS
    dtype = next(model.parameters()).dtype
    if gradients and dtype == torch.float32:
        dtype = PRODUCTS.get(kind, dtype)
    share = share_of_experts(model, targets)
    found: Counter[int] = Counter()  # block -> bytes
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for target in targets:
        n, k = target.shape
        reads = (target.name.rpartition(".")[0], siblings(target.kind))
        own = tokens * (1.0 if target.experts is None else share)
        numbers = own * n if gradients else 0
        numbers += own * k if needs & (INPUT_STATISTICS | {"fisher"}) and reads not in seen else 0
        seen.add(reads)
        found[target.block] += round(dtype.itemsize * numbers)
    given = max(found.values(), default=0) if by_block else sum(found.values())
    return given + 2 * min(AT_ONCE, given)


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
        different: dict[int, Tensor] = {}
        contents: list[tuple[str, list[int]]] = []  # matrix, and its tensors' indices in `different`
        for name, tensors in given:
            for tensor in tensors:
                if id(tensor) not in indices:
                    indices[id(tensor)] = len(different)
                    different[len(different)] = tensor.detach()
            contents.append((name, [indices[id(tensor)] for tensor in tensors]))
        del given
        described = [
            (list(each.shape), str(each.dtype).removeprefix("torch.")) for each in different.values()
        ]
        manifests = [_Manifest(*value) for value, _ in ranks.gathered((contents, described), {})]
        for names in _together(manifests):
            self._deliver(names, manifests, different)

    def _deliver(
        self, names: set[str], manifests: Sequence["_Manifest"], different: dict[int, Tensor]
    ) -> None:
        """All that was given for some matrices, which is dropped then."""
        own, messages, operations = ranks.rank(), list[_Message](), list[dist.P2POp]()
        for source, owner, tag, dtype, indices in self._transfers(names, manifests):
            if source == own:
                sent = torch.cat([different[index].reshape(-1) for index in indices])
                operations.append(dist.P2POp(dist.isend, sent, owner, tag=tag))
            elif owner == own:
                shapes = {index: manifests[source].tensors[index][0] for index in indices}
                messages.append(_Message.to_receive(source, shapes, dtype))
                operations.append(dist.P2POp(dist.irecv, messages[-1].content, source, tag=tag))
        given_here = {index for _, indices in manifests[own].of(names) for index in indices}
        here = {(own, index): different.pop(index) for index in given_here}
        _wait_for(operations)
        for message in messages:
            here |= message.tensors()
        for source, manifest in enumerate(manifests):
            for name, indices in manifest.of(names):
                if self.owners[name] == own:
                    self.use(name, *(here[source, index] for index in indices))

    def _transfers(
        self, names: set[str], manifests: Sequence["_Manifest"]
    ) -> Iterator[tuple[int, int, int, str, list[int]]]:
        """Source, owner, tag, dtype and indices of every message from rank to rank, in the same order on every rank."""
        for source, manifest in enumerate(manifests):
            for tag, (owner, dtype, indices) in enumerate(manifest.messages(names, self.owners)):
                if owner != source:
                    yield source, owner, tag, dtype, indices


def _wait_for(operations: list[dist.P2POp]) -> None:
    """Start all at once, and wait until each is done."""
    if operations:
        with ranks.communicating():
            for work in dist.batch_isend_irecv(operations):
                work.wait()


@dataclass(frozen=True)
class _Manifest:
    """What a rank gave in a round, but for the values."""

    contents: Sequence[tuple[str, Sequence[int]]]  # matrix, and the indices of its tensors
    tensors: Sequence[tuple[Sequence[int], str]]  # shape and dtype, by index

    def of(self, names: set[str]) -> Iterator[tuple[str, Sequence[int]]]:
        """The contents that concern these matrices."""
        return ((name, indices) for name, indices in self.contents if name in names)

    def messages(self, names: set[str], owners: Mapping[str, int]) -> list[tuple[int, str, list[int]]]:
        """Owner, dtype and indices of the tensors of each message about these matrices, in the same order on every rank."""
        wanted: dict[tuple[int, str], list[int]] = {}
        for index, owner in sorted(
            {(index, owners[name]) for name, indices in self.of(names) for index in indices}
        ):
            wanted.setdefault((owner, self.tensors[index][1]), []).append(index)
        return [(owner, dtype, indices) for (owner, dtype), indices in sorted(wanted.items())]

    def nbytes(self, index: int) -> int:
        shape, dtype = self.tensors[index]
        return prod(shape) * getattr(torch, dtype).itemsize


@dataclass(frozen=True)
class _Message:
    """Tensors of one dtype from a rank, one after the other: a launch for each would take longer than their bytes."""

    source: int
    shapes: Mapping[int, Sequence[int]]  # of the tensors by their indices
    content: Tensor  # [m]

    @classmethod
    def to_receive(cls, source: int, shapes: Mapping[int, Sequence[int]], dtype: str) -> "_Message":
        device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
        size = sum(map(prod, shapes.values()))
        return cls(source, shapes, torch.empty(size, dtype=getattr(torch, dtype), device=device))

    def tensors(self) -> dict[tuple[int, int], Tensor]:
        parts = self.content.split([prod(shape) for shape in self.shapes.values()])
        return {
            (self.source, index): part.view(shape)
            for (index, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def _together(manifests: Sequence[_Manifest]) -> Iterator[set[str]]:
    """The matrices in groups of about AT_ONCE bytes, alike on every rank; those that share a tensor are not parted.

    They need not be neighbours: the first projections of queries and of keys and values (DeepSeek) have another between
    them, and gradients at the outputs of attention and MLP are one tensor where a block adds both at once (GPT-NeoX).
    """
    needed: dict[str, set[tuple[int, int]]] = {}  # matrix -> sources and indices of its tensors
    for source, manifest in enumerate(manifests):
        for name, indices in manifest.contents:
            needed.setdefault(name, set()).update((source, index) for index in indices)
    last_use = {each: name for name, tensors in needed.items() for each in tensors}
    group: set[str] = set()
    counted: set[tuple[int, int]] = set()  # tensors of the group
    size = 0
    for name, tensors in needed.items():
        group.add(name)
        size += sum(manifests[source].nbytes(index) for source, index in tensors - counted)
        counted |= tensors
        if size >= AT_ONCE and all(last_use[each] in group for each in counted):
            yield group
            group, counted, size = set(), set(), 0
    if group:
        yield group


def _on_gpu() -> bool:
    return "nccl" in str(dist.get_backend_config())
