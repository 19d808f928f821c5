"""Which tables of a model are looked up by token, beside its embedding."""

from types import MethodType

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from requant.models.token_tables import lookup_obstacle, token_tables

from ...architectures import build_model

TABLE = "model.embed_tokens_per_layer"


@pytest.mark.parametrize(("name", "shape"), [("gemma3n", (257, 96)), ("gemma4-per-layer", (264, 64))])
def test_per_layer_embeddings_are_found(name: str, shape: tuple[int, int]) -> None:
    model = build_model(name)
    found = token_tables(model)
    assert {path: tuple(table.weight.shape) for path, table in found.items()} == {TABLE: shape}
    assert found[TABLE] is model.model.embed_tokens_per_layer
    assert not model.model.embed_tokens_per_layer._forward_pre_hooks
    with torch.device("meta"):  # by their shape alone
        assert list(token_tables(build_model(name))) == [TABLE]


def test_most_models_have_none_and_are_not_asked(architecture: str) -> None:
    model = build_model(architecture)
    asked: list[object] = []
    model.register_forward_pre_hook(lambda *_: asked.append(1))
    assert token_tables(model) == {} and not asked


def with_table(table: nn.Module, ids_of) -> PreTrainedModel:
    """A Llama that looks up one more table by what it makes of its tokens."""
    model = build_model("llama")
    model.model.more = table
    forward = type(model.model).forward

    def forward_with_table(self, input_ids=None, **kwargs):
        output = forward(self, input_ids=input_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state + self.more(ids_of(input_ids)).mean(
            -1, keepdim=True
        )
        return output

    model.model.forward = MethodType(forward_with_table, model.model)
    return model


def test_a_table_is_one_that_is_called_with_the_tokens() -> None:
    by_token = with_table(nn.Embedding(264, 32), lambda ids: ids)
    assert list(token_tables(by_token)) == ["model.more"]
    by_position = with_table(nn.Embedding(264, 32), lambda ids: torch.arange(ids.shape[1])[None])
    assert token_tables(by_position) == {}
    never = build_model("llama")
    never.model.more = nn.Embedding(264, 32)
    assert token_tables(never) == {}


def test_small_and_short_ones_are_none() -> None:
    short = with_table(nn.Embedding(131, 32), lambda ids: ids % 131)
    assert token_tables(short) == {}
    small = with_table(nn.Embedding(264, 3), lambda ids: ids)
    assert token_tables(small) == {}
    shared = build_model("llama")
    shared.model.more = shared.model.embed_tokens
    assert token_tables(shared) == {}


class Odd(nn.Embedding):
    """What no codes can stand in for."""


def test_what_codes_cannot_stand_in_for() -> None:
    assert lookup_obstacle(nn.Embedding(8, 4)) is None
    assert lookup_obstacle(build_model("gemma3n").model.embed_tokens_per_layer) is None
    assert lookup_obstacle(Odd(8, 4)) == "is a Odd"
    assert lookup_obstacle(nn.Embedding(8, 4, max_norm=1.0)) == "renormalizes its rows"
    assert lookup_obstacle(nn.Linear(8, 4)) == "is a Linear"
    assert token_tables(with_table(Odd(264, 32), lambda ids: ids)) == {}
