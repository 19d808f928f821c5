"""Log-probabilities of the tokens of an answer, against the model's own, by OpenAI's client."""

import math
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from .harness import Slow, httpx  # noqa: E402


@torch.no_grad()
def penalized(model: Slow, tokens: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """The likeliest tokens less 2 for each earlier one of the same kind, and the model's own log-probabilities [v]."""
    written, found = list(tokens), []
    for _ in range(count):
        logits = model.model(torch.tensor([written])).logits[0, -1].float()
        found.append(logits.log_softmax(-1))
        for token in written[len(tokens) :]:
            logits[token] -= 2
        written.append(int(logits.argmax()))
    return written[len(tokens) :], found


def test_of_completions(client, model: Slow, chatty) -> None:
    answer = client.completions.create(
        model="tiny", prompt="The city", max_tokens=12, temperature=0, frequency_penalty=2, logprobs=3
    )
    tokens, expected = penalized(model, chatty("The city")["input_ids"], 12)
    found = answer.choices[0].logprobs
    assert answer.choices[0].text == chatty.decode(tokens) and len(found.tokens) == 12
    assert any(log.argmax() != token for log, token in zip(expected, tokens, strict=True))
    for i, (token, log) in enumerate(zip(tokens, expected, strict=True)):
        assert found.tokens[i] == chatty.decode([token])
        assert found.token_logprobs[i] == pytest.approx(float(log[token]), abs=1e-4)
        names = [chatty.decode([one]) for one in log.topk(3).indices.tolist()]
        assert set(found.top_logprobs[i]) == {*names, found.tokens[i]}
        assert found.top_logprobs[i][found.tokens[i]] == found.token_logprobs[i]
    assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)


@pytest.mark.parametrize("stream", [False, True])
def test_of_chat(client, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "temperature": 0,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    if stream:
        events = [event.choices[0] for event in client.chat.completions.create(**asked, stream=True)]
        content = [token for event in events if event.logprobs for token in event.logprobs.content]
        text = "".join(event.delta.content or "" for event in events)
    else:
        (choice,) = client.chat.completions.create(**asked).choices
        content, text = choice.logprobs.content, choice.message.content
    assert len(content) == 9
    if all(token.bytes for token in content):
        assert "".join(token.token for token in content) == text
    for token in content:
        partial = "\ufffd" in token.token  # of a character
        assert token.bytes is None if partial else bytes(token.bytes).decode() == token.token
        first, second = token.top_logprobs
        assert (first.token, first.logprob) == (token.token, token.logprob)  # greedy
        assert first.logprob >= second.logprob and math.exp(first.logprob) + math.exp(second.logprob) <= 1


def test_tokens_after_a_stop_string_are_not_told(client) -> None:
    asked = {"model": "tiny", "prompt": "The city", "max_tokens": 20, "temperature": 0, "logprobs": 0}
    whole = client.completions.create(**asked).choices[0]
    stop = whole.text[5:7]
    cut = client.completions.create(**asked, stop=stop).choices[0]
    count = len(cut.logprobs.tokens)
    assert "".join(cut.logprobs.tokens) == cut.text == whole.text[: whole.text.index(stop)]
    assert cut.logprobs.token_logprobs == pytest.approx(whole.logprobs.token_logprobs[:count], abs=1e-5)
    assert all(len(top) == 1 for top in cut.logprobs.top_logprobs)


def test_none_unless_asked_for(client, url: str) -> None:
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].logprobs is None
    message = [{"role": "user", "content": "Hi"}]
    assert client.chat.completions.create(model="tiny", messages=message).choices[0].logprobs is None
    for body, sentence in (
        ({"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
        ({"logprobs": 3}, "logprobs must be true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
    ):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": message, **body})
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]
