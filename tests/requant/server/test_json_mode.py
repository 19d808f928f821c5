"""JSON mode: whatever a random model would like to write, the answer is JSON of the schema, or is refused before it."""

import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

from requant.extras import requirement  # noqa: E402
from requant.server.engine import Engine  # noqa: E402

from .harness import LIMITS, Slow, httpx, running  # noqa: E402

MESSAGES = [{"role": "user", "content": "Hi"}]
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["town", "city"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def long_url(model, chatty):
    with running(Engine(model, chatty, limits=replace(LIMITS, max_tokens=80, waiting=16))) as address:
        yield address


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_an_answer_of_a_schema(long_url: str, temperature: float) -> None:
    with openai.OpenAI(base_url=f"{long_url}/v1", api_key="any", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format=schema_format(CITY),
            temperature=temperature,
            n=4,
            seed=3,
        )
    found = [json.loads(choice.message.content) for choice in answer.choices]
    for city in found:
        assert list(city) == ["name", "kind", "size"] and city["kind"] in ("town", "city")
        assert len(city["name"]) <= 3 and 0 <= city["size"] <= 99
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert len({json.dumps(city) for city in found}) == (1 if temperature == 0 else 4)


def test_any_object_and_its_stream(long_url: str) -> None:
    """Cut off by its length it is the beginning of an object, as in OpenAI's API; logprobs are the model's own."""
    asked = {
        "messages": MESSAGES,
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "logprobs": True,
    }
    (choice,) = httpx.post(f"{long_url}/v1/chat/completions", json=asked).json()["choices"]
    text = choice["message"]["content"]
    assert text.startswith("{") and "\n" not in text
    assert json.loads(text) if choice["finish_reason"] == "stop" else choice["finish_reason"] == "length"
    assert all(-9999 <= token["logprob"] < 0 for token in choice["logprobs"]["content"])
    with openai.OpenAI(base_url=f"{long_url}/v1", api_key="any", max_retries=0) as client:
        events = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format={"type": "json_object"},
            temperature=0,
            stream=True,
        )
        assert "".join(event.choices[0].delta.content or "" for event in events) == text


def test_other_requests_of_the_batch_are_free(long_url: str) -> None:
    plain = {"prompt": "a", "temperature": 0, "max_tokens": 10}
    alone = httpx.post(f"{long_url}/v1/completions", json=plain).json()
    bound = httpx.post(
        f"{long_url}/v1/completions", json={**plain, "response_format": schema_format({"const": 17})}
    ).json()
    assert bound["choices"][0]["text"] == "17" and bound["choices"][0]["finish_reason"] == "stop"
    again = httpx.post(f"{long_url}/v1/completions", json=plain).json()
    assert again["choices"][0]["text"] == alone["choices"][0]["text"]


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def either(one: str, other: str) -> dict[str, Any]:
    return {"anyOf": [{"properties": {name: {"type": "string"}}} for name in (one, other)]}


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"type": "grammar"}, "type text, json_object, or json_schema"),
        ("json", "type text, json_object, or json_schema"),
        ({"type": "json_schema", "schema": {}}, "with json_schema"),
        (schema_format({"type": "objekt"}), r"cannot be followed \(Invalid type: objekt\)"),
        (schema_format({"not": {"type": "string"}}), r"Unimplemented keys"),
        (schema_format({"$ref": "https://example.com/schema"}), "cannot be followed"),
        (schema_format({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "cannot be followed"),
        (schema_format(nested(14)), "text"),  # is one
        (schema_format(nested(100)), "nested deeper than 30 levels"),
        (schema_format({"type": "integer", "maximum": 10**400}), "cannot be followed"),
        (schema_format({"properties": {f"k{i}": {"pattern": f"(a|b)*x{i}"} for i in range(300)}}), "text"),
        (schema_format({"allOf": [either(f"a{i}", f"b{i}") for i in range(24)]}), "schema too large"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_schemas_of_strangers(url: str, wanted: Any, sentence: str) -> None:
    body = {"prompt": "a", "max_tokens": 3, "response_format": wanted}
    answer = httpx.post(f"{url}/v1/completions", content=json.dumps(body), timeout=20)
    assert re.search(sentence, answer.text), answer.text
    if sentence == "text":
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
        assert "\n" not in answer.json()["error"]["message"]


def test_without_the_library(model: Slow, chatty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with running(Engine(model, chatty, limits=LIMITS)) as address:
        answer = httpx.post(
            f"{address}/v1/completions", json={"prompt": "a", "response_format": {"type": "json_object"}}
        )
    assert (
        answer.status_code == 400
        and f"pip install {requirement('serve')}" in answer.json()["error"]["message"]
    )
