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
from requant.finetune.loop import derived_of, leaves_of, other_parameters, rate_of, single_precision, train
from requant.finetune.teacher import Teacher
from requant.formats.trainable import Theta, learnable, with_theta
from requant.models.targets import LinearSite
from requant.quantizers.registry import METHODS
from requant.run.context import Run, Weights
from requant.run.quantize_linears import chunks_that_fit, gather, quantize_linears
from requant.run.stage_cache import keep_outcome, kept_outcome

ROUNDS = 4


def best(run: Run) -> Weights:
    """Codes of every matrix within the budget; without tuning steps they are those of mode `dense`."""
    if run.recipe.tuning.steps == 0:
        return quantize_linears(run, None, label="quantize")
    kept = kept_outcome(run, "rounds")
    if kept is None:
        kept = in_rounds(run, rounds_of(run.sites))
        keep_outcome(run, "rounds", kept)
    return kept


def rounds_of(sites: Sequence[LinearSite]) -> list[list[LinearSite]]:
    """Sites of at most ROUNDS rounds: the kinds of a block in the model's order, neighbours together."""
    kinds = list(dict.fromkeys(site.kind for site in sites))
    count = min(ROUNDS, len(kinds))
    each, more = divmod(len(kinds), count)
    rounds, start = [], 0
    for index in range(count):
        stop = start + each + (index < more)
        rounds.append([site for site in sites if site.kind in kinds[start:stop]])
        start = stop
    return rounds


def in_rounds(run: Run, rounds: Sequence[Sequence[LinearSite]]) -> Weights:
    """Quantize and train round by round; the model is left at the originals, the others' learning in `run.others`."""
    settings, method = run.recipe.tuning, METHODS[run.recipe.method]
    windows, _ = split_windows(run, settings)
    teacher = Teacher(original_model(run), windows)
    others, rate = other_parameters(run), rate_of(run, settings)
    before = {name: run.original_of(name, parameter) for name, parameter in others.items()}
    weights: Weights = {}
    thetas: dict[str, Theta] = {}
    with single_precision(run.model):
        for index, members in enumerate(rounds):
            for chunk in chunks_that_fit(run, members, method.needs):
                if index == 0:  # the originals, whose statistics the allocator may have left
                    statistics = gather(run, chunk, method.needs)
                else:
                    with run.stage("statistics"):
                        statistics = collect(run.model, run.windows, chunk, needs=method.needs)
                with run.stage("quantize"):
                    for site in chunk:
                        weights[site.name] = method.quantize(
                            site.weight(), statistics[site.name], run.config_of(site)
                        )
                        thetas[site.name] = learnable(weights[site.name])
            run.statistics.clear()
            still_open = [site for later in rounds[index + 1 :] for site in later]
            if still_open:
                with run.stage("tuning"):
                    leaves = leaves_of(thetas, still_open, list(others.values()), rate)
                    derived = derived_of(run, weights, thetas)
                    label = f"round {index + 1}/{len(rounds)}"
                    train(run, teacher, leaves, derived, settings, label=label)
    keep_others(run, before)
    run.path({}).place(0.0)
    return {site.name: with_theta(weights[site.name], thetas[site.name]) for site in run.sites}
