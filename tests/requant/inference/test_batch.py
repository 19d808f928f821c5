"""Sequences in a batch: each has the logits that it has alone, whoever comes and goes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.tiny_configs import tiny_config
from requant.inference.batch import OneSequence, SequenceBatch, open_sequences

PROMPTS = [[5, 9, 200, 31], list(range(40, 64)), [7]]


def alone(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0, -1]


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "opt", "gpt2", "gpt-neox"])
def test_logits_are_those_of_each_alone(tiny_model, name: str) -> None:
    """The second joins after two steps and leaves first; the third takes its place."""
    model = tiny_model(name)
    batch = SequenceBatch(model, 4)
    texts = [list(PROMPTS[0])]

    def check(logits: torch.Tensor) -> None:
        expected = torch.stack([alone(model, text) for text in texts])
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)

    def step() -> None:
        for text in texts:
            text.append((text[-1] * 7 + 3) % 256)
        check(batch.step([text[-1] for text in texts]))

    check(batch.add(PROMPTS[0])[None])
    step(), step()
    for prompt in PROMPTS[1:]:
        texts.append(list(prompt))
        torch.testing.assert_close(batch.add(prompt), alone(model, prompt), atol=2e-5, rtol=1e-4)
        step(), step()
    batch.keep([0, 2])
    texts.pop(1)
    assert batch.cache.get_seq_length() == max(map(len, texts))  # the longest has left with its columns
    step()
    batch.keep([])
    texts[:] = [list(PROMPTS[1])]
    check(batch.add(PROMPTS[1])[None])
    step()


def test_a_sequence_that_finds_no_memory_leaves_the_others(tiny_model, monkeypatch) -> None:
    """It is longer than they are, and fails between keys and values of the last layer."""
    model = tiny_model("llama")
    batch, others = SequenceBatch(model, 3), [list(PROMPTS[0]), list(PROMPTS[2])]
    for text in others:
        batch.add(text)
    calls, cat = 0, torch.cat

    def fail(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        nonlocal calls
        calls += dim == 0
        if calls == 2 * len(batch.cache.layers):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cat(tensors, dim)

    monkeypatch.setattr("requant.inference.batch.torch.cat", fail)
    with pytest.raises(torch.OutOfMemoryError):
        batch.add(PROMPTS[1])
    monkeypatch.undo()
    assert batch.lengths == [4, 1]
    logits = batch.step([9, 9])
    expected = torch.stack([alone(model, [*text, 9]) for text in others])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_a_model_that_fails_with_a_batch_is_decoded_one_by_one(caplog) -> None:
    """xLSTM's state is none of transformers' caches, of which its config does not tell."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("xlstm", 256)).eval()
    assert isinstance(open_sequences(model, length=16, capacity=4), OneSequence)
    assert "fails with a batch of sequences" in caplog.text


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_sliding_windows_are_decoded_one_by_one(tiny_model, name: str, caplog) -> None:
    model = tiny_model(name)
    assert open_sequences(model, length=64, capacity=None).capacity == 1 and not caplog.text
    sequences = open_sequences(model, length=64, capacity=8)
    assert "one after the other, whatever --batch says" in caplog.text
    assert isinstance(sequences, OneSequence) and sequences.capacity == 1
    torch.testing.assert_close(sequences.add(PROMPTS[1]), alone(model, PROMPTS[1]), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(sequences.step([3])[0], alone(model, [*PROMPTS[1], 3]), atol=2e-5, rtol=1e-4)


def test_capacity(tiny_model) -> None:
    assert open_sequences(tiny_model("llama"), length=64, capacity=None).capacity == 8
    assert isinstance(open_sequences(tiny_model("llama"), length=64, capacity=1), OneSequence)
