"""What is planned of a pass is what a run does at once, on a CPU and on a GPU."""

import pytest
import torch

from requant.calibration import batches
from requant.calibration.batches import bytes_of_logits, first_batch, tokens_at_once


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(("count", "length"), [(3, 512), (9, 512), (9, 1500), (2, 9000)])
def test_tokens_of_the_largest_batch(tiny_model, monkeypatch, count: int, length: int, gpu: bool) -> None:
    model = tiny_model("llama")
    windows = torch.zeros(count, length, dtype=torch.int64)
    if gpu:  # there is none, so its batches are made here
        monkeypatch.setattr(batches, "CPU_TOKENS", batches.GPU_TOKENS)
    found = first_batch(windows, model).numel()
    assert tokens_at_once(model, count, length, gpu=gpu) == found
    assert found == length * min(count, max(1, (8192 if gpu else 2048) // length))
    if gpu:
        vocabulary = model.config.vocab_size
        assert bytes_of_logits(model, *windows.shape) == 6 * 4 * found * vocabulary
