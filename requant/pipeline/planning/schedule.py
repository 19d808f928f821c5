"""The stages of a run in order, each with the seconds that it is expected to take (`costs.py`).

`progress.py` shows the stages of a running run under these names: whatever `enter` is called with must be listed here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from requant.allocation.budget import has_budget
from requant.allocation.embedding_and_head import TOKENS, embedding_and_head_of, table_method
from requant.allocation.predictors import MEASURED_TOKENS, PQI_TOKENS
from requant.evaluation.diagnosis import DIAGNOSED_TOKENS, KIND_TOKENS_ON_CPU, KIND_WEIGHTS_ON_CPU
from requant.models.targets import QuantTarget, by_kind_in_block
from requant.pipeline.planning.costs import Costs
from requant.pipeline.planning.rates import PREDICTION_SECONDS
from requant.pipeline.planning.workload import count_gpus, of_fullest_rank
from requant.pipeline.preparation.outline import Outline
from requant.pipeline.preparation.prepare import Prepared
from requant.progress import Stage
from requant.quantizers.table_trellis import WEIGHTS_AT_ONCE
from requant.recipe.schema import Recipe
from requant.run.rounds import round_name, rounds_of


def expected_stages(prepared: Prepared | Outline, recipe: Recipe, device: str) -> list[Stage]:
    """The stages of a run on devices of a type; loading and writing files are not counted."""
    return list(_stages(prepared, recipe, device))


def expected_seconds(prepared: Prepared | Outline, recipe: Recipe, device: str) -> float:
    """Wall time of a run on devices of a type."""
    return sum(stage.seconds for stage in _stages(prepared, recipe, device))


def _stages(prepared: Prepared | Outline, recipe: Recipe, device: str) -> Iterator[Stage]:
    costs = Costs(prepared, recipe, device)
    if has_budget(recipe):
        yield _allocation(costs)
    if recipe.finetune.trains and prepared.own_windows:
        yield Stage(name="own text", kind="own text", seconds=costs.own_text())
    if recipe.trains_in_rounds:
        yield from _rounds(costs)
    else:
        yield _codes(costs, "codes", prepared.targets, kept=costs.kept)
    if recipe.mode == "paper":
        yield from _sparse_part(costs)
    if recipe.mode == "sparse" and costs.steps:
        steps = costs.training(prepared.targets, by_block=False)
        yield Stage(name="recovery", kind="training", seconds=steps)
    yield _embedding_and_head(costs)
    if recipe.mode != "sparse" and costs.steps:
        states = 0.0 if _rounds_leave_states(costs) else costs.states()
        steps = costs.training((), by_block=costs.by_block)
        yield Stage(name="fine-tuning", kind="training", seconds=steps + states + costs.compiling())
    yield _diagnosis(costs)
    yield _evaluation(costs)
    yield Stage(name="samples", kind="samples", seconds=0.0, bars=0)


def _allocation(costs: Costs) -> Stage:
    all_codes = costs.codes(costs.prepared.targets)
    each = all_codes + len(costs.prepared.targets) * costs.forward(MEASURED_TOKENS)
    predicted = of_fullest_rank(costs.prepared.targets, lambda target: target.size) / costs.threads
    predicted *= PREDICTION_SECONDS[costs.device] if "output_hessian" in costs.method.predictor_needs else 0.0
    # embedding and head: the same batches on every GPU
    predicted += count_gpus(costs.prepared) * costs.backward(min(costs.windows, TOKENS), of_weights=False)
    predictor = {
        "curvature": 0.0,
        "measured": each,
        "restored": each,
        "pqi": all_codes + costs.nodes * costs.backward(min(costs.windows, PQI_TOKENS)),
    }
    more = predictor[costs.recipe.budget.predictor]
    seconds = costs.allocation_statistics() + predicted + more
    return Stage(name="allocation", kind="statistics", seconds=seconds, bars=0)


def _codes(costs: Costs, name: str, targets: Sequence[QuantTarget], *, kept: bool, coded: int = 0) -> Stage:
    """Making codes, and statistics unless these are `kept`; so many other weights are `coded` already."""
    seconds = costs.codes(targets) + (0.0 if kept else costs.statistics(targets, coded=coded))
    return Stage(name=name, kind="codes", seconds=seconds)


def _rounds(costs: Costs) -> Iterator[Stage]:
    """The rounds of mode `best`; the training after the last one is a stage of its own."""
    targets = costs.prepared.targets
    rounds = rounds_of(targets, costs.recipe.finetune.rounds)
    coded = 0
    for index, members in enumerate(rounds):
        uncoded = [target for later in rounds[index + 1 :] for target in later]
        name = round_name(index, len(rounds))
        states = 0.0 if index else costs.states()
        codes = _codes(costs, f"{name}, codes", members, kept=costs.kept and not index, coded=coded)
        yield replace(codes, seconds=codes.seconds + (states if costs.by_block else 0.0))
        if index + 1 < len(rounds):
            steps = costs.training(uncoded, by_block=costs.by_block)
            first = (0.0 if costs.by_block else states) + (0.0 if index else costs.compiling())
            yield Stage(name=f"{name}, training", kind="training", seconds=steps + first)
        coded += sum(target.size for target in members)


def _rounds_leave_states(costs: Costs) -> bool:
    """Whether the last training finds them: block by block they are there before the first round's codes, else after its
    training, which a single round has not."""
    targets, count = costs.prepared.targets, costs.recipe.finetune.rounds
    return costs.recipe.trains_in_rounds and (costs.by_block or len(rounds_of(targets, count)) > 1)


def _sparse_part(costs: Costs) -> Iterator[Stage]:
    """The sparse part of mode `paper`: outliers and significant weights."""
    detach, passes = costs.recipe.detach, costs.nodes if costs.recipe.sensitivity.score == "pqi" else 1
    scored = costs.backward(costs.windows) * passes
    if detach.outlier_fraction:
        adaptive = detach.outlier_rule == "adaptive"
        again = costs.codes(costs.prepared.targets)
        inputs = costs.recipe.calibration.inputs
        again += costs.input_passes(costs.method.needs, inputs) if inputs != "original" else 0.0
        trials = len(detach.temperatures) * (again + costs.forward(costs.windows))
        seconds = scored + trials if adaptive else 0.0
        yield Stage(name="outliers", kind="outliers", seconds=seconds, bars=0)
        yield Stage(name="codes again", kind="codes", seconds=0.0 if adaptive else again)
    if detach.significant_fraction:
        seconds, bars = detach.steps * scored, detach.steps * passes
        yield Stage(name="significant weights", kind="scores", seconds=seconds, bars=bars)


def _embedding_and_head(costs: Costs) -> Stage:
    tables = embedding_and_head_of(costs.prepared.model).parts.values()
    sizes, gpus = [part.weight.numel() for part in tables], count_gpus(costs.prepared)
    if costs.recipe.method == "trellis":  # several GPUs code pieces of one table
        sizes = [size // min(gpus, ceil(size / WEIGHTS_AT_ONCE)) for size in sizes]
    weights = sum(sizes)
    coded = has_budget(costs.recipe)
    per_weight = table_method(costs.recipe).seconds_per_weight[costs.device] if coded else 0.0
    seconds = weights * per_weight / costs.threads
    return Stage(name="embedding and head", kind="tables", seconds=seconds, bars=0)


def _diagnosis(costs: Costs) -> Stage:
    targets, hosted = costs.prepared.targets, costs.prepared.hosted
    diagnosed = min(costs.windows, DIAGNOSED_TOKENS)
    kinds, by_kind = len(by_kind_in_block(targets)), 0.0
    if costs.device == "cuda" and not hosted:
        by_kind = kinds * costs.forward(diagnosed)
    elif costs.device == "cpu" and sum(target.size for target in targets) <= KIND_WEIGHTS_ON_CPU:
        by_kind = kinds * costs.forward(min(costs.windows, KIND_TOKENS_ON_CPU))
    blocks = 0 if hosted else len({target.block for target in targets})
    passes = (2 + costs.nodes) * costs.backward(diagnosed) + (2 + blocks) * costs.forward(diagnosed)
    if costs.recipe.finetune.trains:  # PQI of what was trained beside codes: all batches on every GPU
        whole = costs.nodes * costs.backward(diagnosed, of_weights=False)
        passes += count_gpus(costs.prepared) * whole
    return Stage(
        name="diagnosis",
        kind="diagnosis",
        seconds=passes + by_kind + costs.decoding(costs.decodings_of_diagnosis()),
        bars=0,
    )


def _evaluation(costs: Costs) -> Stage:
    seconds = 2 * costs.forward(costs.prepared.eval_windows.numel()) + costs.decoding(not costs.keeps_floats)
    return Stage(name="evaluation", kind="evaluation", seconds=seconds)
