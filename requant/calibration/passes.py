"""Running calibration tokens through a model: forward passes, backward passes, and what each may keep in memory.

The loss is `F = mean over all windows and positions of the next-token cross-entropy`, nats. A backward pass calls
`accumulate` with each matrix's gradient the moment it is complete and then frees it: the gradient of the whole model never
exists. In a model of RECOMPUTE_ABOVE parameters or more each transformer block stores only its input and is run again in the
backward pass (activation checkpointing), so activations cost one hidden state per block, but where the graph of a batch is
small beside the GPU (`batches.recomputes_blocks`). A model whose matrices are on the host takes all batches through one
block before the next (`block_by_block.py`, which says why other models do not).

With several processes (`ranks.py`), each runs its share of the batches; `accumulate` is called on the owner of a matrix, for
every batch in the order of the text, so all sums are those of one process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.batches import (
    RECOMPUTE_ABOVE,
    first_batch,
    own_chunks,
    recomputes_blocks,
    rounds,
)
from requant.calibration.block_by_block import Descent, LossOf, backward_block_by_block
from requant.calibration.exchange import Exchange
from requant.calibration.hidden_states import (
    Precision,
    after_blocks,
    as_it_is,
    in_graph,
    in_graph_from,
)
from requant.errors import NumericalError
from requant.models.deterministic import deterministic
from requant.models.hosted import hosted_blocks
from requant.models.mixed_precision import mixed_precision
from requant.models.targets import QuantTarget, find_blocks, replaced_forward

ROWS_AT_ONCE = 512  # of logits on a GPU, in float32
GradientHandler = Callable[[QuantTarget, Float[Tensor, "n k"]], None]
OutputGradientHandler = Callable[..., None]  # (target, g [m, n]) or (target, g [m, n], x [m, k])


def summed_loss(model: PreTrainedModel, tokens: Int64[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Sum of the next-token cross-entropies of a batch, float32, nats."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, tokens[:, 1:].flatten())


def cross_entropy(logits: Float[Tensor, "m v"], tokens: Int64[Tensor, " m"]) -> Float[Tensor, ""]:
    """The sum over rows, float32, nats; on a GPU a few rows at a time, computed again for their gradients.

    So there are few of the copies in float32 that a loss and its gradient take, each twice as large as logits in 16 bits.
    """
    parts = list(zip(*(each.split(rows_at_once(logits)) for each in (logits, tokens)), strict=True))
    if len(parts) == 1:
        return _cross_entropy(logits, tokens)
    return torch.stack(
        [checkpoint(_cross_entropy, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    ).sum()


def _cross_entropy(logits: Float[Tensor, "m v"], tokens: Int64[Tensor, " m"]) -> Float[Tensor, ""]:
    return functional.cross_entropy(logits.float(), tokens, reduction="sum")


def rows_at_once(logits: Float[Tensor, "m v"]) -> int:
    """How many rows of logits, or of their gradients, are copied to float32 together: all on a CPU."""
    return ROWS_AT_ONCE if logits.is_cuda else len(logits)


class SampledLoss:
    """`summed_loss` with next tokens sampled from the model, one for every position, in place of the text's.

    Batches of `rows` positions (the last may have fewer) come in order. The noise of those that other ranks run is drawn
    and dropped, so that a batch has the same tokens whoever runs it.
    """

    def __init__(self, seed: int, rows: int, device: torch.device) -> None:
        self.generator, self.rows = torch.Generator(device).manual_seed(seed), rows
        self.drawn = 0  # batches

    def __call__(
        self, model: PreTrainedModel, tokens: Int64[Tensor, "b t"], number: int
    ) -> Float[Tensor, ""]:
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        at_once = rows_at_once(logits)
        for _ in range(self.drawn, number):
            for first in range(0, self.rows, at_once):
                rows = min(at_once, self.rows - first)
                exponential((rows, logits.shape[1]), self.generator)
        self.drawn = number + 1
        sampled = [sample(rows, self.generator) for rows in logits.split(at_once)]
        return cross_entropy(logits, torch.cat(sampled))


@torch.no_grad()
def sample(logits: Float[Tensor, "m v"], generator: torch.Generator) -> Int64[Tensor, " m"]:
    """A token for every row, drawn by its probabilities p as argmax p / e with e ~ Exp(1)."""
    p = logits.softmax(-1, dtype=torch.float32)
    # torch.multinomial of NaN would leave the GPU unusable
    return (p / exponential(p.shape, generator)).argmax(-1)


def exponential(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Numbers of Exp(1), float32, on the generator's device."""
    return torch.empty(*shape, device=generator.device).exponential_(generator=generator)


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel, windows: Int64[Tensor, "b t"], *, label: str | None = None, split: bool = True
) -> float:
    """F of the model as it stands, nats per token; not `split` among ranks where each has another model."""
    own = own_chunks(windows, model, split=split)
    at = after_blocks(model, windows, [None if each is None else each[1] for each in own], label=label)
    losses: list[float] = []
    for index, (_, tokens) in enumerate(rounds(windows, model, label=label, split=split)):
        if tokens is not None:
            with at(index):
                losses.append(summed_loss(model, tokens).double().item())
    return _finite(sum(ranks.merged(losses) if split else losses) / scored_tokens(windows), "the loss")


def gradient_pass(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    targets: Sequence[QuantTarget],
    accumulate: GradientHandler,
    *,
    label: str | None = None,
    split: bool = True,
    to_owners: bool = True,
) -> float:
    """One backward pass over all windows; `accumulate(target, gradient [n, k])` is called per batch with dF/dw.

    The gradients of all batches add up to the gradient of F. Returns F. Not `split`, every rank runs all of them, and
    other parameters have the same gradients on each. Not `to_owners`, `accumulate` is called where the batch ran.
    """
    exchange = _exchange(targets, accumulate, to_owners=to_owners)
    losses: list[float] = []

    def loss_of(tokens: Int64[Tensor, "b t"], _number: int) -> Float[Tensor, ""]:
        loss = summed_loss(model, tokens) / scored_tokens(windows)
        losses.append(loss.item())
        return loss

    with deterministic(model), ExitStack() as stack:
        for target in targets:
            stack.enter_context(_gradient_to(target, exchange))
        backward_pass(
            model,
            windows,
            loss_of,
            first_block=first_of(targets),
            after_each=exchange.deliver,
            label=label,
            split=split,
        )
    return _finite(sum(ranks.merged(losses) if split else losses), "the loss")


def output_gradient_pass(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    targets: Sequence[QuantTarget],
    accumulate: OutputGradientHandler,
    *,
    inputs: bool = False,
    seed: int | None = None,
    label: str | None = None,
    descent: Descent | None = None,
    after_each: Callable[[], None] | None = None,
    to_owners: bool = True,
) -> None:
    """One backward pass of the summed loss; `accumulate(target, g [m, n])` is called per batch, in the dtype of the pass.

    Row t of g is the gradient of the loss of the whole text at the linear's output for token t. With `inputs` a third
    argument is x [m, k], the linear's inputs. With a `seed` the loss is that of next tokens sampled from the model.
    `after_each` is called after every batch, of which all ranks have as many. Weights in float32, as training leaves them,
    are multiplied as in training (`models/mixed_precision.py`). Not `to_owners`, `accumulate` is called where the batch ran.
    A `descent` goes on where the last call with it stopped, which had the same seed (`block_by_block.py`).
    """

    def use(target: QuantTarget, *parts: Tensor) -> None:
        accumulate(target, *(part.detach().flatten(0, -2) for part in parts))

    exchange = _exchange(targets, use, to_owners=to_owners)
    in_single_precision = next(model.parameters()).dtype == torch.float32
    count, length = windows.shape
    gpu = next(model.parameters()).is_cuda
    sampled = None
    if seed is not None:
        rows = scored_tokens(first_batch(windows, model, gradients=True))
        sampled = SampledLoss(seed, rows, next(model.parameters()).device)

    def loss_of(tokens: Int64[Tensor, "b t"], number: int) -> Float[Tensor, ""]:
        return summed_loss(model, tokens) if sampled is None else sampled(model, tokens, number)

    def deliver() -> None:
        exchange.deliver()
        if after_each is not None:
            after_each()

    def hook_of(target: QuantTarget) -> Callable[..., None]:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:  # not in the graph-less first pass of a recomputed block
                x = arguments[:1] if inputs else ()
                output.register_hook(lambda g: exchange.give(target.name, g, *x))

        return hook

    with deterministic(model), ExitStack() as stack:
        for target in targets:
            stack.callback(target.module.register_forward_hook(hook_of(target)).remove)
        backward_pass(
            model,
            windows,
            loss_of,
            first_block=first_of(targets),
            precision=mixed_precision if in_single_precision else as_it_is,
            after_each=deliver,
            label=label,
            descent=descent,
            recompute=recomputes_blocks(model, (count, length), gpu=gpu, inputs=inputs),
        )


def backward_pass(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    loss_of: LossOf,
    *,
    first_block: int = 0,
    precision: Precision = as_it_is,
    after_each: Callable[[], None] = lambda: None,
    label: str | None = None,
    descent: Descent | None = None,
    split: bool = True,
    recompute: bool | None = None,
) -> None:
    """Backward passes of `loss_of(tokens, number)` of every batch of this rank; hooks and gradients say what comes of them.

    `first_block` is the first block whose gradients are asked for. `after_each` is called after every batch, of which all
    ranks have as many; where the model's matrices are on the host, after every batch in every block. There blocks are
    recomputed, whatever `recompute` says (None: by model size), and a `descent` goes on where it stopped.
    """
    if hosted_blocks(model) is not None:
        with in_graph_from(model):
            backward_block_by_block(
                model,
                windows,
                own_chunks(windows, model, split=split, gradients=True),
                loss_of,
                first_block=first_block,
                precision=precision,
                after_each=after_each,
                label=label,
                descent=descent,
            )
        return
    with recomputed_blocks(model, recompute, first_block=first_block):
        for number, tokens in rounds(windows, model, label=label, split=split, gradients=True):
            if tokens is not None:
                with precision(tokens):
                    loss = loss_of(tokens, number)
                loss.backward()
            after_each()


def first_of(targets: Sequence[QuantTarget]) -> int:
    """The first block that has one of these matrices; 0 without any."""
    return min((target.block for target in targets), default=0)


def finite(statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The statistics by matrix, once all of them are finite."""
    for name, values in statistics.items():
        if not torch.isfinite(values).all():
            raise NumericalError(f"{name}: its gradients overflow; use --dtype float32 or bfloat16.")
    return statistics


def scored_tokens(windows: Int64[Tensor, "b t"]) -> int:
    """Positions of `windows` that have a next token to predict."""
    return windows.shape[0] * (windows.shape[1] - 1)


def add_product(
    total: Float[Tensor, "n k"], a: Float[Tensor, "m n"], b: Float[Tensor, "m k"], scale: float
) -> None:
    """`total += scale a' b`, added up in float32; of 16-bit tensors on a GPU products are exact, and cost half as much.

    Called where no graph is built, tens of times per block and batch: to say so here would take as long as the launch.
    """
    if total.is_cuda and a.dtype == b.dtype and a.dtype.itemsize == 2:
        torch.addmm(total, a.T, b, out_dtype=torch.float32, alpha=scale, out=total)
    else:
        total.addmm_(a.float().T, b.float(), alpha=scale)


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Products of float32 on the tensor cores of a GPU (TF32) while the context lasts.

    For means over many tokens: a Gram matrix of inputs rounded to 11 bits is still one of inputs, and a KL that only
    compares steps of training is rounded alike in all.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def recomputed_blocks(
    model: PreTrainedModel, recompute: bool | None, *, first_block: int = 0
) -> Iterator[None]:
    """Activation checkpointing of the transformer blocks from `first_block` on while the context lasts; None decides by
    model size. Earlier blocks keep nothing: no graph goes through them.

    Reentrant, because then the first forward pass builds no graph and a hook on a linear's output sees each token
    once, in the recomputation. Blocks that read more than hidden states with gradients (Gemma 3n: per-layer embeddings;
    ZAYA: what earlier routers computed) are not recomputed: no gradients would come to the rest.
    """
    if recompute is None:
        recompute = sum(p.numel() for p in model.parameters()) >= RECOMPUTE_ABOVE
    with in_graph_from(model, first_block), ExitStack() as stack:
        for block in find_blocks(model)[1][first_block:] if recompute else ():
            stack.enter_context(replaced_forward(block, _recomputing(block.forward)))
        yield


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if in_graph((*args, *kwargs.values())):
            return forward(hidden, *args, **kwargs)
        # nothing is random here, and a state cannot be read while a CUDA graph is captured
        return checkpoint(
            lambda h: forward(h, *args, **kwargs), hidden, use_reentrant=True, preserve_rng_state=False
        )

    return run


def _exchange(targets: Sequence[QuantTarget], use: Callable[..., None], *, to_owners: bool) -> Exchange:
    """Calls `use(target, *tensors)` with what is given for a matrix, on its owner or where it is given."""
    by_name = {target.name: target for target in targets}
    owners = {target.name: target.rank for target in targets} if to_owners else None
    return Exchange(owners, lambda name, *tensors: use(by_name[name], *tensors))


@contextmanager
def _gradient_to(target: QuantTarget, exchange: Exchange) -> Iterator[None]:
    parameter = target.parameter

    def take_gradient(p: Tensor) -> None:
        assert p.grad is not None
        exchange.give(target.name, target.oriented(p.grad))
        p.grad = None

    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(take_gradient)
    try:
        yield
    finally:
        handle.remove()
        parameter.requires_grad_(False)
        parameter.grad = None


def _finite(value: float, what: str) -> float:
    if not torch.isfinite(torch.tensor(value)):
        raise NumericalError(
            f"{what} is {value}: the model overflows on the calibration text; "
            "use --dtype float32 or bfloat16."
        )
    return value
