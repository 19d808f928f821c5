"""The last finetuning phase: with all codes fixed, train every float to bring the outputs back to the original's.

Trained are the floats stored with the codes (scales of a grid, levels of a codebook, output scales of a trellis, sparse
residuals), also those of embedding and head if they are quantized, and the parameters without codes (norms, biases, and
otherwise embedding and head, but no token tables), by the KL divergence to the original (`loop.py`). Codes are fixed, so the
checkpoint takes the same bytes. A trellis stores only signs on its input side, for which the norms compensate at no cost: KL
0.301 at 2.028 bits, where both scale vectors give 0.302 at 2.051 (bench-32m). Every `eval_every` steps the KL on the
validation windows is measured, and the best values are restored at the end: on those windows the finetuned model is never
worse than the one it started from.

This is the end-to-end tuning of AQLM and QTIP (Egiazarian et al. 2024, arXiv 2401.06118; Tseng et al. 2024, arXiv
2406.11235), reduced to what a short run on little text allows.
"""

import copy
import logging
from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.allocation.embedding_and_head import QuantizedEmbeddingAndHead
from requant.checkpoint.save import disk_dtypes
from requant.errors import RecipeError
from requant.finetune.loop import single_precision, train
from requant.finetune.memory import FITS, TrainingMemory
from requant.finetune.reparametrized import reparametrized_tables, reparametrized_weights
from requant.finetune.saved_training import SavedTraining
from requant.finetune.step import TrainableTensor
from requant.finetune.teacher import (
    HeadTeacher,
    StateCache,
    Teacher,
    states_on_host,
    why_states_do_not_suffice,
)
from requant.finetune.trainables import EMBEDDING_LR, learning_rate, params_without_codes, trainable_tensors
from requant.formats.contract import TrainableParams
from requant.formats.quantized_weight import (
    QuantizedWeight,
    pack,
    trainable_params,
    with_trainable_params,
)
from requant.models.devices import total_memory
from requant.models.targets import QuantTarget
from requant.recipe.schema import Finetune
from requant.run.context import RunContext, Weights

BLOCKWISE_FROM = 2_500_000_000  # parameters; training them as a whole takes more than most GPUs have
logger = logging.getLogger(__name__)


def finetune(
    run: RunContext,
    weights: Weights,
    settings: Finetune,
    embedding_and_head: QuantizedEmbeddingAndHead | None = None,
) -> Weights:
    """The weights with finetuned floats, those of embedding and head among them where they are given, and token tables as
    they are: those take part with their codes, and do not learn.

    The parameters without codes go into `run.finetuned_params`. The model is left at the originals. Raises RecipeError for
    fewer than two calibration windows.
    """
    tables = {} if embedding_and_head is None else embedding_and_head.weights
    learning = {} if embedding_and_head is None else embedding_and_head.learning
    train_windows, val_windows = split_windows(run, settings)
    teacher = teacher_of(run, settings, train_windows, val_windows)
    run.apply_finetuned_params()  # training writes the matrices
    if embedding_and_head is not None:
        embedding_and_head.apply_weights(quantized=True, learning=False)
    devices = {target.name: target.device for target in run.targets}  # codes of hosted matrices are elsewhere
    trainable = {
        name: {field: value.to(devices[name]) for field, value in trainable_params(weight).items()}
        for name, weight in weights.items()
    }
    table_params = {name: trainable_params(table) for name, table in learning.items()}
    other_params = params_without_codes(run, tables)
    before = {name: run.original_param(name, p) for name, p in other_params.items()}
    with single_precision(params_in_single_precision(run.model, teacher)):
        lr = learning_rate(run, settings)
        trainables = trainable_tensors(trainable, (), list(other_params.values()), lr)
        trainables += [
            TrainableTensor(tensor=value, lr=lr * EMBEDDING_LR)
            for params in table_params.values()
            for value in params.values()
        ]
        derived = reparametrized_weights(run, weights, trainable)
        if embedding_and_head is not None:
            derived += reparametrized_tables(embedding_and_head, table_params)
        saved = SavedTraining.of(run, "finetuned")
        train(run, teacher, trainables, derived, settings, saved=saved, val_windows=val_windows)
    save_finetuned_params(run, before)
    run.apply_original_weights()
    if embedding_and_head is not None:
        embedding_and_head.apply_weights(quantized=False)
    return {
        target.name: trained(target, weights[target.name], trainable[target.name]) for target in run.targets
    } | {
        name: with_trainable_params(table, table_params[name]) if name in learning else table
        for name, table in tables.items()
    }


def trained(target: QuantTarget, weight: QuantizedWeight, params: TrainableParams) -> QuantizedWeight:
    """A matrix with its trained floats, where its codes are kept; a hosted one is packed before, faster on a GPU."""
    found = with_trainable_params(weight.to(target.device), params)
    if target.hosted is None:
        return found
    pack(found)
    return found.to(target.codes_device)


def original_model(run: RunContext) -> PreTrainedModel:
    """A frozen copy of the original."""
    run.apply_original_weights()
    return copy.deepcopy(run.model)


def teacher_of(
    run: RunContext,
    settings: Finetune,
    train_windows: Int64[Tensor, "b t"],
    val_windows: Int64[Tensor, "h t"] | None = None,
) -> Teacher | HeadTeacher:
    """What the run learns from: the original, or its head and states where it learns block by block.

    The windows are the first of `run.train_windows`, the validation windows those after them (`split_windows`). The first
    call computes the states of all, `run.last_states`; of a model that is trained as a whole, steps compute those that they
    need, and leave them to the next training, `run.state_caches`.
    """
    device, (count, length) = run.model.device, run.train_windows.shape
    # of the smallest GPU: all ranks train in the same way
    memory = ranks.smallest(total_memory(device)) if device.type == "cuda" else None
    if trains_by_block(run.model, run.targets, settings, (count, length), device_memory=memory):
        run.apply_original_weights()
        devices = {p.device for p in run.model.parameters()}
        reason = (
            "it lies on several devices"
            if len(devices) > 1
            else why_states_do_not_suffice(run.model, train_windows[:1].to(run.model.device))
        )
        if reason is None:
            if not run.last_states:
                label = run.label("the original's states")
                run.last_states.append(states_on_host(run.model, run.train_windows, label=label))
            return HeadTeacher(run.model, train_windows, val_windows, states=run.last_states[0])
        logger.warning("the model is not trained block by block, and takes more memory: %s", reason)
    teacher = Teacher(original_model(run), train_windows, _earlier_cache(run, train_windows))
    run.state_caches.append(teacher.cache)
    return teacher


def _earlier_cache(run: RunContext, train_windows: Int64[Tensor, "b t"]) -> StateCache | None:
    """States that an earlier training left of the same windows, if all ranks have some."""
    cache = run.state_caches.pop() if run.state_caches else None
    there = cache is not None and cache.states is not None and torch.equal(cache.windows, train_windows)
    return cache if ranks.all_agree(there) else None


def trains_by_block(
    model: PreTrainedModel,
    targets: Sequence[QuantTarget],
    settings: Finetune,
    windows: tuple[int, int],
    *,
    device_memory: int | None,
) -> bool:
    """Whether training goes block by block (`blockwise.py`), as the recipe says; else from BLOCKWISE_FROM parameters on, and
    where training as a whole would not fit a GPU of so many bytes (None: there is none).

    `windows` are those of training, and the estimate that of no codes yet, so that all phases of a run answer alike.
    """
    if settings.blockwise is not None:
        return settings.blockwise
    if sum(p.numel() for p in model.parameters()) >= BLOCKWISE_FROM:
        return True
    if device_memory is None:
        return False
    whole = TrainingMemory(
        model=model,
        targets=targets,
        settings=settings,
        windows=windows,
        by_block=False,
        gpu=True,
        device_memory=device_memory,
    )
    return whole.bytes_of_phase((), at_least=True) > FITS * device_memory


def params_in_single_precision(model: PreTrainedModel, teacher: Teacher | HeadTeacher) -> list[Tensor]:
    """What is float32 from the first training to the last: all parameters, or none where training goes block by block."""
    return [] if isinstance(teacher, HeadTeacher) else list(model.parameters())


def split_windows(run: RunContext, settings: Finetune) -> tuple[Int64[Tensor, "b t"], Int64[Tensor, "h t"]]:
    """Training and validation windows. Raises RecipeError for fewer than two in all."""
    windows = run.train_windows
    if len(windows) < 2:
        raise RecipeError("finetuning needs at least 2 calibration windows; raise --num-samples.")
    held_out = min(settings.val_windows, max(1, len(windows) // 8))
    return windows[:-held_out], windows[-held_out:]


@torch.no_grad()
def save_finetuned_params(run: RunContext, originals: dict[str, Tensor]) -> None:
    """Put the finetuned parameters without codes, rounded to the dtype of their files, into the run with `originals`."""
    dtypes = disk_dtypes(run.model, run.source)
    for name, parameter in run.model.named_parameters():
        if name in originals:
            stored = dtypes.get(parameter.data_ptr(), parameter.dtype)
            finetuned = parameter.detach().to(stored).to(parameter.dtype)
            run.finetuned_params[name] = (originals[name], finetuned.to("cpu", copy=True))
