"""The error of the last hidden states in the loss: its formula, nothing of it at weight 0, and the models that have none."""

import copy
import logging

import pytest
import torch

from requant.finetune import teacher as module
from requant.finetune.divergence import hidden_error, kl
from requant.finetune.loss import loss_sum, usable_hidden_weight
from requant.finetune.teacher import Teacher
from requant.models.targets import find_linears


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(0, 200, (4, 16))


def changed(model):
    """Another model near by."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for target in find_linears(found):
            target.parameter.mul_(1.05)
    return found


def test_the_error_is_relative_to_each_position() -> None:
    expected = torch.tensor([[[3.0, 4.0], [0.0, 100.0]]])
    found = torch.tensor([[[3.0, 5.0], [10.0, 100.0]]])
    torch.testing.assert_close(hidden_error(found, expected).item(), 1 / 25 + 100 / 10_000)
    torch.testing.assert_close(hidden_error(7 * found, 7 * expected).item(), 1 / 25 + 100 / 10_000)


@pytest.mark.parametrize("nothing", [0.0, 1e-15])
def test_a_state_of_zeros_takes_no_part(nothing: float) -> None:
    """Of a token with a row of zeros that nothing precedes: relative to it any error was infinite, and all gradients NaN."""
    expected = torch.tensor([[3.0, 4.0], [nothing, 0.0]])
    found = torch.tensor([[3.0, 5.0], [1e-3, 0.0]], requires_grad=True)
    error = hidden_error(found, expected)
    error.backward()
    assert found.grad is not None
    torch.testing.assert_close(error.item(), 1 / 25)
    torch.testing.assert_close(found.grad, torch.tensor([[0.0, 2 / 25], [0.0, 0.0]]))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("kept", [True, False])
def test_it_is_added_to_the_divergence(tiny_model, windows, monkeypatch, kind, kept) -> None:
    """Whether the original's states are kept or computed again; with gradients that a difference quotient has."""
    monkeypatch.setattr(module, "free_memory", lambda _: 10**12 if kept else 0)
    original = tiny_model(kind)
    model, teacher = changed(original), Teacher(original, windows)
    ((tokens, *states),) = teacher.micro_batches(torch.arange(4), 4)
    assert len(states) == kept
    error = hidden_error(*(m.base_model(input_ids=tokens).last_hidden_state for m in (model, original)))
    plain = loss_sum(model, teacher, tokens, *states)
    torch.testing.assert_close(
        loss_sum(model, teacher, tokens, *states, hidden_weight=2.5), plain + 2.5 * error
    )
    assert error > 0
    parameter = find_linears(model)[0].parameter.requires_grad_(True)
    loss_sum(model, teacher, tokens, *states, hidden_weight=2.5).backward()
    assert parameter.grad is not None
    slope = parameter.grad.norm()
    direction = parameter.grad / slope
    with torch.no_grad():
        ends = []
        for step in (1e-2, -1e-2):
            parameter += step * direction
            ends.append(loss_sum(model, teacher, tokens, *states, hidden_weight=2.5).item())
            parameter -= step * direction
    assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(slope.item(), rel=0.02)


def test_without_a_weight_the_loss_is_the_divergence_bit_for_bit(tiny_model, windows) -> None:
    original = tiny_model("llama")
    model, teacher = changed(original), Teacher(original, windows)
    with torch.no_grad():
        expected = kl(model(input_ids=windows).logits, teacher.logits(windows))
        assert torch.equal(loss_sum(model, teacher, windows, hidden_weight=0.0), expected)


def test_a_model_that_names_its_body_wrongly_has_states(tiny_model, windows) -> None:
    assert usable_hidden_weight(3.0, Teacher(tiny_model("llama4"), windows)) == 3.0


def test_a_model_whose_logits_need_more_than_the_states_has_none(tiny_model, windows, caplog) -> None:
    """OPT calls the decoder inside of its base model."""
    with caplog.at_level(logging.WARNING):
        assert usable_hidden_weight(3.0, Teacher(tiny_model("opt"), windows)) == 0.0
        assert usable_hidden_weight(3.0, Teacher(tiny_model("llama"), windows)) == 3.0
    (record,) = caplog.records
    assert record.message.startswith("hidden states are not matched: ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_in_16_bits_are_matched_on_a_cpu(tiny_model, windows, dtype) -> None:
    """There is no autocast that would cast what the head of the original reads."""
    original = tiny_model("llama")
    model, teacher = changed(original), Teacher(original.to(dtype), windows)
    assert usable_hidden_weight(3.0, teacher) == 3.0
    ((tokens, states),) = teacher.micro_batches(torch.arange(4), 4)
    assert states.dtype == dtype
    kept, computed = (loss_sum(model, teacher, tokens, *s, hidden_weight=2.5) for s in ((states,), ()))
    torch.testing.assert_close(kept, computed)
