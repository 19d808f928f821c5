"""A backward pass that takes all batches through one block before the next, for models whose matrices are on the host.

    forward     for every block: h = block(h) of every batch, without a graph; h goes to the host
    loss        of every batch, from its last h, down to the gradient at that h
    backward    for every block, the last first: block(h) again, with a graph, of every batch; gradient -> that at its input

Each batch is computed as in a pass that recomputes its blocks (`passes.recomputed_blocks`), and hooks see the tokens of a
matrix in the order of the text, so the statistics are bit for bit the same; but a block comes to the GPU twice for a whole
group of batches, not twice for each batch. A group holds as many batches as have room for their h before every block in
half of the host's free memory, divided among the processes of the host. If the statistics do not fit the GPU at once, they
are collected for some blocks at a time, the last ones first: the pass then stops where those blocks begin, and continues
from there (`Descent`).

Models on the GPU keep the passes of `passes.py`, which give bit for bit the same gradients. Of models that are small beside
it (`batches.recomputes_blocks`) those run each block once, not twice: on bench-32m that is 4.0 s of operators instead of 5.1
(8 windows of 512 tokens, two CPU cores). Of others, activation checkpointing does the same work as this file, but leaves the
hidden states on the GPU, and it is the graph that training steps need anyway.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.hidden_states import (
    HiddenStateCache,
    Precision,
    StopForward,
    body_of,
    moved,
    returning,
)
from requant.models.devices import free_memory, to_device
from requant.models.targets import find_blocks, replaced_forward
from requant.progress import tracked

Batch = tuple[int, Int64[Tensor, "_ t"]]  # its number among all, and its tokens
LossOf = Callable[[Int64[Tensor, "c t"], int], Tensor]


class Descent:
    """A backward pass that stops between two blocks and goes on from there, for statistics that do not fit the GPU at once.

    It keeps the gradients where it stands and the hidden states before the blocks in `kept`, of all batches; other states
    are computed again, from the next kept one below, or from the embedding.
    """

    def __init__(self, kept: Collection[int]) -> None:
        self.kept = kept
        self.work: _Group | None = None
        self.at = 0  # blocks from this one on are done

    @classmethod
    def with_stops(
        cls, model: PreTrainedModel, batches: Sequence[Batch | None], stops: Sequence[int]
    ) -> "Descent | None":
        """One that stops before these blocks, and keeps as many states as the host has room for; None without room."""
        blocks = len(find_blocks(model)[1])
        ends = sorted({0, *stops, blocks})
        between = max(end - start for start, end in pairwise(ends))
        # beside the states inside of a part: those before and after it, and gradients
        spare = _states_at_once(model, batches) - (between + 2)
        if spare < 0:
            return None
        inner = ends[1:-1]
        every = -(-len(inner) // spare) if spare else len(inner) + 1
        return cls(inner[every - 1 :: every] if inner else ())


def backward_block_by_block(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    batches: Sequence[Batch | None],
    loss_of: LossOf,
    *,
    first_block: int,
    precision: Precision,
    after_each: Callable[[], None],
    label: str | None,
    descent: Descent | None = None,
) -> None:
    """Backward passes of `loss_of(tokens, number)` of this rank's batches of `windows`; None where others have one more.

    Gradients go down to the input of block `first_block`, of the first one to the embedding's output; with a `descent` from
    where the last call with it stopped, whose loss was the same. `after_each` is called after every batch in every block, by
    all ranks as often. The embedding's output must require gradients.
    """
    blocks = len(find_blocks(model)[1])
    if descent is not None:
        if descent.work is None:
            descent.work, descent.at = _Group(model, windows, batches, precision), blocks
            descent.work.forward(blocks, keep={*descent.kept, blocks}, label=label)
            descent.work.losses(loss_of)
        inside = range(max(1, first_block), descent.at)
        descent.work.forward(descent.at - 1, keep={*descent.kept, *inside}, label=label)
        descent.work.backward(first_block, descent.at, after_each, label=label)
        descent.at = first_block
        return
    count = batches_at_once(model, batches, states=blocks + 2)
    needed = range(max(1, first_block), blocks + 1)
    for start in range(0, len(batches), count):
        work = _Group(model, windows, batches[start : start + count], precision)
        work.forward(blocks, keep=needed, label=label)
        work.losses(loss_of)
        work.backward(first_block, blocks, after_each, label=label)


class _Group:
    """Batches on their way through the model together."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Int64[Tensor, "b t"],
        batches: Sequence[Batch | None],
        precision: Precision,
    ) -> None:
        self.model, self.batches, self.precision = model, batches, precision
        self.device = next(model.parameters()).device
        chunks = [None if each is None else each[1] for each in batches]
        self.cache = HiddenStateCache(model, windows, chunks=chunks, precision=precision)
        self.before: dict[
            int, list[Any]
        ] = {}  # block -> what the one before it returned for each batch, on the CPU
        self.gradients: dict[int, Tensor] = {}  # batch -> that at the last block done, on the CPU

    def forward(self, end: int, *, keep: Collection[int], label: str | None) -> None:
        """Compute the states before block `end` from the last earlier ones there are; those before blocks in `keep` stay."""
        first = max((block for block in self.before if block <= end), default=0)
        self.cache.next_block, self.cache.states = first, self.before.get(first, [])
        for _ in tracked(range(first, end), label=label, unit="blocks"):
            self.cache.advance_to(self.cache.next_block + 1)
            if self.cache.next_block in keep:
                self.before[self.cache.next_block] = self.cache.states
        self.cache.states = []

    def losses(self, loss_of: LossOf) -> None:
        """All that comes after the blocks, and its gradients."""
        for index, (number, tokens) in self._own():
            leaf, output = self._leaf(len(self.cache.blocks), index)
            with torch.enable_grad():
                with returning(self.cache.blocks, output), self.precision(tokens):
                    loss = loss_of(tokens, number)
                loss.backward()
            self.gradients[index] = _gradient(leaf)

    def backward(self, first: int, end: int, after_each: Callable[[], None], *, label: str | None) -> None:
        """Take the gradients from before block `end` back to before block `first`; the states between them are dropped."""
        self.before.pop(end, None)
        for block in tracked(range(end - 1, first - 1, -1), label=label, unit="blocks"):
            for index, each in enumerate(self.batches):
                if each is not None:
                    self._backward(block, index, to_device(each[1], self.device))
                after_each()
            if block > first:
                del self.before[block]

    def _backward(self, block: int, index: int, tokens: Tensor) -> None:
        before, output = (None, None) if block == 0 else self._leaf(block, index)
        with torch.enable_grad():
            hidden, args, kwargs = self._call(block, output, tokens)
            leaf = hidden.detach().requires_grad_()
            with self.precision(tokens):
                found = self.cache.blocks[block].forward(leaf, *args, **kwargs)
            found = found if isinstance(found, Tensor) else found[0]
            found.backward(self.gradients[index].to(self.device))
            if hidden is not before:  # what a model does between two blocks, or before the first
                hidden.backward(leaf.grad)
        self.gradients[index] = _gradient(leaf if before is None or hidden is before else before)

    def _call(
        self, block: int, output: Any, tokens: Tensor
    ) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        """What the model calls the block with, where the one before it returned `output`."""
        found: list[Any] = []

        def called(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            found.extend((hidden, args, kwargs))
            raise StopForward

        body = body_of(self.model)
        with (
            returning(self.cache.blocks[:block], output),
            replaced_forward(self.cache.blocks[block], called),
            self.precision(tokens),
            suppress(StopForward),
        ):
            body(input_ids=tokens, use_cache=False)
        hidden, args, kwargs = found
        return hidden, args, kwargs

    def _leaf(self, block: int, index: int) -> tuple[Tensor, Any]:
        """What the block before returned for a batch, on the GPU, and of that the hidden states, which take a gradient."""
        output = moved(self.before[block][index], self.device)
        leaf = output if isinstance(output, Tensor) else output[0]
        return leaf.requires_grad_(), output

    def _own(self) -> Iterator[tuple[int, tuple[int, Tensor]]]:
        for index, each in enumerate(self.batches):
            if each is not None:
                yield index, (each[0], to_device(each[1], self.device))


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad.cpu()


def batches_at_once(model: PreTrainedModel, batches: Sequence[Batch | None], *, states: int) -> int:
    """How many batches the host has room for, with so many hidden states of each."""
    most = max((each[1].numel() for each in batches if each is not None), default=1)
    return ranks.smallest(max(1, _room(model) // (most * states)))


def _states_at_once(model: PreTrainedModel, batches: Sequence[Batch | None]) -> int:
    """How many hidden states of all batches together the host has room for."""
    tokens = sum(each[1].numel() for each in batches if each is not None)
    return ranks.smallest(_room(model) // max(1, tokens))


def _room(model: PreTrainedModel) -> int:
    """Tokens whose hidden states take half of the host's free memory, or this process's part of it."""
    width = model.config.get_text_config().hidden_size * next(model.parameters()).element_size()
    return free_memory(torch.device("cpu")) // 2 // ranks.world_size() // width
