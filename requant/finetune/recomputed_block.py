"""A transformer block in training of which little but the input is kept; its weights and graph exist while it is computed.

    forward     h = block(h) without a graph
    backward    block(h) again, with a graph, some windows at a time; gradients of its coded matrices -> those of their
                trained floats, by the chain rule; its matrices without codes -= Adam(gradients); gradients dropped

If there is memory for it (`TrainingMemory.graphs_kept`), weights and graph stay from forward to backward instead, and the
block is computed once.

Activation checkpointing is from Chen et al. 2016 (arXiv 1604.06174); updating each matrix as soon as its gradient is
complete is from LOMO (Lv et al. 2023, arXiv 2306.09782). With several ranks each keeps a part of a matrix without codes
(`DividedMatrix`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(frozen=True)
class _Graph:
    """Of a block's call for some windows."""

    hidden: Tensor  # a leaf
    output: Tensor


@dataclass(kw_only=True)
class ChunkSizes:
    """How much goes at once, halved once where memory runs out, and graphs, which are given up before that."""

    windows: int  # through a block
    positions: int  # whose logits exist
    keeps_graphs: bool = False
    lowered: bool = False
    # of chunks, from forward to backward
    graphs: "dict[LearningBlock, list[_Graph]]" = field(default_factory=dict)

    def without_graphs(self, compute: Callable[[], T]) -> T:
        """`compute()`; where memory runs out beside graphs, once more without any, for good."""
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            if not self.keeps_graphs or not is_out_of_memory(error):
                raise
        self.keeps_graphs = False
        self.graphs.clear()
        logger.warning("memory ran out in training: from now on every block is computed twice")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return compute()

    def fitting(self, compute: Callable[[], T]) -> T:
        """`compute()`, which reads both numbers; where memory runs out without graphs for the first time, once more with
        half of them."""
        try:
            return self.without_graphs(compute)
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
    its matrices without codes, None where it has none. `stays`: weights and graph are there from forward to backward.
    """

    def __init__(
        self,
        block: nn.Module,
        coded: Sequence[ReparametrizedWeight],
        divided: Sequence[DividedMatrix],
        optimizer: SixteenBitAdam | None,
        chunks: ChunkSizes,
        *,
        stays: bool = False,
    ) -> None:
        self.forward, self.parameters = block.forward, list(block.parameters())
        self.coded, self.divided, self.optimizer, self.chunks = coded, divided, optimizer, chunks
        self.stays = stays
        self.built: set[Tensor] = set()  # parameters that hold their weights
        self.rest: tuple[Any, ...] | None = None  # what the block returns after its hidden states, if a tuple
        self.dtypes = [weight.parameter.dtype for weight in coded]
        self._release()

    def __call__(self, hidden: Float[Tensor, "b t d"], *args: Any, **kwargs: Any) -> Any:
        learns = torch.is_grad_enabled() and hidden.requires_grad
        output = _Learning.apply(hidden, self, args, kwargs, learns)
        return output if self.rest is None else (output, *self.rest)

    def run(
        self, hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, learns: bool
    ) -> Tensor:
        """The block's output, without a graph of its own; `learns`: `learn` follows."""

        def compute() -> Tensor:
            each = _chunks(hidden, args, kwargs, self.chunks.windows)
            if not (learns and self.stays and self.chunks.keeps_graphs):
                return _joined([self._output(*chunk) for chunk in each])
            graphs = self.chunks.graphs[self] = [self._graph(*chunk) for chunk in each]
            return _joined([graph.output.detach() for graph in graphs])

        with self._built(stays=learns and self.stays):
            return self.chunks.fitting(compute)

    def learn(
        self, hidden: Tensor, gradient: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """The gradient at `hidden` from that at the output; the block's matrices are updated."""

        def compute() -> Tensor:
            for parameter in self.parameters:
                parameter.grad = None
            kept = self.chunks.graphs.pop(self, None)
            anew = (self._graph(*each) for each in _chunks(hidden, args, kwargs, self.chunks.windows))
            found: list[Tensor] = []
            done = 0
            for graph in kept or anew:
                count = len(graph.hidden)
                graph.output.backward(gradient[done : done + count])
                assert graph.hidden.grad is not None
                found.append(graph.hidden.grad)
                done += count
            return _joined(found)

        with self._built():
            found = self.chunks.fitting(compute)
        with torch.enable_grad():
            for weight in self.coded:
                weight.backward()
                weight.parameter.grad = None
        self._update()
        return found

    def run_along(self) -> None:
        """`run` of a rank without windows: other ranks need its parts, and what it decodes. Collective."""
        with torch.no_grad():
            for weight in self.coded:
                if weight.hosted is not None:
                    weight.value()
        for matrix in self.divided:
            matrix.value()

    def learn_along(self) -> None:
        """`learn` of a rank without windows: its gradients are zero, those of others are not."""
        if not self.stays:
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
        # of no graph: what is kept of one is this block's own
        self.rest = tuple(each.detach() if isinstance(each, Tensor) else each for each in output[1:])
        return output[0]

    def _graph(self, hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Graph:
        leaf = hidden.detach().requires_grad_()
        # no casts are kept of weights that are not there long
        with torch.enable_grad(), mixed_precision(leaf, keeps_casts=False):
            return _Graph(leaf, self._output(leaf, args, kwargs))

    @contextmanager
    def _built(self, *, stays: bool = False) -> Iterator[None]:
        """Coded and divided matrices hold their weights while the context lasts. If they stay, until the end of the next:
        coded ones beside a graph only, but divided ones in any case, since other ranks will not send their parts again."""
        staying: Sequence[ReparametrizedWeight | DividedMatrix] = ()
        try:
            for weight in self.coded:
                # other ranks wait for what a hosted one decodes, which must not be done twice, but there are no graphs then
                self.chunks.without_graphs(partial(self._build, weight))
            for matrix in self.divided:
                self._build(matrix)
            yield
            if stays:
                staying = [*self.divided, *(self.coded if self in self.chunks.graphs else ())]
        finally:
            self.built &= {weight.parameter for weight in staying}
            self._release()

    @torch.no_grad()
    def _build(self, weight: ReparametrizedWeight | DividedMatrix) -> None:
        if weight.parameter in self.built:
            return
        with torch.autocast(self.parameters[0].device.type, enabled=False):
            # in one layout: a compiled block is compiled again for another
            weight.parameter.data = weight.value().contiguous()
        self.built.add(weight.parameter)

    def _release(self) -> None:
        for weight in (*self.coded, *self.divided):
            if weight.parameter not in self.built:
                weight.parameter.data = _placeholder(weight.parameter)


class _Learning(torch.autograd.Function):
    """A block of which the graph around it sees only the input."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        block: LearningBlock,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        learns: bool,
    ) -> Tensor:
        ctx.block, ctx.call = block, (args, kwargs)
        ctx.save_for_backward(hidden)
        return block.run(hidden, args, kwargs, learns=learns)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (hidden,) = ctx.saved_tensors
        return ctx.block.learn(hidden, gradients[0], *ctx.call), None, None, None, None


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


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(chunks)) if len(chunks) > 1 else chunks[0]


def _placeholder(parameter: Tensor) -> Tensor:
    """A float32 tensor of a parameter's shape in the memory of one number."""
    return torch.zeros(1, device=parameter.device).expand(parameter.shape)
