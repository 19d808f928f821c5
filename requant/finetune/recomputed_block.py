"""A transformer block in training for which only the input is kept; its weights and its graph exist while it is computed.

    forward     h = block(h) without a graph
    backward    block(h) again, with a graph, some windows at a time; gradients of its coded matrices -> those of their
                trained floats, by the chain rule; its matrices without codes -= Adam(gradients); gradients dropped

Activation checkpointing is from Chen et al. 2016 (arXiv 1604.06174); updating each matrix as soon as its gradient is
complete is from LOMO (Lv et al. 2023, arXiv 2306.09782). With several ranks each keeps a part of a matrix without codes
(`DividedMatrix`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from requant.errors import is_out_of_memory
from requant.finetune.divided import Part
from requant.finetune.sixteen_bit_adam import SixteenBitAdam
from requant.finetune.step import ReparametrizedWeight, gradient_of
from requant.models.mixed_precision import PRODUCTS, mixed_precision

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ChunkSizes:
    """How much goes at once; halved once where memory runs out."""

    windows: int  # through a block
    positions: int  # whose logits exist
    lowered: bool = False

    def fitting(self, compute: Callable[[], T]) -> T:
        """`compute()`, which reads both numbers; where memory runs out for the first time, once more with half of them."""
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            if self.lowered or not is_out_of_memory(error):
                raise
        self.lowered = True
        self.windows, self.positions = max(1, self.windows // 2), max(1, self.positions // 2)
        logger.warning(
            "memory ran out in training: from now on %d windows go through a block at once, and %d logits' positions",
            self.windows,
            self.positions,
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return compute()


class DividedMatrix:
    """A matrix without codes of which each rank keeps and updates a part in float32; whole only while its block is computed.

    It is to its part what a ReparametrizedWeight is to its trained floats: `value` joins the parts of all ranks, and
    `backward` adds up the gradients of all. On a GPU ranks send what products read, which is bfloat16.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.dtype = parameter, parameter.dtype
        of_original = Part.of(parameter)
        self.part = Part(of_original.elements.float(), of_original.shape)

    @torch.no_grad()
    def value(self) -> Tensor:
        return self.part.whole(PRODUCTS.get(self.part.elements.device.type)).float()

    def backward(self) -> None:
        self.part.elements.grad = Part.of_sum(gradient_of(self.parameter)).elements

    def close(self) -> None:
        """Make the parameter whole again, as it was."""
        self.parameter.data = self.part.whole(self.dtype)


class LearningBlock:
    """One transformer block in training; called in place of its forward.

    `coded` are its quantized matrices, `divided` those without codes of which this rank holds a part, `optimizer` that of
    its matrices without codes, None where it has none.
    """

    def __init__(
        self,
        block: nn.Module,
        coded: Sequence[ReparametrizedWeight],
        divided: Sequence[DividedMatrix],
        optimizer: SixteenBitAdam | None,
        chunks: ChunkSizes,
    ) -> None:
        self.forward, self.parameters = block.forward, list(block.parameters())
        self.coded, self.divided, self.optimizer, self.chunks = coded, divided, optimizer, chunks
        self.rest: tuple[Any, ...] | None = None  # what the block returns after its hidden states, if a tuple
        self.dtypes = [weight.parameter.dtype for weight in coded]
        self._release()

    def __call__(self, hidden: Float[Tensor, "b t d"], *args: Any, **kwargs: Any) -> Any:
        output = _Recomputed.apply(hidden, self, args, kwargs)
        return output if self.rest is None else (output, *self.rest)

    def run(self, hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The block's output, without a graph."""

        def compute() -> Tensor:
            each = _chunks(hidden, args, kwargs, self.chunks.windows)
            return torch.cat([self._output(*chunk) for chunk in each])

        with self._built():
            return self.chunks.fitting(compute)

    def learn(
        self, hidden: Tensor, gradient: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """The gradient at `hidden` from that at the output; the block's matrices are updated."""

        def compute() -> Tensor:
            for parameter in self.parameters:
                parameter.grad = None
            found = []
            each = _chunks(hidden, args, kwargs, self.chunks.windows)
            for chunk, arriving in zip(each, gradient.split(self.chunks.windows), strict=True):
                leaf = chunk[0].detach().requires_grad_()
                with torch.enable_grad():
                    with mixed_precision(leaf, keeps_casts=False):  # of weights that are not there long
                        output = self._output(leaf, *chunk[1:])
                    output.backward(arriving)
                assert leaf.grad is not None
                found.append(leaf.grad)
            return torch.cat(found)

        with self._built():
            found = self.chunks.fitting(compute)
        with torch.enable_grad():
            for weight in self.coded:
                weight.backward()
                weight.parameter.grad = None
        self._update()
        return found

    def run_along(self) -> None:
        """`run` of a rank without windows: other ranks need its parts, and what it decodes."""
        with torch.no_grad():
            for weight in self.coded:
                if weight.hosted is not None:
                    weight.value()
        for matrix in self.divided:
            matrix.value()

    def learn_along(self) -> None:
        """`learn` of a rank without windows: its gradients are zero, those of others are not."""
        self.run_along()
        self._update()

    def close(self) -> None:
        """Allocate the coded matrices again, for whoever writes into them; make divided ones whole."""
        for weight, dtype in zip(self.coded, self.dtypes, strict=True):
            weight.allocate(dtype)
        for matrix in self.divided:
            matrix.close()

    def _update(self) -> None:
        """One step of Adam for the matrices without codes; their gradients are dropped."""
        for matrix in self.divided:
            matrix.backward()
            matrix.parameter.grad = None
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _output(self, hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        output = self.forward(hidden, *args, **kwargs)
        if isinstance(output, Tensor):
            return output
        self.rest = tuple(output[1:])
        return output[0]

    @contextmanager
    def _built(self) -> Iterator[None]:
        """Coded and divided matrices hold their weights while the context lasts."""
        with torch.no_grad(), torch.autocast(self.parameters[0].device.type, enabled=False):
            for weight in (*self.coded, *self.divided):
                # in one layout: a compiled block is compiled again for another
                weight.parameter.data = weight.value().contiguous()
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for weight in (*self.coded, *self.divided):
            weight.parameter.data = _placeholder(weight.parameter)


class _Recomputed(torch.autograd.Function):
    """A block of which only the input is kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, block: LearningBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        ctx.block, ctx.call = block, (args, kwargs)
        ctx.save_for_backward(hidden)
        return block.run(hidden, args, kwargs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (hidden,) = ctx.saved_tensors
        return ctx.block.learn(hidden, gradients[0], *ctx.call), None, None, None


def _chunks(
    hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], windows: int
) -> Iterator[tuple[Tensor, tuple[Any, ...], Mapping[str, Any]]]:
    """A block's arguments for some windows at a time: tensors with a row for every window are cut, others are for all."""
    count = len(hidden)

    def cut(value: Any, rows: slice) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(each, rows) for each in value)
        each_window = isinstance(value, Tensor) and value.dim() > 1 and len(value) == count
        return value[rows] if each_window else value

    for start in range(0, count, windows):
        rows = slice(start, start + windows)
        yield hidden[rows], cut(args, rows), {name: cut(value, rows) for name, value in kwargs.items()}


def _placeholder(parameter: Tensor) -> Tensor:
    """A float32 tensor of a parameter's shape in the memory of one number."""
    return torch.zeros(1, device=parameter.device).expand(parameter.shape)
