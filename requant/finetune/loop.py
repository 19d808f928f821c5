"""Training a partly quantized model to answer as the original does.

    minimize   mean_t KL( p_original(. | x_<t) || p(. | x_<t) )

Three kinds of numbers may learn: `theta` of the matrices that have codes (`learnable.py`), the floats of those that do
not have any yet, and the `others`, which are stored in 16 bits whatever is quantized: norms, biases, embedding, head.
Adam (0.9, 0.95) with steps in units of each tensor's root mean square, ten steps of warm-up, then a cosine to zero. What
there is to mend is as large as the errors of the codes, which halve with every bit, and so do the steps (`rate_of`): at
4 bits a third of the rate of 2 bits gives KL 0.0205, the same rate 0.0225, and codes alone have 0.0229 (bench-32m).
The model holds float32 while it learns; on a GPU its products run in bfloat16 and its blocks compiled (`fusing.py`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from requant.allocation.embedding_and_head import embedding_and_head_of
from requant.calibration.passes import batches, recomputed_blocks
from requant.finetune.compile_blocks import Divergence, fused, kl
from requant.finetune.step import ReparametrizedWeight, TrainableTensor, TrainingStep
from requant.finetune.teacher import Teacher, precision_of_learning
from requant.formats.trainable import TrainableParams, weight_function
from requant.models.targets import QuantTarget
from requant.recipe.schema import Finetune
from requant.run.context import RunContext, Weights

RESIDUAL_RATE = 3.0  # of the rate of all else: residuals are few and each stands alone
EMBEDDING_LR = 1 / 3  # a token's row learns only where the token occurs


def trainable_tensors(
    trainable: Mapping[str, TrainableParams],
    open_targets: Sequence[QuantTarget],
    finetuned_params: Sequence[nn.Parameter],
    rate: float,
) -> list[TrainableTensor]:
    """Everything that learns: theta of coded matrices, floats of open ones, and the others."""
    trainables = [
        TrainableTensor(tensor=value, rate=rate * (RESIDUAL_RATE if name == "values" else 1.0))
        for params in trainable.values()
        for name, value in params.items()
    ]
    trainables += [TrainableTensor(tensor=target.parameter, rate=rate) for target in open_targets]
    trainables += [
        TrainableTensor(tensor=p, rate=rate * (EMBEDDING_LR if p.dim() > 1 else 1.0))
        for p in finetuned_params
    ]
    return trainables


def rate_of(run: RunContext, settings: Finetune) -> float:
    """Adam's rate at the run's average width."""
    bits = sum(run.config_of(target).bits * target.size for target in run.targets) / run.total_weights
    return settings.lr * 2 ** (2 - bits)


def other_parameters(run: RunContext) -> dict[str, nn.Parameter]:
    """What is stored in 16 bits whatever is quantized, by name: norms, biases, and embedding and head that stay.

    Matrices that the recipe skips are left alone here too.
    """
    allocation = run.allocation
    widths = {"embedding": 16, "head": 16}
    if allocation is not None:
        widths = {"embedding": allocation.embedding_bits, "head": allocation.head_bits}
    tables = {
        id(part.weight) for role, part in embedding_and_head_of(run.model).parts.items() if widths[role] == 16
    }
    return {name: p for name, p in run.model.named_parameters() if p.dim() < 2 or id(p) in tables}


def train(
    run: RunContext,
    teacher: Teacher,
    trainables: Sequence[TrainableTensor],
    derived: Sequence[ReparametrizedWeight],
    settings: Finetune,
    *,
    label: str,
    judge: Int64[Tensor, "h t"] | None = None,
) -> None:
    """`settings.steps` steps on the teacher's windows; the model ends with the matrices that the leaves then give.

    With `judge`, the leaves end at their best values on those windows, the first included.
    """
    tensors = [leaf.tensor for leaf in trainables]
    count, length = teacher.windows.shape
    drawn = len(_draw(count, length, 0, settings, run.recipe.seed)) * length
    best, kept = math.inf, [t.detach().clone() for t in tensors] if judge is not None else tensors
    part = part_of(run, trainables, derived, settings, length, awaited=teacher.awaited)
    recompute = None if part is None else False
    with fused((run.model, teacher.model), settings.steps) as kl_of, recomputed_blocks(run.model, recompute):
        step_of = TrainingStep(
            lambda *given: kl_sum(run.model, teacher, *given, kl_of=kl_of) / drawn, trainables, derived
        )
        if judge is not None:
            best = divergence(run.model, teacher, judge)
        bar = tqdm(range(settings.steps), desc=label, unit="step", disable=run.quiet)
        for step in bar:
            chosen = _draw(count, length, step, settings, run.recipe.seed)
            step_of(teacher.parts(chosen, part), _share_of_rate(step, settings))
            last = step + 1 == settings.steps
            if judge is not None and (last or (step + 1) % settings.eval_every == 0):
                now = divergence(run.model, teacher, judge)
                bar.set_postfix(kl=f"{now:.4f}", best=f"{min(now, best):.4f}")
                if now < best:
                    best, kept = now, [t.detach().clone() for t in tensors]
        step_of.close()
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)
    for matrix in derived:
        matrix.place()


@contextmanager
def single_precision(model: nn.Module) -> Iterator[None]:
    """Parameters in float32 while the context lasts: Adam's steps are too small for 16 bits."""
    dtypes = {p: p.dtype for p in model.parameters() if p.is_floating_point()}
    for p in dtypes:
        p.data = p.data.float()
    try:
        yield
    finally:
        for p, dtype in dtypes.items():
            p.data = p.data.to(dtype)


def reparametrized_weights(
    run: RunContext, weights: Weights, trainable: Mapping[str, TrainableParams]
) -> list[ReparametrizedWeight]:
    """The matrices that have codes: their parameters as functions of theta."""

    def derive(target: QuantTarget) -> ReparametrizedWeight:
        floats, params = weight_function(weights[target.name]), trainable[target.name]
        return ReparametrizedWeight(parameter=target.parameter, value=lambda: target.oriented(floats(params)))

    return [derive(target) for target in run.targets if target.name in weights]


def kl_sum(
    model: PreTrainedModel,
    teacher: Teacher,
    tokens: Int64[Tensor, "b t"],
    states: Float[Tensor, "b t d"] | None = None,
    *,
    kl_of: Divergence = kl,
) -> Float[Tensor, ""]:
    """Sum of KL(teacher || model) over the positions of a batch, nats; as in training, unless it only judges."""
    with precision_of_learning(tokens) if torch.is_grad_enabled() else nullcontext():
        expected = teacher.logits(tokens, states)
        found = model(input_ids=tokens, use_cache=False).logits
    return kl_of(found, expected)


@torch.no_grad()
def divergence(model: PreTrainedModel, teacher: Teacher, windows: Int64[Tensor, "b t"]) -> float:
    """Mean KL over all positions, nats."""
    total = sum(
        kl_sum(model, teacher, tokens).double().item() for tokens in batches(windows, model, label=None)
    )
    return total / windows.numel()


def part_of(
    run: RunContext,
    trainables: Sequence[TrainableTensor],
    derived: Sequence[ReparametrizedWeight],
    settings: Finetune,
    length: int,
    *,
    awaited: int = 0,
) -> int | None:
    """Windows of `length` tokens that a GPU takes at once without recomputing blocks; None: it has no room for it.

    Counted beside gradients and Adam's state, half as much again: inputs and outputs of every linear in float32, for what
    lies between them, and the logits of both models, their logarithms and gradients; `awaited`: what others will take.
    """
    device = run.model.device
    if device.type != "cuda":
        return None
    head = run.model.get_output_embeddings()
    activations = 4 * sum(sum(target.shape) for target in run.targets)
    logits = 24 * (0 if head is None else head.weight.shape[0])
    state = awaited + 12 * sum(leaf.tensor.numel() for leaf in trainables)
    state += 4 * sum(matrix.parameter.numel() for matrix in derived)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for later
    room = torch.cuda.mem_get_info(device)[0] + kept - state
    part = max(1, settings.tokens_per_step // length)
    while part and 1.5 * part * length * (activations + logits) > room:
        part //= 2
    return part or None


def _share_of_rate(step: int, settings: Finetune) -> float:
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return warm * 0.5 * (1 + math.cos(math.pi * step / max(1, settings.steps)))


def _draw(windows: int, length: int, step: int, settings: Finetune, seed: int) -> Int64[Tensor, " c"]:
    """The windows of one step, by number: every window once before any comes again."""
    count = min(windows, max(1, settings.tokens_per_step // length))
    epoch, first = divmod(step * count, windows)
    generators = (torch.Generator().manual_seed(1_000_003 * seed + epoch + i) for i in range(2))
    order = torch.cat([torch.randperm(windows, generator=generator) for generator in generators])
    return order[first : first + count]
