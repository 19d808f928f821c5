"""The name of the cache among a model's arguments."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from requant.text.kv_cache import takes_cache, with_cache
from requant.text.sampling import sample_documents


class OldModel(torch.nn.Module):
    def forward(self, tokens, past_key_values=None, use_cache=None): ...


class OldStateSpace(torch.nn.Module):
    def forward(self, tokens, cache_params=None, use_cache=None): ...


class NewModel(torch.nn.Module):
    def forward(self, tokens, cache=None, use_cache=None): ...


class Wrapper(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments, **named):
        return self.model(*arguments, **named)


@pytest.mark.parametrize(
    ("model", "name"),
    [(OldModel(), "past_key_values"), (OldStateSpace(), "cache_params"), (NewModel(), "cache")],
)
def test_it_is_what_the_model_calls_it(model: torch.nn.Module, name: str) -> None:
    cache = DynamicCache()
    assert with_cache(model, cache) == {name: cache, "use_cache": True}


def test_models_of_transformers_that_name_none_take_none(tiny_model) -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("openai-gpt", n_embd=16, n_layer=1, n_head=2)
    )
    assert not takes_cache(model) and takes_cache(tiny_model("llama")) and takes_cache(Wrapper(model))
    assert with_cache(model, DynamicCache()) == {"use_cache": False}


@torch.no_grad()
def test_documents_of_a_model_without_a_cache_follow_from_their_whole_text() -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "tie_word_embeddings": False}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("openai-gpt", **sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_()  # so that the text before a token matters
    generator = torch.Generator().manual_seed(0)
    (row,) = sample_documents(
        model, start=1, end=None, batch_size=1, max_tokens=6, generator=generator, top_p=1e-6
    )
    for count, token in enumerate(row):  # the likeliest, as `top_p` leaves no other
        assert token == int(model(torch.tensor([[1, *row[:count]]])).logits[0, -1].argmax())


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_the_installed_transformers_fill_it_without_a_warning(tiny_folder, name: str) -> None:
    """Warnings are errors in tests."""
    model = Wrapper(AutoModelForCausalLM.from_pretrained(tiny_folder(name)).eval())
    tokens, cache = torch.arange(1, 9)[None], DynamicCache(config=model.model.config)
    model.model(tokens[:, :3], **with_cache(model.model, cache))
    model(tokens[:, 3:5], **with_cache(model, cache))
    assert cache.get_seq_length() == 5
    later = model(tokens[:, 5:], **with_cache(model, cache)).logits
    torch.testing.assert_close(later, model(tokens).logits[:, 5:], rtol=1e-4, atol=1e-5)
