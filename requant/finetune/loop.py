"""Distillation: train a partly quantized model to reproduce the original's next-token distributions.

    minimize   mean_t [ KL( p_original(. | x_<t) || p(. | x_<t) ) + c error of the last hidden states ]   (`loss.py`)

Three kinds of tensors are trained: the floats stored with the codes of quantized matrices (`trainable_params` of
`formats/contract.py`), the weights of matrices that are not quantized yet, and the parameters without codes: norms,
biases, and embedding and head until they are quantized. The optimizer is Adam (0.9, 0.95) with each tensor's learning rate
in units of its root mean square, ten steps of warm-up, then a cosine to zero. The errors to correct are those of the codes,
which halve with every bit, so the learning rate does too (`learning_rate`): at 4 bits a third of the rate of 2 bits gives
KL 0.0205, the same rate 0.0225, and codes alone 0.0229 (bench-32m). Parameters are float32 during training; on a GPU matrix
products run in bfloat16 and blocks are compiled (`compile_blocks.py`). With several processes each trains on its part of a
step's windows.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from requant import ranks
from requant.allocation.embedding_and_head import embedding_and_head_of
from requant.calibration.passes import recomputed_blocks
from requant.finetune.best_values import BestValues
from requant.finetune.blockwise import BlockwiseStep, divided_among_ranks
from requant.finetune.compile_blocks import compiles, fused
from requant.finetune.divided import Part
from requant.finetune.loss import loss_sum, mean_kl, usable_hidden_weight
from requant.finetune.memory import bytes_of_a_token
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
from requant.formats.contract import TrainableParams
from requant.models.deterministic import deterministic
from requant.models.devices import Pace, free_memory
from requant.models.experts import routers
from requant.models.hosted import hosted_blocks
from requant.models.targets import QuantTarget
from requant.progress import counted
from requant.recipe.schema import Finetune
from requant.run.context import RunContext

RESIDUAL_LR = 3.0  # times the learning rate: a residual is one weight, not the scale of many
EMBEDDING_LR = 1 / 3  # times the learning rate: a token's row gets gradients only where the token occurs
# Learning rates of as many steps a phase and fewer, and of as many and more. On bench-32m 200 steps end at a KL of .2239
# with 8e-3 and .2312 with 3e-3 at 2 bits, at .0643 and .0646 at 3 (2e-2: .0658); 1000 steps at .0637 and .0621 at 3.
# Between them a power of the steps, which is not measured.
FEW_STEPS, LR_OF_FEW = 200, 8e-3
MANY_STEPS, LR_OF_MANY = 1000, 3e-3


def trainable_tensors(
    trainable: Mapping[str, TrainableParams],
    unquantized: Sequence[QuantTarget],
    other_params: Sequence[nn.Parameter],
    lr: float,
) -> list[TrainableTensor]:
    """All trained tensors: floats of quantized matrices, weights of `unquantized` ones, and parameters without codes."""
    trainables = [
        TrainableTensor(tensor=value, lr=lr * (RESIDUAL_LR if name == "values" else 1.0))
        for params in trainable.values()
        for name, value in params.items()
    ]
    trainables += [TrainableTensor(tensor=target.parameter, lr=lr) for target in unquantized]
    trainables += [
        TrainableTensor(tensor=p, lr=lr * (EMBEDDING_LR if p.dim() > 1 else 1.0)) for p in other_params
    ]
    return trainables


def learning_rate(run: RunContext, settings: Finetune) -> float:
    """Adam's learning rate at the run's average bits, in units of a tensor's root mean square."""
    bits = sum(run.config_of(target).bits * target.size for target in run.targets) / run.total_weights
    lr = default_lr(settings.num_steps) if settings.lr is None else settings.lr
    return lr * 2 ** (2 - bits)


def default_lr(steps: int) -> float:
    """The learning rate at 2 bits of a phase of so many steps."""
    steps = min(max(steps, FEW_STEPS), MANY_STEPS)
    power = math.log(LR_OF_FEW / LR_OF_MANY) / math.log(MANY_STEPS / FEW_STEPS)
    return LR_OF_MANY * (MANY_STEPS / steps) ** power


def params_without_codes(run: RunContext, quantized: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Name -> parameter without codes: norms, biases, routers, and embedding and head unless among `quantized`.

    Matrices that the recipe skips are not trained, nor are token tables.
    """
    parts = embedding_and_head_of(run.model).parts.values()
    tables = {id(part.weight) for part in parts if part.learns and part.name not in quantized}
    tables |= set(map(id, routers(run.model).values()))
    return {name: p for name, p in run.model.named_parameters() if p.dim() < 2 or id(p) in tables}


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
    count, length = teacher.windows.shape
    batch_tokens = len(windows_of_step(count, length, 0, settings, run.recipe.seed)) * length
    # of a model that is large beside its GPU on the host
    best_on = torch.device("cpu") if isinstance(teacher, HeadTeacher) else None
    best = BestValues(tensors, validated=val_windows is not None, on=best_on)
    micro_batch, models, recompute = None, [run.model], False
    if isinstance(teacher, Teacher):
        micro_batch = micro_batch_that_fits(
            run, trainables, derived, settings, length, reserved=teacher.bytes_to_come
        )
        hidden_weight = hidden_weight and usable_hidden_weight(hidden_weight, teacher)
        models, recompute = [run.model, teacher.model], None if micro_batch is None else False

    def micro_batches(step: int) -> list[MicroBatch]:
        chosen = windows_of_step(count, length, step, settings, run.recipe.seed)
        own = chosen[ranks.rank() :: ranks.world_size()]
        found = teacher.micro_batches(own, micro_batch) if len(own) else []
        if isinstance(teacher, Teacher):
            teacher.share(chosen)
        return found

    hosted = hosted_blocks(run.model)
    with (
        ExitStack() as stack,
        deterministic(run.model),
        nullcontext() if hosted is None else hosted.bypassed(),
        single_precision(_widened(run, teacher, trainables, derived)),
        fused(models, settings.num_steps) as kl_of,
        recomputed_blocks(run.model, recompute),
        saved.interrupts_noted() as interrupts,
        ExitStack() as replaced,
    ):
        if isinstance(teacher, HeadTeacher):
            training_step = BlockwiseStep(
                run.model,
                teacher,
                trainables,
                derived,
                batch_tokens=batch_tokens,
                kl_of=kl_of,
                hidden_weight=hidden_weight,
            )
            # also after an error: what `fused` put beneath them can only be taken away when they are gone
            replaced.callback(training_step.forwards.close)
        else:
            loss = partial(
                loss_sum,
                run.model,
                teacher,
                kl_of=kl_of,
                distillation=distillation,
                hidden_weight=hidden_weight,
            )
            training_step = TrainingStep(
                lambda *batch: loss(*batch) / batch_tokens, trainables, derived, optimizer
            )

        def measured(windows: Int64[Tensor, "h t"]) -> float:
            if isinstance(training_step, BlockwiseStep):
                return training_step.mean_kl()
            assert isinstance(teacher, Teacher)
            return mean_kl(run.model, teacher, windows)

        resumed = saved.take()
        done = 0 if resumed is None else resumed.value["step"]
        if resumed is not None:
            best.restore(resumed.value["best_kl"], resumed.tensors)
            restore(buffers, "buffer", resumed.tensors)
            training_step.restore(resumed.tensors)
            if isinstance(teacher, Teacher):
                for step in range(settings.num_steps if saved.round else done):
                    micro_batches(step)  # its states as they were cached, in the same batches
        elif val_windows is not None:
            best.kl = measured(val_windows)

        def state() -> dict[str, Tensor | Part]:
            return {**training_step.state(), **numbered("buffer", buffers), **best.state()}

        pace = Pace(run.model.device)
        bar = stack.enter_context(
            counted(settings.num_steps, label=run.label("training"), unit="steps", done=done)
        )
        for step in range(done, settings.num_steps):
            training_step(micro_batches(step), lr_schedule(step, settings))
            pace()
            shown: dict[str, str] = {}
            if between_steps is not None:
                shown |= between_steps(step)
                for weight in derived:
                    weight.apply()
            last = step + 1 == settings.num_steps
            if val_windows is not None and (last or (step + 1) % settings.eval_every == 0):
                kl_now = measured(val_windows)
                best.offer(kl_now)
                shown |= {"kl": f"{kl_now:.4f}", "best": f"{best.kl:.4f}"}
            bar.update(notes=shown)
            if interrupts or (saved.due and not last):
                saved.save(state, step=step + 1, best_kl=best.kl)
            if interrupts:
                raise KeyboardInterrupt
        training_step.close()
    best.apply()
    ranks.copy_from(0, tensors)  # what ranks computed alike is then alike to the last bit
    for weight in derived:
        weight.apply()
    if saved.due:
        saved.save(
            lambda: {**training_step.state(optimizer=False), **numbered("buffer", buffers)},
            step=settings.num_steps,
            best_kl=best.kl,
        )


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

    An estimate with a margin of one half. It counts gradients, Adam's state and what tokens keep (`memory.py`), of which
    compiled blocks, in 16 bits, keep half (a 1B shape 2.9 MB a token); `reserved` bytes are left free.
    """
    device = run.model.device
    if device.type != "cuda":
        return None
    head = run.model.get_output_embeddings()
    a_token = bytes_of_a_token(run.targets, 0 if head is None else head.weight.shape[0])
    if compiles(settings.num_steps):
        a_token //= 2
    state = reserved + 12 * sum(trainable.tensor.numel() for trainable in trainables)
    state += 4 * sum(weight.parameter.numel() for weight in derived)
    available = free_memory(device) - state
    windows = max(1, settings.tokens_per_step // length)
    while windows and 1.5 * windows * length * a_token > available:
        windows //= 2
    return windows or None


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
