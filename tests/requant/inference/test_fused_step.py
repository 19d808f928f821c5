"""Fused steps: which models qualify, and that their logits are those of the model."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from requant.inference.decode import Decoder
from requant.inference.fused_step import fused_steps


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3", "phi3"])
def test_models_of_the_modules_of_llama_qualify(tiny_model, name: str) -> None:
    (step,) = fused_steps(tiny_model(name), 1)
    assert {block.activation for block in step.blocks} == {"silu"}


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "opt", "gpt2", "gpt-neox"])
def test_others_keep_their_own_steps(tiny_model, name: str) -> None:
    assert not fused_steps(tiny_model(name), 1)


def test_a_decoder_says_which_models_have_none(tiny_model, caplog: pytest.LogCaptureFixture) -> None:
    decoder = Decoder(tiny_model("gpt2"), length=8, graph=False, kernel_attention=False)
    decoder.wants_fused = True  # as with the kernels of a GPU
    logits = decoder.prefill(torch.tensor([[1, 2]]))
    with caplog.at_level(logging.INFO, logger="requant.inference"):
        decoder._fuse((decoder.tokens, decoder.tokens, logits))
    assert decoder.fused is None
    assert "steps of GPT2LMHeadModel are not fused: not all its modules are Llama's" in caplog.text


def test_hooks_of_what_is_passed_over_are_honoured(tiny_model) -> None:
    """An adapter or an offloading library that hangs on a module must still be called."""
    for path in ("model.layers.1", "model.layers.0.self_attn", "model.layers.0.mlp", "model.norm"):
        model = tiny_model("llama")
        handle = model.get_submodule(path).register_forward_hook(lambda *_: None)
        assert not fused_steps(model, 1), path
        handle.remove()
        assert fused_steps(model, 1)


def test_in_the_interpreter(make_checkpoint) -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("interpret_fused_step.py")
    run = subprocess.run(
        [sys.executable, script, make_checkpoint(kind="trellis")[0]],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("batch", [1, 5])
def test_captured_steps_give_the_same_logits(tiny_model, name: str, batch: int) -> None:
    model, tokens = tiny_model(name).cuda().bfloat16(), torch.randint(0, 256, (batch, 70), device="cuda")
    fused, plain = Decoder(model, length=100), Decoder(model, length=100, fused=False)
    assert torch.equal(fused.prefill(tokens), plain.prefill(tokens))
    for _ in range(6):
        wanted = plain.step()
        got = fused.step()
        assert fused.fused is not None and plain.fused is None
        assert fused.captured is not None and plain.captured is not None
        assert ((got - wanted).norm() / wanted.norm()).item() < 3e-2
        fused.tokens.copy_(plain.tokens)


@pytest.mark.gpu
def test_a_model_that_computes_otherwise_keeps_its_own_step(tiny_model, caplog) -> None:
    """Its modules are named as Llama's, but its MLPs add three times as much."""
    model = tiny_model("llama").cuda().bfloat16()
    for block in model.model.layers:
        mlp = block.mlp.forward
        block.mlp.forward = lambda x, mlp=mlp: 3 * mlp(x)
    decoder = Decoder(model, length=40)
    decoder.prefill(torch.randint(0, 256, (1, 9), device="cuda"))
    with caplog.at_level(logging.WARNING):
        decoder.step()
    assert decoder.fused is None and decoder.captured is not None
    assert "gives other logits" in caplog.text
