"""Distillation: train a partly quantized model to reproduce the original's next-token distributions.

    minimize   mean_t [ KL( p_original(. | x_<t) || p(. | x_<t) ) + c error of the last hidden states ]   (`loss.py`)

over the tensors of `trainables.py`, which gives their learning rates too. The optimizer is Adam (0.9, 0.95), with ten steps
of warm-up, then a cosine to zero. Parameters are float32 during training; on a GPU matrix products run in bfloat16 and
blocks are compiled (`compile_blocks.py`). With several processes each trains on its part of a step's windows.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Int64
from torch import Tensor

from requant import ranks
from requant.calibration.passes import recomputed_blocks
from requant.finetune.best_values import BestValues
from requant.finetune.blockwise import BlockwiseStep, divided_among_ranks
from requant.finetune.compile_blocks import compiles, fused
from requant.finetune.divided import Part
from requant.finetune.loss import loss_sum, mean_kl, usable_hidden_weight
from requant.finetune.memory import TrainingMemory, bytes_of_a_token, copied_to_sum, windows_that_fit
from requant.finetune.saved_training import SavedTraining, numbered, restore
from requant.finetune.step import (
    MicroBatch,
    OptimizerOf,
    ReparametrizedWeight,
    TrainableTensor,
    TrainingStep,
    adam,
)
from requant.finetune.teacher import HeadTeacher, Teacher
from requant.models.deterministic import deterministic
from requant.models.devices import Pace, available_memory, free_memory, total_memory
from requant.models.hosted import hosted_blocks
from requant.progress import counted
from requant.recipe.schema import Finetune
from requant.run.context import RunContext


def train(
    run: RunContext,
    teacher: Teacher | HeadTeacher,
    trainables: Sequence[TrainableTensor],
    derived: Sequence[ReparametrizedWeight],
    settings: Finetune,
    *,
    saved: SavedTraining,
    val_windows: Int64[Tensor, "h t"] | None = None,
    optimizer: OptimizerOf = adam,
    between_steps: Callable[[int], Mapping[str, str]] | None = None,
    buffers: Sequence[Tensor] = (),
    distillation: float = 1.0,
    hidden_weight: float = 0.0,
) -> None:
    """`settings.num_steps` steps on the teacher's windows; `trainables` and the weights `derived` from them are updated.

    With `val_windows`, the tensors end at the values with the lowest KL on those windows, the initial ones included.
    `between_steps` is called with the number of each finished step; it may change the `buffers`, on which derived weights
    depend as well, in place, and returns what the progress bar shows. `distillation` is the share of the KL divergence in
    the loss; the rest is the cross-entropy of the text. `hidden_weight` is that of the error of the last hidden states;
    where a model's logits do not follow from them it is 0, and the log says so. Training goes on where `saved` says that an
    earlier run stopped. Raises KeyboardInterrupt after the step in which a signal asked for it, with the state saved.
    """
    tensors = [*(trainable.tensor for trainable in trainables), *buffers]
    # on the host for a model that is large beside its GPU
    best_on = torch.device("cpu") if isinstance(teacher, HeadTeacher) else None
    best = BestValues(tensors, validated=val_windows is not None, on=best_on)
    micro_batch, models, recompute = None, [run.model], False
    if isinstance(teacher, Teacher):
        micro_batch = micro_batch_that_fits(
            run, trainables, derived, settings, teacher.windows.shape[1], reserved=teacher.cache.bytes_to_come
        )
        hidden_weight = hidden_weight and usable_hidden_weight(hidden_weight, teacher)
        models, recompute = [run.model, teacher.model], None if micro_batch is None else False
    batches = _Batches(teacher=teacher, settings=settings, seed=run.recipe.seed, micro_batch=micro_batch)
    hosted = hosted_blocks(run.model)
    with (
        deterministic(run.model),
        nullcontext() if hosted is None else hosted.bypassed(),
        single_precision(_widened(run, teacher, trainables, derived)),
        fused(models, settings.num_steps),
        recomputed_blocks(run.model, recompute),
        saved.interrupts_noted() as interrupts,
        _training_step(
            run,
            teacher,
            trainables,
            derived,
            settings,
            batch_tokens=batches.tokens_per_step,
            optimizer=optimizer,
            distillation=distillation,
            hidden_weight=hidden_weight,
        ) as step,
    ):
        training = _Training(
            run=run,
            batches=batches,
            step=step,
            derived=derived,
            best=best,
            saved=saved,
            val_windows=val_windows,
            between_steps=between_steps,
            buffers=buffers,
        )
        training.run_steps(training.start(), interrupts)
        step.close()
    training.finish()


@dataclass(frozen=True, kw_only=True)
class _Batches:
    """The training windows of each step, and the part of them that this rank processes."""

    teacher: Teacher | HeadTeacher
    settings: Finetune
    seed: int
    micro_batch: int | None  # windows that go through the model at once; None: as the teacher sees fit

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step of all ranks together."""
        return len(self._windows(0)) * self.teacher.windows.shape[1]

    def of_step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of this rank."""
        chosen = self._windows(step)
        own = chosen[ranks.rank() :: ranks.world_size()]
        found = self.teacher.micro_batches(own, self.micro_batch) if len(own) else []
        if isinstance(self.teacher, Teacher):
            self.teacher.cache.share(chosen)
        return found

    def _windows(self, step: int) -> Int64[Tensor, " c"]:
        count, length = self.teacher.windows.shape
        return windows_of_step(count, length, step, self.settings, self.seed)


@contextmanager
def _training_step(
    run: RunContext,
    teacher: Teacher | HeadTeacher,
    trainables: Sequence[TrainableTensor],
    derived: Sequence[ReparametrizedWeight],
    settings: Finetune,
    *,
    batch_tokens: int,
    optimizer: OptimizerOf,
    distillation: float,
    hidden_weight: float,
) -> Iterator[TrainingStep | BlockwiseStep]:
    """A step of the model as a whole, or block by block where the teacher is a head with the original's states."""
    if isinstance(teacher, Teacher):
        loss = partial(loss_sum, run.model, teacher, distillation=distillation, hidden_weight=hidden_weight)
        yield TrainingStep(lambda *batch: loss(*batch) / batch_tokens, trainables, derived, optimizer)
        return
    device = run.model.device
    count, length = teacher.windows.shape
    memory = TrainingMemory(
        model=run.model,
        targets=run.targets,
        settings=settings,
        windows=(count, length),
        by_block=True,
        gpu=device.type == "cuda",
        # of the smallest GPU: ranks that keep graphs of the same blocks wait for each other in the same order
        device_memory=ranks.smallest(total_memory(device)),
        gpus=ranks.world_size(),
        hosted=any(target.hosted is not None for target in run.targets),
        group_size=getattr(run.recipe.quantizer, "group_size", None),
        compiles=device.type == "cuda" and compiles(settings.num_steps),
    )
    derived_parameters = {weight.parameter for weight in derived}
    coded = {target.name for target in run.targets if target.parameter in derived_parameters}
    step = BlockwiseStep(
        run.model,
        teacher,
        trainables,
        derived,
        batch_tokens=batch_tokens,
        block_tokens=memory.tokens_at_once,
        graphs_kept=memory.graphs_kept(coded, available=ranks.smallest(available_memory(device))),
        hidden_weight=hidden_weight,
    )
    try:
        yield step
    finally:
        # also after an error: what `fused` put beneath them can only be taken away when they are gone
        step.forwards.close()


@dataclass(frozen=True, kw_only=True)
class _Training:
    """A training in progress: its steps, what is measured, saved and shown between them, and how it starts and ends."""

    run: RunContext
    batches: _Batches
    step: TrainingStep | BlockwiseStep
    derived: Sequence[ReparametrizedWeight]
    best: BestValues
    saved: SavedTraining
    val_windows: Int64[Tensor, "h t"] | None
    between_steps: Callable[[int], Mapping[str, str]] | None
    buffers: Sequence[Tensor]

    @property
    def num_steps(self) -> int:
        return self.batches.settings.num_steps

    def start(self) -> int:
        """Go on where an earlier run stopped, or measure the initial values; the number of steps that are done."""
        found = self.saved.take()
        if found is None:
            if self.val_windows is not None:
                self.best.kl = self._kl(self.val_windows)
            return 0
        self.best.restore(found.value["best_kl"], found.tensors)
        restore(self.buffers, "buffer", found.tensors)
        self.step.restore(found.tensors)
        done = found.value["step"]
        if isinstance(self.batches.teacher, Teacher):
            for step in range(done):
                self.batches.of_step(step)  # its states as they were cached, in the same batches
        return done

    def run_steps(self, done: int, interrupts: Sequence[int]) -> None:
        """All steps after the first `done`. Raises KeyboardInterrupt after one in which a signal was noted."""
        pace = Pace(self.run.model.device)
        with counted(self.num_steps, label=self.run.label("training"), unit="steps", done=done) as bar:
            for step in range(done, self.num_steps):
                self.step(self.batches.of_step(step), lr_schedule(step, self.batches.settings))
                pace()
                bar.update(notes=self._after_step(step))
                if interrupts or (self.saved.due and step + 1 < self.num_steps):
                    self.saved.save(self._state, step=step + 1, best_kl=self.best.kl)
                if interrupts:
                    raise KeyboardInterrupt

    def finish(self) -> None:
        """Write the best values into the trained tensors, on all ranks alike."""
        self.best.apply()
        ranks.copy_from(0, self.best.tensors)  # what ranks computed alike is then alike to the last bit
        for weight in self.derived:
            weight.apply()
        if self.saved.due:
            self.saved.save(self._state_at_end, step=self.num_steps, best_kl=self.best.kl)

    def _after_step(self, step: int) -> dict[str, str]:
        """Whatever is due after a step (from 0): masks, and every `eval_every` the KL; what the progress bar shows."""
        notes: dict[str, str] = {}
        if self.between_steps is not None:
            notes |= self.between_steps(step)
            for weight in self.derived:
                weight.apply()
        last = step + 1 == self.num_steps
        if self.val_windows is not None and (last or (step + 1) % self.batches.settings.eval_every == 0):
            kl = self._kl(self.val_windows)
            self.best.offer(kl)
            notes |= {"kl": f"{kl:.4f}", "best": f"{self.best.kl:.4f}"}
        return notes

    def _state(self) -> dict[str, Tensor | Part]:
        return {**self.step.state(), **numbered("buffer", self.buffers), **self.best.state()}

    def _state_at_end(self) -> dict[str, Tensor | Part]:
        """What is kept of a finished training: no state of the optimizer, and the best values in the tensors themselves."""
        return {**self.step.state(optimizer=False), **numbered("buffer", self.buffers)}

    def _kl(self, windows: Int64[Tensor, "h t"]) -> float:
        if isinstance(self.step, BlockwiseStep):
            return self.step.mean_kl()
        assert isinstance(self.batches.teacher, Teacher)
        return mean_kl(self.run.model, self.batches.teacher, windows)


def _widened(
    run: RunContext,
    teacher: Teacher | HeadTeacher,
    trainables: Sequence[TrainableTensor],
    derived: Sequence[ReparametrizedWeight],
) -> list[Tensor]:
    """The parameters that training block by block holds in float32: all but matrices that exist only while their block is
    computed. A model that is trained as a whole is in float32 already."""
    if isinstance(teacher, Teacher):
        return []
    coded = {weight.parameter for weight in derived} & {target.parameter for target in run.targets}
    elsewhere = coded.union(divided_among_ranks(run.model, trainables))
    return [p for p in run.model.parameters() if p not in elsewhere]


@contextmanager
def single_precision(parameters: Iterable[Tensor]) -> Iterator[None]:
    """These in float32 while the context lasts: Adam's updates are too small for 16 bits."""
    dtypes = {p: p.dtype for p in parameters if p.is_floating_point()}
    for p in dtypes:
        p.data = p.data.float()
    try:
        yield
    finally:
        for p, dtype in dtypes.items():
            p.data = p.data.to(dtype)


def micro_batch_that_fits(
    run: RunContext,
    trainables: Sequence[TrainableTensor],
    derived: Sequence[ReparametrizedWeight],
    settings: Finetune,
    length: int,
    *,
    reserved: int = 0,
) -> int | None:
    """Windows of `length` tokens that fit a GPU at once without recomputing blocks; None: not even one does.

    Beside gradients, Adam's state and what sums over GPUs take, of what is free now; `reserved` bytes are left.
    """
    device = run.model.device
    if device.type != "cuda":
        return None
    a_token = bytes_of_a_token(run.model, run.targets, device="cuda", compiled=compiles(settings.num_steps))
    learning = [trainable.tensor.numel() for trainable in trainables]
    state = reserved + 12 * sum(learning)
    state += copied_to_sum(sum(learning), max(learning, default=0), gpus=ranks.world_size())
    state += 4 * sum(weight.parameter.numel() for weight in derived)
    return windows_that_fit(free_memory(device) - state, a_token, length, settings) or None


def lr_schedule(step: int, settings: Finetune) -> float:
    """The factor of the learning rate at a step: linear warm-up, then a cosine to zero."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return warm * 0.5 * (1 + math.cos(math.pi * step / max(1, settings.num_steps)))


def windows_of_step(
    windows: int, length: int, step: int, settings: Finetune, seed: int
) -> Int64[Tensor, " c"]:
    """Indices of the windows of one step: a new random order every epoch."""
    count = settings.windows_of_step(windows, length)
    epoch, first = divmod(step * count, windows)
    generators = (torch.Generator().manual_seed(1_000_003 * seed + epoch + i) for i in range(2))
    order = torch.cat([torch.randperm(windows, generator=generator) for generator in generators])
    return order[first : first + count]
