"""The peak memory of a run over all its stages, from shapes: what the dry run reports about memory.

Training is added up in `finetune/memory.py`, a model larger than its GPU in `hosting.py`.
"""

from typing import Any

import torch

from requant.calibration.batches import bytes_of_logits, tokens_at_once, vocabulary_of
from requant.calibration.collect import bytes_needed
from requant.calibration.exchange import exchanged_bytes
from requant.calibration.experts import share_of_experts
from requant.calibration.passes import RECOMPUTE_ABOVE
from requant.finetune.memory import fullest_phase, hosted_training_bytes, packed_bytes
from requant.inference.own_text import bytes_to_write
from requant.models.devices import total_memory
from requant.pipeline.hosting import (
    block_statistics,
    hosted_bytes,
    largest_block,
    matrix_bytes,
    outside_bytes,
    parameter_bytes,
    work_bytes,
)
from requant.pipeline.prepare import Outline, Prepared
from requant.pipeline.schedule import count_gpus, goes_by_block, of_fullest_rank, windows_to_train
from requant.quantizers.registry import find_method
from requant.recipe.schema import Recipe
from requant.run.quantize_linears import by_block, statistics_budget

# Of a process on Linux, measured with the CPU build of torch 2.13
PROCESS_BYTES = 462 << 20  # that has imported what the command needs and loaded nothing
NUMBA_BYTES = 140 << 20  # that has compiled the search for trellis codes; 77 MiB where its loops are on disk
CHARACTER_BYTES = 135  # of a text that becomes tokens
CHARACTER_BYTES_KEPT = 88  # of them, by the C library, after it has become tokens
HEAP_FACTOR = (
    1.5  # what the C library holds for blocks that it does not map one by one, over what lives in them
)
MAPPED_BYTES = 32 << 20  # a block from which on it does
LOGIT_BYTES = 18  # at the beginning of a backward pass, four to five copies in float32


def expected_memory(prepared: Prepared | Outline, recipe: Recipe, device: str) -> int:
    """Model + the largest of {statistics, scores, evaluation, own text} + codes + originals (where they share memory).

    Mode `paper` holds a float32 score per weight; other modes add up the scores of one matrix at a time, in three tensors
    of its size. Evaluation copies everything outside the blocks, and on a CPU keeps the original's last hidden states.
    Codes take a byte per weight; once packed for the workspace, they are on the CPU. Corrected inputs take a copy of the
    model and, on a CPU, the hidden states of both. For a model larger than the GPU, only one block's floats count, and
    codes are on the host. Statistics are collected in as many passes as keep them below half of the free memory and leave
    room for a pass, and then for the working memory of coding a matrix: factors of Hessians, which count if layers are
    wide. Training is added up in `finetune/memory.py`. On a CPU the whole process counts: its programs, the code of
    numba's loops, logits and activations of a backward pass with the gaps between them (`_backward_bytes`), and what
    tokenizing the texts leaves behind, or takes if that is more. Each of several GPUs holds the statistics of its own
    matrices, in mode `paper` their scores, and what a batch contributes to all matrices, on its way to their owners.
    """
    weights = sum(target.size for target in prepared.targets)
    model, codes = parameter_bytes(prepared.model), weights
    outside = outside_bytes(prepared.model, prepared.targets)
    if prepared.hosted:
        model, codes = outside + largest_block(prepared.targets), 0
    own = 0
    if device == "cpu":
        own = hosted_bytes(prepared.targets) + packed_bytes(prepared.targets, recipe)
    needs = find_method(recipe.method).needs
    statistics = of_fullest_rank(prepared.targets, lambda target: bytes_needed(target, needs))
    scores = matrix_bytes(prepared.targets)
    if recipe.mode == "paper":
        scores = 4 * of_fullest_rank(prepared.targets, lambda target: target.size)
        scores += model if count_gpus(prepared) > 1 else 0
    embedding: Any = prepared.model.get_input_embeddings()
    evaluation = outside
    if device == "cpu":
        evaluation += (
            prepared.eval_windows.numel() * embedding.weight.shape[1] * embedding.weight.element_size()
        )
    logits = bytes_of_logits(prepared.model, *prepared.windows.shape)
    activations = logits if device != "cpu" else _backward_bytes(prepared)
    if recipe.calibration.inputs == "corrected":
        model *= 2
        own += 8 * prepared.windows.numel() * embedding.weight.shape[1] if own else 0
    block = block_statistics(prepared.targets, needs)
    work = work_bytes(prepared.targets, needs)
    if count_gpus(prepared) > 1:
        tokens = tokens_at_once(prepared.model, *prepared.windows.shape, gpu=device != "cpu")
        given = exchanged_bytes(
            prepared.model, prepared.targets, tokens, needs, kind=device, by_block=prepared.hosted
        )
        activations = max(activations, given)  # it is sent when the logits are gone
    beside = work if device == "cpu" else max(work, activations)
    free = total_memory(torch.device(device)) - model - codes
    statistics = min(statistics, max(block, round(statistics_budget(free, beside))))
    written = 0
    if recipe.finetune.trains:
        length = prepared.train_windows.shape[1]
        written = bytes_to_write(prepared.model, prepared.own_windows, length, device=device)
    stages = (
        model + codes + max(max(scores, statistics, evaluation, written) + activations, statistics + work)
    )
    if device != "cpu":
        return own + max(stages, _training_memory(prepared, recipe, device))
    stages = own + max(stages, _training_memory(prepared, recipe, device))
    characters = 0
    if isinstance(prepared, Prepared):
        characters = len(prepared.calibration.text) + len(prepared.evaluation.text)
    programs = PROCESS_BYTES + (NUMBA_BYTES if recipe.method == "trellis" else 0)
    return programs + max(CHARACTER_BYTES_KEPT * characters + stages, model + CHARACTER_BYTES * characters)


def _backward_bytes(prepared: Prepared | Outline) -> int:
    """Logits, inputs and outputs of every linear for a batch of a CPU, float32; of one block where blocks are recomputed.

    Most of these are small blocks, made and freed in turn, between which gaps remain.
    """
    tokens = tokens_at_once(prepared.model, *prepared.windows.shape, gpu=False)
    vocabulary = vocabulary_of(prepared.model)
    share = share_of_experts(prepared.model, prepared.targets)
    floats = [
        sum(sum(target.shape) * (1 if target.experts is None else share) for target in members)
        for members in by_block(prepared.targets)
    ]
    parameters = sum(p.numel() for p in prepared.model.parameters())
    activations = 4 * tokens * (max(floats) if parameters >= RECOMPUTE_ABOVE else sum(floats))
    logits = LOGIT_BYTES * tokens * vocabulary
    if 4 * tokens * vocabulary <= MAPPED_BYTES:
        logits *= HEAP_FACTOR
    return round(logits + HEAP_FACTOR * activations)


def _training_memory(prepared: Prepared | Outline, recipe: Recipe, device: str) -> int:
    """Of the fullest phase: one after every round of mode `best`, else one at the end."""
    if not recipe.finetune.trains:
        return 0
    return fullest_phase(
        prepared.model,
        prepared.targets,
        recipe,
        windows_to_train(prepared),
        by_block=goes_by_block(prepared, recipe, device),
        gpu=device == "cuda",
        device_memory=total_memory(torch.device(device)),
        gpus=count_gpus(prepared),
        hosted=prepared.hosted,
    )


def host_memory(prepared: Prepared | Outline, recipe: Recipe) -> int:
    """Bytes of the host beside the matrices of a hosted model: its codes, and what training keeps there."""
    gpus = count_gpus(prepared)
    training = 0
    if recipe.finetune.trains:
        windows = windows_to_train(prepared)
        training = hosted_training_bytes(prepared.model, prepared.targets, recipe, windows, gpus=gpus)
    return gpus * sum(target.size for target in prepared.targets) + training
