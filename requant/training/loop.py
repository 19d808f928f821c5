"""Training a partly quantized model to answer as the original does.

    minimize   mean_t KL( p_original(. | x_<t) || p(. | x_<t) )

Three kinds of numbers may learn: `theta` of the matrices that have codes (`learnable.py`), the floats of those that do
not have any yet, and the `others`, which are stored in 16 bits whatever is quantized: norms, biases, embedding, head.
Adam (0.9, 0.95) with steps in units of each tensor's root mean square, ten steps of warm-up, then a cosine to zero. What
there is to mend is as large as the errors of the codes, which halve with every bit, and so do the steps (`rate_of`): at
4 bits a third of the rate of 2 bits gives KL 0.0205, the same rate 0.0225, and codes alone have 0.0229 (bench-32m).
The model holds float32 while it learns; on a GPU its products run in bfloat16.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from requant.calibration.passes import batches, recomputed_blocks
from requant.models import LinearSite
from requant.recipe import Tuning
from requant.run import Run, Weights
from requant.training.learnable import Theta, weight_function
from requant.training.step import Leaf, TrainingStep
from requant.vocabulary import vocabulary_of

RESIDUAL_RATE = 3.0  # of the rate of all else: residuals are few and each stands alone
VOCABULARY_RATE = 1 / 3  # a token's row learns only where the token occurs


def leaves_of(
    thetas: Mapping[str, Theta], open_sites: Sequence[LinearSite], others: Sequence[nn.Parameter], rate: float
) -> list[Leaf]:
    """Everything that learns: theta of coded matrices, floats of open ones, and the others."""
    leaves = [
        Leaf(tensor=value, rate=rate * (RESIDUAL_RATE if name == "values" else 1.0))
        for theta in thetas.values()
        for name, value in theta.items()
    ]
    leaves += [Leaf(tensor=site.parameter, rate=rate) for site in open_sites]
    leaves += [Leaf(tensor=p, rate=rate * (VOCABULARY_RATE if p.dim() > 1 else 1.0)) for p in others]
    return leaves


def rate_of(run: Run, settings: Tuning) -> float:
    """Adam's rate at the run's average width."""
    bits = sum(run.config_of(site).bits * site.size for site in run.sites) / run.total_weights
    return settings.rate * 2 ** (2 - bits)


def other_parameters(run: Run) -> dict[str, nn.Parameter]:
    """What is stored in 16 bits whatever is quantized, by name: norms, biases, and embedding and head that stay.

    Matrices that the recipe skips are left alone here too.
    """
    allocation = run.allocation
    widths = {"embedding": 16, "head": 16}
    if allocation is not None:
        widths = {"embedding": allocation.embedding_bits, "head": allocation.head_bits}
    tables = {id(part.weight) for role, part in vocabulary_of(run.model).parts.items() if widths[role] == 16}
    return {name: p for name, p in run.model.named_parameters() if p.dim() < 2 or id(p) in tables}


def train(
    run: Run,
    teacher: PreTrainedModel,
    leaves: Sequence[Leaf],
    settings: Tuning,
    windows: Int64[Tensor, "b t"],
    *,
    label: str,
    judge: Int64[Tensor, "h t"] | None = None,
) -> None:
    """`settings.steps` steps. With `judge`, the leaves end at their best values on those windows, the first included."""
    tensors = [leaf.tensor for leaf in leaves]
    drawn = _draw(windows, 0, settings, run.recipe.seed).numel()
    best, kept = math.inf, [t.detach().clone() for t in tensors] if judge is not None else tensors
    with recomputed_blocks(run.model, None):
        if judge is not None:
            best = divergence(run.model, teacher, judge)
        step_of = TrainingStep(lambda tokens: kl_sum(run.model, teacher, tokens) / drawn, leaves)
        bar = tqdm(range(settings.steps), desc=label, unit="step", disable=run.quiet)
        for step in bar:
            tokens = _draw(windows, step, settings, run.recipe.seed)
            step_of(list(batches(tokens, run.model, label=None)), _share_of_rate(step, settings))
            last = step + 1 == settings.steps
            if judge is not None and (last or (step + 1) % settings.check_every == 0):
                now = divergence(run.model, teacher, judge)
                bar.set_postfix(kl=f"{now:.4f}", best=f"{min(now, best):.4f}")
                if now < best:
                    best, kept = now, [t.detach().clone() for t in tensors]
        step_of.close()
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)


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


@contextmanager
def computed(run: Run, weights: Weights, thetas: Mapping[str, Theta]) -> Iterator[None]:
    """The linears that have codes, with weights computed from theta at every call."""
    with ExitStack() as stack:
        for site in run.sites:
            if site.name in weights:
                stack.enter_context(_computed(site, weight_function(weights[site.name]), thetas[site.name]))
        yield


def kl_sum(
    model: PreTrainedModel, teacher: PreTrainedModel, tokens: Int64[Tensor, "b t"]
) -> Float[Tensor, ""]:
    """Sum of KL(teacher || model) over the positions of a batch, nats; in bfloat16 on a GPU, unless it only judges."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=tokens.is_cuda and torch.is_grad_enabled()):
        with torch.no_grad():
            expected = teacher(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
        found = model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
    return functional.kl_div(found, expected, reduction="sum", log_target=True)


@torch.no_grad()
def divergence(model: PreTrainedModel, teacher: PreTrainedModel, windows: Int64[Tensor, "b t"]) -> float:
    """Mean KL over all positions, nats."""
    total = sum(
        kl_sum(model, teacher, tokens).double().item() for tokens in batches(windows, model, label=None)
    )
    return total / windows.numel()


def _share_of_rate(step: int, settings: Tuning) -> float:
    warm = min(1.0, (step + 1) / settings.warm_up)
    return warm * 0.5 * (1 + math.cos(math.pi * step / max(1, settings.steps)))


def _draw(train: Int64[Tensor, "b t"], step: int, settings: Tuning, seed: int) -> Int64[Tensor, "c t"]:
    """The windows of one step: every window once before any comes again."""
    count = min(len(train), max(1, settings.tokens_per_step // train.shape[1]))
    epoch, first = divmod(step * count, len(train))
    generators = (torch.Generator().manual_seed(1_000_003 * seed + epoch + i) for i in range(2))
    order = torch.cat([torch.randperm(len(train), generator=generator) for generator in generators])
    return train[order[first : first + count]]


@contextmanager
def _computed(
    site: LinearSite, floats: Callable[[Mapping[str, Tensor]], Tensor], theta: Mapping[str, Tensor]
) -> Iterator[None]:
    """The linear with its weight computed from theta at every call."""

    def forward(x: Tensor) -> Tensor:
        return functional.linear(x, floats(theta).to(x.dtype), getattr(site.module, "bias", None))

    site.module.forward = forward
    try:
        yield
    finally:
        del site.module.forward
