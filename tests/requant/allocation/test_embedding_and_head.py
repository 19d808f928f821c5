import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from requant.allocation.budget import uniform
from requant.allocation.embedding_and_head import (
    EmbeddingAndHead,
    Part,
    embedding_and_head_bits,
    embedding_and_head_curvature,
    embedding_and_head_losses,
    embedding_and_head_of,
    part_sizes,
    quantize_embedding_and_head,
    table_method,
)
from requant.calibration.stats import Curvature
from requant.errors import ModelError, RecipeError
from requant.formats.bands import Bands
from requant.formats.quantized_weight import QuantizedWeight, spec_of
from requant.formats.trellis import Trellis
from requant.pipeline.prepare import prepare, start
from requant.quantizers import table_trellis, trellis
from requant.quantizers.registry import METHODS
from requant.quantizers.rtn import encode, fit_grid
from requant.quantizers.table_grid import GRID, diagonal_loss
from requant.quantizers.table_trellis import TRELLIS
from requant.quantizers.tables import TableMethod
from requant.recipe.schema import Budget, Calibration, Evaluation, Recipe
from requant.run.workspace import Workspace

from ..greedy_search import greedy_states


def table(v: int = 160, d: int = 96) -> tuple[torch.Tensor, Curvature]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(v, d, generator=generator) * 0.02
    weight[:, 3] *= 20  # an outlier column, as embeddings have
    x = torch.randn(4 * d, d, generator=generator) * torch.rand(d, generator=generator).sqrt()
    x += 0.5 * x.roll(1, dims=1)  # columns that go together
    return weight, Curvature(rows=torch.rand(v, generator=generator), covariance=x.T @ x / len(x))


def loss_of(weight: torch.Tensor, quantized: QuantizedWeight, uses: list[Curvature]) -> float:
    """The quadratic form, written out."""
    error = quantized.dequantize() - weight
    return 0.5 * sum((use.rows * ((error @ use.covariance) * error).sum(1)).sum().item() for use in uses)


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


def foretold(run, weight: torch.Tensor, use: Curvature, method: str) -> dict:
    embedding_and_head = EmbeddingAndHead(
        parts={"embedding": Part(name="e", module=nn.Embedding.from_pretrained(weight))},
        tied=False,
        head=None,
    )
    context = run("llama")
    recipe = dataclasses.replace(context.recipe, method=method, quantizer=METHODS[method].config())
    context = dataclasses.replace(context, recipe=recipe, curvature={"embedding": [use]})
    widths = [*table_method(recipe).widths, 16]
    return embedding_and_head_losses(context, embedding_and_head, {"embedding": widths})["embedding"]


@pytest.mark.parametrize("bits", [4, 5, 7, 8])
def test_the_predicted_loss_is_that_of_the_codes_on_a_grid(run, bits: int) -> None:
    weight, use = table()
    found = GRID.quantize(weight, [use], bits)
    loss = 0.5 * (use.rows[:, None] * use.columns * (found.dequantize() - weight).square()).sum().item()
    assert diagonal_loss(weight, found, [use]) == pytest.approx(loss, rel=1e-4)
    losses = foretold(run, weight, use, "rtn")
    assert losses[bits] == pytest.approx(loss, rel=0.25) and losses[16] == 0


@pytest.mark.parametrize("bits", [2, 3, 4.25, 6])
def test_the_predicted_loss_is_that_of_the_codes_in_a_trellis(run, bits: float) -> None:
    weight, use = table(
        d=128
    )  # one Hadamard block: of several, that of the outlier column is coded worse than the rest
    losses = foretold(run, weight, use, "trellis")
    found = TRELLIS.quantize(weight, [use], bits)
    assert losses[bits] == pytest.approx(loss_of(weight, found, [use]), rel=0.12) and losses[16] == 0
    assert sorted(losses.values(), reverse=True) == [losses[bits] for bits in sorted(losses)]


def test_trellis_codes_lose_less_than_a_grid_of_more_bytes() -> None:
    """At 4 bits half as much, and they take 0.34 bits per weight less."""
    weight, use = table()
    grid, trellis = GRID.quantize(weight, [use], 4), TRELLIS.quantize(weight, [use], 4)
    assert loss_of(weight, trellis, [use]) < 0.6 * loss_of(weight, grid, [use])
    assert spec_of(trellis).bytes < 0.96 * spec_of(grid).bytes


def test_feedback_of_a_trellis_follows_the_covariance() -> None:
    """Codes made under C lose less by it than codes that take columns for independent."""
    weight, use = table()
    flat = dataclasses.replace(use, covariance=torch.eye(96))
    informed, blind = TRELLIS.quantize(weight, [use], 3), TRELLIS.quantize(weight, [flat], 3)
    assert loss_of(weight, informed, [use]) < 0.9 * loss_of(weight, blind, [use])


def by_frequency(v: int, d: int = 16) -> tuple[torch.Tensor, Curvature]:
    """A table whose tokens are numbered by their frequency, as Zipf has it."""
    weight, use = table(v, d)
    rows = 1 / (torch.arange(v) + 3.0)
    return weight, dataclasses.replace(use, rows=rows / rows.sum())


def test_common_tokens_get_more_bits_where_tokens_are_in_that_order() -> None:
    weight, use = by_frequency(2100)
    found = TRELLIS.quantize(weight, [use], 3.5)
    assert isinstance(found.dense, Bands)
    bits = [part.bits for part in found.dense.parts]
    assert bits == sorted(bits, reverse=True) and bits[0] >= 5 and bits[-1] >= 2
    assert [part.shape[0] for part in found.dense.parts] == [256, 256, 512, 2100 - 1024]
    assert 3.45 < found.dense.bits <= 3.5
    assert spec_of(found).bytes <= TRELLIS.packed_spec((2100, 16), 3.5).bytes
    flat = table_trellis._coded(weight, [use], 3.5, table_trellis.column_scales(weight))
    assert loss_of(weight, found, [use]) < 0.6 * loss_of(
        weight, QuantizedWeight(dense=flat, sparse=None), [use]
    )
    foretold = TRELLIS.predicted_losses(weight, [use], [3.5])[3.5]
    assert foretold == pytest.approx(loss_of(weight, found, [use]), rel=0.15)


def test_bands_share_a_rotation_at_any_width(monkeypatch) -> None:
    """96 columns are three Hadamard blocks, each with a spread of its own, which is that of all rows."""
    monkeypatch.setattr(table_trellis, "FEWEST_ROWS", 128)
    weight, use = by_frequency(128, 96)
    weight[:16, :32] *= 5
    found = TRELLIS.quantize(weight, [use], 3.5)
    assert isinstance(found.dense, Bands)
    first, *others = (part.input_scales for part in found.dense.parts)
    assert len(first.abs().unique()) > 1 and all(torch.equal(first, other) for other in others)


def test_rows_of_zeros_stay() -> None:
    """Of tokens that nobody has; their neighbours keep their scales."""
    weight, use = by_frequency(64)
    weight[[3, 40]] = 0
    found = TRELLIS.quantize(weight, [use], 4).dequantize()
    assert not found[[3, 40]].any() and found[[2, 4, 39, 41]].any(1).all()


def test_tokens_in_no_order_share_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "tail_biting_states", greedy_states)  # widths are chosen before codes
    weight, use = by_frequency(2100)
    assert isinstance(TRELLIS.quantize(weight, [use], 4).dense, Bands)  # in this order
    assert isinstance(TRELLIS.quantize(weight, [use], 2).dense, Trellis)  # none may have fewer
    even = dataclasses.replace(use, rows=torch.ones(2100) / 2100)
    assert isinstance(TRELLIS.quantize(weight, [even], 4).dense, Trellis)
    backwards = dataclasses.replace(use, rows=by_frequency(2100)[1].rows.flip(0))
    assert isinstance(TRELLIS.quantize(weight, [backwards], 4).dense, Trellis)


@pytest.mark.parametrize("bits", [2, 2.25, 3, 4.75, 6.5, 8])
@pytest.mark.parametrize("rows", [2048, 4096, 50257])
def test_bands_take_no_more_than_one_width(rows: int, bits: float) -> None:
    """But for a magnitude and the signs of the columns of each."""
    one = trellis.packed_spec(table_trellis.config_of(bits), (rows, 256)).bytes
    # beyond 6 bits scales take 16 bits in place of 8
    assert one <= TRELLIS.packed_spec((rows, 256), bits).bytes <= one + 3 * (32 + 4) + rows // 4


@pytest.mark.parametrize("v", [300, 304])
def test_rows_of_a_trellis_are_looked_up_as_stored(v: int) -> None:
    """The scale of every row is its own, and what was planned is what is stored."""
    weight, use = table(v)
    weight[5] *= 10
    weight[7] = 0
    found = TRELLIS.quantize(weight, [use], 4.5)
    assert isinstance(found.dense, Trellis) and not found.dense.rotates_output
    assert spec_of(found) == TRELLIS.packed_spec((v, 96), 4.5)
    errors = (found.dequantize() - weight).norm(dim=1) / weight.norm(dim=1).clamp(min=1e-9)
    assert errors[[4, 5, 6, v - 1]].max() < 0.1


def test_shrunk_ranges_lose_less_than_the_full_ones() -> None:
    _, use = table(300)
    weight = torch.distributions.Laplace(0.0, 0.02).sample((300, 96))
    importance = use.rows[:, None] * use.columns
    fit = fit_grid(weight, bits=4, group_size=64, symmetric=False)
    plain = ((encode(weight, fit, bits=4, group_size=64).dequantize() - weight).square() * importance).sum()
    found = ((GRID.quantize(weight, [use], 4).dequantize() - weight).square() * importance).sum()
    assert found < 0.95 * plain


@pytest.mark.parametrize("method", [GRID, TRELLIS])
def test_rows_are_quantized_in_chunks_alike(monkeypatch: pytest.MonkeyPatch, method: TableMethod) -> None:
    monkeypatch.setattr(trellis, "tail_biting_states", greedy_states)
    weight, use = table()
    whole = method.quantize(weight, [use], 5)
    monkeypatch.setattr("requant.quantizers.table_grid.ELEMENTS", 96 * 7)
    monkeypatch.setattr("requant.quantizers.table_trellis.WEIGHTS_AT_ONCE", 96 * 50)
    parts = method.quantize(weight, [use], 5)
    assert torch.equal(whole.dequantize(), parts.dequantize())
    assert method.predicted_losses(weight, [use], [5])[5] > 0


def _grad(output: torch.Tensor) -> torch.Tensor:
    assert output.grad is not None
    return output.grad


@pytest.mark.parametrize("method", [GRID, TRELLIS])
def test_tokens_that_the_text_lacks_are_quantized_all_the_same(method: TableMethod) -> None:
    weight, use = table()
    use = dataclasses.replace(use, rows=use.rows * (torch.arange(160) < 80))
    found = method.quantize(weight, [use], 8)
    assert (found.dequantize() - weight)[80:].abs().max() < 0.01


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


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-per-layer"])
@pytest.mark.parametrize("method", [GRID, TRELLIS])
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


def test_sizes(tiny_folder, run) -> None:
    context = run("llama")
    part = embedding_and_head_of(context.model).parts["head"]
    sizes = part_sizes(context.model, context.source, part, (4, 16), GRID)
    assert sizes[16] == 264 * 64 * 4  # the source is float32
    assert sizes[4] == GRID.packed_spec((264, 64), 4).bytes == 264 * (32 + 2 + 4)
    # whole tiles, a number of 8 bits a row, their magnitude; signs of the columns, and theirs
    assert TRELLIS.packed_spec((264, 64), 4).bytes == 272 * 32 + 264 + 2 + 8 + 2


def of(budget: Budget, method: str = "rtn") -> Recipe:
    return Recipe(method=method, quantizer=METHODS[method].config(), budget=budget)


def test_what_may_be_chosen(run) -> None:
    untied, tied = (embedding_and_head_of(run(name).model) for name in ("llama", "llama-tied"))
    free = (3, 4, 5, 6, 7, 8, 16)
    assert embedding_and_head_bits(of(Budget()), untied) == {"embedding": (16,), "head": (16,)}
    assert embedding_and_head_bits(of(Budget(bits=3.0)), untied) == {"embedding": free, "head": free}
    assert embedding_and_head_bits(of(Budget(size=5)), untied) == {"embedding": free, "head": free}
    assert embedding_and_head_bits(of(Budget(size=5, head_bits=8)), untied) == {
        "embedding": free,
        "head": (8,),
    }
    assert embedding_and_head_bits(of(Budget(head_bits=8)), tied) == {"embedding": (8,)}
    assert embedding_and_head_bits(of(Budget(embedding_bits=6, head_bits=6)), tied) == {"embedding": (6,)}
    with pytest.raises(
        RecipeError, match=r"embedding_bits is 4 and budget.head_bits 8, but this model ties them"
    ):
        embedding_and_head_bits(of(Budget(embedding_bits=4, head_bits=8)), tied)


def test_a_token_table_may_have_what_the_embedding_may(run) -> None:
    parts = embedding_and_head_of(run("gemma3n").model)
    assert parts.tied
    given = embedding_and_head_bits(of(Budget(bits=3.0, head_bits=6)), parts)
    assert given == {"embedding": (6,), "model.embed_tokens_per_layer": (6,)}
    assert embedding_and_head_bits(of(Budget(bits=3.0, embedding_bits=16)), parts) == dict.fromkeys(
        parts.parts, (16,)
    )
    free = embedding_and_head_bits(of(Budget(bits=3.0)), parts)
    assert free["model.embed_tokens_per_layer"] == free["embedding"] == (3, 4, 5, 6, 7, 8, 16)


def test_trellis_codes_have_two_bits_and_quarters(run) -> None:
    tied = embedding_and_head_of(run("llama-tied").model)
    found = embedding_and_head_bits(of(Budget(size=5), "trellis"), tied)["embedding"]
    assert found[:3] == (2, 2.25, 2.5) and found[-2:] == (8, 16)
    whole = embedding_and_head_bits(of(Budget(size=5, quarters=False), "trellis"), tied)["embedding"]
    assert whole == (2, 3, 4, 5, 6, 7, 8, 16)
    assert embedding_and_head_bits(of(Budget(head_bits=2), "trellis"), tied) == {"embedding": (2,)}
    with pytest.raises(
        RecipeError, match=r"head_bits is 2, but an embedding or head on a grid takes 3 to 8 whole bits"
    ):
        embedding_and_head_bits(of(Budget(head_bits=2)), tied)


class Odd(nn.Embedding):
    """What no codes can stand in for."""


def test_other_embeddings_stay_as_they_are(run) -> None:
    context = run("llama")
    for module, why in ((Odd(264, 64), "is a Odd"), (nn.Embedding(264, 64, max_norm=1.0), "renormalizes")):
        context.model.set_input_embeddings(module)
        embedding_and_head = embedding_and_head_of(context.model)
        assert embedding_and_head_bits(of(Budget(size=5)), embedding_and_head) == {
            "embedding": (16,),
            "head": (3, 4, 5, 6, 7, 8, 16),
        }
        with pytest.raises(ModelError, match=f"model.embed_tokens {why}.*give --head-bits 16"):
            embedding_and_head_bits(of(Budget(embedding_bits=8)), embedding_and_head)


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
