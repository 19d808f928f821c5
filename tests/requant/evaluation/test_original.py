"""The original's logits from its last hidden states: those of a whole copy, for every architecture."""

import copy

import pytest
import torch

from requant.evaluation.original import OriginalLogits
from requant.evaluation.perplexity import perplexity_and_kl
from requant.models.targets import find_blocks
from tests.requant.evaluation.test_perplexity import TEXT


def changed(model) -> None:
    """Every parameter overwritten, as quantization does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def check(model, windows: torch.Tensor) -> OriginalLogits:
    whole, original = copy.deepcopy(model), OriginalLogits(model, windows)
    changed(model)
    expected = perplexity_and_kl(model, windows, text=TEXT, reference=whole)
    assert expected.mean_kl and expected.mean_kl > 0
    assert perplexity_and_kl(model, windows, text=TEXT, reference=original) == expected
    return original


def test_no_second_model(tiny_model, tiny_windows, architecture: str) -> None:
    original = check(tiny_model(architecture), tiny_windows)
    if architecture == "opt":  # its head calls the decoder itself, past the base model
        assert not original.states and len(find_blocks(original.model)[1]) == 2
    else:
        assert len(original.states) == len(tiny_windows) and not len(find_blocks_of(original))


def test_no_second_mixture(tiny_model, tiny_windows, mixture: str) -> None:
    original = check(tiny_model(mixture), tiny_windows)
    assert len(original.states) == len(tiny_windows)


def test_no_second_model_where_it_names_its_body_wrongly(tiny_model, tiny_windows) -> None:
    original = check(tiny_model("llama4"), tiny_windows)
    assert len(original.states) == len(tiny_windows)


def find_blocks_of(original: OriginalLogits) -> torch.nn.ModuleList:
    return next(module for module in original.model.modules() if isinstance(module, torch.nn.ModuleList))


def test_where_states_do_not_suffice_the_copy_is_whole(tiny_model, tiny_windows, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")

    def refused(*_: object) -> None:
        raise TypeError("this head takes more than hidden states")

    monkeypatch.setattr("requant.evaluation.original.logits_of_states", refused)
    original = check(tiny_model("llama"), tiny_windows)
    assert not original.states and len(find_blocks(original.model)[1]) == 2
    assert "the original is copied whole" in caplog.text


def test_logits_that_differ_in_a_bit_are_not_taken(tiny_model, tiny_windows, monkeypatch) -> None:
    monkeypatch.setattr("requant.evaluation.original.torch.equal", lambda *_: False)
    original = check(tiny_model("llama"), tiny_windows)
    assert not original.states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_not_rounded(tiny_model, tiny_windows, dtype: torch.dtype) -> None:
    original = check(tiny_model("llama").to(dtype), tiny_windows)
    assert {states.dtype for states in original.states.values()} == {dtype}
