"""The stages of a run in order, each with the seconds that it is expected to take.

Times are floating-point operations over a share of the rate of a short matrix product, plus the method's time per weight. If
the GPUs are not present, the rate is that of an H200. `progress.py` shows the stages of a running run under these names:
whatever `enter` is called with must be listed here.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil

import torch

from requant import ranks
from requant.allocation.budget import has_budget
from requant.allocation.embedding_and_head import TOKENS, embedding_and_head_of, table_method
from requant.allocation.predictors import MEASURED_TOKENS, PQI_TOKENS
from requant.calibration.batches import tokens_at_once, windows_without_logits
from requant.calibration.collect import one_pass_suffices
from requant.calibration.experts import share_of_experts
from requant.calibration.gram import products
from requant.calibration.passes import RECOMPUTE_ABOVE
from requant.finetune.compile_blocks import MIN_STEPS_TO_COMPILE
from requant.finetune.decoded_block import weights_to_decode
from requant.finetune.final import trains_by_block
from requant.inference.own_text import PREFIX, cache_bytes, windows_at_once
from requant.models.devices import total_memory
from requant.models.targets import QuantTarget, siblings
from requant.pipeline.diagnosis import MATRIX_TOKENS_ON_CPU, MATRIX_WEIGHTS_ON_CPU
from requant.pipeline.hosting import hosted_bytes, parameter_bytes
from requant.pipeline.outline import Outline
from requant.pipeline.prepare import DIAGNOSED_TOKENS, Prepared
from requant.pipeline.rates import (
    ADAM_SECONDS,
    COMPILE_SECONDS,
    COMPILED,
    DECODE_SECONDS,
    FRACTION_OF_PEAK,
    FULL_STEP,
    FULL_WIDTH,
    HOST_BYTES,
    LAUNCH_SECONDS,
    PREDICTION_SECONDS,
    SENT_BYTES,
    STEP_BYTES,
    STEP_SECONDS,
    product_rate,
)
from requant.pipeline.statistics import statistics_passes
from requant.progress import Stage
from requant.quantizers.registry import find_method
from requant.quantizers.table_trellis import WEIGHTS_AT_ONCE
from requant.recipe.schema import Recipe
from requant.run.rounds import round_name, rounds_of
from requant.sensitivity.pqi import NODES

FORWARDS = {"original": 1, "quantized": 2, "corrected": 7}  # whole passes, for the Hessians of all matrices


def expected_stages(prepared: Prepared | Outline, recipe: Recipe, device: str) -> list[Stage]:
    """The stages of a run on devices of a type; loading and writing files are not counted."""
    return list(_stages(prepared, recipe, device))


def expected_seconds(prepared: Prepared | Outline, recipe: Recipe, device: str) -> float:
    """Wall time of a run on devices of a type."""
    return sum(stage.seconds for stage in _stages(prepared, recipe, device))


def _stages(prepared: Prepared | Outline, recipe: Recipe, device: str) -> Iterator[Stage]:
    costs = _Costs(prepared, recipe, device)
    if has_budget(recipe):
        yield costs.allocation()
    if recipe.finetune.trains and prepared.own_windows:
        yield costs.own_text()
    if recipe.trains_in_rounds:
        yield from costs.rounds()
    else:
        yield costs.making_codes("codes", prepared.targets, kept=costs.kept)
    if recipe.mode == "paper":
        yield from costs.sparse_part()
    if recipe.mode == "sparse" and costs.steps:
        whole = sum(target.size for target in prepared.targets)
        yield costs.training("recovery", whole, by_block=False)
    yield costs.embedding_and_head()
    if recipe.mode != "sparse" and costs.steps:
        last = costs.training("fine-tuning", 0, by_block=costs.by_block)
        states = 0.0 if costs.rounds_leave_states else costs.states()
        yield replace(last, seconds=last.seconds + states + costs.compiling())
    yield costs.diagnosis()
    yield costs.evaluation()
    yield Stage(name="samples", kind="samples", seconds=0.0, bars=0)


class _Costs:
    """Seconds of the parts of a run on devices of a type."""

    def __init__(self, prepared: Prepared | Outline, recipe: Recipe, device: str) -> None:
        self.prepared, self.recipe, self.device = prepared, recipe, device
        self.parameters = sum(p.numel() for p in prepared.model.parameters())
        self.product_rate = product_rate(next(prepared.model.parameters()).dtype, device) * count_gpus(
            prepared
        )
        self.rate = self.product_rate * FRACTION_OF_PEAK[device]
        if device == "cuda":
            width = prepared.model.get_input_embeddings().get_parameter("weight").shape[1]
            self.rate *= min(1.0, width / FULL_WIDTH)
        self.blocks = len({target.block for target in prepared.targets})
        self.compiled = device == "cuda" and recipe.finetune.num_steps >= MIN_STEPS_TO_COMPILE
        self.method, self.nodes = find_method(recipe.method), len(NODES[recipe.sensitivity.nodes])
        self.windows, self.steps = prepared.windows.numel(), recipe.finetune.num_steps
        self.threads = torch.get_num_threads() if device == "cpu" else 1
        # to the GPU, in a pass over the blocks
        self.brought = hosted_bytes(prepared.targets) / HOST_BYTES if prepared.hosted else 0.0
        self.parallel = recipe.calibration.inputs == "original"  # not with earlier matrices quantized
        self.inputs = (
            len(self.method.needs & {"hessian"})
            * FORWARDS[recipe.calibration.inputs]
            * self.forward(self.windows)
        )
        if self.parallel and one_pass_suffices(self.method.needs):
            self.inputs = 0.0
        # whether the codes need not wait for statistics, since the allocation's came from one pass
        self.kept = has_budget(recipe) and len(self._passes(prepared.targets)) == 1
        self.by_block = recipe.finetune.trains and goes_by_block(prepared, recipe, device)

    def forward(self, tokens: int, *, batch: int | None = None) -> float:
        """In batches of so many tokens; None: of as many as the logits allow."""
        launching = self._blocks_of_batches(tokens, batch) * LAUNCH_SECONDS[0]
        return max(2 * self.parameters * tokens / self.rate, launching) + self.brought

    def backward(self, tokens: int, share: float = 1.0, *, of_weights: bool = True) -> float:
        """Through all blocks, and back through a share of them, which large models compute once more for that; gradients
        `of_weights` are as much arithmetic as those of inputs."""
        again = self.parameters >= RECOMPUTE_ABOVE
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
        passes = self._passes(targets, coded=coded)
        gradients = sum(self.backward(self.windows, share, of_weights=False) for share in passes)
        gradients *= len(self.method.needs & {"fisher", "output_hessian"})
        return gradients + self.inputs * (len(passes) if self.parallel else 1) + self._hessians(targets)

    def _hessians(self, targets: Sequence[QuantTarget]) -> float:
        """The products whose sums are the Hessians of these matrices: as much arithmetic as a pass where layers are wide."""
        share = share_of_experts(self.prepared.model, targets)
        inputs: dict[tuple[str, ...], float] = {}  # by what reads them
        outputs = 0.0
        for target in targets:
            n, k = target.shape
            seen = 1.0 if target.experts is None else share
            inputs[(target.name.rpartition(".")[0], *siblings(target.kind))] = seen * products(k)
            outputs += seen * products(n)
        needs = self.method.needs
        sides = sum(inputs.values()) * ("hessian" in needs) + outputs * ("output_hessian" in needs)
        return 2 * self.windows * sides / self.product_rate

    def _passes(self, targets: Sequence[QuantTarget], *, coded: int = 0) -> list[float]:
        return statistics_passes(self.prepared, self.recipe, self.device, targets, coded=coded)

    def codes(self, targets: Sequence[QuantTarget]) -> float:
        weights = of_fullest_rank(targets, lambda target: target.size)
        return weights * self.method.seconds_per_weight[self.device] / self.threads

    def allocation(self) -> Stage:
        all_codes = self.codes(self.prepared.targets)
        each = all_codes + len(self.prepared.targets) * self.forward(MEASURED_TOKENS)
        predicted = of_fullest_rank(self.prepared.targets, lambda target: target.size) / self.threads
        predicted *= (
            PREDICTION_SECONDS[self.device] if "output_hessian" in self.method.predictor_needs else 0.0
        )
        # embedding and head: the same batches on every GPU
        predicted += count_gpus(self.prepared) * self.backward(min(self.windows, TOKENS), of_weights=False)
        predictor = {
            "curvature": 0.0,
            "measured": each,
            "restored": each,
            "pqi": all_codes + self.nodes * self.backward(min(self.windows, PQI_TOKENS)),
        }
        more = predictor[self.recipe.budget.predictor]
        seconds = self.statistics(self.prepared.targets) + predicted + more
        return Stage(name="allocation", kind="statistics", seconds=seconds, bars=0)

    def making_codes(self, name: str, targets: Sequence[QuantTarget], *, kept: bool, coded: int = 0) -> Stage:
        """With their statistics, unless they are `kept`, beside the codes of so many other weights."""
        seconds = self.codes(targets) + (0.0 if kept else self.statistics(targets, coded=coded))
        return Stage(name=name, kind="codes", seconds=seconds)

    def own_text(self) -> Stage:
        prepared, length = self.prepared, self.prepared.train_windows.shape[1]
        arithmetic = self.forward(prepared.own_windows * length)
        steps_of_few = arithmetic * FULL_STEP / windows_at_once(prepared.model, length)
        seconds = steps_of_few if self.device == "cpu" else _writing(prepared)
        return Stage(name="own text", kind="own text", seconds=max(2 * arithmetic, seconds))

    def training(self, name: str, still_open: int, *, by_block: bool) -> Stage:
        """A phase of training, with so many weights without codes. Block by block every block runs twice."""
        prepared, recipe, steps = self.prepared, self.recipe, self.steps
        passes = 4 if by_block else 3
        rate = self.rate * (COMPILED if self.compiled else 1.0)
        seconds = steps * passes * 2 * self.parameters * tokens_of_step(prepared, recipe) / rate
        if prepared.hosted and recipe.finetune.trains:
            # codes that are decoded in every step, forward and backward
            gpus = count_gpus(prepared)
            decoding = DECODE_SECONDS * weights_to_decode(prepared.targets, gpus)
            sending = hosted_bytes(prepared.targets) / SENT_BYTES if gpus > 1 else 0.0
            seconds += steps * 2 * (decoding + sending)
        shared = steps * _step_of_several(prepared, recipe, still_open, by_block=by_block)
        return Stage(name=name, kind="training", seconds=seconds + shared)

    def compiling(self) -> float:
        return COMPILE_SECONDS * self.compiled

    def states(self) -> float:
        """Of the original's last hidden states: block by block those of all windows before the first step, else as steps
        come to them."""
        count, length = windows_to_train(self.prepared)
        seen = self.steps * tokens_of_step(self.prepared, self.recipe)
        windows = windows_without_logits(length, gpu=self.device == "cuda")
        return self.forward(
            count * length if self.by_block else min(count * length, seen), batch=windows * length
        )

    @property
    def rounds_leave_states(self) -> bool:
        """Whether the last training finds them: block by block they are there before the first round's codes, else after its
        training, which a single round has not."""
        targets, count = self.prepared.targets, self.recipe.finetune.rounds
        return self.recipe.trains_in_rounds and (self.by_block or len(rounds_of(targets, count)) > 1)

    def rounds(self) -> Iterator[Stage]:
        """Of mode `best`; the training after the last one is a stage of its own."""
        targets = self.prepared.targets
        rounds = rounds_of(targets, self.recipe.finetune.rounds)
        whole = still_open = sum(target.size for target in targets)
        for index, members in enumerate(rounds):
            coded = whole - still_open
            still_open -= sum(target.size for target in members)
            name = round_name(index, len(rounds))
            states = 0.0 if index else self.states()
            codes = self.making_codes(f"{name}, codes", members, kept=self.kept and not index, coded=coded)
            yield replace(codes, seconds=codes.seconds + (states if self.by_block else 0.0))
            if index + 1 < len(rounds):
                phase = self.training(f"{name}, training", still_open, by_block=self.by_block)
                first = (0.0 if self.by_block else states) + (0.0 if index else self.compiling())
                yield replace(phase, seconds=phase.seconds + first)

    def sparse_part(self) -> Iterator[Stage]:
        """Of mode `paper`: outliers and significant weights."""
        detach, passes = self.recipe.detach, self.nodes if self.recipe.sensitivity.score == "pqi" else 1
        scored = self.backward(self.windows) * passes
        if detach.outlier_fraction:
            adaptive = detach.outlier_rule == "adaptive"
            again = self.codes(self.prepared.targets)
            again += self.inputs if self.recipe.calibration.inputs != "original" else 0.0
            trials = len(detach.temperatures) * (again + self.forward(self.windows))
            seconds = scored + trials if adaptive else 0.0
            yield Stage(name="outliers", kind="outliers", seconds=seconds, bars=0)
            yield Stage(name="codes again", kind="codes", seconds=0.0 if adaptive else again)
        if detach.significant_fraction:
            seconds, bars = detach.steps * scored, detach.steps * passes
            yield Stage(name="significant weights", kind="scores", seconds=seconds, bars=bars)

    def embedding_and_head(self) -> Stage:
        tables = embedding_and_head_of(self.prepared.model).parts.values()
        sizes, gpus = [part.weight.numel() for part in tables], count_gpus(self.prepared)
        if self.recipe.method == "trellis":  # several GPUs code pieces of one table
            sizes = [size // min(gpus, ceil(size / WEIGHTS_AT_ONCE)) for size in sizes]
        weights = sum(sizes)
        coded = has_budget(self.recipe)
        per_weight = table_method(self.recipe).seconds_per_weight[self.device] if coded else 0.0
        seconds = weights * per_weight / self.threads
        return Stage(name="embedding and head", kind="tables", seconds=seconds, bars=0)

    def diagnosis(self) -> Stage:
        targets, hosted = self.prepared.targets, self.prepared.hosted
        diagnosed = min(self.windows, DIAGNOSED_TOKENS)
        by_matrix = 0.0
        if self.device == "cuda" and not hosted:
            by_matrix = len(targets) * self.forward(diagnosed)
        elif self.device == "cpu" and sum(target.size for target in targets) <= MATRIX_WEIGHTS_ON_CPU:
            by_matrix = len(targets) * self.forward(min(self.windows, MATRIX_TOKENS_ON_CPU))
        blocks = 0 if hosted else len({target.block for target in targets})
        passes = (2 + self.nodes) * self.backward(diagnosed) + (2 + blocks) * self.forward(diagnosed)
        if self.recipe.finetune.trains:  # PQI of what was trained beside codes: all batches on every GPU
            whole = self.nodes * self.backward(diagnosed, of_weights=False)
            passes += count_gpus(self.prepared) * whole
        return Stage(
            name="diagnosis",
            kind="diagnosis",
            seconds=passes + by_matrix + self.decoding(self._decoded_in_diagnosis()),
            bars=0,
        )

    def evaluation(self) -> Stage:
        seconds = 2 * self.forward(self.prepared.eval_windows.numel()) + self.decoding(1)
        return Stage(name="evaluation", kind="evaluation", seconds=seconds)

    def decoding(self, times: float) -> float:
        """To make floats of all codes so many times, as every GPU does that holds a whole model."""
        if self.device != "cuda":
            return 0.0
        return times * sum(target.size for target in self.prepared.targets) * DECODE_SECONDS

    def _decoded_in_diagnosis(self) -> float:
        """How many times a GPU makes floats of all codes: for the step that the gradients of every batch are multiplied by,
        at every node of PQI, and once to leave the model quantized after each score and each kind of dF."""
        prepared, gpus = self.prepared, count_gpus(self.prepared)
        count, length = prepared.windows.shape
        count = min(count, max(1, DIAGNOSED_TOKENS // length))
        at_once = tokens_at_once(prepared.model, count, length, gpu=True, gradients=True) // length
        steps = (2 + self.nodes) * ceil(ceil(count / at_once) / gpus)
        trained = self.recipe.finetune.trains
        if prepared.hosted:  # whenever a block comes: in a pass that goes back all but the last come twice
            back = 2 - 1 / len({target.block for target in prepared.targets})
            return steps + self.nodes * (1 + trained) * back + 1
        alone = 2 * (1 / gpus + 1)  # blocks, then matrices, of which each GPU takes a share
        return steps + self.nodes + 3 + trained * (self.nodes + 1) + 1 + alone


def _writing(prepared: Prepared | Outline) -> float:
    """Seconds in which the GPUs write the windows of the model's own, each a share of the batches."""
    length = prepared.train_windows.shape[1]
    at_once = windows_at_once(prepared.model, length)
    batches = ceil(ceil(prepared.own_windows / at_once) / count_gpus(prepared))
    weights = parameter_bytes(prepared.model)
    keys_and_values = (
        min(at_once, prepared.own_windows) * cache_bytes(prepared.model, length) / 2
    )  # on average
    return batches * (length - PREFIX) * (STEP_SECONDS + (weights + keys_and_values) / STEP_BYTES)


def tokens_of_step(prepared: Prepared | Outline, recipe: Recipe) -> int:
    """Of training."""
    count, length = prepared.train_windows.shape
    return length * recipe.finetune.windows_of_step(count + prepared.own_windows, length)


def goes_by_block(prepared: Prepared | Outline, recipe: Recipe, device: str) -> bool:
    """Whether training goes block by block."""
    return recipe.mode != "sparse" and trains_by_block(
        prepared.model,
        prepared.targets,
        recipe.finetune,
        windows_to_train(prepared),
        device_memory=total_memory(torch.device(device)) if device == "cuda" else None,
    )


def windows_to_train(prepared: Prepared | Outline) -> tuple[int, int]:
    """How many windows training may take, with those of the model's own, and their length."""
    count, length = prepared.train_windows.shape
    return count + prepared.own_windows, length


def _step_of_several(
    prepared: Prepared | Outline, recipe: Recipe, still_open: int, *, by_block: bool
) -> float:
    """Seconds that a step of training takes on several GPUs beside its arithmetic, with so many weights without codes.

    Gradients are summed, and every GPU updates all that it holds whole. Block by block a matrix without codes is held in
    parts: its 16-bit values are joined for the forward and the backward pass, its float32 gradients are summed.
    """
    gpus = count_gpus(prepared)
    if gpus == 1 or not recipe.finetune.trains:
        return 0.0
    others = (gpus - 1) / gpus
    whole = sum(p.numel() for p in prepared.model.parameters()) - sum(
        target.size for target in prepared.targets
    )
    parts = still_open if by_block else 0
    whole += still_open - parts
    return others * ((2 * 4 * whole + (2 * 2 + 4) * parts) / SENT_BYTES + ADAM_SECONDS * whole)


def count_gpus(prepared: Prepared | Outline) -> int:
    """Among how many ranks the matrices are divided."""
    return ranks.count_owners(prepared.targets)


def of_fullest_rank(targets: Sequence[QuantTarget], size: Callable[[QuantTarget], int]) -> int:
    """The sum of `size` over the matrices of the rank that has most."""
    sums: Counter[int] = Counter()
    for target in targets:
        sums[target.rank] += size(target)
    return max(sums.values())
