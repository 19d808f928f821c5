"""What is planned of a pass is what a run does at once, on a CPU and on a GPU."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.shapes import config_of
from requant.calibration import batches
from requant.calibration.batches import (
    bytes_of_a_token,
    bytes_of_logits,
    first_batch,
    recomputes_blocks,
    tokens_at_once,
)
from requant.calibration.collect import batch_bytes
from requant.models.experts import unfuse_experts


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


@pytest.mark.parametrize(
    ("width", "vocabulary", "tokens"),
    [
        (2048, 128256, 4096),
        (3072, 128256, 2048),
        (4096, 128256, 2048),
        (2048, 262144, 2048),
        (512, 32000, 8192),
    ],
)
def test_with_gradients_a_narrow_model_takes_more_windows_of_at_most_twice_the_logits(
    monkeypatch, width: int, vocabulary: int, tokens: int
) -> None:
    config = LlamaConfig(hidden_size=width, vocab_size=vocabulary, num_hidden_layers=1)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert tokens_at_once(model, 64, 2048, gpu=True, gradients=True) == tokens
    assert tokens_at_once(model, 1, 2048, gpu=True, gradients=True) == 2048
    assert tokens_at_once(model, 64, 512, gpu=False, gradients=True) == tokens_at_once(
        model, 64, 512, gpu=False
    )
    # without any more memory than its logits take with those of another model in float32, or two thirds of the GPU's
    monkeypatch.setattr("requant.models.devices._most_of_a_gpu", 2**30)
    plain = tokens_at_once(model, 64, 2048, gpu=True)
    assert tokens_at_once(model, 64, 2048, gpu=True, gradients=True) == plain


def test_a_batch_of_1b_is_planned_as_an_h200_took_it(monkeypatch) -> None:
    """21.3 GB with the model (2.5) and statistics of twelve blocks (10.9); on 16 GB one window at once."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of("1b")).to(torch.bfloat16)
    needs = frozenset({"hessian", "output_hessian"})
    for memory, tokens in ((24 << 30, 4096), (16 << 30, 2048)):
        monkeypatch.setattr("requant.models.devices._most_of_a_gpu", memory)
        assert tokens_at_once(model, 256, 2048, gpu=True, gradients=True) == tokens
        planned = batch_bytes(model, (256, 2048), needs, by_block=False)
        assert planned == pytest.approx(
            7.9e9 if tokens == 4096 else bytes_of_logits(model, 256, 2048), rel=0.05
        )
    assert batch_bytes(model, (256, 2048), frozenset({"hessian"}), by_block=False) == bytes_of_logits(
        model, 256, 2048
    )


def test_large_models_are_computed_once_where_their_graph_is_small_beside_the_gpu(monkeypatch) -> None:
    """8B on an H200, in 16 bits and without the linears' inputs; the plan counts the graph of every block then."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of("8b")).bfloat16()
    windows = (128, 2048)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    graph = 2048 * bytes_of_a_token(model)
    assert 8e9 < graph < 150e9 / 12
    assert not recomputes_blocks(model, windows, gpu=True)
    assert batch_bytes(model, windows, frozenset({"output_hessian"}), by_block=False) > graph
    assert recomputes_blocks(model, windows, gpu=False)
    assert recomputes_blocks(model, windows, gpu=True, inputs=True)
    assert batch_bytes(model, windows, frozenset({"fisher"}), by_block=False) < graph
    monkeypatch.setattr("requant.models.devices.H200_MEMORY", 80 * 2**30)
    assert recomputes_blocks(model, windows, gpu=True)
    monkeypatch.undo()
    assert recomputes_blocks(model.float(), windows, gpu=True)


def test_blocks_with_experts_are_computed_again(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(batches, "RECOMPUTE_ABOVE", 0)
    mixture = tiny_model("qwen3-moe").bfloat16()
    unfuse_experts(mixture)  # as a run loads it
    assert recomputes_blocks(mixture, (2, 32), gpu=True)
    assert not recomputes_blocks(tiny_model("llama").bfloat16(), (2, 32), gpu=True)
