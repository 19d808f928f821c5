"""One step of Adam with gradient accumulation; on one GPU a replay of CUDA graphs.

    for each micro-batch: gradients += d loss(micro-batch) / d (trainables, derived)
    gradients of trainables += (d derived / d trainables)' times gradients of derived
    gradients of trainables are summed over ranks, where the run has several processes (`divided.py`), in parts: while
        one is updated the next are summed; on GPUs large ones in the dtype of matrix products
    trainables -= Adam(gradients), at `lr_factor` of every tensor's learning rate
    derived = value(trainables)

A quantized matrix is derived: it is a function of trainable tensors. It is computed once per step and written into the
model's own parameter, and its gradient is propagated back through the function once per step, whatever the number of
micro-batches. So the model consists of plain modules, which a compiler can fuse.

A step of a small model is thousands of kernel launches, which Python issues more slowly than a GPU runs them. So after a
few eager steps, which initialize libraries and the optimizer's state, three graphs are captured: the gradients of a
micro-batch of each shape, the chain rule, and the update. From then on gradients and learning rates stay at fixed
addresses, and a step copies its inputs and replays the graphs. Gradients of the first micro-batch overwrite those of the
step before, which costs nothing; to set them to zero and add to them would be 16 bytes of traffic for every weight. The
sums over ranks come before the updates and are in no graph. Tensors on a CPU or on several GPUs, and models that cannot be
captured, stay eager. If memory runs out, micro-batches are halved once, and the log says so.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from requant import ranks
from requant.errors import is_out_of_memory
from requant.finetune.divided import in_parts, started_sum
from requant.finetune.scaled_rows import ScaledRows
from requant.models.hosted import HostedMatrix
from requant.models.mixed_precision import PRODUCTS

MicroBatch = tuple[Tensor, ...]  # tokens, and what else the loss takes
Shapes = tuple[torch.Size, ...]
# parameter groups of one tensor each, and whether a CUDA graph will capture the step -> an optimizer of torch's interface
OptimizerOf = Callable[[list[dict[str, Any]], bool], Any]
BETAS = 0.9, 0.95  # of Adam
EAGER_STEPS = 3  # before the capture
PARTS = 8  # of the tensors, of several ranks: one is updated while the next are summed
STARTED = 2  # sums of parts that are under way meanwhile, no more: their copies in 16 bits take memory
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainableTensor:
    """A float32 tensor to train, and its learning rate in units of its root mean square."""

    tensor: Tensor
    lr: float


@dataclass(frozen=True, kw_only=True)
class ReparametrizedWeight:
    """A parameter of the model that is a function of trainable tensors."""

    parameter: Tensor
    value: Callable[[], Tensor]  # in the parameter's shape, differentiable
    hosted: HostedMatrix | None = None  # where nothing keeps the parameter's memory between its uses
    rows: Sequence[ScaledRows] = ()  # the same value, where it is such rows, one below the other
    stack: Hashable = None  # equal for matrices that may be computed together (`weight_stack.py`)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.parameter]

    def values(self) -> Sequence[Tensor]:
        return [self.value()]

    @torch.no_grad()
    def apply(self) -> None:
        """Write the function's value into the parameter; into a hosted one when its block is called."""
        hosted = self.hosted
        if hosted is not None:
            hosted.set_source(lambda: hosted.oriented(self.value()))
        elif self.rows:
            for own, part in self._parts(self.parameter):
                own.write(part)
        else:
            self.parameter.copy_(self.value())

    @torch.no_grad()
    def allocate(self, dtype: torch.dtype) -> None:
        """Make room again in a parameter whose memory was given up; in a hosted one a placeholder."""
        if self.hosted is None:
            self.parameter.data = torch.empty(self.parameter.shape, dtype=dtype, device=self.parameter.device)
        else:
            self.hosted.release()

    def backward(self) -> None:
        """The chain rule: propagate the parameter's gradient to the trainable tensors."""
        gradient = self.parameter.grad
        if gradient is None:
            return
        if self.rows:
            for own, part in self._parts(gradient):
                own.add_gradient(part)
        else:
            value = self.value()
            value.backward(gradient.to(value.dtype))

    def _parts(self, tensor: Tensor) -> Iterator[tuple[ScaledRows, Tensor]]:
        return zip(self.rows, tensor.detach().split([len(own.scales) for own in self.rows]), strict=True)


def adam(groups: list[dict[str, Any]], captures: bool) -> torch.optim.Adam:
    """The optimizer of all training but that in 16 bits and that of masks."""
    return torch.optim.Adam(groups, betas=BETAS, fused=captures or None, capturable=captures)


class TrainingStep:
    """`step(micro_batches, lr_factor)` minimizes the sum of `loss(*micro_batch)`; `close` ends the training.

    Derived parameters hold their functions' values from the start, and after every step.
    """

    def __init__(
        self,
        loss: Callable[..., Float[Tensor, ""]],
        trainables: Sequence[TrainableTensor],
        derived: Sequence[ReparametrizedWeight] = (),
        optimizer: OptimizerOf = adam,
    ) -> None:
        self.loss = loss
        self.derived = derived
        self.tensors = [trainable.tensor.requires_grad_(True) for trainable in trainables]
        devices = {tensor.device for tensor in self.tensors}
        self.device = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
        self.captures = self.device.type == "cuda"
        full_lrs = [each.lr * each.tensor.detach().square().mean().sqrt().item() for each in trainables]
        self.full_lrs = torch.tensor(full_lrs, device=self.device)
        self.lrs = self.full_lrs.clone()  # each parameter group reads its own entry, also inside a graph
        groups: list[dict[str, Any]] = [
            {"params": [tensor], "lr": self.lrs[i] if self.captures else lr}
            for i, (tensor, lr) in enumerate(zip(self.tensors, full_lrs, strict=True))
        ]
        self.parts = in_parts(self.tensors, PARTS if ranks.world_size() > 1 else 1)
        self.optimizers = [optimizer(groups[part], self.captures) for part in self.parts]
        # of a micro-batch: whether it is the first of its step, and its shapes
        self.graphs: dict[tuple[bool, Shapes], tuple[torch.cuda.CUDAGraph, MicroBatch]] = {}
        # of the chain rule, and of the update of each part
        self.updates: tuple[Callable[[], None], Sequence[Callable[[], None]]] | None = None
        self.steps = 0
        self.halves = False  # micro-batches, since memory ran out
        for weight in derived:
            weight.parameter.requires_grad_(True)
            weight.apply()

    def __call__(self, micro_batches: Sequence[MicroBatch], lr_factor: float) -> None:
        self._set_lrs(lr_factor)
        if self.halves:
            micro_batches = _halved(micro_batches)
        if self.captures and self.steps == EAGER_STEPS:
            self._capture(micro_batches)
        try:
            self._compute_gradients(micro_batches)
        except (RuntimeError, MemoryError) as error:
            if self.halves or self.graphs or not is_out_of_memory(error):
                raise
            self._halve()
            self._compute_gradients(_halved(micro_batches))
        chain_rule, updates = self.updates or (self._chain_rule, self._updates())
        chain_rule()
        sums = deque(self._started_sum(part) for part in self.parts[:STARTED])
        for following, update in enumerate(updates, start=STARTED):
            sums.popleft()()  # and forget its copies
            if following < len(self.parts):
                sums.append(self._started_sum(self.parts[following]))
            update()
        if self.updates is None:
            self._drop_gradients()
        self.steps += 1

    def state(self, *, optimizer: bool = True) -> dict[str, Tensor]:
        """What the next step depends on; without the `optimizer`, what is left of it after the last."""
        states = {
            tensor: state for each in self.optimizers if optimizer for tensor, state in each.state.items()
        }
        return state_of(self.tensors, self.full_lrs, states)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken, before the first step."""
        optimizers = [
            each for each, part in zip(self.optimizers, self.parts, strict=True) for _ in self.tensors[part]
        ]
        restore_state(
            state,
            self.tensors,
            self.full_lrs,
            lambda i: optimizers[i].state[self.tensors[i]],
            moments=torch.float32,
            counts_on_cpu=not self.captures,
        )
        for weight in self.derived:
            weight.apply()

    def close(self) -> None:
        """Free gradients and graphs."""
        self.graphs, self.updates = {}, None
        self._drop_gradients()
        for tensor in self._differentiated:
            tensor.requires_grad_(False)

    @property
    def _differentiated(self) -> list[Tensor]:
        return [*self.tensors, *(weight.parameter for weight in self.derived)]

    def _drop_gradients(self) -> None:
        for tensor in self._differentiated:
            tensor.grad = None

    def _set_lrs(self, lr_factor: float) -> None:
        if self.captures:
            torch.mul(self.full_lrs, lr_factor, out=self.lrs)
            return
        groups = [group for each in self.optimizers for group in each.param_groups]
        for group, lr in zip(groups, self.full_lrs.tolist(), strict=True):
            group["lr"] = lr * lr_factor

    def _halve(self) -> None:
        """Drop the gradients of a step that memory did not suffice for, and halve micro-batches from now on."""
        self.halves = True
        self._drop_gradients()
        if self.captures:
            torch.cuda.empty_cache()
        logger.warning(
            "memory ran out in training: from now on half as many windows go through the model at once"
        )

    def _compute_gradients(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The sum over the micro-batches; what gradients hold is lost."""
        kinds = [(index == 0, _shapes(each)) for index, each in enumerate(micro_batches)]
        if self.updates is not None and (not kinds or kinds[0] not in self.graphs):
            for tensor in self._differentiated:  # their addresses stay
                if tensor.grad is not None:
                    tensor.grad.zero_()
        for kind, micro_batch in zip(kinds, micro_batches, strict=True):
            if kind not in self.graphs:
                self.loss(*micro_batch).backward()
                continue
            graph, static_inputs = self.graphs[kind]
            for static_input, tensor in zip(static_inputs, micro_batch, strict=True):
                static_input.copy_(tensor)
            graph.replay()

    def _chain_rule(self) -> None:
        for weight in self.derived:
            weight.backward()

    def _started_sum(self, part: slice) -> Callable[[], None]:
        """Begin to sum the gradients of a part over ranks."""
        if ranks.world_size() == 1:
            return lambda: None
        return started_sum(
            [gradient_of(tensor) for tensor in self.tensors[part]], PRODUCTS.get(self.device.type)
        )

    def _updates(self) -> list[Callable[[], None]]:
        return [partial(self._update, index) for index in range(len(self.parts))]

    def _update(self, index: int) -> None:
        """Update one part; after the last, also the derived weights."""
        self.optimizers[index].step()
        if index + 1 == len(self.parts):
            for weight in self.derived:
                weight.apply()

    def _capture(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Capture the gradients of each kind of micro-batch, the chain rule and the update; capturing computes nothing.

        The first micro-batch finds no gradients, so it allocates them, and its graph writes where they are.
        """
        pool = torch.cuda.graph_pool_handle()
        try:
            for index, micro_batch in enumerate(micro_batches):
                kind = index == 0, _shapes(micro_batch)
                if kind in self.graphs:
                    continue
                graph, static_inputs = torch.cuda.CUDAGraph(), tuple(t.clone() for t in micro_batch)
                with torch.cuda.graph(graph, pool=pool):
                    self.loss(*static_inputs).backward()
                self.graphs[kind] = graph, static_inputs
            # where no weight is derived there is no chain rule, and torch warns of an empty graph
            chain_rule = _captured(self._chain_rule, pool) if self.derived else self._chain_rule
            if ranks.world_size() > 1:  # another rank may have a gradient where this one has none
                for tensor in self.tensors:
                    gradient_of(tensor)
            updates = [_captured(update, pool) for update in self._updates()]
        except RuntimeError as error:
            self.graphs = {}
            self._drop_gradients()
            logger.warning(
                "a step of training cannot be captured as a CUDA graph, so it runs without: %s", error
            )
        else:
            self.updates = chain_rule, updates


def _captured(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """The same launches, as one graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph.replay


def state_of(
    tensors: Sequence[Tensor], lrs: Tensor, states: Mapping[Tensor, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The trained tensors, their learning rates, and what an optimizer holds of each, by names for `restore_state`."""
    found = {"lrs": lrs} | {f"tensor.{i}": tensor for i, tensor in enumerate(tensors)}
    for i, tensor in enumerate(tensors):
        for name, value in states.get(tensor, {}).items():
            # a count may be one tensor for all, which a file cannot hold
            found[f"optimizer.{i}.{name}"] = value if value.dim() else value.clone()
    return found


@torch.no_grad()
def restore_state(
    state: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    lrs: Tensor,
    held_of: Callable[[int], dict[str, Tensor]],
    *,
    moments: torch.dtype,
    counts_on_cpu: bool,
) -> None:
    """Overwrite all that `state_of` saved; `held_of(i)`: the optimizer's state of tensor i, empty before its first step.

    Its moments become the dtype that the optimizer has them in, for the other kind of step may have saved them.
    """
    lrs.copy_(state["lrs"])
    for i, tensor in enumerate(tensors):
        tensor.copy_(state[f"tensor.{i}"])
        held, prefix = held_of(i), f"optimizer.{i}."
        for name, value in state.items():
            if not name.startswith(prefix):
                continue
            name = name.removeprefix(prefix)
            if name in held:
                held[name].copy_(value)
            elif value.dim():
                held[name] = value.to(tensor.device, moments, copy=True)
            else:  # Adam counts its steps on the CPU, unless they are captured
                held[name] = value.to("cpu" if counts_on_cpu else tensor.device, copy=True)


def gradient_of(tensor: Tensor) -> Tensor:
    """The tensor's gradient, zero where this rank had no window in the step."""
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad


def _halved(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Two of every micro-batch of more than one window."""
    return [
        half for each in micro_batches for half in zip(*(tensor.chunk(2) for tensor in each), strict=True)
    ]


def _shapes(micro_batch: MicroBatch) -> Shapes:
    return tuple(t.shape for t in micro_batch)
