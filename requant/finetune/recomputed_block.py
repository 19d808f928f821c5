"""A transformer block in training of which little but the input is kept; its weights and graph exist while it is computed.

    forward     h = block(h) without a graph
    backward    block(h) again, with a graph, some windows at a time; gradients of its coded matrices -> those of their
                trained floats, by the chain rule; its matrices without codes -= Adam(gradients); gradients dropped

where h are the hidden states, and whatever else blocks hand on with gradients (`block_call.py`).

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
from functools import cache, partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from requant.errors import is_out_of_memory
from requant.finetune.block_call import (
    BlockCall,
    BlockGraph,
    BlockResult,
    Key,
    joined,
    joined_gradients,
    returned,
)
from requant.finetune.divided import Part
from requant.finetune.sixteen_bit_adam import SixteenBitAdam
from requant.finetune.step import ReparametrizedWeight, gradient_of
from requant.finetune.weight_stack import WeightStack, in_stacks
from requant.models.mixed_precision import PRODUCTS, mixed_precision

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ChunkSizes:
    """How much goes at once, halved once where memory runs out, and graphs, which are given up before that.

    What is computed again then is a rank's own work; what ranks send each other, in one order, is outside of it.
    """

    windows: int  # through a block
    positions: int  # whose logits exist
    keeps_graphs: bool = False
    lowered: bool = False
    # of chunks, from forward to backward
    graphs: "dict[LearningBlock, list[BlockGraph]]" = field(default_factory=dict)

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

    It is to its part what a ReparametrizedWeight is to its trained floats: `values` joins the parts of all ranks, and
    `backward` adds up the gradients of all. On a GPU ranks send what products read, which is bfloat16.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.dtype = parameter, parameter.dtype
        of_original = Part.of(parameter)
        self.part = Part(of_original.elements.float(), of_original.shape)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.parameter]

    @torch.no_grad()
    def values(self) -> Sequence[Tensor]:
        return [self.part.whole(PRODUCTS.get(self.part.elements.device.type)).float()]

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
        self.computed = in_stacks(coded)
        self.stays = stays
        self.built: set[Tensor] = set()  # parameters that hold their weights
        self.rest: Mapping[int, Any] | None = None  # what the block returned that is not carried
        self.dtypes = [weight.parameter.dtype for weight in coded]
        self._release()

    def __call__(self, hidden: Float[Tensor, "b t d"], *args: Any, **kwargs: Any) -> Any:
        call = BlockCall.of(hidden, *args, **kwargs)
        learns = torch.is_grad_enabled() and hidden.requires_grad
        outputs = _Learning.apply(self, tuple(call.carried), call.rest, learns, *call.carried.values())
        return returned(outputs, self.rest)

    def run(self, call: BlockCall, *, learns: bool) -> tuple[Tensor, ...]:
        """What the block's result carries, without a graph of its own; `learns`: `learn` follows."""

        def compute() -> tuple[Tensor, ...]:
            each = call.chunks(self.chunks.windows)
            if not (learns and self.stays and self.chunks.keeps_graphs):
                return joined([self._result(chunk).carried for chunk in each])
            graphs = self.chunks.graphs[self] = [self._graph(chunk) for chunk in each]
            return joined([[output.detach() for output in graph.result.carried] for graph in graphs])

        with self._built(stays=learns and self.stays):
            return self.chunks.fitting(compute)

    def learn(self, call: BlockCall, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The gradients at what the call carries, from those at what its result does; the block's matrices are updated."""

        def compute() -> tuple[Tensor, ...]:
            for parameter in self.parameters:
                parameter.grad = None
            kept = self.chunks.graphs.pop(self, None)
            anew = (self._graph(chunk) for chunk in call.chunks(self.chunks.windows))
            found: list[list[Tensor]] = []
            done = 0
            for graph in kept or anew:
                rows = slice(done, done + graph.call.windows)
                found.append(graph.backward([None if each is None else each[rows] for each in gradients]))
                done = rows.stop
            return joined_gradients(found, call)

        with self._built():
            found = self.chunks.fitting(compute)
        with torch.enable_grad():
            for weight in self.computed:
                weight.backward()
                for parameter in weight.parameters:
                    parameter.grad = None
        self._update()
        return found

    def run_along(self) -> None:
        """`run` of a rank without windows: other ranks need its parts, and what it decodes. Collective."""
        with torch.no_grad():
            for weight in self.coded:
                if weight.hosted is not None:
                    weight.value()
        for matrix in self.divided:
            matrix.values()

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

    def _result(self, call: BlockCall) -> BlockResult:
        result = call.result(self.forward)
        self.rest = result.rest
        return result

    def _graph(self, chunk: BlockCall) -> BlockGraph:
        call = chunk.from_leaves()
        # no casts are kept of weights that are not there long
        with torch.enable_grad(), mixed_precision(call.carried[0], keeps_casts=False):
            return BlockGraph(call, self._result(call))

    @contextmanager
    def _built(self, *, stays: bool = False) -> Iterator[None]:
        """Coded and divided matrices hold their weights while the context lasts. If they stay, until the end of the next:
        coded ones beside a graph only, but divided ones in any case, since other ranks will not send their parts again."""
        staying: Sequence[ReparametrizedWeight | DividedMatrix] = ()
        try:
            for weight in self.computed:
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
    def _build(self, weight: ReparametrizedWeight | WeightStack | DividedMatrix) -> None:
        if weight.parameters[0] in self.built:
            return
        with torch.autocast(self.parameters[0].device.type, enabled=False):
            for parameter, value in zip(weight.parameters, weight.values(), strict=True):
                # in one layout: a compiled block is compiled again for another
                parameter.data = value.contiguous()
        self.built.update(weight.parameters)

    def _release(self) -> None:
        for weight in (*self.coded, *self.divided):
            if weight.parameter not in self.built:
                weight.parameter.data = _placeholder(weight.parameter)


class _Learning(torch.autograd.Function):
    """A block of which the graph around it sees only what is carried in and out."""

    @staticmethod
    def forward(
        ctx: Any,
        block: LearningBlock,
        keys: tuple[Key, ...],
        rest: Mapping[Key, Any],
        learns: bool,
        *carried: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.block, ctx.keys, ctx.rest = block, keys, rest
        ctx.save_for_backward(*carried)
        ctx.set_materialize_grads(False)
        return block.run(BlockCall(dict(zip(keys, carried, strict=True)), rest), learns=learns)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call = BlockCall(dict(zip(ctx.keys, ctx.saved_tensors, strict=True)), ctx.rest)
        return None, None, None, None, *ctx.block.learn(call, gradients)


def _placeholder(parameter: Tensor) -> Tensor:
    """A float32 tensor of a parameter's shape in the memory of one number."""
    return _zero(parameter.device).expand(parameter.shape)


@cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device)
