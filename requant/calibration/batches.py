"""Windows in batches: how many fit into one pass with logits, and which of the batches a process runs.

On a GPU a batch with gradients has up to twice as many tokens as one without, whose logits are compared in float32 with
those of another model: of its own, `passes.cross_entropy` makes float32 copies of a few rows at a time.
"""

from collections.abc import Iterator, Sequence
from math import ceil

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.models.devices import to_device, total_memory
from requant.models.experts import Experts
from requant.models.targets import find_blocks
from requant.progress import tracked

MOST_LOGITS = 300_000_000  # of a batch: near 1 GB
GPU_TOKENS, CPU_TOKENS = 8192, 2048  # of a batch, at most
# in float32, of a batch without gradients: two models', their logarithms, and what compares them
COPIES_OF_LOGITS = 6
# Tokens times the square of a block's width that take a GPU, forward and back, about as long as Python: an H200 works for
# 55 ms at 2048 tokens of a 1B shape, and waits for Python for another 25.
FULL_BLOCK = 1.4e10
# numbers that a block's graph keeps of a token, over its width, and three of the MLP's; 3.7 GB for 4096 tokens of the 1B
# shape, whose MLP is four times as wide
WIDTHS_OF_A_BLOCK, WIDTHS_OF_AN_MLP = 2, 3
# parameters; below, memory suffices and a second forward pass through the blocks is not worth it
RECOMPUTE_ABOVE = 2_000_000_000
# of a GPU, which the graph of a batch may take of a model that is as large as that
MEMORY_OF_A_GRAPH = 1 / 12
MEMORY_OF_A_BATCH = 1 / 3  # of a GPU, for a batch of more windows than logits alone would allow


def batches(
    windows: Int64[Tensor, "b t"],
    model: PreTrainedModel,
    *,
    label: str | None,
    windows_each: int | None = None,
) -> Iterator[Int64[Tensor, "c t"]]:
    """Chunks whose logits stay near 1 GB, or of `windows_each` windows, on the model's device, with a progress bar."""
    for chunk in tracked(chunks(windows, model, windows_each), label=label, unit="batches"):
        yield to_device(chunk, next(model.parameters()).device)


def rounds(
    windows: Int64[Tensor, "b t"],
    model: PreTrainedModel,
    *,
    label: str | None,
    split: bool = True,
    gradients: bool = False,
) -> Iterator[tuple[int, Int64[Tensor, "c t"] | None]]:
    """The `batches` of this rank, each with its number among all; None where other ranks have one more."""
    device = next(model.parameters()).device
    numbered = own_chunks(windows, model, split=split, gradients=gradients)
    for each in tracked(numbered, label=label, unit="batches"):
        yield (-1, None) if each is None else (each[0], to_device(each[1], device))


def own_chunks(
    windows: Int64[Tensor, "b t"],
    model: PreTrainedModel,
    *,
    split: bool = True,
    windows_each: int | None = None,
    gradients: bool = False,
) -> Sequence[tuple[int, Int64[Tensor, "_ t"]] | None]:
    """All of `rounds` at once, or batches of `windows_each` windows, on the device of the windows."""
    numbered = list(enumerate(chunks(windows, model, windows_each, gradients=gradients)))
    return ranks.rounds(numbered) if split else numbered


def first_batch(
    windows: Int64[Tensor, "b t"], model: PreTrainedModel, *, gradients: bool = False
) -> Int64[Tensor, "c t"]:
    """The first of `batches`, and a largest one, on the device of the windows."""
    return chunks(windows, model, None, gradients=gradients)[0]


def bytes_of_logits(model: PreTrainedModel, count: int, length: int) -> int:
    """Bytes of all copies of the logits of the largest batch of `count` windows on a GPU.

    Without gradients, whose logits take less for all that there may be twice as many (`collect.batch_bytes`).
    """
    if model.get_output_embeddings() is None:
        return 0
    return 4 * COPIES_OF_LOGITS * tokens_at_once(model, count, length, gpu=True) * vocabulary_of(model)


def tokens_at_once(
    model: PreTrainedModel, count: int, length: int, *, gpu: bool, gradients: bool = False
) -> int:
    """Tokens of the largest batch of `count` windows of `length` tokens."""
    return length * min(count, _windows_at_once(model, length, gpu=gpu, gradients=gradients))


def vocabulary_of(model: PreTrainedModel) -> int:
    """Number of logits per token; an estimate for a model without a head."""
    head = model.get_output_embeddings()
    return 50_000 if head is None else head.weight.shape[0]


def chunks(
    windows: Int64[Tensor, "b t"],
    model: PreTrainedModel,
    windows_each: int | None,
    *,
    gradients: bool = False,
) -> Sequence[Int64[Tensor, "_ t"]]:
    """All `batches`, on the device of the windows."""
    gpu = next(model.parameters()).is_cuda
    return windows.split(
        windows_each or _windows_at_once(model, windows.shape[1], gpu=gpu, gradients=gradients)
    )


def windows_without_logits(length: int, *, gpu: bool) -> int:
    """Windows of a batch for which the model computes no logits, so that they do not limit it."""
    return max(1, (GPU_TOKENS if gpu else CPU_TOKENS) // length)


def _windows_at_once(model: PreTrainedModel, length: int, *, gpu: bool, gradients: bool) -> int:
    """Windows of a batch; on a GPU, with gradients, enough to keep it busy while Python calls a block, if memory allows."""
    most = MOST_LOGITS // vocabulary_of(model)
    if not gpu:
        return max(1, min(CPU_TOKENS, most) // length)
    windows = max(1, min(GPU_TOKENS, most) // length)
    if not gradients:
        return windows
    width = model.get_input_embeddings().get_parameter("weight").shape[1]
    busy = min(ceil(FULL_BLOCK / width**2 / length), min(GPU_TOKENS, 2 * most) // length)
    room = MEMORY_OF_A_BATCH * total_memory(torch.device("cuda"))
    fit = int(room / (length * bytes_of_a_token(model)))
    return max(windows, min(busy, fit))


def bytes_of_a_token(model: PreTrainedModel, *, recomputes: bool = False) -> int:
    """About what a token of a batch with gradients takes of a GPU: three copies of its logits, and what the graph keeps of
    the blocks, or of one of them and the hidden states before all, where it `recomputes` them."""
    width = model.get_input_embeddings().get_parameter("weight").shape[1]
    blocks = len(find_blocks(model)[1])
    of_mlp = getattr(model.config.get_text_config(), "intermediate_size", None)
    of_mlp = max(of_mlp if isinstance(of_mlp, int) else 0, 4 * width)  # it may be that of one expert
    of_block = WIDTHS_OF_A_BLOCK * width + WIDTHS_OF_AN_MLP * of_mlp
    kept = of_block + blocks * width if recomputes else of_block * blocks
    return next(model.parameters()).element_size() * (3 * vocabulary_of(model) + kept)


def recomputes_blocks(
    model: PreTrainedModel, windows: tuple[int, int], *, gpu: bool, inputs: bool = False
) -> bool:
    """Whether a pass for gradients at outputs, of `windows` (count, length), keeps only the input of every block and runs
    it again.

    So it is with RECOMPUTE_ABOVE parameters or more, unless the graph of a batch is small beside the GPU (8B on 141 GB: 9.1
    GB). Passes that want the linears' `inputs` too, blocks with experts, and weights in float32, of which products keep
    casts, would take more than is counted here.
    """
    if sum(p.numel() for p in model.parameters()) < RECOMPUTE_ABOVE:
        return False
    in_float32 = next(model.parameters()).element_size() == 4
    if not gpu or inputs or in_float32 or any(isinstance(module, Experts) for module in model.modules()):
        return True
    graph = tokens_at_once(model, *windows, gpu=True, gradients=True) * bytes_of_a_token(model)
    return graph > MEMORY_OF_A_GRAPH * total_memory(torch.device("cuda"))
