"""One step of Adam over parts of a batch; on one GPU a replay of CUDA graphs.

    for part in parts: gradients += d loss(part) / d (leaves, derived)
    gradients of leaves += d derived / d leaves, transposed, times gradients of derived
    leaves -= Adam(gradients), at `share` of every leaf's rate
    derived = value(leaves)

A coded matrix is a function of leaves. It is computed once a step and written into the model's own parameter, whose
gradient goes back through the function once a step too, whatever the number of parts; the model stays one of plain
modules, which a compiler can fuse.

A step of a small model is thousands of launches, which Python issues more slowly than a GPU runs them. So after a few
eager steps, which set up libraries and the optimizer's state, the gradients of a part and the update of the leaves are
captured once each: gradients and rates then live where the graphs expect them, and a step is a copy of its parts and a
replay. Leaves on a CPU or on several GPUs, and models that cannot be captured, go on step by step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Part = tuple[Tensor, ...]  # tokens of a part of the batch, and what else the loss takes
EAGER_STEPS = 3  # before the capture
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainableTensor:
    """A float32 tensor that learns, and the step of Adam in units of its root mean square."""

    tensor: Tensor
    rate: float


@dataclass(frozen=True, kw_only=True)
class ReparametrizedWeight:
    """A parameter of the model that is a function of leaves."""

    parameter: Tensor
    value: Callable[[], Tensor]  # in the parameter's shape, differentiable

    @torch.no_grad()
    def place(self) -> None:
        self.parameter.copy_(self.value())

    def hand_back(self) -> None:
        """The chain rule: the gradient of the parameter becomes one of the leaves."""
        if self.parameter.grad is not None:
            self.value().backward(self.parameter.grad)


class TrainingStep:
    """`step(parts, share)` for the sum of `loss(*part)` over the parts; `close` ends the learning.

    Parameters that derive from leaves hold their values from the start, and after every step.
    """

    def __init__(
        self,
        loss: Callable[..., Float[Tensor, ""]],
        trainables: Sequence[TrainableTensor],
        derived: Sequence[ReparametrizedWeight] = (),
    ) -> None:
        self.loss = loss
        self.derived = derived
        self.tensors = [leaf.tensor.requires_grad_(True) for leaf in trainables]
        devices = {tensor.device for tensor in self.tensors}
        self.device = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
        self.captures = self.device.type == "cuda"
        sizes = [leaf.rate * leaf.tensor.detach().square().mean().sqrt().item() for leaf in trainables]
        self.full_rates = torch.tensor(sizes, device=self.device)
        self.rates = self.full_rates.clone()  # a group looks its own up here, also from inside a graph
        self.optimizer = torch.optim.Adam(
            [
                {"params": [tensor], "lr": self.rates[i] if self.captures else size}
                for i, (tensor, size) in enumerate(zip(self.tensors, sizes, strict=True))
            ],
            betas=(0.9, 0.95),
            fused=self.captures or None,
            capturable=self.captures,
        )
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, Part]] = {}
        self.update: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        for matrix in derived:
            matrix.parameter.requires_grad_(True)
            matrix.place()

    def __call__(self, parts: Sequence[Part], share: float) -> None:
        self._set_rates(share)
        if self.captures and self.steps == EAGER_STEPS:
            self._capture(parts)
        for part in parts:
            self._add_gradients(part)
        if self.update is None:
            self._update()
        else:
            self.update.replay()
        self.steps += 1

    def close(self) -> None:
        """Give gradients and graphs back."""
        self.graphs, self.update = {}, None
        for tensor in (*self.tensors, *(matrix.parameter for matrix in self.derived)):
            tensor.grad = None
            tensor.requires_grad_(False)

    def _set_rates(self, share: float) -> None:
        if self.captures:
            torch.mul(self.full_rates, share, out=self.rates)
            return
        for group, rate in zip(self.optimizer.param_groups, self.full_rates.tolist(), strict=True):
            group["lr"] = rate * share

    def _add_gradients(self, part: Part) -> None:
        captured = self.graphs.get(_shapes(part))
        if captured is None:
            self.loss(*part).backward()
            return
        graph, inputs = captured
        for expected, given in zip(inputs, part, strict=True):
            expected.copy_(given)
        graph.replay()

    def _update(self) -> None:
        for matrix in self.derived:
            matrix.hand_back()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.captures)
        for matrix in self.derived:
            matrix.place()
            if self.captures and matrix.parameter.grad is not None:
                matrix.parameter.grad.zero_()
            else:
                matrix.parameter.grad = None

    def _capture(self, parts: Sequence[Part]) -> None:
        """The gradients of one part of each shape, and the update; nothing is computed by it."""
        pool = torch.cuda.graph_pool_handle()
        try:
            for part in parts:
                if _shapes(part) in self.graphs:
                    continue
                graph, inputs = torch.cuda.CUDAGraph(), tuple(t.clone() for t in part)
                with torch.cuda.graph(graph, pool=pool):
                    self.loss(*inputs).backward()
                self.graphs[_shapes(part)] = graph, inputs
            update = torch.cuda.CUDAGraph()
            with torch.cuda.graph(update, pool=pool):
                self._update()
        except RuntimeError as error:
            self.graphs = {}
            logger.warning(
                "a step of training cannot be captured as a CUDA graph, so it runs without: %s", error
            )
        else:
            self.update = update


def _shapes(part: Part) -> tuple[torch.Size, ...]:
    return tuple(t.shape for t in part)
