"""Mode `best`: quantize the matrices in rounds, kind by kind, and after each round train everything that is still float.

    for every round of kinds (q and k; v and o; gate and up; down):
        collect the round's statistics in the model as it now is
        quantize its matrices, each at the bits that the budget gives it (allocation/budget.py)
        train all that is not a code to match the original's outputs (finetune/loop.py): the matrices that are not
            quantized yet, scales and levels of those that are, norms, biases, embedding, head
    quantize embedding and head (allocation/embedding_and_head.py)
    train once more with all codes fixed (finetune/final.py)

On bench-32m at 2.03 bits (KL to the original, nats): codes alone 0.415; the same codes and trained scales 0.343; rounds
of one block each 0.302; bits by measured loss 0.289; a learning rate three times as large and norms in place of input
scales 0.277; rounds of kinds 0.269, in two thirds of the time; training the embedding too 0.258. Rounds over blocks are
from QuIP# and QTIP (Tseng et al. 2024, arXiv 2402.04396 and 2406.11235), who train each block to match its own output.
We deviate: the target is the whole model's output, and a round holds one kind of matrix from every block, so that every
layer can compensate the errors of every other. With more than four `finetune.rounds` the largest are halved by blocks,
so that the second half, matrices of the same kind, can compensate the errors of the first: six rounds, the default, lower
the KL by 1.6 to 2.4 % at 2 to 4 bits for the same total number of steps. Rounds match the last hidden states as well as the
outputs (`finetune.hidden_weight`), which tells matrices without codes more than the next tokens of a short text do: the KL
falls by 4.0, 4.3 and 5.8 % at 2, 3 and 4 bits, in the same time. The last training has few numbers to learn, and did as well
or better with the KL divergence alone (demo-4m).
"""

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from requant import progress, ranks
from requant.calibration.collect import collect
from requant.calibration.stats import LinearStats
from requant.finetune.final import (
    params_in_single_precision,
    save_finetuned_params,
    split_windows,
    teacher_of,
)
from requant.finetune.loop import single_precision, train
from requant.finetune.memory import exhaustion_explained
from requant.finetune.reparametrized import reparametrized_weights
from requant.finetune.saved_training import SavedTraining
from requant.finetune.teacher import HeadTeacher, Teacher
from requant.finetune.trainables import learning_rate, params_without_codes, trainable_tensors
from requant.formats.contract import TrainableParams
from requant.formats.quantized_weight import QuantizedWeight, trainable_params, with_trainable_params
from requant.models.targets import QuantTarget
from requant.quantizers.registry import METHODS
from requant.run.context import RunContext, Weights
from requant.run.quantize_linears import compile_ahead, make_codes, quantize_linears
from requant.run.rounds import round_name, rounds_of
from requant.run.side_by_side import Batch
from requant.run.stage_cache import load_stage, load_weights, save_stage, stage_key
from requant.run.statistics import chunks_that_fit, gather, release
from requant.run.workspace import digest

logger = logging.getLogger(__name__)


def best(run: RunContext, rounds: Sequence[Sequence[QuantTarget]] | None = None) -> Weights:
    """Codes of every matrix within the budget, and floats trained round by round, by default in the recipe's `rounds`.

    The model is left at the originals, `run.finetuned_params` is filled. Without finetuning steps, or without rounds, codes
    are those of mode `dense`.
    """
    if not run.recipe.trains_in_rounds:
        progress.enter("codes")
        return quantize_linears(run, None, label="quantize")
    finished = load_stage(run, "rounds")
    if finished is not None:
        return finished
    rounds = rounds or rounds_of(run.targets, run.recipe.finetune.rounds)
    settings = run.recipe.finetune
    compile_ahead(run, run.targets, wait=False)
    train_windows, _ = split_windows(run, settings)
    progress.enter(f"{round_name(0, len(rounds))}, codes")  # which waits for the original's states
    teacher = teacher_of(run, settings, train_windows)
    other_params = params_without_codes(run)
    before = {name: run.original_param(name, parameter) for name, parameter in other_params.items()}
    saved = SavedTraining.of(run, "rounds")
    if saved.found is not None:
        coded = [target for members in rounds[: saved.found.value["round"] + 1] for target in members]
        if len(stored_codes(run, coded)[1]) < len(coded):
            logger.warning("codes that belong to the saved state of training are gone; it begins anew")
            saved.found = None
    weights: Weights = {}
    trainable: dict[str, TrainableParams] = {}
    with single_precision(params_in_single_precision(run.model, teacher)):
        for index, members in enumerate(rounds):
            name, saved.round = round_name(index, len(rounds)), index
            if index:
                progress.enter(f"{name}, codes")
            weights |= codes_of_round(run, members, first=index == 0)
            trainable |= {target.name: trainable_params(weights[target.name]) for target in members}
            run.statistics.clear()
            unquantized = [target for later in rounds[index + 1 :] for target in later]
            if unquantized and not saved.round_is_over:
                progress.enter(f"{name}, training")
                _train_round(
                    run, teacher, weights, trainable, unquantized, list(other_params.values()), saved=saved
                )
    save_finetuned_params(run, before)
    run.apply_original_weights()
    weights = {
        target.name: with_trainable_params(weights[target.name], trainable[target.name])
        for target in run.targets
    }
    save_stage(run, "rounds", weights)
    return weights


def stored_codes(run: RunContext, members: Sequence[QuantTarget]) -> tuple[Mapping[str, str], Weights]:
    """The keys of the matrices' codes, and those codes that an earlier run left."""
    base = stage_key(run, "codes")
    keys = {target.name: digest(base, target.name) for target in members}
    return keys, load_weights(run, "codes", keys, {target.name: target.codes_device for target in members})


def codes_of_round(run: RunContext, members: Sequence[QuantTarget], *, first: bool) -> Weights:
    """Codes of the matrices in the model as it now is, from the workspace where an earlier run made them."""
    method = METHODS[run.recipe.method]
    keys, weights = stored_codes(run, members)
    pending = [target for target in members if target.name not in weights]
    own, left = len(ranks.owned(members)), len(ranks.owned(pending))
    with progress.counted(own, label=run.label("codes"), unit="matrices", done=own - left) as bar:
        for chunk in chunks_that_fit(run, pending, method.needs):
            if first:  # nothing is quantized yet; the allocator may have collected these already
                statistics = gather(run, chunk, method.needs)
            else:
                with run.stage("statistics"):
                    statistics = collect(
                        run.model,
                        run.windows,
                        chunk,
                        needs=method.needs,
                        all_experts=run.recipe.calibration.all_experts,
                        label=run.label("statistics"),
                    )

            def quantize(
                batch: Batch, stats: Mapping[str, LinearStats] = statistics
            ) -> Sequence[QuantizedWeight]:
                config, own = run.config_of(batch[0]), [stats[target.name] for target in batch]
                if method.quantize_batch is not None and len(batch) > 1:
                    return method.quantize_batch([target.weight() for target in batch], own, config)
                return [method.quantize(batch[0].weight(), own[0], config)]

            weights |= make_codes(run, chunk, quantize, stage="codes", keys=keys, bar=bar)
            release(run, statistics)
    return weights


def _train_round(
    run: RunContext,
    teacher: Teacher | HeadTeacher,
    weights: Weights,
    trainable: Mapping[str, TrainableParams],
    unquantized: Sequence[QuantTarget],
    other_params: Sequence[nn.Parameter],
    *,
    saved: SavedTraining,
) -> None:
    """Train what is not a code after a round: matrices of later rounds, scales and levels of `weights`, other parameters."""
    settings = run.recipe.finetune
    with run.stage("finetuning"), exhaustion_explained(in_rounds=True):
        trainables = trainable_tensors(trainable, unquantized, other_params, learning_rate(run, settings))
        derived = reparametrized_weights(run, weights, trainable)
        train(run, teacher, trainables, derived, settings, saved=saved, hidden_weight=settings.hidden_weight)
