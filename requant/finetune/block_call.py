"""A call of a block with all that carries gradients into it and out of it, some windows at a time.

    outputs                          = block(carried, rest)              hidden states, and what else there is of each window
    gradients at each of `carried`  <- gradients at each of the outputs

Blocks mostly read and return hidden states alone. Those of ZAYA also hand on what their routers computed, and those of some
Gemma 4 models read a tensor that follows from the embedding. So whatever takes a gradient is carried, if it is an argument
of its own, and so is every tensor that a block returns, if it has a row for every window. Anything else that a block is
given or returns takes no gradient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from requant.finetune.step import gradient_of

Key = int | str  # of an argument: its position, or its name


@dataclass(frozen=True)
class BlockCall:
    """The arguments of a block. `carried` are those that take gradients, hidden states first, and `rest` are all others."""

    carried: Mapping[Key, Tensor]
    rest: Mapping[Key, Any]

    @classmethod
    def of(cls, hidden: Tensor, *args: Any, **kwargs: Any) -> "BlockCall":
        given: dict[Key, Any] = {**dict(enumerate(args, start=1)), **kwargs}
        carried = {
            key: each for key, each in given.items() if isinstance(each, Tensor) and each.requires_grad
        }
        return cls({0: hidden, **carried}, {key: each for key, each in given.items() if key not in carried})

    @property
    def windows(self) -> int:
        return len(self.carried[0])

    def chunks(self, windows: int) -> Iterator["BlockCall"]:
        """The calls for some windows at a time: tensors with a row for every window are cut, others are for all."""
        for start in range(0, self.windows, windows):
            rows = slice(start, start + windows)
            carried, rest = (
                {key: _cut(each, rows, self.windows) for key, each in given.items()}
                for given in (self.carried, self.rest)
            )
            yield BlockCall(carried, rest)

    def from_leaves(self) -> "BlockCall":
        """The same, where a graph begins at all that is carried."""
        leaves = {key: each.detach().requires_grad_() for key, each in self.carried.items()}
        return BlockCall(leaves, self.rest)

    def result(self, forward: Callable[..., Any]) -> "BlockResult":
        given = {**self.carried, **self.rest}
        args = [given[key] for key in range(len(given)) if key in given]
        returned = forward(*args, **{key: each for key, each in given.items() if isinstance(key, str)})
        return BlockResult.of(returned, self.windows)


@dataclass(frozen=True)
class BlockResult:
    """What a block returned. `carried` are hidden states and the other tensors with a row for every window; `rest` are the
    members of the tuple that are not such tensors, by their places, None if it was not a tuple."""

    carried: Sequence[Tensor]
    rest: Mapping[int, Any] | None

    @classmethod
    def of(cls, returned: Any, windows: int) -> "BlockResult":
        if isinstance(returned, Tensor):
            return cls([returned], None)
        carried = {i: each for i, each in enumerate(returned) if i == 0 or _of_each(each, windows)}
        rest = {
            # of no graph: what is kept of one is this block's own
            i: each.detach() if isinstance(each, Tensor) else each
            for i, each in enumerate(returned)
            if i not in carried
        }
        return cls(list(carried.values()), rest)


@dataclass(frozen=True)
class BlockGraph:
    """The graph of autograd from a block's call to its result."""

    call: BlockCall  # from leaves
    result: BlockResult

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients at all that the call carries, from those at what the result does; None for what nothing reads."""
        reached = [
            (output, gradient)
            for output, gradient in zip(self.result.carried, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        torch.autograd.backward([output for output, _ in reached], [gradient for _, gradient in reached])
        return [gradient_of(leaf) for leaf in self.call.carried.values()]


def returned(carried: Sequence[Tensor], rest: Mapping[int, Any] | None) -> Any:
    """What a block returns, from both parts of its result."""
    if rest is None:
        return carried[0]
    following = iter(carried)
    return tuple(rest[i] if i in rest else next(following) for i in range(len(carried) + len(rest)))


def joined(chunks: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Tensors of all windows from those of each chunk."""
    return tuple(map(_joined, zip(*chunks, strict=True)))


def joined_gradients(chunks: Sequence[Sequence[Tensor]], call: BlockCall) -> tuple[Tensor, ...]:
    """Those at all that a call carries, from those of its chunks; where a tensor was for all, their sum."""
    return tuple(
        torch.stack(parts).sum(0) if len(parts) > 1 and parts[0].shape == whole.shape else _joined(parts)
        for parts, whole in zip(zip(*chunks, strict=True), call.carried.values(), strict=True)
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _of_each(value: Any, windows: int) -> bool:
    """Whether it is a tensor with a row for every window."""
    return isinstance(value, Tensor) and value.dim() > 1 and len(value) == windows


def _cut(value: Any, rows: slice, windows: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(each, rows, windows) for each in value)
    return value[rows] if _of_each(value, windows) else value
