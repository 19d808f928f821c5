"""The peak memory of a run over all its stages, from shapes: what the dry run reports about memory.

Training is added up in `finetune/memory.py`, a model larger than its GPU in `pipeline/preparation/hosting.py`.
"""

from typing import Any

import torch

from requant.calibration.collect import working_bytes
from requant.finetune.memory import fullest_phase, hosted_training_bytes, packed_bytes
from requant.inference.own_text import bytes_to_write
from requant.models.devices import total_memory
from requant.models.targets import QuantTarget
from requant.pipeline.planning.statistics import most_needs, most_statistics, statistics_memory
from requant.pipeline.planning.workload import count_gpus, of_fullest_rank, training_memory, windows_to_train
from requant.pipeline.preparation.outline import Outline
from requant.pipeline.preparation.prepare import Prepared
from requant.pipeline.preparation.shape_bytes import (
    bytes_on_host,
    hosted_bytes,
    largest_block,
    outside_bytes,
    score_bytes,
)
from requant.quantizers.method import Method, PruningMethod
from requant.quantizers.registry import find_method
from requant.recipe.schema import Recipe
from requant.run.decoded_once import keeps_floats
from requant.run.side_by_side import Batch, at_once, batched, bytes_of_largest

# Of a process on Linux, measured with the CPU build of torch 2.13
PROCESS_BYTES = 462 << 20  # that has imported what the command needs and loaded nothing
NUMBA_BYTES = 140 << 20  # that has compiled the search for trellis codes; 77 MiB where its loops are on disk
CHARACTER_BYTES = 135  # of a text that becomes tokens
CHARACTER_BYTES_KEPT = 88  # of them, by the C library, after it has become tokens


def expected_memory(prepared: Prepared | Outline, recipe: Recipe, device: str) -> int:
    """Model + the largest of {statistics, scores, evaluation, own text} + codes + originals (where they share memory).

    While a result is measured its floats are kept, if memory is ample (`run/decoded_once.py`).

    Mode `paper` holds a float32 score per weight; other modes add up the scores of one matrix at a time, in three tensors
    of its size. Evaluation copies everything outside the blocks, and on a CPU keeps the original's last hidden states.
    Codes take a byte per weight; once packed for the workspace, they are on the CPU. Corrected inputs take a copy of the
    model and, on a CPU, the hidden states of both. For a model larger than the GPU, only one block's floats count, and
    codes are on the host. Statistics are collected in as many passes as keep them below half of the free memory and leave
    room for a pass, and then for the working memory of coding a matrix: factors of Hessians, which count if layers are
    wide, of as many matrices as a GPU codes at once. Training is added up in `finetune/memory.py`. On a CPU the whole
    process counts: its programs, the code of numba's loops, logits and activations of a backward pass with the gaps between
    them (`statistics.py`), and what tokenizing the texts leaves behind, or takes if that is more. Each of several GPUs
    holds the statistics of its own matrices, in mode `paper` their scores, and what a batch contributes to all matrices,
    on its way to their owners.
    """
    memory = statistics_memory(prepared, recipe, device, most_needs(recipe))
    model, codes = memory.model, memory.codes
    own = 0
    if device == "cpu":
        own = hosted_bytes(prepared.targets) + packed_bytes(prepared.targets, recipe)
    method = find_method(recipe.method)
    collecting, coding = most_statistics(prepared, recipe, device)
    scores, outside = score_bytes(prepared.targets), outside_bytes(prepared.model, prepared.targets)
    if recipe.mode == "paper":
        scores = 4 * of_fullest_rank(prepared.targets, lambda target: target.size)
        scores += model if count_gpus(prepared) > 1 else 0
    embedding: Any = prepared.model.get_input_embeddings()
    evaluation = outside
    if device == "cpu":
        evaluation += (
            prepared.eval_windows.numel() * embedding.weight.shape[1] * embedding.weight.element_size()
        )
    if recipe.calibration.inputs == "corrected" and own:
        own += 8 * prepared.windows.numel() * embedding.weight.shape[1]
    written = 0
    if recipe.finetune.trains:
        length = prepared.train_windows.shape[1]
        written = bytes_to_write(prepared.model, prepared.own_windows, length, device=device)
    work = memory.work
    if device != "cpu" and method.side_by_side:
        work = _work_at_once(prepared, method, total_memory(torch.device(device)) - model - coding)
    weights = sum(target.size for target in prepared.targets)
    ample = keeps_floats(weights, total_memory(torch.device(device)), hosted=prepared.hosted)
    measured = max(scores, evaluation) + (4 * weights if ample else 0)
    at_work = codes + max(measured, written) + memory.batch
    stages = model + max(at_work, collecting + memory.batch, coding + work)
    if device != "cpu":
        return own + max(stages, _training_memory(prepared, recipe, device))
    stages = own + max(stages, _training_memory(prepared, recipe, device))
    characters = 0
    if isinstance(prepared, Prepared):
        characters = len(prepared.calibration.text) + len(prepared.evaluation.text)
    programs = PROCESS_BYTES + (NUMBA_BYTES if recipe.method == "trellis" else 0)
    return programs + max(CHARACTER_BYTES_KEPT * characters + stages, model + CHARACTER_BYTES * characters)


def _work_at_once(prepared: Prepared | Outline, method: Method | PruningMethod, free: int) -> int:
    """Bytes that matrices take while they are quantized side by side on a GPU, if those of one shape get the same bits."""

    def work(target: QuantTarget) -> int:
        return working_bytes(target, method.needs)

    batches: list[Batch] = [[target] for target in prepared.targets]
    if method.quantize_batch is not None:
        batches = batched(prepared.targets, lambda target: target.shape, work, free)
    return at_once(batches, work, free) * bytes_of_largest(batches, work)


def _training_memory(prepared: Prepared | Outline, recipe: Recipe, device: str) -> int:
    """Bytes of the fullest phase of training: one after every round of mode `best`, else one at the end."""
    if not recipe.finetune.trains:
        return 0
    return fullest_phase(training_memory(prepared, recipe, device), recipe)


def host_memory(prepared: Prepared | Outline, recipe: Recipe) -> int:
    """Bytes of the host beside the matrices of a hosted model, in the last training or, without one, at the end.

    Each process has all codes, the originals of what has no codes or is coded last (embedding and head), and the pinned
    memory into which the following block is read (`models/hosted.py`); training adds what it keeps there.
    """
    gpus = count_gpus(prepared)
    training = 0
    if recipe.finetune.trains:
        windows = windows_to_train(prepared)
        training = hosted_training_bytes(prepared.model, prepared.targets, recipe, windows, gpus=gpus)
    codes = sum(target.size for target in prepared.targets)
    outside = outside_bytes(prepared.model, prepared.targets)
    return gpus * (codes + outside + largest_block(prepared.targets)) + training


def on_host(prepared: Prepared | Outline) -> int:
    """Bytes of the host that the matrices of a hosted model take, of all processes."""
    folder = prepared.folder if isinstance(prepared, Outline) else prepared.source
    assert folder is not None  # a model that was given loaded stays where it is
    return bytes_on_host(prepared.targets, folder, gpus=count_gpus(prepared))
