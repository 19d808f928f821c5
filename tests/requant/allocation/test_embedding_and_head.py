"""Embedding and head: which bits may be chosen for them, what they take, and when their codes are made."""

import dataclasses

import pytest
import torch
from torch import nn

from requant.allocation.budget import uniform
from requant.allocation.embedding_and_head import (
    embedding_and_head_bits,
    embedding_and_head_of,
    part_sizes,
    quantize_embedding_and_head,
)
from requant.errors import ModelError, RecipeError
from requant.quantizers.registry import METHODS
from requant.quantizers.table_grid import GRID
from requant.quantizers.table_trellis import TRELLIS
from requant.recipe.schema import Budget, Recipe


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
    assert embedding_and_head_bits(of(Budget(size=5, head_bits=8.0)), untied) == {
        "embedding": free,
        "head": (8,),
    }
    assert embedding_and_head_bits(of(Budget(head_bits=8.0)), tied) == {"embedding": (8,)}
    assert embedding_and_head_bits(of(Budget(embedding_bits=6.0, head_bits=6.0)), tied) == {"embedding": (6,)}
    with pytest.raises(
        RecipeError, match=r"embedding_bits is 4 and budget.head_bits 8, but this model ties them"
    ):
        embedding_and_head_bits(of(Budget(embedding_bits=4.0, head_bits=8.0)), tied)


def test_a_token_table_may_have_what_the_embedding_may(run) -> None:
    parts = embedding_and_head_of(run("gemma3n").model)
    assert parts.tied
    given = embedding_and_head_bits(of(Budget(bits=3.0, head_bits=6.0)), parts)
    assert given == {"embedding": (6,), "model.embed_tokens_per_layer": (6,)}
    assert embedding_and_head_bits(of(Budget(bits=3.0, embedding_bits=16.0)), parts) == dict.fromkeys(
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
    assert embedding_and_head_bits(of(Budget(head_bits=2.0), "trellis"), tied) == {"embedding": (2,)}
    with pytest.raises(
        RecipeError, match=r"head_bits is 2, but an embedding or head on a grid takes 3 to 8 whole bits"
    ):
        embedding_and_head_bits(of(Budget(head_bits=2.0)), tied)
    with pytest.raises(RecipeError, match=r"^budget\.embedding_bits is 2, but"):
        embedding_and_head_bits(
            of(Budget(embedding_bits=2.0, head_bits=3.0)), embedding_and_head_of(run("llama").model)
        )


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
            embedding_and_head_bits(of(Budget(embedding_bits=8.0)), embedding_and_head)


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
