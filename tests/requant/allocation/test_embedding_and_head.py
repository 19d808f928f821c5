import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from requant.allocation.budget import uniform
from requant.allocation.embedding_and_head import (
    WIDTHS,
    Curvature,
    EmbeddingAndHead,
    Part,
    embedding_and_head_bits,
    embedding_and_head_curvature,
    embedding_and_head_losses,
    embedding_and_head_of,
    embedding_and_head_spec,
    part_sizes,
    quantize_embedding_and_head,
    quantize_table,
    table_loss,
)
from requant.errors import ModelError, RecipeError
from requant.pipeline.prepare import prepare, start
from requant.quantizers.registry import METHODS
from requant.quantizers.rtn import encode, fit_grid
from requant.recipe.schema import Budget, Calibration, Evaluation, Recipe
from requant.run.workspace import Workspace


def table(v: int = 300, d: int = 96) -> tuple[torch.Tensor, Curvature]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(v, d, generator=generator) * 0.02
    weight[:, 3] *= 20  # an outlier column, as embeddings have
    return weight, Curvature(
        rows=torch.rand(v, generator=generator), columns=torch.rand(d, generator=generator)
    )


@pytest.fixture
def run(tiny_folder, tiny_text_file: Path):
    def of(name: str):
        recipe = Recipe(
            mode="dense",
            method="rtn",
            quantizer=METHODS["rtn"].config(),
            calibration=Calibration(num_samples=4, seq_len=32),
            evaluation=Evaluation(context=32, windows=2, samples=0),
        )
        prepared = prepare(str(tiny_folder(name)), recipe, tiny_text_file)
        return start(prepared, recipe, workspace=Workspace(None), quiet=True)

    return of


@pytest.mark.parametrize("bits", [4, 5, 7, 8])
def test_the_predicted_loss_is_that_of_the_codes(run, bits: int) -> None:
    weight, use = table()
    found = quantize_table(weight, [use], bits=bits)
    error = found.dequantize() - weight
    loss = 0.5 * (use.rows[:, None] * use.columns * error.square()).sum().item()
    assert table_loss(weight, found, [use]) == pytest.approx(loss, rel=1e-4)
    embedding_and_head = EmbeddingAndHead(
        parts={"embedding": Part(name="e", module=nn.Embedding.from_pretrained(weight))},
        tied=False,
        head=None,
    )
    context = dataclasses.replace(run("llama"), curvature={"embedding": [use]})
    foretold = embedding_and_head_losses(context, embedding_and_head, {"embedding": WIDTHS})["embedding"]
    assert foretold[bits] == pytest.approx(loss, rel=0.25) and foretold[16] == 0


def test_shrunk_ranges_lose_less_than_the_full_ones() -> None:
    _, use = table()
    weight = torch.distributions.Laplace(0.0, 0.02).sample((300, 96))
    importance = use.rows[:, None] * use.columns
    fit = fit_grid(weight, bits=4, group_size=64, symmetric=False)
    plain = ((encode(weight, fit, bits=4, group_size=64).dequantize() - weight).square() * importance).sum()
    found = ((quantize_table(weight, [use], bits=4).dequantize() - weight).square() * importance).sum()
    assert found < 0.95 * plain


def test_rows_are_quantized_in_chunks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, use = table()
    whole = quantize_table(weight, [use], bits=5)
    monkeypatch.setattr("requant.allocation.embedding_and_head.ELEMENTS", 96 * 7)
    parts = quantize_table(weight, [use], bits=5)
    assert torch.equal(whole.dequantize(), parts.dequantize())
    assert table_loss(weight, parts, [use]) == pytest.approx(0.5 * _loss(weight, whole, use), rel=1e-4)


def _grad(output: torch.Tensor) -> torch.Tensor:
    assert output.grad is not None
    return output.grad


def _loss(weight: torch.Tensor, quantized, use: Curvature) -> float:
    return (use.rows[:, None] * use.columns * (quantized.dequantize() - weight).square()).sum().item()


def test_tokens_that_the_text_lacks_are_quantized_all_the_same() -> None:
    weight, use = table()
    use = dataclasses.replace(use, rows=use.rows * (torch.arange(300) < 150))
    found = quantize_table(weight, [use], bits=8)
    assert (found.dequantize() - weight)[150:].abs().max() < 0.01


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
    torch.testing.assert_close(
        uses[0].columns, scale * _grad(output).flatten(0, 1).square().sum(0) / tokens, rtol=1e-3, atol=1e-9
    )
    x, output = kept["head"]
    torch.testing.assert_close(
        uses[1].rows, _grad(output).flatten(0, 1).square().sum(0) / tokens, rtol=1e-3, atol=1e-9
    )
    torch.testing.assert_close(
        uses[1].columns, x.flatten(0, 1).square().sum(0) / tokens, rtol=1e-3, atol=1e-9
    )


def test_the_curvature_foretells_the_divergence(run) -> None:
    """What 4 bits do to the outputs, within a factor of two: the form is quadratic, and its text is short."""
    context = run("llama")
    embedding_and_head = embedding_and_head_of(context.model)
    uses = embedding_and_head_curvature(context, embedding_and_head)
    part = embedding_and_head.parts["head"]
    weight, codes = part.weight.clone(), quantize_table(part.weight, uses["head"], bits=4)
    with torch.no_grad():
        before = context.model(context.windows).logits.log_softmax(-1)
        part.weight.copy_(codes.dequantize())
        after = context.model(context.windows).logits.log_softmax(-1)
    found = (
        functional.kl_div(after, before, reduction="sum", log_target=True).item() / context.windows.numel()
    )
    assert found / 2 < table_loss(weight, codes, uses["head"]) < 2 * found


def test_sizes(tiny_folder, run) -> None:
    context = run("llama")
    part = embedding_and_head_of(context.model).parts["head"]
    sizes = part_sizes(context.model, context.source, part, WIDTHS)
    assert sizes[16] == 264 * 64 * 4  # the source is float32
    assert sizes[4] == embedding_and_head_spec((264, 64), 4).bytes == 264 * (32 + 2 + 4)


def test_what_may_be_chosen(run) -> None:
    untied, tied = (embedding_and_head_of(run(name).model) for name in ("llama", "llama-tied"))
    assert embedding_and_head_bits(Budget(), untied) == {"embedding": (16,), "head": (16,)}
    assert embedding_and_head_bits(Budget(bits=3.0), untied) == {"embedding": WIDTHS, "head": WIDTHS}
    assert embedding_and_head_bits(Budget(size=5), untied) == {"embedding": WIDTHS, "head": WIDTHS}
    assert embedding_and_head_bits(Budget(size=5, head_bits=8), untied) == {"embedding": WIDTHS, "head": (8,)}
    assert embedding_and_head_bits(Budget(head_bits=8), tied) == {"embedding": (8,)}
    assert embedding_and_head_bits(Budget(embedding_bits=6, head_bits=6), tied) == {"embedding": (6,)}
    with pytest.raises(
        RecipeError, match=r"embedding_bits is 4 and budget.head_bits 8, but this model ties them"
    ):
        embedding_and_head_bits(Budget(embedding_bits=4, head_bits=8), tied)


class Odd(nn.Embedding):
    """What no codes can stand in for."""


def test_other_embeddings_stay_as_they_are(run) -> None:
    context = run("llama")
    for module, why in ((Odd(264, 64), "is a Odd"), (nn.Embedding(264, 64, max_norm=1.0), "renormalizes")):
        context.model.set_input_embeddings(module)
        embedding_and_head = embedding_and_head_of(context.model)
        assert embedding_and_head_bits(Budget(size=5), embedding_and_head) == {
            "embedding": (16,),
            "head": WIDTHS,
        }
        with pytest.raises(ModelError, match=f"model.embed_tokens {why}.*give --head-bits 16"):
            embedding_and_head_bits(Budget(embedding_bits=8), embedding_and_head)


def test_codes_of_trained_floats_take_their_place(run) -> None:
    """What earlier rounds have learned is in the codes, and no longer among the parameters without codes."""
    context = run("llama-tied")
    part = embedding_and_head_of(context.model).parts["embedding"]
    original = part.weight.detach().clone()
    decided = uniform(context.recipe, context.targets, {"embedding": (6,)})
    context = dataclasses.replace(context, allocation=decided)
    context.finetuned_params[f"{part.name}.weight"] = (original, 1.5 * original)
    context.finetuned_params["model.norm.weight"] = (torch.ones(64), torch.ones(64))
    found = quantize_embedding_and_head(context)
    assert list(context.finetuned_params) == ["model.norm.weight"]
    found.apply_weights(quantized=True)
    assert (part.weight - 1.5 * original).norm() < 0.05 * original.norm()
    found.apply_weights(quantized=False)
    assert torch.equal(part.weight, original)
