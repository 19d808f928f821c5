"""The rounds of mode `best`: which matrices are quantized together, in which order, and how much their errors count.

    w_r = w_1^((R - r) / (R - 1))                   r = 1 .. R rounds
    w_1 = 0.4 up to 2 bits, 1 from 3 bits on        or `budget.first_round_weight`; a single round counts 1

A predicted loss is that of a matrix quantized alone in a model that does not change otherwise
(`allocation/predictors.py`). In mode `best` the rounds that follow train everything that is still float, and they repair a
larger share of larger errors: the budget multiplies a loss of round r by w_r, so that bits go to what is quantized last.
"Bits" are those of the matrices; under a budget for the whole file, those that they would get without weights. Between 2
and 3 bits the logarithm of w_1 is interpolated linearly. The weights are our own, and reports show predicted losses
without them. On bench-32m they lower the KL by 2.3 % at 2 bits, and would raise it by 0.7 and 2 % at 3 and 4, where little
is left to repair.
"""

from collections.abc import Sequence

from requant.models.targets import QuantTarget

ROUNDS = 4  # of whole kinds
FIRST_WEIGHT = 0.4  # chosen on demo-4m (`eval/LOG.md`)


def rounds_of(targets: Sequence[QuantTarget], count: int = ROUNDS) -> list[list[QuantTarget]]:
    """The targets of at most `count` rounds: the kinds of a block in the model's order, consecutive ones together.

    There are ROUNDS of whole kinds, at most. For each that `count` allows beyond them, the one of most weights is halved
    by blocks; of equal ones the last.
    """
    kinds = list(dict.fromkeys(target.kind for target in targets))
    whole = min(ROUNDS, count, len(kinds))
    each, more = divmod(len(kinds), whole)
    rounds, start = [], 0
    for index in range(whole):
        stop = start + each + (index < more)
        rounds.append([target for target in targets if target.kind in kinds[start:stop]])
        start = stop
    for _ in range(count - ROUNDS):
        divisible = [i for i, members in enumerate(rounds) if len({target.block for target in members}) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda i: (sum(target.size for target in rounds[i]), i))
        rounds[largest : largest + 1] = _halves(rounds[largest])
    return rounds


def _halves(targets: Sequence[QuantTarget]) -> list[list[QuantTarget]]:
    """The targets in the first half of the blocks, and the others."""
    blocks = list(dict.fromkeys(target.block for target in targets))
    first = set(blocks[: (len(blocks) + 1) // 2])
    return [[target for target in targets if (target.block in first) is early] for early in (True, False)]


def round_name(index: int, count: int) -> str:
    """The rounds of mode `best` are numbered from 1."""
    return f"round {index + 1} of {count}"


def first_round_weight(bits: float) -> float:
    """What the losses of the first round count by default, where the matrices get so many bits per weight."""
    return FIRST_WEIGHT ** min(1.0, max(0.0, 3 - bits))


def round_weights(targets: Sequence[QuantTarget], count: int, first: float) -> dict[str, float]:
    """What the predicted loss of each target counts: `first` in the first round, 1 in the last, in equal ratios between."""
    rounds = rounds_of(targets, count)
    steps = max(1, len(rounds) - 1)
    return {
        target.name: first ** ((len(rounds) - 1 - index) / steps)
        for index, members in enumerate(rounds)
        for target in members
    }
