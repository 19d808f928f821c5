"""Collecting the statistics of a list of linears (`LinearStats`): one backward pass for each statistic of gradients, and one
forward pass for those of inputs, unless output Hessians are collected too, whose pass sees the inputs as well.
"""

from collections import Counter
from collections.abc import Sequence

from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.batches import (
    bytes_of_a_token,
    bytes_of_logits,
    recomputes_blocks,
    tokens_at_once,
    vocabulary_of,
)
from requant.calibration.block_by_block import Descent
from requant.calibration.fisher import position_fisher
from requant.calibration.hessian import InputStatistics, input_statistics, observed_inputs
from requant.calibration.hidden_states import HiddenStateCache
from requant.calibration.output_hessian import output_hessians
from requant.calibration.passes import ROWS_AT_ONCE
from requant.calibration.stats import GRADIENT_STATISTICS, INPUT_STATISTICS, LinearStats
from requant.models.targets import QuantTarget, siblings

COPIES_OF_A_HESSIAN, COPIES_OF_A_MATRIX = 4, 6  # at most at once, while a trellis is made


def collect(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    targets: Sequence[QuantTarget],
    *,
    needs: frozenset[str],
    cache: HiddenStateCache | None = None,
    reference: HiddenStateCache | None = None,
    descent: Descent | None = None,
    all_experts: bool = False,
    label: str | None = None,
) -> dict[str, LinearStats]:
    """The fields named in `needs` for every target that this rank owns, by name; with a `reference` also `cross_hessian`.

    `cache` and `reference` only serve statistics of inputs (see `input_statistics`), a `descent` those of gradients. With
    `all_experts` every expert sees every token for the former; the latter are always those of the tokens that were routed to
    it.
    """
    inputs: dict[str, InputStatistics] = {}
    outputs: dict[str, Tensor] = {}
    together = one_pass_suffices(needs) and cache is None and reference is None and not all_experts
    if together:
        mean_abs = "input_mean_abs" in needs
        with observed_inputs(model, windows, targets, mean_abs=mean_abs) as (inputs, after_each):
            outputs = output_hessians(
                model, windows, targets, label=label, descent=descent, after_each=after_each
            )
    elif needs & INPUT_STATISTICS:
        inputs = input_statistics(
            model,
            windows,
            targets,
            cache=cache,
            reference=reference,
            all_tokens=all_experts,
            label=label,
        )
    fisher = (
        position_fisher(model, windows, targets, label=label, descent=descent) if "fisher" in needs else {}
    )
    if "output_hessian" in needs and not together:
        outputs = output_hessians(model, windows, targets, label=label, descent=descent)
    return {
        target.name: LinearStats(
            hessian=inputs[target.name].hessian if "hessian" in needs else None,
            cross_hessian=inputs[target.name].cross if "hessian" in needs else None,
            input_mean_abs=inputs[target.name].mean_abs if "input_mean_abs" in needs else None,
            fisher=fisher.get(target.name),
            output_hessian=outputs.get(target.name),
            tokens=inputs[target.name].tokens if inputs else windows.numel(),
        )
        for target in ranks.owned(targets)
    }


def one_pass_suffices(needs: frozenset[str]) -> bool:
    """Whether statistics of inputs come with the pass of output Hessians."""
    return bool(needs & INPUT_STATISTICS) and "output_hessian" in needs


def bytes_needed(targets: Sequence[QuantTarget], needs: frozenset[str]) -> Counter[int]:
    """Rank -> float32 bytes that `collect` holds for these targets, while it collects them and after.

    Siblings on one rank (`models.targets.SIBLINGS`) read one input and share its Hessian, which counts once. Experts that
    saw no token share theirs too, which no shape tells: each counts.
    """
    found: Counter[int] = Counter()
    seen: set[tuple[int, str, tuple[str, ...]]] = set()
    for target in targets:
        n, k = target.shape
        floats = {"fisher": n * k, "output_hessian": n * n}
        reads = (target.rank, target.name.rpartition(".")[0], siblings(target.kind))
        if reads not in seen:
            floats |= {"hessian": k * k, "input_mean_abs": k}
            seen.add(reads)
        found[target.rank] += 4 * sum(floats.get(field, 0) for field in needs)
    return found


def batch_bytes(
    model: PreTrainedModel, windows: tuple[int, int], needs: frozenset[str], *, by_block: bool
) -> int:
    """What a batch of the pass takes of a GPU beside statistics, of `windows` (count, length); nothing is sent to others.

    Copies of logits: without gradients those that are compared with another model's; else three in the model's dtype, and
    four in float32 of a few rows, with what the graph keeps of the blocks; where they are recomputed, or the pass goes
    `by_block`, of one of them, and hidden states before the others.
    """
    plain = bytes_of_logits(model, *windows)
    if not needs & GRADIENT_STATISTICS:
        return plain
    tokens = tokens_at_once(model, *windows, gpu=True, gradients=True)
    rows = 4 * 4 * min(ROWS_AT_ONCE, tokens) * vocabulary_of(model)
    recomputes = by_block or recomputes_blocks(model, windows, gpu=True, inputs="fisher" in needs)
    return max(plain, rows + tokens * bytes_of_a_token(model, recomputes=recomputes))


def working_bytes(target: QuantTarget, needs: frozenset[str]) -> int:
    """Float32 bytes that predicted losses or codes of one target are made in: copies and factors of its Hessians, one side
    at a time, and the matrix as it was, rotated, and as it is coded."""
    n, k = target.shape
    sides = [side for field, side in (("hessian", k), ("output_hessian", n)) if field in needs]
    return 4 * (COPIES_OF_A_HESSIAN * max(sides, default=0) ** 2 + COPIES_OF_A_MATRIX * n * k)
