"""Training in several processes: sums of gradients over ranks, and tensors that are divided among them.

Sums are added in an order that gloo (along a ring) or NCCL chooses by the number of ranks, the sizes of the tensors and
how the GPUs are linked. So on a CPU, results with training are the same every time for a given number of ranks, and differ
in rounding between numbers of ranks.

Gradients of large tensors can be rounded to 16 bits for their sum (`large_in`): half as many bytes are sent. Little is lost
where products are in 16 bits too: a matrix's gradient leaves its product with so many, and is only added up over
micro-batches in float32; on one GPU the product's sum over all tokens is rounded in the same way.

What trains block by block (`blockwise.py`) is divided: of a matrix without codes each rank holds a `Part` (ZeRO stage 3,
Rajbhandari et al. 2020, arXiv 1910.02054), whose gradients are added in the order of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from requant import ranks

ALONE_FROM = 2**20  # elements of a tensor that is added up where it is; smaller ones go together


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replace contiguous tensors of one dtype by their sums over ranks, the same on every rank."""
    started_sum(tensors)()


@torch.no_grad()
def started_sum(tensors: Sequence[Tensor], large_in: torch.dtype | None = None) -> Callable[[], None]:
    """`sum_over_ranks`, perhaps still under way: when the result is called it is done for what the stream does next.

    Large tensors are added up where they are, or in copies of another dtype, which last as long as the result; small ones
    together, in their own.
    """
    if ranks.world_size() == 1:
        return lambda: None
    small = [tensor for tensor in tensors if tensor.numel() < ALONE_FROM]
    large = [tensor for tensor in tensors if tensor.numel() >= ALONE_FROM]
    sent = [tensor if large_in is None else tensor.to(large_in) for tensor in large]
    if small:
        sent.append(torch.cat([tensor.view(-1) for tensor in small]))
    with ranks.communicating():
        running = [dist.all_reduce(tensor, async_op=True) for tensor in sent]

    def finish() -> None:
        with ranks.communicating():
            for work in running:
                assert work is not None
                work.wait()
        for tensor, value in zip(large, sent, strict=False):  # the last one sent may be the small ones
            if value is not tensor:
                tensor.copy_(value)
        if small:
            for tensor, value in zip(small, sent[-1].split([each.numel() for each in small]), strict=True):
                tensor.view(-1).copy_(value)

    return torch.no_grad()(finish)


def in_parts(tensors: Sequence[Tensor], count: int) -> list[slice]:
    """The tensors as at most `count` slices of consecutive ones, of about as many elements each."""
    whole, edges, done = sum(tensor.numel() for tensor in tensors), [0], 0
    for index, tensor in enumerate(tensors, start=1):
        done += tensor.numel()
        if done * count >= whole * len(edges) or index == len(tensors):
            edges.append(index)
    return [slice(start, stop) for start, stop in pairwise(edges)]


def rows_of_all(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows that each rank has, in the order of ranks: `counts` of them, which all ranks know."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    found = rows.new_empty(len(counts), *padded.shape)
    with ranks.communicating():
        dist.all_gather(list(found), padded)
    return [own[:count] for own, count in zip(found, counts, strict=True)]


@dataclass(frozen=True)
class Part:
    """This rank's equal part of a tensor's elements, in row-major order; the last parts are filled with zeros."""

    elements: Tensor  # [ceil(numel / ranks)]
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Tensor) -> "Part":
        """This rank's part of a tensor that it holds whole."""
        return cls(_equal_parts(tensor.detach())[ranks.rank()].clone(), tensor.shape)

    @classmethod
    def of_sum(cls, tensor: Tensor) -> "Part":
        """This rank's part of the sum of a tensor over ranks, added in the order of ranks."""
        sent = _equal_parts(tensor.detach())
        received = torch.empty_like(sent)
        with ranks.communicating():
            dist.all_to_all_single(received, sent)
        return cls(_sum_of_rows(received), tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, not of this part."""
        return self.shape.numel() * self.elements.element_size()

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, from the parts of all ranks, which are rounded to the dtype before they are sent."""
        elements = self.elements if dtype is None else self.elements.to(dtype)
        found = elements.new_empty(ranks.world_size(), elements.numel())
        with ranks.communicating():
            dist.all_gather(list(found), elements)
        return found.view(-1)[: self.shape.numel()].view(self.shape)


def _equal_parts(tensor: Tensor) -> Tensor:
    """The elements in as many rows as there are ranks; filled with zeros, and a copy, where there are not as many."""
    flat, count = tensor.reshape(-1), ranks.world_size()
    missing = -flat.numel() % count
    return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(count, -1)


def _sum_of_rows(rows: Tensor) -> Tensor:
    """The rows added up in their order; the first is overwritten."""
    first, *others = rows
    for row in others:
        first += row
    return first
