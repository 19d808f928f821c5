"""From a byte budget to the bits of every matrix, of the embedding and of the head.

    bits    everything stored for the quantized matrices, at most `bits * weights / 8` bytes; embedding and head get the
            fewest bits that add at most EMBEDDING_AND_HEAD_LOSS to the predicted loss
    size    the whole weight files: matrices, embedding, head, norms, headers, split by the same knapsack

Measured in bytes of the file, embedding and head seldom deserve the bits at which they lose only 1 %: a byte spent there
saves less loss than a byte spent on the matrices. Since `bits` is a promise about the matrices, the better split is not
used, but it is reported (`Allocation.best_split`).

`sizes.py` counts the bytes, `predictors.py` predicts the loss at each bit width, and `knapsack.py` minimizes the sum of the
losses, weighted by round in mode `best`. A run without a budget gives every matrix codes of the recipe's bits
(`quantizer.bits`), and what is stored besides codes comes on top.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from requant import ranks
from requant.allocation.embedding_and_head import (
    EmbeddingAndHead,
    embedding_and_head_bits,
    embedding_and_head_losses,
    embedding_and_head_of,
    part_sizes,
    table_method,
)
from requant.allocation.knapsack import TOLERANCE, Option, allocate, allocate_with_curve
from requant.allocation.predictors import outlier_factors, predicted_losses
from requant.allocation.sizes import (
    available_bits,
    matrix_sizes,
    overhead_bytes,
    packed_spec,
    sparse_bytes,
    sparse_header,
)
from requant.errors import RecipeError
from requant.models.targets import QuantTarget
from requant.quantizers.method import Bits
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Recipe
from requant.run.context import Allocation, RunContext, Split
from requant.run.rounds import first_round_weight, round_weights
from requant.run.workspace import digest

MAX_BITS_WITH_OUTLIERS = 4  # finer codes leave outliers too little to save
# of the matrices' predicted loss: what embedding and head may add where `bits` leaves them free
EMBEDDING_AND_HEAD_LOSS = 0.01
# What the loss of embedding and head counts beside those of matrices in mode `best`, whose training leaves 0.61, 0.73 and
# 0.77 of the KL of 2, 3 and 4 bits (bench-32m): by the inverse at 3 and 4 bits, while at 2 the matrices' own weights say so.
TABLE_WEIGHT = 1.3
# bits of embedding and head beyond those of the matrices, where nothing is measured: 2.75, 3 and 3 in files of 2, 3 and 4
# bits of bench-32m, 3 in that of 3 bits of demo-4m
USUALLY_MORE = 3
CLEARLY_LESS = 0.9  # of the predicted loss: what another split of the file has to reach to be worth a line


def allocate_bits(run: RunContext) -> Allocation:
    """The bits of every matrix, and of embedding and head, under the recipe's budget.

    A run that has an allocation already keeps it. Raises RecipeError, with the bytes that can be reached, for a budget that
    cannot be met.
    """
    if run.allocation is not None:
        return run.allocation
    recipe, target_bits = run.recipe, run.recipe.budget.bits
    embedding_and_head = embedding_and_head_of(run.model)
    part_bits = embedding_and_head_bits(recipe, embedding_and_head)
    if not has_budget(recipe):
        return uniform(recipe, run.targets, part_bits)
    budget = _budget_of(run, embedding_and_head, part_bits)
    check_reachable(run, budget.sizes, budget.bytes, budget.fixed)
    widths = {target.name: list(budget.sizes[target.name]) for target in run.targets}
    losses = predicted_losses(run, widths, budget.average)
    losses |= embedding_and_head_losses(run, embedding_and_head, part_bits)
    options = _options(run, budget.sizes, losses)
    if recipe.trains_in_rounds:
        options = _weighted_by_round(run, options, budget.free)
    choice, curve = allocate_with_curve(options, budget.free)
    best_split = None
    if target_bits is None:
        chosen = {role: choice.options[role].bits for role in part_bits}
        added = 0.0  # embedding and head are part of the choice
    else:  # their bytes are not in the budget
        limit = EMBEDDING_AND_HEAD_LOSS * choice.loss / len(part_bits)
        chosen = {role: fewest_bits(losses[role], limit) for role in part_bits}
        added = math.fsum(losses[role][bits] for role, bits in chosen.items())
        if any(len(found) > 1 for found in part_bits.values()):
            split = _best_split(run, embedding_and_head, options, losses, chosen, budget)
            best_split = split if split.predicted <= CLEARLY_LESS * (choice.loss + added) else None
    found = {target.name: choice.options[target.name] for target in run.targets}
    allocation = Allocation(
        bits={name: option.bits for name, option in found.items()},
        outlier_fractions={
            name: option.outlier_fraction for name, option in found.items() if option.outlier_fraction
        },
        bytes=choice.bytes + budget.fixed,
        budget=budget.bytes,
        predicted=choice.loss + added,
        predictor=recipe.budget.predictor,
        loss_curve={other + budget.fixed: loss + added for other, loss in curve.items()},
        embedding_bits=chosen["embedding"],
        head_bits=chosen.get("head", chosen["embedding"]),
        token_table_bits=of_token_tables(chosen),
        best_split=best_split,
    )
    return _of_rank_zero(allocation)


@dataclass(frozen=True, kw_only=True)
class _Budget:
    """Bytes that are to be divided, and what may be bought with them."""

    bytes: int
    fixed: int  # of them, what no choice changes
    sizes: Mapping[
        str, Mapping[Bits, int]
    ]  # of matrices by bits; of a file also of embedding, head and token tables
    average: float  # bits that a weight gets, about

    @property
    def free(self) -> int:
        return self.bytes - self.fixed


def _budget_of(
    run: RunContext, embedding_and_head: EmbeddingAndHead, part_bits: Mapping[str, Sequence[Bits]]
) -> _Budget:
    """The budget of a recipe: bytes of the matrices alone for `bits`, of the whole file for `size`."""
    recipe = run.recipe
    sizes: dict[str, Mapping[Bits, int]] = {t.name: matrix_sizes(recipe, t) for t in run.targets}
    fixed = sparse_bytes(recipe, run.targets)
    if recipe.budget.bits is not None:
        total = int(recipe.budget.bits * run.total_weights / 8)
        average = 8 * (total - fixed) / run.total_weights
        return _Budget(bytes=total, fixed=fixed, sizes=sizes, average=average)
    assert recipe.budget.size is not None
    fixed += overhead_bytes(run, embedding_and_head)
    taken, weights = 0, run.total_weights  # by what has no choice, and those that share the rest
    for role, part in embedding_and_head.parts.items():
        sizes[role] = part_sizes(run.model, run.source, part, part_bits[role], table_method(recipe))
        if len(sizes[role]) == 1:
            taken += sum(sizes[role].values())
        else:
            weights += part.weight.numel()
    average = 8 * (recipe.budget.size - fixed - taken) / weights
    return _Budget(bytes=recipe.budget.size, fixed=fixed, sizes=sizes, average=average)


def _of_rank_zero(own: Allocation) -> Allocation:
    """What rank 0 decided, on every rank: losses that each computed by itself may differ in the last bit."""
    decided, _ = ranks.shared(dataclasses.asdict(own), {})
    loss_curve = {int(size): loss for size, loss in decided["loss_curve"].items()}  # keys of JSON are strings
    split = None if decided["best_split"] is None else Split(**decided["best_split"])
    return Allocation(**(decided | {"loss_curve": loss_curve, "best_split": split}))


def _best_split(
    run: RunContext,
    embedding_and_head: EmbeddingAndHead,
    options: Mapping[str, Sequence[Option]],
    losses: Mapping[str, Mapping[Bits, float]],
    chosen: Mapping[str, Bits],
    budget: _Budget,
) -> Split:
    """The choice of least predicted loss in a file as large as that of the matrices' budget with embedding and head at the
    `chosen` bits.

    By the recipe's code: where that is `pair`, `--size` itself takes `mul1`, and loses a little less than predicted.
    """
    sizes = {
        role: part_sizes(run.model, run.source, part, list(losses[role]), table_method(run.recipe))
        for role, part in embedding_and_head.parts.items()
    }
    shared = budget.free + sum(sizes[role][bits] for role, bits in chosen.items())
    weight = TABLE_WEIGHT if run.recipe.trains_in_rounds else 1.0
    tables = {
        role: [
            Option(bits=bits, bytes=size, loss=losses[role][bits], weight=weight)
            for bits, size in found.items()
        ]
        for role, found in sizes.items()
    }
    choice = allocate({**options, **tables}, shared)
    taken = budget.fixed + sum(choice.options[target.name].bytes for target in run.targets)
    bits = {role: choice.options[role].bits for role in tables}
    return Split(
        size=shared + budget.fixed + overhead_bytes(run, embedding_and_head),
        predicted=choice.loss,
        bits=8 * taken / run.total_weights,
        embedding_bits=bits["embedding"],
        head_bits=bits.get("head", bits["embedding"]),
        token_table_bits=of_token_tables(bits),
    )


def fewest_bits(losses: Mapping[Bits, float], limit: float) -> Bits:
    """The fewest bits of predicted loss at most `limit`; the most where none are."""
    return min((bits for bits, loss in losses.items() if loss <= limit), default=max(losses))


def with_allocation(run: RunContext, allocation: Allocation) -> RunContext:
    """The run with these bits for every matrix; its fingerprint changes, so cached results of others are not reused."""
    if allocation.budget is None:
        return dataclasses.replace(run, allocation=allocation)
    return dataclasses.replace(
        run,
        allocation=allocation,
        bits=allocation.bits,
        outlier_fractions=allocation.outlier_fractions,
        fingerprint=digest(run.fingerprint, allocation.bits, allocation.outlier_fractions),
    )


def has_budget(recipe: Recipe) -> bool:
    """Whether matrices may get different bits within a budget."""
    return recipe.budget.bits is not None or recipe.budget.size is not None


def outliers_compete(recipe: Recipe) -> bool:
    """Whether the budget may buy outliers (`quantizers/outliers.py`) in place of bits."""
    can = METHODS[recipe.method].outlier_cost is not None and recipe.quantizer.outlier_fraction == 0
    return recipe.mode == "best" and can and recipe.budget.outliers


def uniform(
    recipe: Recipe, targets: Sequence[QuantTarget], widths: Mapping[str, Sequence[Bits]]
) -> Allocation:
    """The recipe's bits for every matrix, without a budget; for tables that a budget would choose for, what is usual."""
    tables = {role: _usual(recipe, choices) for role, choices in widths.items()}
    return Allocation(
        bits={target.name: target.options.get("bits", recipe.quantizer.bits) for target in targets},
        bytes=sum(packed_spec(recipe, target.shape, options=target.options).bytes for target in targets),
        embedding_bits=tables["embedding"],
        head_bits=tables.get("head", tables["embedding"]),
        token_table_bits=of_token_tables(tables),
    )


def _usual(recipe: Recipe, choices: Sequence[Bits]) -> Bits:
    if len(choices) == 1 or recipe.budget.bits is None:
        return choices[0]
    expected = recipe.budget.bits + USUALLY_MORE
    return min(choices, key=lambda bits: abs(bits - expected))


def of_token_tables(bits: Mapping[str, Bits]) -> dict[str, Bits]:
    """The bits of token tables, by name, among the bits of all roles."""
    return {role: own for role, own in bits.items() if role not in ("embedding", "head")}


def check_reachable(
    run: RunContext, sizes: Mapping[str, Mapping[Bits, int]], budget: int, fixed: int
) -> None:
    """Raise RecipeError for a budget below the smallest checkpoint, or above the largest."""
    least, most = (fixed + sum(pick(choices.values()) for choices in sizes.values()) for pick in (min, max))
    if least <= budget <= most / (1 - TOLERANCE):
        return
    which, reached = ("smallest", least) if budget < least else ("largest", most)
    method = run.recipe.method
    fixes = any("bits" in target.options for target in run.targets)
    pinned = " with the bits that modules fixes" if fixes else ""
    made = f"that method '{method}' makes of this model{pinned}"
    other, residuals = "", sparse_bytes(run.recipe, run.targets)
    if budget < least and fixes:
        other = ", or fix fewer bits"
    elif 8 * (budget - fixed) < run.total_weights and residuals:  # codes of one bit would not fit either
        other = (
            ", or lower detach.outlier_fraction and detach.significant_fraction, whose residuals take "
            f"{8 * residuals / run.total_weights:.3f} bits per weight"
        )
    elif budget < least and method != "trellis":
        other = ", or give --method trellis, whose codes start at 1 bit"
    if run.recipe.budget.bits is None:
        raise RecipeError(
            f"--size {run.recipe.budget.size:,} cannot be met: the {which} checkpoint {made} has {reached:,} bytes; give "
            f"--size {reached}{other}."
        )
    bits = 8 * reached / run.total_weights
    shown = math.ceil(1000 * bits) / 1000 if budget < least else math.floor(1000 * bits) / 1000
    remedy = f"give --bits {shown:g}{other}" if shown <= 8 else other.removeprefix(", or ") or "give --size"
    raise RecipeError(
        f"--bits {run.recipe.budget.bits:g} cannot be met: the {which} {made} is {shown:.3f} bits per weight, all stored "
        f"bytes counted; {remedy}."
    )


def _options(
    run: RunContext, sizes: Mapping[str, Mapping[Bits, int]], losses: Mapping[str, Mapping[Bits, float]]
) -> dict[str, list[Option]]:
    """Name -> the ways to store a tensor."""
    options = {
        name: [Option(bits=bits, bytes=size, loss=losses[name][bits]) for bits, size in choices.items()]
        for name, choices in sizes.items()
    }
    if outliers_compete(run.recipe):
        factors = outlier_factors(run)
        for target in run.targets:
            own = _with_outliers(run.recipe, target, factors[target.name], losses[target.name])
            options[target.name] += own
    return options


def _weighted_by_round(
    run: RunContext, options: Mapping[str, Sequence[Option]], budget: int
) -> dict[str, list[Option]]:
    """The same, where the losses of matrices count what they do in their rounds of mode `best`.

    Embedding and head count TABLE_WEIGHT: they are quantized after the last round, and the training with all codes fixed
    that follows repairs them least.
    """
    first = run.recipe.budget.first_round_weight
    if first is None:
        bits = run.recipe.budget.bits
        if bits is None:  # embedding and head share the budget: what matrices get before losses are weighted
            choice = allocate(options, budget)
            bits = 8 * sum(choice.options[target.name].bytes for target in run.targets) / run.total_weights
        first = first_round_weight(bits)
    weights = round_weights(run.targets, run.recipe.finetune.rounds, first)
    return {
        name: [dataclasses.replace(option, weight=weights.get(name, TABLE_WEIGHT)) for option in found]
        for name, found in options.items()
    }


def _with_outliers(
    recipe: Recipe, target: QuantTarget, factors: Mapping[float, float], losses: Mapping[Bits, float]
) -> list[Option]:
    """Codes of few bits with outliers, for a matrix whose outlier fraction no module pattern fixes.

    `factors`: outlier fraction -> the part of the loss that remains; `losses`: of codes alone.
    """
    if "outlier_fraction" in target.options:
        return []
    found: list[Option] = []
    few = [b for b in available_bits(recipe, target.options) if b <= MAX_BITS_WITH_OUTLIERS]
    for bits, (fraction, left) in itertools.product(few, factors.items()):
        layout = packed_spec(recipe, target.shape, bits, fraction, target.options)
        file = recipe.budget.size
        size = layout.bytes + (0 if file is None else sparse_header(target.name, layout, file))
        found.append(Option(bits=bits, outlier_fraction=fraction, bytes=size, loss=left * losses[bits]))
    return found
