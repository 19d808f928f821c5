"""The routes, as OpenAI's own client sees them, over a real socket."""

from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from requant.server.engine import Engine  # noqa: E402

from .harness import LIMITS, Slow, httpx, running  # noqa: E402


@torch.no_grad()
def greedy(model: Slow, tokens: list[int], count: int) -> list[int]:
    """The likeliest tokens without a cache."""
    written = list(tokens)
    for _ in range(count):
        written.append(int(model.model(torch.tensor([written])).logits[0, -1].argmax()))
    return written[len(tokens) :]


def test_completion(client, model: Slow, chatty) -> None:
    answer = client.completions.create(model="tiny", prompt="The city", max_tokens=12, temperature=0)
    prompt = chatty("The city")["input_ids"]
    (choice,) = answer.choices
    assert choice.text == chatty.decode(greedy(model, prompt, 12)) and choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    assert answer.usage.total_tokens == len(prompt) + 12
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == "tiny"


def test_chat_is_the_template_and_then_a_completion(client) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=8, temperature=0
    )
    plain = client.completions.create(
        model="tiny", prompt="[system]Be brief.[user]Hello[assistant]", max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].message.role == "assistant" and answer.usage == plain.usage


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_is_the_same_text_in_pieces(client, usage: bool) -> None:
    asked = {"model": "tiny", "prompt": "The city", "max_tokens": 10, "temperature": 0}
    whole = client.completions.create(**asked)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = list(client.completions.create(**asked, stream=True, **options))
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    assert len(events) > 3
    *head, last = events if not usage else events[:-1]
    assert last.choices[0].finish_reason == "length"
    assert all(event.choices[0].finish_reason is None for event in head)
    if usage:
        assert events[-1].choices == [] and events[-1].usage == whole.usage
    else:
        assert events[-1].usage is None


def test_a_chat_stream_begins_with_the_role(client) -> None:
    events = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, stream=True, seed=7
        )
    )
    assert events[0].choices[0].delta.role == "assistant" and events[-1].choices[0].finish_reason == "length"
    assert all(event.object == "chat.completion.chunk" for event in events)


def test_seeds_and_choices(client) -> None:
    asked = {"model": "tiny", "prompt": "The", "max_tokens": 12, "temperature": 1.0, "n": 3}
    one, two = (client.completions.create(**asked, seed=7) for _ in range(2))
    texts = [choice.text for choice in one.choices]
    assert texts == [choice.text for choice in two.choices] and len(set(texts)) == 3
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert 12 < one.usage.completion_tokens <= 36  # the end token may be drawn
    other = client.completions.create(**asked, seed=8)
    assert [choice.text for choice in other.choices] != texts
    free = [client.completions.create(**asked).choices[0].text for _ in range(3)]
    assert len(set(free)) > 1, "requests without a seed must differ"
    nearly_greedy = client.completions.create(**{**asked, "top_p": 1e-6, "n": 1})
    assert (
        nearly_greedy.choices[0].text
        == client.completions.create(**{**asked, "temperature": 0, "n": 1}).choices[0].text
    )


def test_several_prompts_and_token_prompts(client, chatty) -> None:
    tokens = chatty("The")["input_ids"]
    texts = client.completions.create(model="tiny", prompt=["The", "A"], max_tokens=4, temperature=0)
    ids = client.completions.create(model="tiny", prompt=[tokens], max_tokens=4, temperature=0)
    assert len(texts.choices) == 2 and texts.choices[0].text == ids.choices[0].text
    assert texts.usage.prompt_tokens == len(tokens) + 1


def test_stop(client) -> None:
    asked = {"model": "tiny", "prompt": "The city", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[5:7]
    cut = client.completions.create(**asked, stop=["never to be found", stop])
    assert cut.choices[0].text == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 20
    streamed = client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == cut.choices[0].text


def test_the_end_token_ends(client, model: Slow, monkeypatch: pytest.MonkeyPatch, chatty) -> None:
    tokens = greedy(model, chatty("The city")["input_ids"], 6)
    with running(_ending(model, chatty, tokens[5])) as address:
        answer = httpx.post(
            f"{address}/v1/completions", json={"prompt": "The city", "max_tokens": 20, "temperature": 0}
        ).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == chatty.decode(tokens[: tokens.index(tokens[5])])


def _ending(model: Slow, chatty: Any, token: int) -> Engine:
    engine = Engine(model, chatty, limits=LIMITS)
    engine.ends = frozenset([token])
    return engine


def test_models_and_health(client, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "requant"
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "model": "tiny", "waiting": 0}
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; there is: tiny"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="a")
