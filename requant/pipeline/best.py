"""Mode `best`: matrices take their codes kind by kind, and in between, what is still float learns to mend the damage.

    for every round of kinds (q and k; v and o; gate and up; down):
        measure the round's statistics in the model as it now stands
        quantize its matrices, each at the width that the budget gives it (allocation.py)
        train all that is not code against the original (training/loop.py): open matrices, scales, norms, embedding
    train once more with all codes fixed (training/tuning.py)

On bench-32m at 2.03 bits (KL to the original, nats): codes alone 0.415; the same codes and trained scales 0.343; rounds
of one block each 0.302; widths by measured loss 0.289; steps three times as long and norms in place of input scales
0.277; rounds of kinds 0.269, in two thirds of the time; the embedding learning too 0.258. Rounds over blocks are from
Tseng et al. 2024 (QTIP, arXiv 2406.11235) after QuIP#, who train each block's own output; here the whole model's output
is the target, and a round holds one kind of matrix from every block, so that every layer can mend every other.
"""

from collections.abc import Sequence

from requant.calibration.statistics import collect
from requant.finetune.final import keep_others, original_model, split_windows
from requant.finetune.loop import (
    other_parameters,
    rate_of,
    reparametrized_weights,
    single_precision,
    train,
    trainable_tensors,
)
from requant.finetune.teacher import Teacher
from requant.formats.trainable import TrainableParams, trainable_params, with_trainable_params
from requant.models.targets import QuantTarget
from requant.quantizers.registry import METHODS
from requant.run.context import RunContext, Weights
from requant.run.quantize_linears import chunks_that_fit, gather, quantize_linears
from requant.run.stage_cache import load_stage, save_stage

ROUNDS = 4


def best(run: RunContext) -> Weights:
    """Codes of every matrix within the budget; without tuning steps they are those of mode `dense`."""
    if run.recipe.finetune.steps == 0:
        return quantize_linears(run, None, label="quantize")
    kept = load_stage(run, "rounds")
    if kept is None:
        kept = in_rounds(run, rounds_of(run.targets))
        save_stage(run, "rounds", kept)
    return kept


def rounds_of(targets: Sequence[QuantTarget]) -> list[list[QuantTarget]]:
    """Sites of at most ROUNDS rounds: the kinds of a block in the model's order, neighbours together."""
    kinds = list(dict.fromkeys(target.kind for target in targets))
    count = min(ROUNDS, len(kinds))
    each, more = divmod(len(kinds), count)
    rounds, start = [], 0
    for index in range(count):
        stop = start + each + (index < more)
        rounds.append([target for target in targets if target.kind in kinds[start:stop]])
        start = stop
    return rounds


def in_rounds(run: RunContext, rounds: Sequence[Sequence[QuantTarget]]) -> Weights:
    """Quantize and train round by round; the model is left at the originals, the others' learning in `run.others`."""
    settings, method = run.recipe.finetune, METHODS[run.recipe.method]
    windows, _ = split_windows(run, settings)
    teacher = Teacher(original_model(run), windows)
    finetuned_params, rate = other_parameters(run), rate_of(run, settings)
    before = {name: run.original_of(name, parameter) for name, parameter in finetuned_params.items()}
    weights: Weights = {}
    trainable: dict[str, TrainableParams] = {}
    with single_precision(run.model):
        for index, members in enumerate(rounds):
            for chunk in chunks_that_fit(run, members, method.needs):
                if index == 0:  # the originals, whose statistics the allocator may have left
                    statistics = gather(run, chunk, method.needs)
                else:
                    with run.stage("statistics"):
                        statistics = collect(run.model, run.windows, chunk, needs=method.needs)
                with run.stage("quantize"):
                    for target in chunk:
                        weights[target.name] = method.quantize(
                            target.weight(), statistics[target.name], run.config_of(target)
                        )
                        trainable[target.name] = trainable_params(weights[target.name])
            run.statistics.clear()
            still_open = [target for later in rounds[index + 1 :] for target in later]
            if still_open:
                with run.stage("tuning"):
                    trainables = trainable_tensors(
                        trainable, still_open, list(finetuned_params.values()), rate
                    )
                    derived = reparametrized_weights(run, weights, trainable)
                    label = f"round {index + 1}/{len(rounds)}"
                    train(run, teacher, trainables, derived, settings, label=label)
    keep_others(run, before)
    run.path({}).place(0.0)
    return {
        target.name: with_trainable_params(weights[target.name], trainable[target.name])
        for target in run.targets
    }
