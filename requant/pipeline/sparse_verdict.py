"""2:4 or plain codes: what mode `best` achieves with the same bytes, and which of the two to use for which purpose.

    one token at a time   a product's time is that of reading its bytes, so at equal bytes the lower KL wins
    many tokens           a product's time is that of its arithmetic; 2:4 does half of it where tensor cores skip zeros

A Gaussian weight loses 13.2 % of its energy to the best 2:4 mask, even with exact values: as much as to codes of 1.46 bits.
The mask costs 0.75 bits and the values come on top, so plain codes of the same size are better (docs/sparsity.md).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from requant import progress
from requant.allocation.budget import allocate_bits
from requant.allocation.sizes import packed_spec
from requant.display import format_seconds
from requant.formats.semi_structured import FLOAT16_BITS
from requant.models.devices import current_gpu, pick_device, used_memory
from requant.pipeline.planning.memory import expected_memory
from requant.pipeline.planning.plan import Plan
from requant.pipeline.planning.schedule import expected_stages
from requant.pipeline.preparation.prepare import Prepared, prepare, start
from requant.pipeline.quantize import quantize
from requant.pipeline.quantized_model import QuantizedModel
from requant.progress import Stage
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Recipe, Recovery
from requant.run.workspace import Workspace

CODES_METHOD = "trellis"
# Products with 2:4 weights of 16 bits over dense bfloat16 ones, from 1024 tokens and so many rows and columns on: by
# cuSPARSELt 0.8, on an H100 at one shape (to 1.07) and on an H200 at four (from 1.13; docs/sparsity.md)
SPARSE_SPEED, FASTER_SIZE = "1.02 to 1.55", 4096


@dataclass(frozen=True, kw_only=True)
class PlainCodes:
    """Mode `best` at the bytes of a 2:4 run, or at as many as its codes can take."""

    budget: float  # bits per weight that all bytes may come to
    bits: float  # all bytes, a weight
    bytes: int  # of the matrices
    predicted: float  # KL, nats per token, of the codes without training
    kl: float | None = None  # measured, where it was run


@dataclass(frozen=True, kw_only=True)
class SparseVerdict:
    """A 2:4 run beside plain codes; bits per weight and bytes are those of the matrices."""

    bits: float
    bytes: int
    dense_bytes: int
    kl: float
    value_bits: int
    large_fraction: float  # of the weights, in matrices that sparse products are known to speed up
    codes: PlainCodes

    def rows(self) -> list[dict[str, object]]:
        """The table that is printed."""
        codes = self.codes
        kl = f"{codes.predicted:.4f} (predicted)" if codes.kl is None else f"{codes.kl:.4f}"
        sparse_rate = f"{SPARSE_SPEED} by cuSPARSELt" if self._why_not is None else "1"
        rows: Mapping[str, tuple[object, object]] = {
            "bits per weight": (f"{self.bits:.3f}", f"{codes.bits:.3f}"),
            "bytes of the matrices": (f"{self.bytes:,}", f"{codes.bytes:,}"),
            "KL to the original, nats": (f"{self.kl:.4f}", kl),
            "speed of one stream by its bytes, dense 16 bits = 1": (
                f"{self.dense_bytes / self.bytes:.2f}",
                f"{self.dense_bytes / codes.bytes:.2f}",
            ),
            "speed from 1024 tokens on, dense bfloat16 = 1": (sparse_rate, "1"),
        }
        return [{"": name, "2:4": one, "plain codes": other} for name, (one, other) in rows.items()]

    def sentences(self) -> list[str]:
        """Which to take, one sentence for each purpose."""
        codes = self.codes
        theirs, how = (codes.predicted, "predicted") if codes.kl is None else (codes.kl, "measured")
        if theirs < self.kl:
            streams = (
                f"Memory and single streams: take plain codes (`requant quantize --mode best --bits {codes.budget:g} "
                "--head-bits 16`): "
                f"with no more bytes, on which that speed depends, their KL is {theirs:.4f} ({how}), that of 2:4 "
                f"{self.kl:.4f}."
            )
        else:
            streams = (
                f"Memory and single streams: take 2:4; its KL is {self.kl:.4f}, that of plain codes of the same bytes "
                f"{theirs:.4f} ({how})."
            )
        if self._why_not is None:
            share = "" if self.large_fraction == 1 else f" for {self.large_fraction:.0%} of the weights"
            batches = (
                "Prefill and large batches: take 2:4 only where its products run (in requant on Ampere to Hopper, by "
                f"cuSPARSELt), at {SPARSE_SPEED} times the speed of dense bfloat16{share}, and where a KL of {self.kl:.4f} "
                "is acceptable, else dense FP8."
            )
        else:
            winner = "plain codes" if theirs < self.kl else "2:4"
            batches = (
                f"Prefill and large batches: take {winner}; {self._why_not}, "
                "so both run at the speed of dense weights."
            )
        return [streams, batches]

    @property
    def _why_not(self) -> str | None:
        """Why no product of these matrices is sparse; None where some are."""
        if self.value_bits != FLOAT16_BITS:
            return f"no kernel here multiplies 2:4 values of {self.value_bits} bits at the sparse rate"
        if self.large_fraction == 0:
            return f"sparse products are known to be faster from {FASTER_SIZE} rows and columns on only"
        return None


def plain_codes(
    recipe: Recipe, *, device: str, dtype: str, workspace: Workspace, measure: bool, quiet: bool
) -> PlainCodes:
    """What mode `best` would make of the bytes of the 2:4 run of `recipe`: predicted, and with `measure` run too.

    Nothing of the model stays in memory, so this comes before the 2:4 run.
    """
    with current_gpu(pick_device(device)), workspace.reserved():
        progress.enter("loading")
        prepared = prepare(recipe.model, recipe, device=device, dtype=dtype, scored=False, quiet=quiet)
        wanted = codes_recipe(recipe, codes_budget(prepared, recipe))
        where = prepared.model.device
        compared = comparison_stages(prepared, wanted, where.type, measure=measure)
        progress.expect(
            [*compared, *expected_stages(prepared, recipe, where.type)], memory=lambda: used_memory(where)
        )
        progress.enter(compared[0].name)
        run = start(prepared, wanted, workspace=workspace, quiet=quiet)
        allocation = allocate_bits(run)
    assert allocation.predicted is not None
    assert wanted.budget.bits is not None
    found = PlainCodes(
        budget=wanted.budget.bits,
        bits=8 * allocation.bytes / run.total_weights,
        bytes=allocation.bytes,
        predicted=allocation.predicted,
    )
    if not measure:
        return found
    del run, prepared
    result = quantize(recipe.model, wanted, device=device, dtype=dtype, workspace=workspace, quiet=quiet)
    return dataclasses.replace(found, kl=result.after.mean_kl)


def comparison_stages(prepared: Prepared, wanted: Recipe, device: str, *, measure: bool) -> list[Stage]:
    """What the plain codes of the recipe `wanted` take: their prediction, and with `measure` the whole run."""
    stages = expected_stages(prepared, wanted, device)
    predicting = dataclasses.replace(stages[0], name="plain codes of the same bytes")
    return [predicting, *(stages if measure else ())]


def with_comparison(plan: Plan, prepared: Prepared, *, measure: bool) -> Plan:
    """The plan of a 2:4 run with the time and memory of `plain_codes`, which come before it, and what they are."""
    recipe, device = prepared.recipe, plan.device
    wanted = codes_recipe(recipe, codes_budget(prepared, recipe))
    seconds = sum(stage.seconds for stage in comparison_stages(prepared, wanted, device, measure=measure))
    how = f"measured: about {format_seconds(seconds)} of the time" if measure else "predicted"
    return dataclasses.replace(
        plan,
        seconds=plan.seconds + seconds,
        peak_memory=max(plan.peak_memory, expected_memory(prepared, wanted, device) if measure else 0),
        comparison=f"plain codes of {wanted.budget.bits:g} bits per weight, {how}",
    )


def codes_budget(prepared: Prepared, recipe: Recipe) -> float:
    """Bits per weight of the 2:4 run of `recipe`, or the most that plain codes can have."""
    bits = pruned_bytes(prepared, recipe) * 8 / sum(target.size for target in prepared.targets)
    return min(math.floor(1000 * bits) / 1000, float(METHODS[CODES_METHOD].bits[-1]))


def codes_recipe(recipe: Recipe, bits: float) -> Recipe:
    """Mode `best` at this budget, with the texts, the training steps and the skipped matrices of a 2:4 run."""
    config: Any = METHODS[CODES_METHOD].config
    return dataclasses.replace(
        recipe,
        mode="best",
        method=CODES_METHOD,
        quantizer=config(),
        calibration=dataclasses.replace(recipe.calibration, inputs="original"),
        recovery=Recovery(),
        budget=Budget(bits=bits, head_bits=16.0, embedding_bits=16.0),
    )


def pruned_bytes(prepared: Prepared, recipe: Recipe) -> int:
    """Bytes of the matrices of a 2:4 run, which follow from their shapes."""
    return sum(packed_spec(recipe, target.shape, options=target.options).bytes for target in prepared.targets)


def sparse_verdict(result: QuantizedModel, codes: PlainCodes) -> SparseVerdict:
    """The 2:4 run beside the plain codes of its bytes."""
    stored = pruned_bytes(result.prepared, result.recipe)
    targets = result.prepared.targets
    weights = sum(target.size for target in targets)
    large = sum(target.size for target in targets if min(target.shape) >= FASTER_SIZE)
    assert result.after.mean_kl is not None
    return SparseVerdict(
        bits=8 * stored / weights,
        bytes=stored,
        dense_bytes=2 * weights,
        kl=result.after.mean_kl,
        value_bits=result.recipe.quantizer.bits,
        large_fraction=large / weights,
        codes=codes,
    )
