"""Transformer blocks compiled for training on a GPU, so that elementwise work is fused.

Of the 42 ms that a GPU spends on a step of bench-32m, 10 are matrix products and attention; the rest is four thousand
small kernels for norms, rotary embeddings, activations and the KL divergence of the logits (`divergence.py`). Blocks of one
class share their code, so one block is compiled for the model in training and one for the teacher, in seconds. Blocks with
experts are not compiled; their experts compute grouped products, which a CUDA graph can hold (`step.py`). Without a working
compiler (torch.compile needs a C compiler), or if it fails on a block, blocks run eagerly.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel

from requant.errors import first_line
from requant.models.experts import Experts, grouped_products
from requant.models.targets import find_blocks, replaced_forward

logger = logging.getLogger(__name__)
MIN_STEPS_TO_COMPILE = 100  # fewer are done before the compiler is


@contextmanager
def fused(models: Sequence[PreTrainedModel], steps: int) -> Iterator[None]:
    """The models' blocks are compiled while the context lasts, on a GPU and for enough steps.

    Compiled blocks run under autocast only; validation, in float32 and TF32, runs the blocks eagerly.
    """
    if not _on_gpus(models):
        yield
        return
    compiled = compiles(steps)
    with ExitStack() as stack:
        if compiled:
            stack.enter_context(torch._dynamo.config.patch(suppress_errors=True))  # its import takes seconds
            stack.enter_context(_failures_in_one_line())
        for model in models:
            stack.enter_context(grouped_products(model))
        for block in (block for model in models for block in find_blocks(model)[1]):
            routed = any(isinstance(module, Experts) for module in block.modules())  # was never compiled
            stack.enter_context(
                replaced_forward(block, _fused(block.forward, compiles=compiled and not routed))
            )
        yield


def compiles(steps: int) -> bool:
    """Whether blocks are compiled for so many steps on a GPU."""
    return steps >= MIN_STEPS_TO_COMPILE and _compiler_works()


def try_compiler(model: PreTrainedModel, steps: int) -> None:
    """Find out early whether a model's training will be compiled, for a caller that waits for something else: the first
    `compiles` takes seconds, most of them imports, and starts torch's worker processes; later ones return its answer."""
    if _on_gpus((model,)):
        compiles(steps)


def start_compiler(device: str, steps: int | None) -> None:
    """Start the worker processes of torch's compiler for training on a `device`, without waiting for them.

    They import torch themselves, which takes seconds; whoever compiles first would wait for that. `steps` None: as many as
    the model's size says, which are enough.
    """
    if torch.device(device).type != "cuda" or (steps is not None and steps < MIN_STEPS_TO_COMPILE):
        return
    try:
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
    except Exception as error:  # `_compiler_works` says what matters of it
        logger.info("the compiler's processes start later: %s", first_line(error))


def _on_gpus(models: Sequence[PreTrainedModel]) -> bool:
    return {p.device.type for model in models for p in model.parameters()} == {"cuda"}


@contextmanager
def _failures_in_one_line() -> Iterator[None]:
    """What torch's compiler gives up runs eagerly; its hundreds of lines about that are one of ours, the first time."""
    said = False

    def brief(record: logging.LogRecord) -> bool:
        nonlocal said
        text = record.getMessage()
        if "WON'T CONVERT" not in text:
            return True
        if not said:
            errors = re.findall(r"^[\w.]+(?:Error|Exception): .*$", text, re.MULTILINE)
            reason = errors[-1] if errors else text.splitlines()[0]
            logger.warning(
                "a part of training runs without torch.compile, slower and in more memory: %s", reason
            )
        said = True
        return False

    source = logging.getLogger("torch._dynamo.convert_frame")
    source.addFilter(brief)
    try:
        yield
    finally:
        source.removeFilter(brief)


def _in_training() -> bool:
    return torch.is_autocast_enabled("cuda")


@cache
def _compiler_works() -> bool:
    """Whether torch.compile works on this machine; if not, one warning instead of one a block."""
    try:
        with warnings.catch_warnings():
            # what torch itself deprecates, which a strict caller would raise
            warnings.simplefilter("ignore")
            torch.compile(torch.exp)(torch.ones(8, device="cuda"))
    except Exception as error:  # torch, triton and the C compiler raise their own
        logger.warning(
            "training runs without torch.compile, at less than half the speed: %s", first_line(error)
        )
        return False
    return True


def _fused(plain: Callable[..., Any], *, compiles: bool) -> Callable[..., Any]:
    compiled = torch.compile(plain, dynamic=False) if compiles else plain
    called, unmasked = signature(plain), False

    def forward(*args: Any, **kwargs: Any) -> Any:
        # transformers builds an attention mask while a stream is captured, since a graph might be replayed with padding;
        # with a mask attention uses slower kernels, and the block would be compiled again, which breaks the capture
        nonlocal unmasked
        given = called.bind(*args, **kwargs)
        if not torch.cuda.is_current_stream_capturing():
            unmasked = given.arguments.get("attention_mask") is None
        elif unmasked and "attention_mask" in given.arguments:
            given.arguments["attention_mask"] = None
        return (compiled if _in_training() else plain)(*given.args, **given.kwargs)

    return forward
