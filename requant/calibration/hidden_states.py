"""A forward pass that resumes where the last one stopped: cached hidden states of the calibration text between two blocks.

Sequential calibration needs the inputs of one block at a time, with all earlier blocks quantized. The hidden states before
the current block are cached on the CPU, so all blocks together cost one pass through the model, instead of one pass from
the first block for each. A model whose matrices are on the host (`models/hosted.py`) is run this way too: each block comes
to the GPU once for all batches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant.calibration.batches import own_chunks
from requant.models.devices import to_device
from requant.models.hosted import hosted_blocks
from requant.models.targets import find_blocks, replaced_forward
from requant.progress import tracked

Precision = Callable[
    [Tensor], AbstractContextManager[Any]
]  # for a batch of tokens: as in which a pass computes
# Relative error of the same logits twice: a GPU may add what experts give in another order, in 16 bits. Blocks that miss
# something are off by their whole output, or raise.
ALIKE = 0.02


class StopForward(Exception):
    """Raised by a hook when the rest of the forward pass is not needed."""


def as_it_is(_tokens: Tensor) -> AbstractContextManager[None]:
    """The precision of the weights."""
    return nullcontext()


def chunks_of(model: PreTrainedModel, windows: Int64[Tensor, "b t"]) -> list[Int64[Tensor, "_ t"] | None]:
    """This rank's batches, where the windows lie."""
    return [None if each is None else each[1] for each in own_chunks(windows, model)]


def body_of(model: Any) -> Any:
    """The model without its head. Llama 4's has another name than the model says: it is the child with the embedding."""
    body = getattr(model, model.base_model_prefix, None)
    if body is not None:
        return body
    embedding = model.get_input_embeddings()
    return next((child for child in model.children() if embedding in (*child.modules(),)[1:]), model)


class HiddenStateCache:
    """The hidden states of the windows before block `next_block` of one model.

    `chunks` are this rank's batches, None where other ranks have one more; by default those of the windows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Int64[Tensor, "b t"],
        *,
        chunks: Sequence[Int64[Tensor, "_ t"] | None] | None = None,
        precision: Precision = as_it_is,
    ) -> None:
        self.model, self.windows, self.precision = model, windows, precision
        self.chunks = chunks_of(model, windows) if chunks is None else chunks
        self.blocks = list(find_blocks(model)[1])
        self.next_block = 0
        self.states: list[
            Any
        ] = []  # one for each of this rank's batches: what block `next_block - 1` returned, on the CPU

    def module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def batches(self, label: str | None = None) -> Iterator[Int64[Tensor, "c t"] | None]:
        """The batches of this rank; None where other ranks have one more."""
        device = next(self.model.parameters()).device
        for chunk in tracked(self.chunks, label=label, unit="batches"):
            yield None if chunk is None else to_device(chunk, device)

    def run(self, index: int, tokens: Int64[Tensor, "c t"]) -> None:
        """Run this rank's batch `index` from block `next_block` on, until a hook raises StopForward; without the head."""
        body = body_of(self.model)
        with self.skipping(index, tokens.device), self.precision(tokens):
            try:
                body(input_ids=tokens, use_cache=False)
            except StopForward:
                return

    def run_all(self, label: str | None = None) -> None:
        """Run every batch through all blocks, from the first on; hooks see each batch in each block once."""
        if hosted_blocks(self.model) is not None:
            self.advance_to(len(self.blocks), label=label)
            return
        for index, tokens in enumerate(self.batches(label)):
            if tokens is not None:
                self.run(index, tokens)

    @torch.no_grad()
    def advance_to(self, block: int, *, label: str | None = None) -> None:
        """Advance to before block `block`, with the weights that the model has now."""
        for _ in tracked(range(self.next_block, block), label=label, unit="blocks"):
            following: list[Any] = []

            def save(_module: nn.Module, _inputs: Any, output: Any, states: list[Any] = following) -> None:
                states.append(moved(output, "cpu"))
                raise StopForward

            handle = self.blocks[self.next_block].register_forward_hook(save)
            try:
                for index, tokens in enumerate(self.batches()):
                    if tokens is not None:
                        self.run(index, tokens)
            finally:
                handle.remove()
            self.states, self.next_block = following, self.next_block + 1

    @contextmanager
    def skipping(self, index: int, device: torch.device) -> Iterator[None]:
        """Earlier blocks return the cached hidden states of this rank's batch `index` without computing."""
        if self.next_block == 0:
            yield
            return
        with returning(self.blocks[: self.next_block], moved(self.states[index], device)):
            yield


@contextmanager
def returning(blocks: Sequence[nn.Module], output: Any) -> Iterator[None]:
    """These blocks return `output` without computing while the context lasts."""
    own = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward  # uncovers the class's own method
            if forward is not None:
                block.forward = forward


def why_not_block_by_block(model: PreTrainedModel, *, gradients: bool, carried: bool = False) -> str | None:
    """Why a model cannot run one block at a time, from cached hidden states; None if it can.

    Blocks may read keys and values of earlier ones (Gemma 3n), which are not there then. With `gradients`, they may read
    inputs that follow from the embedding (Gemma 4's small models) or what earlier routers computed (ZAYA), and would need
    the gradients of those too; with `carried` these are passed on (`finetune/block_call.py`), if each is an argument of its
    own.
    """
    blocks = list(find_blocks(model)[1])
    tokens = torch.ones(1, 4, dtype=torch.int64, device=model.device)
    beyond = "blocks read more of earlier ones than their hidden states"
    # the first two, since a graph over all blocks would keep all matrices of a hosted model on the GPU
    asked = zip(blocks[:2], ("every block reads the embedding", beyond), strict=False) if gradients else ()
    for block, why in asked:
        beside = _beside_hidden_states(model, block, tokens)
        if in_graph([each for each in beside if not (carried and isinstance(each, Tensor))]):
            return why
    outputs: list[Any] = []
    handle = blocks[max(0, len(blocks) - 2)].register_forward_hook(lambda *given: outputs.append(given[-1]))
    with torch.no_grad():
        try:
            expected = model(input_ids=tokens, use_cache=False).logits
        finally:
            handle.remove()
        try:
            with returning(blocks[:-1], outputs[0]):
                error = model(input_ids=tokens, use_cache=False).logits - expected
            alike = bool(error.float().norm() <= ALIKE * expected.float().norm())
        except (LookupError, TypeError, AttributeError):
            alike = False
        finally:
            if (hosted := hosted_blocks(model)) is not None:
                hosted.release()
    return None if alike else beyond


def in_graph(values: Sequence[Any]) -> bool:
    """Whether a tensor among these, or in a tuple or list of them, takes a gradient."""
    return any(
        value.requires_grad
        if isinstance(value, Tensor)
        else isinstance(value, tuple | list) and in_graph(value)
        for value in values
    )


def _beside_hidden_states(model: PreTrainedModel, block: nn.Module, tokens: Tensor) -> list[Any]:
    """What else the model gives a block, with gradients from the embedding's output on."""
    found: list[Any] = []

    def called(_hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.extend((*args, *kwargs.values()))
        raise StopForward

    with (
        torch.enable_grad(),
        in_graph_from(model),
        replaced_forward(block, called),
        suppress(StopForward),
    ):
        model(input_ids=tokens, use_cache=False)
    return found


@contextmanager
def in_graph_from(model: PreTrainedModel, block: int = 0) -> Iterator[None]:
    """What block `block` reads requires gradients while the context lasts, and so does everything computed from it; for
    the first block that is the embedding's output.

    The model is given a copy, since a tensor at which a graph begins cannot be changed in place, as CTRL does to scale it.
    """

    def begun(hidden: Tensor) -> Tensor:
        return hidden.requires_grad_().clone()

    def reads(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (begun(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": begun(kwargs["hidden_states"])}

    if block:
        handle = find_blocks(model)[1][block].register_forward_pre_hook(reads, with_kwargs=True)
    else:
        embedding: Any = model.get_input_embeddings()
        handle = embedding.register_forward_hook(lambda _module, _inputs, output: begun(output))
    try:
        yield
    finally:
        handle.remove()


def after_blocks(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    chunks: Sequence[Int64[Tensor, "_ t"] | None],
    *,
    precision: Precision = as_it_is,
    label: str | None = None,
) -> Callable[[int], AbstractContextManager[None]]:
    """A context for the forward pass over each batch: in that of batch i the model is called with batch i.

    The blocks of a hosted model have run by then, each on all batches, and return what they gave; any other model computes
    as ever. `windows` are those of the batches, `precision` that of the passes.
    """
    if hosted_blocks(model) is None:
        return lambda _index: nullcontext()
    cache = HiddenStateCache(model, windows, chunks=chunks, precision=precision)
    cache.advance_to(len(cache.blocks), label=label)
    device = next(model.parameters()).device
    return lambda index: cache.skipping(index, device)


def moved(output: Any, device: torch.device | str) -> Any:
    """What a block returns, a tensor or a tuple that begins with one, on a device."""
    if isinstance(output, Tensor):
        return output.to(device)
    return tuple(part.to(device) if isinstance(part, Tensor) else part for part in output)
