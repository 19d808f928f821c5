"""The elementwise work of a step of training, fused by torch's compiler, on a GPU.

Of 42 ms that a GPU works on a step of bench-32m, 10 are products and attention; the rest are four thousand small kernels
for norms, rotations of positions, activations and the divergence of the logits. Blocks of one class share their code, so
one block is compiled for the model that learns and one for the teacher, in seconds, and the divergence

    KL = sum_t sum_v p_v (log p_v - log q_v)

reads the logits of both in the 16 bits in which the products left them. Without a compiler (torch's needs one for C), or
where it fails on a block, blocks run as they are.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from inspect import signature, unwrap
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from requant.errors import first_line
from requant.models.targets import find_blocks, replaced_forward

logger = logging.getLogger(__name__)
Divergence = Callable[[Tensor, Tensor], Tensor]
WORTH_COMPILING = 100  # steps; fewer end before the compiler does


def kl(found: Float[Tensor, "b t v"], expected: Float[Tensor, "b t v"]) -> Float[Tensor, ""]:
    """Sum over positions of KL(expected || found) of two models' logits, nats, in float32."""
    q, p = found.float().log_softmax(-1), expected.float().log_softmax(-1)
    return functional.kl_div(q, p, reduction="sum", log_target=True)


@contextmanager
def fused(models: Sequence[PreTrainedModel], steps: int) -> Iterator[Divergence]:
    """`kl` for training, compiled like the models' blocks while the context lasts, where that pays: on a GPU.

    Blocks are compiled for what runs under autocast; what judges, in float32, finds them as they are.
    """
    if not _on_gpus(models):
        yield kl
        return
    compiles = steps >= WORTH_COMPILING and _compiler_works()
    with ExitStack() as stack:
        if compiles:
            stack.enter_context(torch._dynamo.config.patch(suppress_errors=True))  # its import takes seconds
        for block in (block for model in models for block in find_blocks(model)[1]):
            stack.enter_context(replaced_forward(block, _fused(block.forward, compiles=compiles)))
        yield torch.compile(unwrap(kl), dynamic=False) if compiles else kl  # without the type checks of tests


def _on_gpus(models: Sequence[PreTrainedModel]) -> bool:
    return {p.device.type for model in models for p in model.parameters()} == {"cuda"}


def _learns() -> bool:
    return torch.is_autocast_enabled("cuda")


@cache
def _compiler_works() -> bool:
    """Whether torch can compile at all on this machine; otherwise it says so once instead of once a block."""
    try:
        torch.compile(torch.exp)(torch.ones(8, device="cuda"))
    except Exception as error:  # whatever its many parts raise
        logger.warning(
            "training runs without torch's compiler, at less than half the speed: %s", first_line(error)
        )
        return False
    return True


def _fused(plain: Callable[..., Any], *, compiles: bool) -> Callable[..., Any]:
    compiled = torch.compile(plain, dynamic=False) if compiles else plain
    called, unmasked = signature(plain), False

    def forward(*args: Any, **kwargs: Any) -> Any:
        # transformers makes a mask whenever a stream is captured, for a graph might meet padding; with a mask attention
        # takes slower kernels, and a block would be compiled a second time, which a capture does not survive
        nonlocal unmasked
        given = called.bind(*args, **kwargs)
        if not torch.cuda.is_current_stream_capturing():
            unmasked = given.arguments.get("attention_mask") is None
        elif unmasked and "attention_mask" in given.arguments:
            given.arguments["attention_mask"] = None
        return (compiled if _learns() else plain)(*given.args, **given.kwargs)

    return forward
