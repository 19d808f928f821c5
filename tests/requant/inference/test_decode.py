"""Steps of one token: the same text whatever cache holds the past."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from eval.tiny_configs import tiny_config
from requant.inference.batch import OneSequence, open_sequences
from requant.inference.decode import Decoder, argmax_by_parts, generate_tokens
from requant.inference.static_cache import SharedLengthCache, static_cache
from requant.text import kv_cache


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt-neox", "phi3"])
def test_a_static_cache_changes_nothing(tiny_model, name: str) -> None:
    """What a graph replays: steps on a static cache, whose lengths were taken back after warming up."""
    model, tokens = tiny_model(name), torch.randint(0, 256, (3, 9))
    plain, static = Decoder(model, length=24), Decoder(model, length=24)
    static.cache = static_cache(model, 24)
    assert torch.allclose(plain.prefill(tokens), static.prefill(tokens), atol=1e-5)
    before = static.cache.length.clone(), static.tokens.clone(), static.logits.clone()
    for _ in range(3):
        static._step()
        static._restore(*before)
    for _ in range(6):
        assert torch.allclose(plain.step(), static.step(), atol=1e-5)
    static.cache.reset()
    assert int(static.cache.length) == 0
    plain.reset()
    assert torch.allclose(plain.prefill(tokens), static.prefill(tokens), atol=1e-5)


@pytest.mark.parametrize("v", [1, 7, 32000, 50257, 128256])
def test_the_likeliest_token_is_found_by_parts(v: int) -> None:
    logits = torch.randn(3, v)
    assert torch.equal(argmax_by_parts(logits), logits.argmax(-1, keepdim=True))


def test_a_model_on_several_devices_has_no_static_cache(tiny_model) -> None:
    model = tiny_model("llama")
    assert static_cache(model, 20) is not None
    model.lm_head.to("meta")
    assert static_cache(model, 20) is None


def test_steps_are_those_of_the_whole_text(tiny_model) -> None:
    model = tiny_model("llama")
    decoder, tokens = Decoder(model, length=20), torch.randint(0, 256, (2, 5))
    logits = decoder.prefill(tokens)
    for _ in range(4):
        tokens = torch.cat([tokens, decoder.tokens], 1)
        logits = decoder.step()
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits[:, -1], logits, atol=1e-5)
    decoder.reset()
    assert torch.allclose(decoder.prefill(tokens), logits, atol=1e-5)


NO_CACHE = {
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", NO_CACHE)
def test_a_model_without_a_cache_reads_the_whole_text_again(kind: str, caplog) -> None:
    caplog.set_level("INFO")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **NO_CACHE[kind])).eval()
    tokens = torch.randint(0, 256, (2, 9))
    whole = model(tokens, use_cache=False).logits
    decoder = Decoder(model, length=9, graph=True)
    assert not decoder.wants_graph and "takes no cache" in caplog.text
    for _ in range(2):
        found = [decoder.prefill(tokens[:, :5]).clone()]
        found += [decoder.step(tokens[:, at : at + 1]).clone() for at in range(5, 9)]
        torch.testing.assert_close(torch.stack(found, dim=1), whole[:, 4:], rtol=1e-4, atol=1e-5)
        decoder.reset()
    assert isinstance(open_sequences(model, length=9, capacity=4), OneSequence)


@torch.no_grad()
@pytest.mark.parametrize("caches", [(SharedLengthCache,), (SharedLengthCache, DynamicCache)])
def test_a_model_that_fails_with_a_cache_goes_on_with_less(tiny_model, monkeypatch, caplog, caches) -> None:
    model, tokens = tiny_model("llama"), torch.randint(0, 256, (1, 9))
    whole, forward, name = model(tokens).logits, type(model).forward, kv_cache._argument(type(model))

    def picky(self, input_ids, **options):
        if type(options.get("cache", options.get("past_key_values"))) in caches:
            raise ValueError("not this cache")
        return forward(self, input_ids, **options)

    monkeypatch.setattr(type(model), "forward", picky)
    monkeypatch.setattr(kv_cache, "_argument", lambda kind: name)
    decoder = Decoder(model, length=9, kernel_attention=False)
    decoder.cache = static_cache(model, 9)
    for _ in range(2):  # it is tried, and said, once
        found = [decoder.prefill(tokens[:, :5]).clone()]
        found += [decoder.step(tokens[:, at : at + 1]).clone() for at in range(5, 9)]
        torch.testing.assert_close(torch.stack(found, dim=1), whole[:, 4:], rtol=1e-4, atol=1e-5)
        decoder.reset()
    assert (decoder.cache is None) == (DynamicCache in caches)
    assert caplog.text.count("LlamaForCausalLM fails with a cache") == len(caches)


@torch.no_grad()
@pytest.mark.parametrize("static", [True, False])
def test_a_prompt_at_fault_changes_no_decoder(tiny_model, caplog, static: bool) -> None:
    """It fails with every cache, so none of them is given up, and nothing is logged."""
    model, tokens = tiny_model("llama"), torch.randint(0, 256, (1, 9))
    decoder = Decoder(model, length=9, kernel_attention=False)
    if static:
        decoder.cache, decoder.wants_graph = static_cache(model, 9), True
    cache = decoder.cache
    with pytest.raises(IndexError):
        decoder.prefill(tokens + 1000)
    assert (
        decoder.cache is cache and decoder.wants_cache and decoder.wants_graph == static and not caplog.text
    )
    decoder.wants_graph = False  # there is none on a CPU
    decoder.reset()
    torch.testing.assert_close(decoder.prefill(tokens), model(tokens).logits[:, -1])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["openai-gpt", "bamba"])
def test_prompts_behind_others(kind: str) -> None:
    """Bamba's first layer, by which it counts its text, is a state."""
    if kind == "bamba" and Version(transformers.__version__) < Version("5.17"):
        pytest.skip("a state of Bamba takes no prompt behind others")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, 256)).eval()
    tokens = torch.randint(0, 256, (1, 12))
    whole = model(tokens, use_cache=False).logits
    decoder = Decoder(model, length=12)
    found = [decoder.prefill(tokens[:, :5]).clone(), decoder.step(tokens[:, 5:6]).clone()]
    found += [decoder.prefill(tokens[:, 6:9]).clone(), decoder.step(tokens[:, 9:10]).clone()]
    torch.testing.assert_close(torch.stack(found, 1), whole[:, [4, 5, 8, 9]], rtol=1e-4, atol=1e-5)


def test_a_sliding_window_goes_without_a_graph(tiny_model) -> None:
    decoder = Decoder(tiny_model("mistral"), length=20, graph=True)
    assert not decoder.wants_graph


def test_writing_stops_at_an_end_and_at_the_limit(tiny_model) -> None:
    model, prompt = tiny_model("llama"), torch.arange(1, 5)[None]
    settings = {"temperature": 0.0, "generator": torch.Generator().manual_seed(0)}
    written = generate_tokens(model, prompt, max_new_tokens=6, **settings)
    assert len(written) == 6
    whole = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=[])[0, 4:]
    assert written == whole.tolist()
    end = frozenset(written[3:4])
    assert (
        generate_tokens(model, prompt, max_new_tokens=6, end=end, **settings)
        == written[: written.index(*end)]
    )


def test_a_compiled_model_runs_the_steps(tiny_model) -> None:
    """The prompt goes through the model itself, steps through what was made of it."""
    model, tokens = tiny_model("llama"), torch.randint(0, 256, (2, 5))
    torch._dynamo.reset()
    plain = Decoder(model, length=12)
    compiled = Decoder(model, length=12, step_model=torch.compile(model, backend="eager"))
    assert torch.allclose(plain.prefill(tokens), compiled.prefill(tokens), atol=1e-6)
    assert torch.allclose(plain.step(), compiled.step(), atol=1e-5)
