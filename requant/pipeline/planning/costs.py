"""Seconds that the parts of a run take: passes over the model, statistics, codes, steps of training.

Times are floating-point operations over a share of the rate of a short matrix product (`rates.py`), plus the method's time
per weight. If the GPUs are not present, the rate is that of an H200. `schedule.py` adds these up to the stages of a run.
"""

from collections.abc import Sequence
from math import ceil

import torch

from requant.allocation.budget import has_budget
from requant.calibration.batches import (
    RECOMPUTE_ABOVE,
    recomputes_blocks,
    tokens_at_once,
    windows_without_logits,
)
from requant.calibration.collect import one_pass_suffices
from requant.calibration.experts import share_of_experts
from requant.calibration.gram import products
from requant.calibration.stats import GRADIENT_STATISTICS
from requant.evaluation.diagnosis import DIAGNOSED_TOKENS
from requant.finetune.compile_blocks import MIN_STEPS_TO_COMPILE
from requant.finetune.decoded_block import weights_to_decode
from requant.inference.own_text import PREFIX, cache_bytes, windows_at_once
from requant.models.devices import total_memory
from requant.models.targets import QuantTarget, find_blocks, siblings
from requant.pipeline.planning.rates import (
    ADAM_SECONDS,
    COMPILE_SECONDS,
    COMPILED,
    DECODE_SECONDS,
    EXPERT_SECONDS,
    FRACTION_OF_PEAK,
    FULL_STEP,
    FULL_WIDTH,
    HOST_BYTES,
    LAUNCH_SECONDS,
    SENT_BYTES,
    STEP_BYTES,
    STEP_SECONDS,
    product_rate,
)
from requant.pipeline.planning.statistics import statistics_passes
from requant.pipeline.planning.workload import (
    count_gpus,
    goes_by_block,
    of_fullest_rank,
    tokens_of_step,
    training_memory,
    windows_to_train,
)
from requant.pipeline.preparation.outline import Outline
from requant.pipeline.preparation.prepare import Prepared
from requant.pipeline.preparation.shape_bytes import hosted_bytes, parameter_bytes
from requant.processes import started
from requant.quantizers.registry import METHODS, find_method
from requant.recipe.schema import Recipe
from requant.run.decoded_once import keeps_floats
from requant.sensitivity.pqi import NODES

FORWARDS = {"original": 1, "quantized": 2, "corrected": 7}  # whole passes, for the Hessians of all matrices


class Costs:
    """Seconds of the parts of a run on devices of a type."""

    def __init__(self, prepared: Prepared | Outline, recipe: Recipe, device: str) -> None:
        self.prepared, self.recipe, self.device = prepared, recipe, device
        self.parameters = sum(p.numel() for p in prepared.model.parameters())
        # processes that are still to start will share the cores that this one has measured
        sharing = count_gpus(prepared) if device == "cpu" and started() == 1 else 1
        self.product_rate = product_rate(next(prepared.model.parameters()).dtype, device)
        self.product_rate *= count_gpus(prepared) / sharing
        self.rate = self.product_rate * FRACTION_OF_PEAK[device]
        if device == "cuda":
            width = prepared.model.get_input_embeddings().get_parameter("weight").shape[1]
            self.rate *= min(1.0, width / FULL_WIDTH)
        self.blocks = len({target.block for target in prepared.targets})
        self.compiled = device == "cuda" and recipe.finetune.num_steps >= MIN_STEPS_TO_COMPILE
        self.method, self.nodes = find_method(recipe.method), len(NODES[recipe.sensitivity.nodes])
        self.windows, self.steps = prepared.windows.numel(), recipe.finetune.num_steps
        self.threads = torch.get_num_threads() / sharing if device == "cpu" else 1  # of a process
        # to the GPU, in a pass over the blocks
        self.brought = hosted_bytes(prepared.targets) / HOST_BYTES if prepared.hosted else 0.0
        self.parallel = recipe.calibration.inputs == "original"  # not with earlier matrices quantized
        # whether the codes need not wait for statistics, since the allocation's came from one pass
        self.kept = (
            has_budget(recipe)
            and len(self.passes(prepared.targets, METHODS[recipe.method].allocation_needs)) == 1
        )
        self.by_block = recipe.finetune.trains and goes_by_block(prepared, recipe, device)

    def forward(self, tokens: int, *, batch: int | None = None) -> float:
        """A forward pass, in batches of so many tokens; None: of as many as the logits allow."""
        launching = self._blocks_of_batches(tokens, batch) * LAUNCH_SECONDS[0]
        return max(2 * self.parameters * tokens / self.rate, launching) + self.brought

    def backward(
        self, tokens: int, share: float = 1.0, *, of_weights: bool = True, again: bool | None = None
    ) -> float:
        """A pass through all blocks, and back through a `share` of them, for which they may be computed `again` (None: by
        model size).

        Gradients `of_weights` take as much arithmetic as those of inputs.
        """
        again = self.parameters >= RECOMPUTE_ABOVE if again is None else again
        back = 1 + of_weights + again
        forth, gradients = LAUNCH_SECONDS
        calls = self._blocks_of_batches(tokens, gradients=True)
        launching = calls * (forth + share * (gradients + again * forth))
        arithmetic = 2 * self.parameters * tokens / self.rate * (1 + back * share)
        return max(arithmetic, launching) + 2 * self.brought

    def _blocks_of_batches(self, tokens: int, batch: int | None = None, *, gradients: bool = False) -> float:
        """How many times a GPU's process calls a block, for all batches; 0 on a CPU."""
        if self.device != "cuda":
            return 0.0
        count, length = self.prepared.windows.shape
        batch = batch or tokens_at_once(self.prepared.model, count, length, gpu=True, gradients=gradients)
        return tokens / batch / count_gpus(self.prepared) * self.blocks

    def statistics(self, targets: Sequence[QuantTarget], *, coded: int = 0) -> float:
        """What codes of these matrices need, where so many weights are `coded` already."""
        needs = self.method.needs
        passes = self.passes(targets, needs, coded=coded)
        inputs = self.input_passes(needs, self.recipe.calibration.inputs)
        return (
            inputs * (len(passes) if self.parallel else 1)
            + self._gradients(needs, passes)
            + self.hessians(targets, needs)
        )

    def allocation_statistics(self) -> float:
        """What predicted losses and then the codes need, in the original model."""
        needs, targets = METHODS[self.recipe.method].allocation_needs, self.prepared.targets
        passes = self.passes(targets, needs)
        inputs = self.input_passes(needs, "original")
        return inputs * len(passes) + self._gradients(needs, passes) + self.hessians(targets, needs)

    def input_passes(self, needs: frozenset[str], inputs: str) -> float:
        """The passes for inputs of matrices beside those for gradients; `inputs` as `calibration.inputs` of a recipe."""
        if "hessian" not in needs or (inputs == "original" and one_pass_suffices(needs)):
            return 0.0
        return FORWARDS[inputs] * self.forward(self.windows)

    def _gradients(self, needs: frozenset[str], passes: Sequence[float]) -> float:
        prepared = self.prepared
        count, length = prepared.windows.shape
        gradients = 0.0
        for need in needs & GRADIENT_STATISTICS:
            again = bool(prepared.hosted) or recomputes_blocks(
                prepared.model, (count, length), gpu=self.device == "cuda", inputs=need == "fisher"
            )
            gradients += sum(
                self.backward(self.windows, share, of_weights=False, again=again) for share in passes
            )
        return gradients

    def hessians(self, targets: Sequence[QuantTarget], needs: frozenset[str]) -> float:
        """The products whose sums are the Hessians of these matrices: as much arithmetic as a pass where layers are wide."""
        share = share_of_experts(self.prepared.model, targets)
        inputs: dict[tuple[str, ...], float] = {}  # by what reads them
        outputs = 0.0
        for target in targets:
            n, k = target.shape
            seen = 1.0 if target.experts is None else share
            inputs[(target.name.rpartition(".")[0], *siblings(target.kind))] = seen * products(k)
            outputs += seen * products(n)
        sides = sum(inputs.values()) * ("hessian" in needs) + outputs * ("output_hessian" in needs)
        return 2 * self.windows * sides / self.product_rate

    def passes(self, targets: Sequence[QuantTarget], needs: frozenset[str], *, coded: int = 0) -> list[float]:
        return statistics_passes(self.prepared, self.recipe, self.device, targets, needs, coded=coded)

    def codes(self, targets: Sequence[QuantTarget]) -> float:
        weights = of_fullest_rank(targets, lambda target: target.size)
        return weights * self.method.seconds_per_weight[self.device] / self.threads

    def own_text(self) -> float:
        """Writing the windows of the original model's own text."""
        prepared, length = self.prepared, self.prepared.train_windows.shape[1]
        arithmetic = self.forward(prepared.own_windows * length)
        steps_of_few = arithmetic * FULL_STEP / windows_at_once(prepared.model, length)
        seconds = steps_of_few if self.device == "cpu" else _writing(prepared)
        return max(2 * arithmetic, seconds)

    def training(self, uncoded: Sequence[QuantTarget], *, by_block: bool) -> float:
        """A phase of training, while these matrices have no codes. Block by block, blocks whose graphs are not kept run
        twice."""
        prepared, recipe, steps = self.prepared, self.recipe, self.steps
        again = 0.0  # of the blocks, the share that runs twice
        if by_block:
            still_open = {target.name for target in uncoded}
            coded = {target.name for target in prepared.targets} - still_open
            kept = training_memory(prepared, recipe, self.device).graphs_kept(coded)
            again = 1 - kept / len(find_blocks(prepared.model)[1])
        rate = self.rate * (COMPILED if self.compiled else 1.0)
        # parameters that a token meets: on a CPU, where nothing was measured, all
        met, of_experts = float(self.parameters), 0
        if self.device == "cuda":
            of_experts = sum(target.size for target in prepared.targets if target.experts is not None)
            met -= of_experts * (1 - share_of_experts(prepared.model, prepared.targets))
        arithmetic = (3 + again) * 2 * met * tokens_of_step(prepared, recipe) / rate
        seconds = steps * (arithmetic + EXPERT_SECONDS * of_experts)
        if prepared.hosted and recipe.finetune.trains:
            # codes that are decoded in every step, forward and backward
            gpus = count_gpus(prepared)
            decoding = DECODE_SECONDS * weights_to_decode(prepared.targets, gpus)
            sending = hosted_bytes(prepared.targets) / SENT_BYTES if gpus > 1 else 0.0
            seconds += steps * 2 * (decoding + sending)
        open_weights = sum(target.size for target in uncoded)
        joined = 1 + again if by_block else 0.0
        return seconds + steps * _step_of_several(prepared, recipe, open_weights, joined=joined)

    def compiling(self) -> float:
        return COMPILE_SECONDS * self.compiled

    def states(self) -> float:
        """The original's last hidden states: of all windows before the first step if training goes block by block, else as
        steps come to them."""
        count, length = windows_to_train(self.prepared)
        seen = self.steps * tokens_of_step(self.prepared, self.recipe)
        windows = windows_without_logits(length, gpu=self.device == "cuda")
        return self.forward(
            count * length if self.by_block else min(count * length, seen), batch=windows * length
        )

    def decoding(self, times: float) -> float:
        """Dequantizing all codes so many times, as every GPU does that holds a whole model."""
        if self.device != "cuda":
            return 0.0
        return times * sum(target.size for target in self.prepared.targets) * DECODE_SECONDS

    @property
    def keeps_floats(self) -> bool:
        """Whether codes are decoded once for all that is measured (`run/decoded_once.py`)."""
        weights = sum(target.size for target in self.prepared.targets)
        memory = total_memory(torch.device(self.device))
        return keeps_floats(weights, memory, hosted=bool(self.prepared.hosted))

    def decodings_of_diagnosis(self) -> float:
        """How many times a GPU dequantizes all codes: once if it keeps their floats, else for the step that the gradients of
        every batch are multiplied by, at every node of PQI, for each kind of dF, and to leave the model quantized."""
        prepared, gpus = self.prepared, count_gpus(self.prepared)
        if self.keeps_floats:
            return 1
        count, length = prepared.windows.shape
        count = min(count, max(1, DIAGNOSED_TOKENS // length))
        at_once = tokens_at_once(prepared.model, count, length, gpu=True, gradients=True) // length
        steps = (2 + self.nodes) * ceil(ceil(count / at_once) / gpus)
        trained = self.recipe.finetune.trains
        if prepared.hosted:  # whenever a block comes: in a pass that goes back all but the last come twice
            back = 2 - 1 / len({target.block for target in prepared.targets})
            return steps + self.nodes * (1 + trained) * back + 1
        alone = 2 / gpus  # blocks, then matrices, of which each GPU takes a share
        return steps + self.nodes * (1 + trained) + 1 + alone + 1


def _writing(prepared: Prepared | Outline) -> float:
    """Seconds in which the GPUs write the windows of the model's own, each a share of the batches."""
    length = prepared.train_windows.shape[1]
    at_once = windows_at_once(prepared.model, length)
    batches = ceil(ceil(prepared.own_windows / at_once) / count_gpus(prepared))
    weights = parameter_bytes(prepared.model)
    # on average
    keys_and_values = min(at_once, prepared.own_windows) * cache_bytes(prepared.model, length) / 2
    return batches * (length - PREFIX) * (STEP_SECONDS + (weights + keys_and_values) / STEP_BYTES)


def _step_of_several(prepared: Prepared | Outline, recipe: Recipe, uncoded: int, *, joined: float) -> float:
    """Seconds that a step of training takes on several GPUs beside its arithmetic, with so many weights without codes.

    Gradients are summed, as a whole in 16 bits, and every GPU updates all that it holds whole. Block by block a matrix
    without codes is held in parts: its 16-bit values are joined `joined` times, whenever its block runs (0: the model is
    trained as a whole), and gradients are summed in float32.
    """
    gpus = count_gpus(prepared)
    if gpus == 1 or not recipe.finetune.trains:
        return 0.0
    others = (gpus - 1) / gpus
    whole = sum(p.numel() for p in prepared.model.parameters()) - sum(
        target.size for target in prepared.targets
    )
    parts = uncoded if joined else 0
    whole += uncoded - parts
    summed = 4 if joined else 2  # bytes
    return others * ((2 * summed * whole + (2 * joined + 4) * parts) / SENT_BYTES + ADAM_SECONDS * whole)
