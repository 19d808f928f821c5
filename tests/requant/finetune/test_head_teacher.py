"""A teacher of the head alone: its states on the host or in a file, and what is said where they do not fit."""

import pytest
import torch

from requant.errors import InputError
from requant.finetune import teacher as module
from requant.finetune.teacher import HeadTeacher
from requant.models.targets import find_blocks


def test_a_teacher_keeps_the_head_and_states_on_the_host(tiny_model, windows, monkeypatch) -> None:
    """In memory, or in a file where that is short."""
    model = tiny_model("llama-tied")
    expected = model(input_ids=windows).logits
    for free in (10**12, 0):
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        teacher = HeadTeacher(model, windows[:4], windows[4:])
        assert sum(p.numel() for p in teacher.model.parameters()) < 0.3 * sum(
            p.numel() for p in model.parameters()
        )
        ((tokens, states),) = teacher.micro_batches(torch.tensor([3, 5]), None)
        assert torch.equal(tokens, windows[[3, 5]]) and list(teacher.val) == [4, 5]
        torch.testing.assert_close(teacher.logits(tokens, states), expected[[3, 5]])
    assert len(find_blocks(model)[1]) == 2


def test_a_full_disk_is_said(tiny_model, windows, monkeypatch) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "free_memory", lambda _: 0)
    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"No space left on device.*lower finetune.train_windows"):
        HeadTeacher(tiny_model("llama"), windows)


def test_too_little_memory_to_try_it_is_no_reason_to_take_more(tiny_model, windows, monkeypatch) -> None:
    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(module, "logits_of_states", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        module.why_states_do_not_suffice(tiny_model("llama"), windows)
