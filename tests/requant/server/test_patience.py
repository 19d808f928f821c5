"""What keeps the server answering: requests in a batch, slow clients cut off, long texts and templates aside."""

import asyncio
import copy
import functools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")

from requant.server import connection
from requant.server.engine import Engine
from requant.server.protocol import Limits
from requant.text.chat import ChatTemplate

from .harness import LIMITS, Slow, httpx, running


def ask(address: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": "The", "max_tokens": 8, "temperature": 0} | body
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def test_a_short_answer_does_not_wait_for_long_ones(model: Slow, chatty) -> None:
    """Three long answers and a short one: each step writes a token of all of them."""
    with running(Engine(model, chatty, limits=LIMITS)) as address:
        alone = text_of(ask(address, max_tokens=40))
        before, model.pause = model.steps, 0.05
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append(text_of(ask(address, max_tokens=40))))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        ask(address, prompt="A", max_tokens=2)
        assert any(thread.is_alive() for thread in threads)
        for thread in threads:
            thread.join()
        assert model.steps - before < 3 * 40  # not one after another
        assert texts == [alone] * 3
    model.pause = 0.0


def test_one_at_a_time(model: Slow, chatty) -> None:
    limits = Limits(max_tokens=40, context=100, batch=1)
    with running(Engine(model, chatty, limits=limits)) as address:
        assert ask(address, n=3)["usage"]["completion_tokens"] == 24


def test_sampling_fields_are_honoured(url: str) -> None:
    greedy = text_of(ask(url, max_tokens=30))
    for options in ({"top_k": 1}, {"min_p": 1.0}):
        assert text_of(ask(url, max_tokens=30, temperature=1.5, **options)) == greedy
    assert text_of(ask(url, max_tokens=30, top_k=-1)) == greedy
    repeated = ask(url, prompt=[65], max_tokens=30, frequency_penalty=-2, presence_penalty=-2)
    varied = ask(url, prompt=[65], max_tokens=30, frequency_penalty=2, presence_penalty=2)
    kinds = [len(set(text_of(answer))) for answer in (repeated, varied)]
    assert kinds[0] < kinds[1]


@pytest.mark.parametrize(
    "field",
    [
        {"logprobs": 6}, {"top_logprobs": 3}, {"response_format": {"type": "xml"}}, {"repetition_penalty": 1.2},
        {"logit_bias": {"1": 5}}, {"top_k": -2}, {"min_p": 1.5}, {"presence_penalty": 3}, {"guided_json": {}},
        {"reasoning_effort": "high"}, {"x\n": 1},
    ],
    ids=str,
)  # fmt: skip
def test_no_field_is_accepted_silently(url: str, field: dict[str, Any]) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", **field})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and repr(next(iter(field)))[1:-1] in message


def test_a_long_prompt_is_refused_by_its_bytes(model: Slow, chatty, monkeypatch) -> None:
    limits = Limits(max_tokens=40, context=100, body_bytes=1 << 20)
    engine = Engine(model, chatty, limits=limits)
    monkeypatch.setattr(engine, "_tokenize", lambda prompt: 1 / 0)
    with running(engine) as address:
        text = "a" * 500_000
        for body in (
            {"prompt": text},
            {"messages": [{"role": "", "content": text}]},
            {"messages": [{"role": text, "content": ""}]},
        ):
            path = "completions" if "prompt" in body else "chat/completions"
            answer = httpx.post(f"{address}/v1/{path}", json=body)
            assert answer.status_code == 400
            assert (
                "has 500000 bytes, but the context of 100 tokens holds" in answer.json()["error"]["message"]
            )


def test_health_answers_while_texts_become_tokens(model: Slow, chatty, monkeypatch) -> None:
    engine = Engine(model, chatty, limits=LIMITS)
    tokenize = engine._tokenize

    def slow(prompt: Any) -> list[int]:
        time.sleep(1.0)
        return tokenize(prompt)

    monkeypatch.setattr(engine, "_tokenize", slow)
    with running(engine) as address:
        thread = threading.Thread(target=ask, args=[address])
        thread.start()
        time.sleep(0.2)
        before = time.monotonic()
        assert httpx.get(f"{address}/health").status_code == 200
        assert time.monotonic() - before < 0.7
        thread.join()


def test_an_endless_chat_template_is_cut_off(model: Slow, tokenizer, monkeypatch) -> None:
    hostile = copy.deepcopy(tokenizer)
    hostile.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr("requant.server.engine.ChatTemplate", functools.partial(ChatTemplate, seconds=1.0))
    with running(Engine(model, hostile, limits=LIMITS)) as address:
        body = {"messages": [{"role": "user", "content": "a"}]}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400 and "chat template ran longer" in answer.json()["error"]["message"]
        assert ask(address)["usage"]["completion_tokens"]


def closed_after(address: str, sent: bytes, *, wait: float) -> float:
    """Seconds until the server closes a connection on which `sent` was sent."""
    host, port = address.removeprefix("http://").split(":")
    before = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=wait) as client:
        client.sendall(sent)
        while client.recv(10_000):
            pass
    return time.monotonic() - before


def test_half_sent_requests_are_closed(model: Slow, chatty, monkeypatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.5)
    limits = Limits(max_tokens=40, context=100, body_seconds=0.5)
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n"
    with running(Engine(model, chatty, limits=limits)) as address:
        half_sent = (
            b"", b"GET /hea", head % 10, head % 100 + b"\r\n" + body,
            head % len(body) + b"\r\n" + body + b"GET /he",  # the second request on a connection
        )  # fmt: skip
        with ThreadPoolExecutor(len(half_sent)) as pool:
            seconds = list(pool.map(lambda sent: closed_after(address, sent, wait=20), half_sent))
        assert max(seconds) < 15
        answer = httpx.post(f"{address}/v1/completions", content=body)
        assert answer.status_code == 200


def test_a_reader_that_stops_is_cut_off(monkeypatch) -> None:
    """The clock of `pause_writing`, and that reading on stops it."""
    monkeypatch.setattr(connection, "READER_SECONDS", 0.1)

    class Transport:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    async def aborted(resumes: bool) -> bool:
        import uvicorn
        from uvicorn.server import ServerState

        config = uvicorn.Config(lambda *_: None, log_level="error")
        config.load()
        made = connection.Connection(config, ServerState(), {})
        made.transport = Transport()  # type: ignore[assignment]
        made.flow = type("Flow", (), {"pause_writing": lambda _: None, "resume_writing": lambda _: None})()
        made.pause_writing()
        if resumes:
            made.resume_writing()
        await asyncio.sleep(0.3)
        return made.transport.aborted

    assert asyncio.run(aborted(False)) and not asyncio.run(aborted(True))
