"""Tuning: with the codes fixed, the numbers beside them learn to bring the model's outputs back to the original's.

    minimize over theta   mean_t KL( p_original(. | x_<t) || p_theta(. | x_<t) )

theta holds what a checkpoint stores in floats for a matrix: scales of a grid, levels of a codebook, both scale vectors
of a trellis, the residuals of the sparse part. Codes stay as they are, and so do the model's norms and embeddings: the
path from w to w~, along which sensitivities are taken, then still ends at the tuned model. Adam (0.9, 0.95) with a
step of `rate` times the root mean square of each tensor (three times that for residuals), ten steps of warm-up, then a
cosine to zero. Every `check_every` steps the KL on held-out windows is measured, and the best theta wins: the tuned
model is never worse than the one it started from, there. The idea is end-to-end tuning of AQLM and QTIP (Egiazarian et
al. 2024, arXiv 2401.06118; Tseng et al. 2024, arXiv 2406.11235), reduced to what a short run on little text can bear.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from requant.calibration.passes import batches, recomputed_blocks
from requant.errors import RecipeError
from requant.formats import Codebook, Grid, QuantizedWeight, Trellis
from requant.models import LinearSite
from requant.recipe import Tuning
from requant.run import Run, Weights

Theta = dict[str, Tensor]  # float32 leaves of one matrix, by field


def learnable(weight: QuantizedWeight) -> Theta:
    """The float fields of a matrix as float32 copies."""
    match weight.dense:
        case Grid(scales=scales):
            theta = {"scales": scales}
        case Codebook(levels=levels):
            theta = {"levels": levels}
        case Trellis(input_scales=inputs, output_scales=outputs):
            theta = {"input_scales": inputs, "output_scales": outputs}
    if weight.sparse is not None:
        theta |= {"values": weight.sparse.floats()}
    return {name: value.detach().float().clone() for name, value in theta.items()}


def with_theta(weight: QuantizedWeight, theta: Mapping[str, Tensor]) -> QuantizedWeight:
    """The matrix with learned fields, rounded to the 16 bits in which they are stored."""
    fields = {name: value.detach().half() for name, value in theta.items() if name != "values"}
    sparse = weight.sparse
    if sparse is not None and sparse.row_scales is None:
        sparse = replace(sparse, values=theta["values"].detach().half())
    elif sparse is not None and sparse.row_scales is not None:
        steps = theta["values"].detach() / sparse.row_scales.float()[sparse.rows]
        sparse = replace(sparse, values=steps.round().clamp(-127, 127).to(torch.int8))
    return QuantizedWeight(dense=replace(weight.dense, **fields), sparse=sparse)


def weight_function(weight: QuantizedWeight) -> Callable[[Mapping[str, Tensor]], Float[Tensor, "n k"]]:
    """theta -> float weight, differentiable; what does not depend on theta is computed once."""
    dense, sparse = weight.dense, weight.sparse
    match dense:
        case Grid():
            unit = replace(dense, scales=torch.ones_like(dense.scales)).dequantize()
            groups = torch.arange(dense.shape[1], device=unit.device) // dense.group_size

            def floats(theta: Mapping[str, Tensor]) -> Tensor:
                return unit * theta["scales"][:, groups]

        case Codebook():
            codes = dense.codes

            def floats(theta: Mapping[str, Tensor]) -> Tensor:
                return theta["levels"].gather(1, codes.long())

        case Trellis():
            ones = {
                "input_scales": torch.ones_like(dense.input_scales),
                "output_scales": torch.ones_like(dense.output_scales),
            }
            turned = replace(dense, **ones).dequantize()

            def floats(theta: Mapping[str, Tensor]) -> Tensor:
                return theta["output_scales"][:, None] * turned * theta["input_scales"]

    if sparse is None:
        return floats
    rows, columns = sparse.rows, sparse.indices.long()
    return lambda theta: floats(theta).index_put((rows, columns), theta["values"], accumulate=True)


def tune(run: Run, weights: Weights, settings: Tuning) -> Weights:
    """The weights with tuned fields; the model is left at the originals."""
    held_out = min(settings.held_out, max(1, len(run.windows) // 8))
    train, judge = run.windows[:-held_out], run.windows[-held_out:]
    if len(train) == 0:
        raise RecipeError("tuning needs at least 2 calibration windows; raise --num-samples.")
    run.path(weights).place(0.0)
    teacher = copy.deepcopy(run.model)
    thetas = {name: learnable(weight) for name, weight in weights.items()}
    groups = [
        _group(value, settings.rate * (3 if name == "values" else 1))
        for theta in thetas.values()
        for name, value in theta.items()
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    leaves = [group["params"][0] for group in groups]
    with ExitStack() as stack:
        for site in run.sites:
            stack.enter_context(_computed(site, weight_function(weights[site.name]), thetas[site.name]))
        stack.enter_context(recomputed_blocks(run.model, None))
        best, kept = _divergence(run.model, teacher, judge), [leaf.detach().clone() for leaf in leaves]
        bar = tqdm(range(settings.steps), desc="tune", unit="step", disable=run.quiet)
        for step in bar:
            for tokens in batches(_draw(train, step, settings, run.recipe.seed), run.model, label=None):
                _kl(run.model, teacher, tokens).div(settings.tokens_per_step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if (step + 1) % settings.check_every == 0 or step + 1 == settings.steps:
                now = _divergence(run.model, teacher, judge)
                bar.set_postfix(kl=f"{now:.4f}", best=f"{min(now, best):.4f}")
                if now < best:
                    best, kept = now, [leaf.detach().clone() for leaf in leaves]
    with torch.no_grad():
        for leaf, value in zip(leaves, kept, strict=True):
            leaf.copy_(value)
    return {name: with_theta(weight, thetas[name]) for name, weight in weights.items()}


def _group(leaf: Tensor, rate: float) -> dict[str, Any]:
    leaf.requires_grad_(True)
    return {"params": [leaf], "lr": rate * leaf.detach().float().square().mean().sqrt().item()}


def _rate(step: int, settings: Tuning) -> float:
    warm = min(1.0, (step + 1) / settings.warm_up)
    return warm * 0.5 * (1 + math.cos(math.pi * step / max(1, settings.steps)))


def _draw(train: Int64[Tensor, "b t"], step: int, settings: Tuning, seed: int) -> Int64[Tensor, "c t"]:
    """The windows of one step: every window once before any comes again."""
    count = min(len(train), max(1, settings.tokens_per_step // train.shape[1]))
    epoch, first = divmod(step * count, len(train))
    generators = (torch.Generator().manual_seed(1_000_003 * seed + epoch + i) for i in range(2))
    order = torch.cat([torch.randperm(len(train), generator=generator) for generator in generators])
    return train[order[first : first + count]]


def _kl(model: PreTrainedModel, teacher: PreTrainedModel, tokens: Int64[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Sum of KL(teacher || model) over the positions of a batch, nats."""
    with torch.no_grad():
        expected = teacher(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
    found = model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
    return functional.kl_div(found, expected, reduction="sum", log_target=True)


@torch.no_grad()
def _divergence(model: PreTrainedModel, teacher: PreTrainedModel, windows: Int64[Tensor, "b t"]) -> float:
    total = sum(_kl(model, teacher, tokens).double().item() for tokens in batches(windows, model, label=None))
    return total / windows.numel()


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
