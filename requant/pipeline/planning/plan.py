"""What a run will do and cost, before it starts: the dry run.

Bytes are exact for the dense part (they follow from the layout) and an upper bound for the sparse part. With a budget the
bits are distributed as the run will do it, which takes its calibration passes. Memory and time are estimates, from
`memory.py` and `schedule.py`.

An `Outline`, from config.json alone, can be planned too: nothing is measured, so a budget counts as spent, embedding and
head get the usual bits, and times are those of H200s if the GPUs are not present. With several GPUs each holds a whole
model, and its share of statistics, scores and whatever trains block by block; work is divided evenly, matrices as the run
will divide them. Of what GPUs send to each other, the memory counts what a batch contributes to matrices; the time counts
gradients and, for a model larger than the GPUs, decoded matrices.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant.allocation.budget import allocate_bits, has_budget, uniform
from requant.allocation.embedding_and_head import embedding_and_head_bits, embedding_and_head_of
from requant.allocation.sizes import file_bytes, packed_spec, sparse_bytes
from requant.display import format_seconds
from requant.models.devices import total_memory
from requant.models.targets import QuantTarget
from requant.pipeline.planning.memory import expected_memory, host_memory, on_host
from requant.pipeline.planning.quicker import warn_of_a_slow_run
from requant.pipeline.planning.schedule import expected_seconds
from requant.pipeline.planning.workload import count_gpus, goes_by_block, tokens_of_step
from requant.pipeline.preparation.hosting import HOSTED
from requant.pipeline.preparation.outline import Outline
from requant.pipeline.preparation.prepare import Prepared, start
from requant.pipeline.preparation.shape_bytes import bytes_before
from requant.pipeline.preparation.texts import names_of_texts
from requant.recipe.schema import Recipe
from requant.run.context import Allocation
from requant.run.rounds import rounds_of
from requant.run.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predictions for one run."""

    method: str
    mode: str
    device: str
    calibration: str  # text and windows
    scored_on: str
    matrices: Mapping[str, int]  # kind -> how many
    weights: int
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    whole_bits_per_weight: float  # of the weight files
    peak_memory: int  # bytes of one GPU, or of the process
    seconds: float
    device_memory: int  # bytes of one GPU, or of the machine
    gpus: int = 1
    allocation: Allocation | None = None  # of a budget
    # kind -> bits -> how many matrices
    widths: Mapping[str, Mapping[int | float, int]] = field(default_factory=dict)
    rotations: str | None = None  # whether they are folded; None where the recipe does not ask for it
    code: str | None = None  # of a trellis
    tables: str | None = None  # bits of embedding and head, where they were not chosen but guessed
    training: str | None = None  # phases, steps, tokens; None without training
    hosted_bytes: int = 0  # of the matrices that stay in the host's memory, of all processes
    host_memory: int = 0  # beside them
    comparison: str | None = None  # of a 2:4 run: the plain codes of as many bytes

    def lines(self) -> list[str]:
        process = "GPU" if self.device == "cuda" else "process"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.matrices.items())
        method = self.method if self.code is None else f"{self.method} ({self.code})"
        return [
            f"method          {method}, mode {self.mode}, on {self.device}",
            f"calibration     {self.calibration}",
            f"scored on       {self.scored_on}",
            f"matrices        {sum(self.matrices.values())} ({kinds})",
            f"weights         {self.weights:,}",
            f"bits per weight {self.bits_per_weight:.3f} of the matrices, {self.whole_bits_per_weight:.3f} of the file",
            f"bytes           {self.bytes_before:,} -> {'' if self.tables is None else 'about '}{self.bytes_after:,}",
            *([] if self.tables is None else [f"  {self.tables}"]),
            f"peak memory     about {self.peak_memory / 2**30:.2f} GiB"
            + (f" a {process}" if self.gpus > 1 else "")
            + self._lacking(),
            f"time            about {format_seconds(self.seconds)}"
            + (f" on {self.gpus} {'GPUs' if process == 'GPU' else 'processes'}" if self.gpus > 1 else ""),
            *([] if self.training is None else [f"training        {self.training}"]),
            *self._host_lines(),
            *([] if self.comparison is None else [f"compared with   {self.comparison}"]),
            *([] if self.rotations is None else [f"rotations       {self.rotations}"]),
            *self._budget_lines(),
        ]

    def _host_lines(self) -> list[str]:
        if not self.hosted_bytes:
            return []
        return [
            f"on the host     {HOSTED}: {self.hosted_bytes / 2**30:.2f} GiB, and {self.host_memory / 2**30:.2f} GiB of "
            "codes and states",
            "samples         none of text by a model larger than the GPU",
        ]

    def _lacking(self) -> str:
        """What to say of memory that is not there."""
        if self.peak_memory <= self.device_memory:
            return ""
        owner = "the GPU" if self.device == "cuda" else "this machine"
        return f", more than the {self.device_memory / 2**30:.2f} GiB of {owner}"

    def _budget_lines(self) -> list[str]:
        """The allocation: widths by kind, bytes, loss, and what other budgets would give."""
        found = self.allocation
        if found is None or found.budget is None:
            return []
        width = max(map(len, self.widths))
        lines = [
            f"budget          {found.budget:,} bytes, {found.bytes:,} spent ({found.unspent:.2%} unspent)",
            *(
                f"  {kind:{width}}  "
                + ", ".join(f"{count} at {bits}" for bits, count in sorted(counts.items()))
                for kind, counts in self.widths.items()
            ),
        ]
        if found.outlier_fractions:
            largest = max(found.outlier_fractions.values())
            lines.append(
                f"  outliers stored as floats in {len(found.outlier_fractions)} matrices, at most {largest:.2%}"
            )
        if any(bits != 16 for bits in found.bits_of_tables.values()):
            tables = "".join(f", {name} at {bits:g}" for name, bits in found.token_table_bits.items())
            lines.append(f"  embedding at {found.embedding_bits:g} bits, head at {found.head_bits:g}{tables}")
        if found.predicted is not None:
            lines.append(f"predicted loss  {found.predicted:.4f} nats per token, by {found.predictor}")
            if (split := found.best_split) is not None:
                lines.append(
                    f"  a file as large, --size {split.size}, would lose {split.predicted:.4f}: {split}"
                )
            lines += [
                f"  {size:,} bytes would lose {loss:.4f}" for size, loss in sorted(found.loss_curve.items())
            ]
        return lines


def make_plan(
    prepared: Prepared | Outline, recipe: Recipe, *, device: str | None = None, quiet: bool = True
) -> Plan:
    """Predictions from shapes, the recipe and a matrix product of a tenth of a second; with a budget, its allocation.

    `device` is where the run will be, None: where the model is.
    """
    device = prepared.model.device.type if device is None else torch.device(device).type
    warn_of_a_slow_run(prepared, recipe, device)
    allocation = _allocation(prepared, recipe, quiet=quiet)
    budgeted = allocation.budget is not None
    weights = sum(target.size for target in prepared.targets)
    matrices = _matrix_bytes(prepared, recipe, allocation)
    bytes_after = _file_bytes(prepared, recipe, allocation, matrices)
    calibration, scored_on = _text_names(prepared, recipe)
    return Plan(
        method=recipe.method,
        mode=recipe.mode,
        device=device,
        calibration=f"{calibration}, {_windows(prepared.windows)}",
        scored_on=f"{scored_on}, {_windows(prepared.eval_windows)}",
        code=getattr(recipe.quantizer, "code", None),
        matrices=dict(Counter(target.kind for target in prepared.targets)),
        weights=weights,
        bits_per_weight=8 * matrices / weights,
        bytes_before=bytes_before(_original(prepared), prepared.source),
        bytes_after=bytes_after,
        whole_bits_per_weight=8 * bytes_after / _parameter_count(prepared),
        peak_memory=expected_memory(prepared, recipe, device),
        seconds=expected_seconds(prepared, recipe, device),
        device_memory=total_memory(torch.device(device)),
        gpus=count_gpus(prepared),
        allocation=allocation if budgeted else None,
        widths=_widths(prepared.targets, allocation) if budgeted else {},
        rotations=_rotations(prepared, recipe),
        tables=_guessed_tables(prepared, recipe, allocation),
        training=_training(prepared, recipe, device),
        hosted_bytes=on_host(prepared) if prepared.hosted else 0,
        host_memory=host_memory(prepared, recipe) if prepared.hosted else 0,
    )


def _matrix_bytes(prepared: Prepared | Outline, recipe: Recipe, allocation: Allocation) -> float:
    """All that the checkpoint stores for the matrices; of an outline a budget counts as spent."""
    targets = prepared.targets
    if isinstance(prepared, Outline) and recipe.budget.bits is not None:
        return recipe.budget.bits * sum(target.size for target in targets) / 8
    return sparse_bytes(recipe, targets) + sum(
        packed_spec(
            recipe,
            target.shape,
            allocation.bits[target.name],
            allocation.outlier_fractions.get(target.name),
            target.options,
        ).bytes
        for target in targets
    )


def _file_bytes(prepared: Prepared | Outline, recipe: Recipe, allocation: Allocation, matrices: float) -> int:
    """The weight files with so many bytes of `matrices`; of an outline a budget counts as spent."""
    if isinstance(prepared, Outline) and recipe.budget.size is not None:
        return recipe.budget.size
    original = _original(prepared)
    return file_bytes(original, prepared.source, recipe, prepared.targets, allocation, matrices)


def _original(prepared: Prepared | Outline) -> PreTrainedModel:
    """The model whose bytes are those of the original, where there are no weight files to ask."""
    return prepared.stored if isinstance(prepared, Outline) else prepared.model


def _parameter_count(prepared: Prepared | Outline) -> int:
    return sum(p.numel() for p in prepared.model.parameters())


def _widths(targets: Sequence[QuantTarget], allocation: Allocation) -> dict[str, dict[int | float, int]]:
    """Kind of matrix -> bits -> how many have them."""
    widths: dict[str, Counter[int | float]] = {}
    for target in targets:
        widths.setdefault(target.kind, Counter())[allocation.bits[target.name]] += 1
    return {
        kind: dict(counts) for kind, counts in widths.items()
    }  # a Counter does not survive dataclasses.asdict


def _text_names(prepared: Prepared | Outline, recipe: Recipe) -> tuple[str, str]:
    """Names of the texts for calibration and evaluation; an outline looks nothing up."""
    if isinstance(prepared, Prepared):
        return prepared.calibration.name, prepared.evaluation.name
    return names_of_texts(prepared.folder, recipe)


def _windows(windows: Int64[Tensor, "b t"]) -> str:
    return f"{windows.shape[0]} x {windows.shape[1]} tokens"


def _allocation(prepared: Prepared | Outline, recipe: Recipe, *, quiet: bool) -> Allocation:
    if isinstance(prepared, Outline) or not has_budget(recipe):
        return uniform(
            recipe,
            prepared.targets,
            embedding_and_head_bits(recipe, embedding_and_head_of(prepared.model)),
        )
    # Passes over the text, the longest part of a dry run that has read the weights: the widths, the predicted loss and what
    # other sizes would lose all follow from them. From config.json alone (`--gpus`) a plan does without either.
    return allocate_bits(start(prepared, recipe, workspace=Workspace(None), quiet=quiet, reported=False))


def _guessed_tables(prepared: Prepared | Outline, recipe: Recipe, allocation: Allocation) -> str | None:
    if not isinstance(prepared, Outline) or recipe.budget.bits is None:
        return None
    choices = embedding_and_head_bits(recipe, embedding_and_head_of(prepared.model))
    guessed = {role: allocation.bits_of_tables[role] for role, bits in choices.items() if len(bits) > 1}
    if not guessed:
        return None
    named = ", ".join(f"{role} at {bits:g} bits" for role, bits in guessed.items())
    return f"{named}, as is usual: the run chooses by what they lose"


def _rotations(prepared: Prepared | Outline, recipe: Recipe) -> str | None:
    if recipe.rotations != "folded":
        return None
    if isinstance(prepared, Outline):
        return "folded into the model where its architecture allows it"
    return f"per matrix: {prepared.why_not_folded}" if prepared.why_not_folded else "folded into the model"


def _training(prepared: Prepared | Outline, recipe: Recipe, device: str) -> str | None:
    """Mode `best` trains after each of its rounds, the last time with all codes fixed; other modes at the end alone."""
    if prepared.bytes_to_train:
        needed = prepared.bytes_to_train / 2**30
        return f"none: it would take about {needed:.2f} GiB of a GPU; --finetune-steps tries all the same"
    if not recipe.finetune.trains:
        return None
    found = f"{recipe.finetune.num_steps} steps of {tokens_of_step(prepared, recipe):,} tokens"
    if recipe.mode == "best" and not recipe.trains_in_rounds:
        found += " at the end only"
    if recipe.trains_in_rounds:
        found += f" after each of {len(rounds_of(prepared.targets, recipe.finetune.rounds))} rounds"
    if prepared.own_windows:
        found += f", with {prepared.own_windows:,} windows that the model writes"
    if goes_by_block(prepared, recipe, device):
        found += ", block by block"
    return found
