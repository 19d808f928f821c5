"""Fused steps: which models qualify, and that their logits are those of the model."""

import logging

import pytest
import torch

from requant.inference.decode import Decoder
from requant.inference.fused_prefill import kind_of
from requant.inference.fused_step import MixtureBlock, PlainBlock, fused_steps
from requant.inference.step_inputs import AngleInputs, ModelInputs, RowInputs, step_inputs
from requant.models.experts import unfuse_experts


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3", "phi3"])
def test_models_of_the_modules_of_llama_qualify(tiny_model, name: str) -> None:
    (step,) = fused_steps(tiny_model(name), 1, 20)
    assert {block.activation for block in step.blocks} == {"silu"}


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "mixtral"])
def test_blocks_with_experts_qualify(tiny_model, name: str) -> None:
    """Those of an original, too: it is what a checkpoint's speed is compared with."""
    model = tiny_model(name)
    for unfused in (False, True):
        if unfused:
            unfuse_experts(model)
        (step,) = fused_steps(model, 1, 20)
        assert {type(block) for block in step.blocks} == {MixtureBlock}
    if name != "mixtral":  # whose files' names are others
        model.model.layers[0].mlp = tiny_model("llama").model.layers[0].mlp
        (step,) = fused_steps(model, 1, 20)
        assert [type(block) for block in step.blocks[:2]] == [PlainBlock, MixtureBlock]


@pytest.mark.parametrize("name", ["olmoe", "gpt-oss", "deepseek-v3"])
def test_mixtures_with_other_attention_keep_their_own_steps(tiny_model, name: str) -> None:
    """Norms of all heads together, sinks, latents."""
    model = tiny_model(name)
    unfuse_experts(model)
    assert not fused_steps(model, 1, 20)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "opt", "gpt2", "gpt-neox"])
def test_others_keep_their_own_steps(tiny_model, name: str) -> None:
    assert not fused_steps(tiny_model(name), 1, 20)


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
        assert not fused_steps(model, 1, 20), path
        handle.remove()
        assert fused_steps(model, 1, 20)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "phi4-mini"])
def test_rows_and_angles_are_copied_where_they_are_fixed(tiny_model, name: str) -> None:
    model = tiny_model(name)
    inputs = step_inputs(model, 20)
    assert isinstance(inputs, RowInputs)
    wanted = ModelInputs(model)
    for position in (0, 7, 19):
        _, cos, sin, _ = wanted(torch.zeros(1, 1, dtype=torch.int64), torch.tensor(position))
        assert torch.equal(inputs.cos[position], cos[0]) and torch.equal(inputs.sin[position], sin[0])
    model.model.embed_tokens.register_forward_hook(lambda _module, _inputs, x: 2 * x)
    hooked = step_inputs(model, 20)
    assert isinstance(hooked, AngleInputs)
    tokens = torch.tensor([[3], [5], [250]])
    for position in map(torch.tensor, (0, 7, 19)):
        for ours, theirs in zip(hooked(tokens, position)[:3], wanted(tokens, position)[:3], strict=True):
            assert torch.equal(ours, theirs)
    model.model.rotary_emb.register_forward_hook(lambda *_: None)
    assert isinstance(step_inputs(model, 20), ModelInputs)


def test_angles_that_change_with_the_length_are_the_models(tiny_model) -> None:
    for rope_type in ("dynamic", "longrope", {"full_attention": "default"}):
        model = tiny_model("llama")
        model.model.rotary_emb.rope_type = rope_type
        assert isinstance(step_inputs(model, 20), ModelInputs), rope_type


def test_an_embedding_of_another_class_is_called(tiny_model) -> None:
    """Gemma's multiplies its rows; one that is quantized has none."""
    model = tiny_model("llama")
    model.model.embed_tokens.__class__ = type("Scaled", (torch.nn.Embedding,), {})
    assert isinstance(step_inputs(model, 20), AngleInputs)


@pytest.mark.parametrize(
    "kinds", [("llama",), pytest.param(("qwen3", "phi3", "qwen3_moe"), marks=pytest.mark.slow)], ids=" ".join
)
def test_in_the_interpreter(interpreted, make_checkpoint, kinds: tuple[str, ...]) -> None:
    interpreted("interpret_fused_step.py", str(make_checkpoint(kind="trellis")[0]), *kinds)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "phi4-mini"])
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
        assert torch.equal(fused.tokens, got.argmax(-1, keepdim=True))
        assert torch.equal(fused.cache.length, plain.cache.length)
        fused.tokens.copy_(plain.tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "phi4-mini"])
@pytest.mark.parametrize("batch", [1, 5])
def test_prompts_are_fused_from_the_third_on(tiny_model, name: str, batch: int) -> None:
    """Behind others too, and a step after them."""
    model = tiny_model(name).cuda().bfloat16()
    fused, plain = Decoder(model, length=150), Decoder(model, length=150, fused=False)
    prompts = [torch.randint(0, 256, (batch, count), device="cuda") for count in (70, 66)]
    (kind,) = {kind_of(batch * count) for count in (70, 66)}
    plain.prefill(prompts[0])
    for compared in (False, True):
        assert torch.equal(fused.prefill(prompts[0]), plain.logits)
        assert (kind in fused.fused_prefill.found) == compared
        fused.reset()
    plain.reset()
    for tokens in prompts:
        wanted, got = plain.prefill(tokens), fused.prefill(tokens)
        assert fused.fused_prefill.found[kind] is not None
        assert ((got - wanted).norm() / wanted.norm()).item() < 3e-2
    fused.tokens.copy_(plain.tokens)
    wanted, got = plain.step(), fused.step()
    assert ((got - wanted).norm() / wanted.norm()).item() < 3e-2


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
