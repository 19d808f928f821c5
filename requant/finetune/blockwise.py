"""A step of training, block by block, for models that are large compared to their GPU: the same gradients in less memory.

    forward     for every block: h = block(h) without a graph; of all activations only h is kept
    divergence  LOGITS_AT_ONCE logits at a time, down to the gradient at the last hidden states
    backward    for every block, the last first: block(h) again, with a graph, `block_tokens` tokens at a time, unless its
                graph was kept
                gradients of its coded matrices -> those of their trained floats, by the chain rule
                matrices without codes -= Adam(gradients);  gradients dropped

What blocks hand on beside hidden states, with gradients, is a part of h (`block_call.py`).

The weights of a coded matrix exist only while its block is computed, forward and backward, and so do all gradients of
matrices. The numbers are those of `step.py`: the same sums over a step's tokens, in another order. What is kept between
steps differs: Adam's moments are bfloat16 (`SixteenBitAdam`), and so, in a bfloat16 model, are the values that codes stand
for before the scales. (Decoding a trellis again would cost a kilobyte of traffic per weight in torch, some seconds per
step at 8e9 weights.) Bytes per weight:

    without codes           8    float32, two moments                     (`step.py`: 20, with the original and its cast)
    coded                   3    code, and its value before the scales    (`step.py`: 17)
    embedding, head, norms  12   float32, gradient, two moments           (`step.py`: 16)

In a model larger than the GPU all matrices are coded; their codes wait on the host and are decoded when they are needed,
each by one rank (`decoded_block.py`), and h waits on the host too. With N ranks, which learn from different windows, each
holds an Nth of what a matrix without codes takes (`DividedMatrix`). In addition there are h before every block, one block
at work (`recomputed_block.py`), and the logits (`memory.py` adds it all up). A GPU that has more memory than that keeps the
graphs of as many blocks as fit, the last ones, which are then computed once. If memory runs out all the same, no graphs are
kept from then on, then half as many tokens are processed at once, and the log says so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.hidden_states import body_of
from requant.finetune.divergence import hidden_error, kl
from requant.finetune.divided import Part, sum_over_ranks
from requant.finetune.recomputed_block import ChunkSizes, DividedMatrix, LearningBlock
from requant.finetune.sixteen_bit_adam import SixteenBitAdam
from requant.finetune.step import (
    MicroBatch,
    ReparametrizedWeight,
    TrainableTensor,
    gradient_of,
    restore_state,
    state_of,
)
from requant.finetune.teacher import HeadTeacher, logits_of_states
from requant.models.mixed_precision import mixed_precision
from requant.models.targets import find_blocks, replaced_forward

TOKENS_AT_ONCE = 8192  # through a block, unless a GPU has room for all of a step (`memory.py`)
LOGITS_AT_ONCE = {"cpu": 2**27, "cuda": 2**29}  # 3 to 4 GB with all that is computed of them (`memory.py`)


class BlockwiseStep:
    """`step(micro_batches, lr_factor)` minimizes the divergence from the teacher, as `TrainingStep` does; `close` ends it.

    A step's windows come as one micro-batch with their states, or none for a rank without windows. `trainables` are
    float32, but for those that ranks divide (`divided_among_ranks`); derived parameters inside of blocks hold nothing
    between steps. `block_tokens` go through a block at once; the last `graphs_kept` blocks are not computed again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: HeadTeacher,
        trainables: Sequence[TrainableTensor],
        derived: Sequence[ReparametrizedWeight],
        *,
        batch_tokens: int,
        block_tokens: int | None = None,
        graphs_kept: int = 0,
        hidden_weight: float = 0.0,
    ) -> None:
        self.model, self.teacher, self.batch_tokens = model, teacher, batch_tokens
        self.hidden_weight = hidden_weight
        blocks = list(find_blocks(model)[1])
        of_parameter = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
        for tensor in (*(each.tensor for each in trainables), *(weight.parameter for weight in derived)):
            tensor.requires_grad_(True)
        full_lrs = [
            each.lr * each.tensor.detach().float().square().mean().sqrt().item() for each in trainables
        ]
        self.full_lrs = torch.tensor(full_lrs)
        self.divided = {tensor: DividedMatrix(tensor) for tensor in divided_among_ranks(model, trainables)}
        self.learning = [each.tensor for each in trainables]
        self.tensors = [  # what Adam updates
            self.divided[tensor].part.elements if tensor in self.divided else tensor
            for tensor in self.learning
        ]
        updated_with = [of_parameter.get(id(p)) if p.dim() > 1 else None for p in self.learning]
        optimizers = _optimizers(updated_with, self.tensors, full_lrs)
        of_tensor = {
            tensor: each
            for optimizer in optimizers.values()
            for tensor, each in zip(optimizer.tensors, optimizer.each, strict=True)
        }
        self.optimizers = [of_tensor[tensor] for tensor in self.tensors]  # one a tensor
        self.optimizer = optimizers.pop(None)
        coded: dict[int | None, list[ReparametrizedWeight]] = {None: []}
        for weight in derived:
            coded.setdefault(of_parameter.get(id(weight.parameter)), []).append(weight)
        self.outside = coded[None]  # embedding and head
        for weight in self.outside:
            weight.apply()
        _, length = teacher.windows.shape
        head: Any = model.get_output_embeddings()
        self.chunks = ChunkSizes(
            windows=max(1, (block_tokens or TOKENS_AT_ONCE) // length),
            positions=positions_at_once(head.weight.shape[0], model.device.type),
            keeps_graphs=graphs_kept > 0,
        )
        self.blocks = [
            LearningBlock(
                block,
                coded.get(index, []),
                [matrix for tensor, matrix in self.divided.items() if of_parameter[id(tensor)] == index],
                optimizers.get(index),
                self.chunks,
                stays=index >= len(blocks) - graphs_kept,
            )
            for index, block in enumerate(blocks)
        ]
        self.derived = derived
        # where hidden states wait for the backward pass: beside a model larger than the GPU on the host
        self.kept_on: Callable[[], AbstractContextManager[Any]] = nullcontext
        if any(weight.hosted is not None for weight in derived):
            self.kept_on = partial(save_on_cpu, pin_memory=model.device.type == "cuda")
        self.forwards = ExitStack()
        self.forwards.callback(self.chunks.graphs.clear)
        for block, learning in zip(blocks, self.blocks, strict=True):
            self.forwards.enter_context(replaced_forward(block, learning))

    def __call__(self, micro_batches: Sequence[MicroBatch], lr_factor: float) -> None:
        for optimizer, lr in zip(self.optimizers, self.full_lrs.tolist(), strict=True):
            optimizer.param_groups[0]["lr"] = lr * lr_factor
        if micro_batches:
            ((tokens, states),) = micro_batches
            self._learn(tokens, states)
        else:
            self._run_along()
            for block in reversed(self.blocks):
                block.learn_along()
        for weight in self.outside:
            weight.backward()
        if ranks.world_size() > 1:
            sum_over_ranks([gradient_of(tensor) for tensor in self.optimizer.tensors])
        self.optimizer.step()
        self.optimizer.zero_grad()
        for weight in self.outside:
            weight.parameter.grad = None
            weight.apply()

    def state(self, *, optimizer: bool = True) -> dict[str, Tensor | Part]:
        """What the next step depends on; without the `optimizer`, what is left of it after the last."""
        states = {
            tensor: state for each in self.optimizers if optimizer for tensor, state in each.state.items()
        }
        found = state_of(self.tensors, self.full_lrs, states)
        parts: dict[str, Tensor | Part] = {
            name: Part(value, matrix.part.shape)
            for name, value in found.items()
            if (matrix := self._divided_at(name)) is not None and value.dim()
        }
        return {**found, **parts}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken, before the first step."""
        divided = {
            name: Part.of(value).elements
            for name, value in state.items()
            if self._divided_at(name) is not None and value.dim()
        }
        restore_state(
            {**state, **divided},
            self.tensors,
            self.full_lrs,
            lambda i: self.optimizers[i].state[self.tensors[i]],
            moments=torch.bfloat16,
            counts_on_cpu=True,
        )
        for weight in self.outside:
            weight.apply()

    def close(self) -> None:
        """Free gradients; the blocks run as before."""
        self.forwards.close()
        for block in self.blocks:
            block.close()
        for tensor in (*self.learning, *(weight.parameter for weight in self.derived)):
            tensor.grad = None
            tensor.requires_grad_(False)

    @torch.no_grad()
    def mean_kl(self) -> float:
        """Mean KL over all positions of the validation windows, nats; as many at once as a step has."""
        count, length = len(self.teacher.val), self.teacher.windows.shape[1]
        at_once = max(1, self.batch_tokens // length // ranks.world_size())
        sums = []
        for windows in ranks.rounds(torch.tensor(self.teacher.val).split(at_once)):
            if windows is None:
                self._run_along()
                continue
            ((tokens, states),) = self.teacher.micro_batches(windows, None)
            hidden = self._hidden(tokens).flatten(0, 1)
            sums.append(sum(self._kl(*part).double().item() for part in self._rows(hidden, states)))
        return sum(ranks.merged(sums)) / (count * length)

    def _divided_at(self, name: str) -> DividedMatrix | None:
        """Whose part an entry of a state is, where the whole matrix is in the file."""
        kind, _, rest = name.partition(".")
        if kind not in ("tensor", "optimizer"):
            return None
        return self.divided.get(self.learning[int(rest.partition(".")[0])])

    def _run_along(self) -> None:
        for block in self.blocks:
            block.run_along()

    def _learn(self, tokens: Int64[Tensor, "b t"], states: Float[Tensor, "b t d"]) -> None:
        hidden = self._hidden(tokens)
        gradient = torch.cat(
            [
                self.chunks.fitting(lambda part=part: self._gradient(*part))
                for part in self._rows(hidden.detach().flatten(0, 1), states)
            ]
        )
        hidden.backward(gradient.view_as(hidden))

    def _hidden(self, tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "b t d"]:
        """The last hidden states."""
        with mixed_precision(tokens, keeps_casts=False), self.kept_on():
            return body_of(self.model)(input_ids=tokens, use_cache=False).last_hidden_state

    def _rows(
        self, hidden: Float[Tensor, "p d"], states: Float[Tensor, "b t d"]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self.chunks.positions
        yield from zip(hidden.split(rows), states.flatten(0, 1).split(rows), strict=True)

    def _gradient(self, hidden: Float[Tensor, "p d"], states: Float[Tensor, "p d"]) -> Float[Tensor, "p d"]:
        """The gradient of the loss at the hidden states of some positions; the head's own gradient accumulates."""
        found = torch.empty_like(hidden)  # before anything is added to the head's, which is not taken back
        rows = self.chunks.positions
        for own, original, out in zip(hidden.split(rows), states.split(rows), found.split(rows), strict=True):
            leaf = own.detach().requires_grad_()
            loss = self._kl(leaf, original)
            if self.hidden_weight:
                loss = loss + self.hidden_weight * hidden_error(leaf, original)
            (loss / self.batch_tokens).backward()
            assert leaf.grad is not None
            out.copy_(leaf.grad)
        return found

    def _kl(self, hidden: Float[Tensor, "p d"], states: Float[Tensor, "p d"]) -> Float[Tensor, ""]:
        """The sum over some positions."""
        tokens = self.teacher.windows.new_zeros(1, len(hidden), device=hidden.device)
        with mixed_precision(hidden, keeps_casts=False):
            expected = self.teacher.logits(tokens, states[None])
            found = logits_of_states(self.model, self.teacher.output_class, tokens, hidden[None])
        return kl(found, expected)


def _optimizers(
    updated_with: Sequence[int | None], tensors: Sequence[Tensor], lrs: Sequence[float]
) -> dict[int | None, SixteenBitAdam]:
    """The optimizer of every block's matrices, and for None of all that is updated at the end of a step."""
    groups: dict[int | None, list[dict[str, Any]]] = {None: []}
    for block, tensor, lr in zip(updated_with, tensors, lrs, strict=True):
        groups.setdefault(block, []).append({"params": [tensor], "lr": lr})
    return {block: SixteenBitAdam(members) for block, members in groups.items()}


def divided_among_ranks(model: PreTrainedModel, trainables: Sequence[TrainableTensor]) -> list[Tensor]:
    """The matrices of blocks without codes, where there are several ranks to divide them."""
    if ranks.world_size() == 1:
        return []
    inside = {id(p) for block in find_blocks(model)[1] for p in block.parameters()}
    return [each.tensor for each in trainables if each.tensor.dim() > 1 and id(each.tensor) in inside]


def positions_at_once(vocabulary: int, device: str) -> int:
    """Positions with LOGITS_AT_ONCE logits, a power of two."""
    return 1 << max(1, LOGITS_AT_ONCE[device] // vocabulary).bit_length() - 1
