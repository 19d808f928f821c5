"""What the server refuses, whom it turns away, and what it does when a client or the server itself leaves."""

import asyncio
import json
import re
import socket
import threading
import time
from typing import Any

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from requant.server.engine import Engine  # noqa: E402
from requant.server.protocol import ApiError, Limits  # noqa: E402

from .harness import LIMITS, Slow, httpx, running  # noqa: E402


@pytest.mark.parametrize(
    ("body", "sentence", "param"),
    [
        ({}, "prompt must be a string", "prompt"),
        ({"prompt": []}, "prompt must be a string", "prompt"),
        ({"prompt": ""}, "holds no token", "prompt"),
        ({"prompt": [1, "a"]}, "prompt must be a string", "prompt"),
        ({"prompt": [[]]}, "prompt must be a string", "prompt"),
        ({"prompt": "\ud800"}, "half a surrogate pair", "prompt"),
        ({"prompt": "a", "\ud800": 1}, "is not a field that this server knows", "?"),
        ({"prompt": "a", "best": 1}, "'best' is not a field that this server knows", "best"),
        ({"prompt": [5000]}, "a token outside 0 to 263", "prompt"),
        ({"prompt": ["a"] * 5}, "5 answers in one request; at most 4", "prompt"),
        ({"prompt": ["a"] * 2, "n": 3}, "6 answers in one request; at most 4", "n"),
        (
            {"prompt": "a", "max_tokens": 41},
            "max_tokens is 41; it takes a whole number from 1 to 40",
            "max_tokens",
        ),
        ({"prompt": "a", "max_tokens": True}, "max_tokens is True", "max_tokens"),
        ({"prompt": "a" * 90, "max_tokens": 20}, "exceed the context of 100 tokens", "max_tokens"),
        ({"prompt": "a", "temperature": 3}, "temperature is 3; it takes a number from 0 to 2", "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature is nan", "temperature"),
        ({"prompt": "a", "top_p": "x" * 99}, "top_p is 'xxx.*\\.\\.\\.; it takes", "top_p"),
        ({"prompt": "a", "n": 9}, "n is 9; it takes a whole number from 1 to 8", "n"),
        ({"prompt": "a", "seed": 1.5}, "seed is 1.5", "seed"),
        ({"prompt": "a", "stop": ["a", ""]}, "none of them empty", "stop"),
        ({"prompt": "a", "stop": list("abcde")}, "at most 4", "stop"),
        ({"prompt": "a", "stream": "yes"}, "stream must be true or false", "stream"),
        ({"prompt": "a", "stream_options": 3}, "stream_options must be an object", "stream_options"),
        ({"prompt": "a", "logprobs": 6}, "logprobs is 6; it takes a whole number from 0 to 5", "logprobs"),
        ({"prompt": "a", "top_logprobs": 2}, "top_logprobs is a field of chat completions", "top_logprobs"),
        (
            {"prompt": "a", "max_completion_tokens": 2},
            "is a field of chat completions; give max_tokens",
            "max_completion_tokens",
        ),
        ({"prompt": "a", "messages": [{}]}, "messages is a field of chat completions", "messages"),
        ({"prompt": "a", "echo": True}, "echo is not supported", "echo"),
        ({"prompt": "a", "model": 3}, "model must be a string", "model"),
    ],
)
def test_requests_that_are_refused(url: str, body: dict[str, Any], sentence: str, param: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=json.dumps(body))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert re.search(sentence, error["message"]) and error["param"] == param


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (None, "messages must be a list"),
        ([], "messages must be a list"),
        (["hi"], r"messages\[0\] must be an object with a role"),
        ([{"role": "user"}], r"messages\[0\].content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "a part that is not text"),
        (
            [{"role": "assistant", "content": "a", "tool_calls": [{"id": "b"}]}],
            r"messages\[0\].tool_calls is not supported",
        ),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
        ([{"role": "\ud800", "content": "a"}], "half a surrogate pair"),
    ],
)
def test_messages_that_are_refused(url: str, messages: Any, sentence: str) -> None:
    body = json.dumps({"messages": messages})
    answer = httpx.post(f"{url}/v1/chat/completions", content=body)
    assert answer.status_code == 400 and re.search(sentence, answer.json()["error"]["message"])


def test_a_chat_takes_no_prompt(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "prompt": "b"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert (
        answer.status_code == 400 and "prompt is a field of completions" in answer.json()["error"]["message"]
    )


def test_a_length_that_was_not_asked_for_fits_the_context(url: str, chatty) -> None:
    content = "a" * (90 - len(chatty.apply_chat_template([{"role": "user", "content": ""}])["input_ids"]))
    body = {"messages": [{"role": "user", "content": content}], "temperature": 1e-300}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] <= 100
    answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 20})
    assert (
        answer.status_code == 400 and "exceed the context of 100 tokens" in answer.json()["error"]["message"]
    )


def test_a_token_that_the_model_lacks(url: str, model, monkeypatch) -> None:
    monkeypatch.setattr(model.get_input_embeddings(), "num_embeddings", 5)
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "zzz"})
    assert answer.status_code == 400
    assert "the model's embedding has 5 rows: use the tokenizer" in answer.json()["error"]["message"]


def test_what_openai_ignores_is_ignored(client) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=2,
        user="me",
        frequency_penalty=0,
        extra_body={"metadata": {"a": "b"}},
    )
    assert answer.usage.completion_tokens == 2


def test_other_bodies_and_pages(url: str) -> None:
    post = f"{url}/v1/completions"
    for content, sentence in (
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("[" * 10_000, "not valid JSON"),
    ):
        answer = httpx.post(post, content=content)
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]
    answer = httpx.post(post, json={"prompt": "a" * 20_000})
    assert answer.status_code == 413 and "larger than 20000 bytes" in answer.json()["error"]["message"]
    for path, status in (("/", 404), ("/docs", 404), ("/openapi.json", 404), ("/v1/embeddings", 404)):
        answer = httpx.get(url + path)
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(post).status_code == 405 and "error" in httpx.get(post).json()


def test_a_model_without_a_chat_template(model: Slow, tokenizer) -> None:
    with running(Engine(model, tokenizer, limits=LIMITS)) as address:
        answer = httpx.post(
            f"{address}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}
        )
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


@pytest.mark.parametrize("given", ["secret", " secret\n"])
def test_the_key(model: Slow, chatty, given: str) -> None:
    with running(Engine(model, chatty, limits=LIMITS), api_key=given) as address:
        assert httpx.get(f"{address}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = httpx.get(f"{address}/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
            assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="guess", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.completions.create(model="tiny", prompt="a")


def test_a_full_queue_says_so_and_drains(model: Slow, chatty) -> None:
    model.pause = 0.05
    limits = Limits(max_tokens=40, context=100, waiting=1, batch=1)
    with running(Engine(model, chatty, limits=limits)) as address:
        answers: list[Any] = []

        def ask() -> None:
            body = {"prompt": "a", "max_tokens": 10, "temperature": 0}
            answers.append(httpx.post(f"{address}/v1/completions", json=body, timeout=30))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        states = sorted(answer.status_code for answer in answers)
        assert states == [200, 200, 429, 429]
        full = next(answer for answer in answers if answer.status_code == 429)
        assert full.json()["error"]["code"] == "queue_full" and full.headers["retry-after"] == "1"
        texts = {answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}
        assert len(texts) == 1
        assert httpx.get(f"{address}/health").json()["waiting"] == 0
    model.pause = 0.0


def test_who_leaves_is_not_written_for(url: str, model: Slow) -> None:
    model.pause = 0.05
    before = model.steps
    # an end that is drawn by chance would be a whole answer
    body = {"prompt": "a", "max_tokens": 40, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.4)
    time.sleep(0.6)
    steps = model.steps
    time.sleep(0.3)
    assert model.steps == steps < before + 40
    model.pause = 0.0


@pytest.mark.parametrize("stream", [pytest.param(True, marks=pytest.mark.slow), False])
def test_who_leaves_keeps_no_place_in_the_queue(model: Slow, chatty, stream: bool) -> None:
    model.pause = 0.1
    engine = Engine(model, chatty, limits=Limits(max_tokens=40, context=100, waiting=1, batch=1))
    engine.ends = frozenset()  # drawn by chance, an end would free the place
    with running(engine) as address:
        url, body = f"{address}/v1/completions", {"prompt": "a", "max_tokens": 40}
        with httpx.stream("POST", url, json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            for _ in range(2):
                with pytest.raises(httpx.ReadTimeout):  # not refused
                    httpx.post(url, json={**body, "stream": stream}, timeout=0.3)
                time.sleep(0.2)
                assert httpx.get(f"{address}/health").json()["waiting"] == 0
            next(lines)
    model.pause = 0.0


def test_a_stream_that_is_cut_by_the_end_of_the_server_says_so(model: Slow, chatty) -> None:
    model.pause = 0.05
    engine = Engine(model, chatty, limits=LIMITS)
    engine.ends = frozenset()  # drawn by chance, an end would be a whole answer
    with running(engine) as address:
        body = {"prompt": "a", "max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.close()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        refused = httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
    model.pause = 0.0


def test_whoever_asks_an_engine_that_has_ended_is_told(model: Slow, chatty) -> None:
    """For JSON too: the thread that makes its parsers is that of the tokenizer."""
    engine = Engine(model, chatty, limits=LIMITS)
    engine.close()
    engine.join()
    for ask, value in ((engine.tokens_of, "a"), (engine.matcher_of, {"type": "object"})):
        with pytest.raises(ApiError, match="the server is shutting down") as caught:
            asyncio.run(ask(value))
        assert caught.value.status == 503


def test_a_request_that_fails_does_not_end_the_server(model: Slow, chatty, monkeypatch, caplog) -> None:
    engine = Engine(model, chatty, limits=LIMITS)
    with running(engine) as address:
        with monkeypatch.context() as patch:
            patch.setattr(engine._sequences, "add", lambda tokens: 1 / 0)
            answer = httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "ZeroDivisionError" in caplog.text and "Zero" not in answer.text
        with monkeypatch.context() as patch:  # an answer that has just joined is told too
            patch.setattr("requant.server.engine.sample_next", lambda *_, **__: 1 / 0)
            answer = httpx.post(f"{address}/v1/completions", json={"prompt": "a"}, timeout=20)
        assert answer.status_code == 500
        with monkeypatch.context() as patch:
            patch.setattr("requant.server.engine.TextStream", lambda *_: 1 / 0)
            answer = httpx.post(f"{address}/v1/completions", json={"prompt": "a"}, timeout=5)
        assert answer.status_code == 500
        assert (
            httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        )


def test_whoever_has_joined_is_told_of_a_failure(model: Slow, chatty, monkeypatch) -> None:
    """The first answer goes on; memory cannot be had when the second, of one token, leaves within the same turn."""
    engine = Engine(model, chatty, limits=LIMITS)
    engine.ends = frozenset()
    sequences, begun, both_wait = engine._sequences, threading.Event(), threading.Event()
    add, keep, states = sequences.add, sequences.keep, {}

    def wait_and_add(prompt: list[int]) -> Any:
        begun.set()
        both_wait.wait(5)
        return add(prompt)

    monkeypatch.setattr(sequences, "add", wait_and_add)
    monkeypatch.setattr(sequences, "keep", lambda rows: 1 / 0 if rows else keep(rows))
    with running(engine) as address:

        def ask(tokens: int) -> None:
            body = {"prompt": "a", "max_tokens": tokens, "temperature": 0}
            states[tokens] = httpx.post(f"{address}/v1/completions", json=body, timeout=5).status_code

        threads = [threading.Thread(target=ask, args=(tokens,)) for tokens in (9, 1)]
        threads[0].start()
        assert begun.wait(5)
        threads[1].start()
        while not engine.waiting:
            time.sleep(0.01)
        both_wait.set()
        for thread in threads:
            thread.join()
    assert states == {9: 500, 1: 200}


def test_a_client_that_leaves_within_its_request_is_no_failure(url: str, client, caplog) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.2)  # until the server waits for the rest
    time.sleep(0.2)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
