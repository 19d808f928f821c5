"""The curvature of embedding, head and token tables against plain autograd, and the losses that it predicts."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from requant.allocation.embedding_and_head import (
    EmbeddingAndHead,
    Part,
    embedding_and_head_curvature,
    embedding_and_head_losses,
    embedding_and_head_of,
    table_method,
)
from requant.calibration.stats import Curvature
from requant.quantizers.registry import METHODS
from requant.quantizers.table_grid import GRID, diagonal_loss
from requant.quantizers.table_trellis import TRELLIS
from requant.quantizers.tables import TableMethod

from ..quantizers.tables import loss_of, table


def foretold(run, weight: torch.Tensor, use: Curvature, method: str) -> dict:
    embedding_and_head = EmbeddingAndHead(
        parts={"embedding": Part(name="e", module=nn.Embedding.from_pretrained(weight))},
        tied=False,
        head=None,
    )
    context = run("llama")
    recipe = dataclasses.replace(context.recipe, method=method, quantizer=METHODS[method].config())
    context = dataclasses.replace(context, recipe=recipe, curvature={"embedding": [use]})
    widths = [*table_method(recipe).bits, 16]
    return embedding_and_head_losses(context, embedding_and_head, {"embedding": widths})["embedding"]


@pytest.mark.parametrize("bits", [4, 5, 7, 8])
def test_the_predicted_loss_is_that_of_the_codes_on_a_grid(run, bits: int) -> None:
    weight, use = table()
    found = GRID.quantize(weight, [use], bits)
    loss = 0.5 * (use.rows[:, None] * use.columns * (found.dequantize() - weight).square()).sum().item()
    assert diagonal_loss(weight, found, [use]) == pytest.approx(loss, rel=1e-4)
    losses = foretold(run, weight, use, "rtn")
    assert losses[bits] == pytest.approx(loss, rel=0.25) and losses[16] == 0


@pytest.mark.parametrize("bits", [4.25, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (2, 3, 6))])
def test_the_predicted_loss_is_that_of_the_codes_in_a_trellis(run, bits: float) -> None:
    weight, use = table(
        d=128
    )  # one Hadamard block: of several, that of the outlier column is coded worse than the rest
    losses = foretold(run, weight, use, "trellis")
    found = TRELLIS.quantize(weight, [use], bits)
    assert losses[bits] == pytest.approx(loss_of(weight, found, [use]), rel=0.12) and losses[16] == 0
    assert sorted(losses.values(), reverse=True) == [losses[bits] for bits in sorted(losses)]


def _grad(output: torch.Tensor) -> torch.Tensor:
    assert output.grad is not None
    return output.grad


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3", "gpt-neox"])
def test_curvature_is_the_mean_of_squares(run, name: str) -> None:
    """Against one pass of plain autograd over all windows at once."""
    context = run(name)
    embedding_and_head = embedding_and_head_of(context.model)
    found = embedding_and_head_curvature(context, embedding_and_head)
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(use: str):
        def hook(_module, inputs, output) -> None:
            output.requires_grad_()
            output.retain_grad()
            kept[use] = inputs[0], output

        return hook

    embedding = embedding_and_head.parts["embedding"].module
    assert embedding_and_head.head is not None
    handles = [
        embedding.register_forward_hook(keep("embedding")),
        embedding_and_head.head.register_forward_hook(keep("head")),
    ]
    logits = context.model(context.windows, use_cache=False).logits[:, :-1].flatten(0, 1)
    functional.cross_entropy(logits, context.windows[:, 1:].flatten(), reduction="sum").backward()
    for handle in handles:
        handle.remove()
    tokens = context.windows.numel()
    uses = found["embedding"] if embedding_and_head.tied else [found["embedding"][0], found["head"][0]]
    scale = getattr(embedding, "scalar_embed_scale", 1.0) ** 2
    ids, output = kept["embedding"]
    torch.testing.assert_close(uses[0].rows, torch.bincount(ids.flatten(), minlength=264) / tokens)
    gradients = _grad(output).flatten(0, 1)
    torch.testing.assert_close(
        uses[0].covariance, scale * gradients.T @ gradients / tokens, rtol=1e-3, atol=1e-8
    )
    x, output = kept["head"]
    torch.testing.assert_close(
        uses[1].rows, _grad(output).flatten(0, 1).square().sum(0) / tokens, rtol=1e-3, atol=1e-9
    )
    inputs = x.flatten(0, 1)
    torch.testing.assert_close(uses[1].covariance, inputs.T @ inputs / tokens, rtol=1e-3, atol=1e-6)
    assert torch.equal(uses[1].columns, uses[1].covariance.diagonal())


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-per-layer"])
def test_curvature_of_a_token_table(run, name: str) -> None:
    """Against one pass of plain autograd, before the table's scale; its rows are the tokens that it was called with."""
    context = run(name)
    embedding_and_head = embedding_and_head_of(context.model)
    assert list(embedding_and_head.parts)[-1:] == ["model.embed_tokens_per_layer"]
    part = embedding_and_head.parts["model.embed_tokens_per_layer"]
    assert not part.learns
    (found,) = embedding_and_head_curvature(context, embedding_and_head)[part.name]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_module, inputs, output) -> None:
        output.requires_grad_()
        output.retain_grad()
        kept.append((inputs[0], output))

    with part.module.register_forward_hook(keep):
        logits = context.model(context.windows, use_cache=False).logits[:, :-1].flatten(0, 1)
    functional.cross_entropy(logits, context.windows[:, 1:].flatten(), reduction="sum").backward()
    ((ids, output),) = kept
    tokens, rows = context.windows.numel(), part.shape[0]
    gradients = _grad(output).flatten(0, 1) * part.module.scalar_embed_scale
    torch.testing.assert_close(found.rows, torch.bincount(ids.flatten(), minlength=rows) / tokens)
    torch.testing.assert_close(found.covariance, gradients.T @ gradients / tokens, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gemma3n", GRID),
        ("gemma4-per-layer", TRELLIS),
        pytest.param("gemma3n", TRELLIS, marks=pytest.mark.slow),
        ("gemma4-per-layer", GRID),
    ],
)
def test_the_curvature_of_a_token_table_foretells_the_divergence(run, name: str, method: TableMethod) -> None:
    context = run(name)
    embedding_and_head = embedding_and_head_of(context.model)
    part = embedding_and_head.parts["model.embed_tokens_per_layer"]
    uses = embedding_and_head_curvature(context, embedding_and_head)[part.name]
    weight, codes = part.weight.clone(), method.quantize(part.weight.detach(), uses, 4)
    with torch.no_grad():
        before = context.model(context.windows).logits.log_softmax(-1)
        part.weight.copy_(codes.dequantize())
        after = context.model(context.windows).logits.log_softmax(-1)
    found = (
        functional.kl_div(after, before, reduction="sum", log_target=True).item() / context.windows.numel()
    )
    assert found / 2 < loss_of(weight, codes, uses) < 2 * found


@pytest.mark.parametrize("method", [GRID, TRELLIS])
def test_the_curvature_foretells_the_divergence(run, method: TableMethod) -> None:
    """What 4 bits do to the outputs, within a factor of two: the form is quadratic, and its text is short."""
    context = run("llama")
    embedding_and_head = embedding_and_head_of(context.model)
    uses = embedding_and_head_curvature(context, embedding_and_head)
    part = embedding_and_head.parts["head"]
    weight, codes = part.weight.clone(), method.quantize(part.weight.detach(), uses["head"], 4)
    with torch.no_grad():
        before = context.model(context.windows).logits.log_softmax(-1)
        part.weight.copy_(codes.dequantize())
        after = context.model(context.windows).logits.log_softmax(-1)
    found = (
        functional.kl_div(after, before, reduction="sum", log_target=True).item() / context.windows.numel()
    )
    assert found / 2 < loss_of(weight, codes, uses["head"]) < 2 * found
