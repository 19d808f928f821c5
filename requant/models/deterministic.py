"""Gradients that are bit for bit the same in two runs on one GPU, for models for which that is requested.

Of everything that a run computes on a GPU, only gradients of attention differ from one run to the next: kernels of cuDNN
and FlashAttention add the contributions of blocks of keys to a query in the order in which those finish. A difference in
the last bit of a Hessian is enough to send the search for trellis codes down another path at a near tie. In deterministic
mode torch makes these kernels add in a fixed order, which takes longer, and raises for operations that have no such
implementation (sums along the text in state-space models). So a model is tested once, before the run, with the gradient of
a few tokens.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from requant.errors import ModelError
from requant.models.hosted import hosted_blocks
from requant.models.mixed_precision import mixed_precision

TOKENS = 16  # of the text that asks
# cuBLAS is deterministic with one of fixed size; this is torch's own on Hopper
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FILLS = "fill_uninitialized_memory"
_demanded: WeakSet[PreTrainedModel] = WeakSet()


def demand_deterministic_gradients(model: PreTrainedModel, demanded: bool) -> None:
    """Whether `deterministic(model)` has an effect from now on; a CPU is deterministic anyway.

    Call it before hooks are registered, for it runs the model. Raises ModelError for a model on the host, and where an
    operation has no deterministic implementation.
    """
    _demanded.discard(model)  # an earlier run of the same model may have had it
    if not demanded or model.device.type == "cpu":
        return
    if hosted_blocks(model) is not None:
        raise ModelError(
            "--deterministic does not reach a model whose matrices are on the host, as this GPU needs it: leave it out."
        )
    os.environ.setdefault(WORKSPACE, ":4096:8")
    check_deterministic_gradients(model)
    _demanded.add(model)


def check_deterministic_gradients(model: PreTrainedModel) -> None:
    """Raise ModelError unless all operations of a forward and a backward pass are deterministic where the model is."""
    try:
        with _deterministic_algorithms():
            _differentiate(model)
    except RuntimeError as error:
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise ModelError(
            f"--deterministic: {operation}, which this model computes, has no deterministic implementation: leave it out."
        ) from error


@contextmanager
def deterministic(model: PreTrainedModel) -> Iterator[None]:
    """Gradients of the model repeat while the context lasts, if that was demanded."""
    if model not in _demanded:
        yield
        return
    with _deterministic_algorithms():
        yield


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills = getattr(torch.utils.deterministic, FILLS)
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, FILLS, False)  # nothing here reads what it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        setattr(torch.utils.deterministic, FILLS, fills)


@torch.enable_grad()
def _differentiate(model: PreTrainedModel) -> None:
    """The gradient of a sum of logits by the embedding's output, in the precision of training; parameters get none."""
    embedded: list[Tensor] = []

    def start(_module: torch.nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale it in place

    handle = model.get_input_embeddings().register_forward_hook(start)
    try:
        with mixed_precision(next(model.parameters()), keeps_casts=False):
            tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=model.device)
            logits = model(input_ids=tokens, use_cache=False).logits
        torch.autograd.grad(logits.float().sum(), embedded)
    finally:
        handle.remove()
