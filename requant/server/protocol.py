"""What OpenAI's clients send and expect: requests checked field by field, answers and errors in their JSON.

A field that would change the answer and is not supported, or that is not known, is refused by name; only fields without
effect on the text (`user`, `metadata`, ...) are ignored.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from requant.server.text_stream import UNFINISHED

MAX_STOPS = 4  # as OpenAI
MAX_CHOICES = 8
MAX_TOP_LOGPROBS = {"chat": 20, "completion": 5}  # as OpenAI
LEAST_LOGPROB = -9999.0  # as OpenAI: JSON has no minus infinity
# field -> the values that change nothing; any other is refused
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
}
HONOURED = frozenset(
    [
        "frequency_penalty",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "min_p",
        "model",
        "n",
        "presence_penalty",
        "prompt",
        "response_format",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_logprobs",
        "top_p",
    ]
)
# field -> what to do where a completion has it
ONLY_OF_CHAT = {
    "max_completion_tokens": "give max_tokens",
    "messages": "leave it out",
    "top_logprobs": "give logprobs: 1 to 5",
}
IGNORED = frozenset(["metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"])


class ApiError(Exception):
    """A request that is refused or failed: HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for."""

    max_tokens: int = 1024  # generated for one choice
    context: int = 2048  # prompt and answer together
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0  # to send a body
    waiting: int = 128  # length of the queue, without the running requests
    batch: int | None = None  # sequences decoded together; see `open_sequences`


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are sampled and when generation ends."""

    max_tokens: int
    may_be_shorter: bool = False  # no length was asked for: what the context has room for, where that is less
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0  # off the logit of every token of the answer so far
    frequency_penalty: float = 0.0  # times its count
    seed: int | None = None
    stop: tuple[str, ...] = ()
    # how many of the likeliest tokens are told beside each; None: no logprobs at all
    logprobs: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token of the answer with its log-probability, nats, by the model alone: before temperature, penalties, schema."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]  # the likeliest tokens
    offset: int  # of its text in the answer, characters


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request; `prompts` are texts, token lists, or one list of chat messages."""

    model: str | None
    prompts: list[Any]
    sampling: Sampling
    schema: Mapping[str, Any] | None = None  # the JSON schema of the answers
    choices: int = 1  # of every prompt
    stream: bool = False
    include_usage: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


def parse_completion(body: Mapping[str, Any], limits: Limits) -> Request:
    """A body of /v1/completions; raises ApiError."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or _is_tokens(prompt):
        prompts = [prompt]
    elif (
        isinstance(prompt, list) and prompt and all(isinstance(one, str) or _is_tokens(one) for one in prompt)
    ):
        prompts = prompt
    else:
        raise ApiError("prompt must be a string, a list of token ids, or a list of either.", param="prompt")
    for name, instead in ONLY_OF_CHAT.items():
        if body.get(name):
            raise ApiError(f"{name} is a field of chat completions; {instead}.", param=name)
    most = MAX_TOP_LOGPROBS["completion"]
    logprobs = None if body.get("logprobs") is None else _whole(body, "logprobs", 0, 0, most)
    return _request(body, prompts, limits, max_tokens=16, logprobs=logprobs)  # OpenAI's default


def parse_chat(body: Mapping[str, Any], limits: Limits) -> Request:
    """A body of /v1/chat/completions; raises ApiError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message.", param="messages")
    if body.get("prompt"):
        raise ApiError("prompt is a field of completions; leave it out.", param="prompt")
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    most = body.get("max_completion_tokens")
    if most is not None:
        body = {**body, "max_tokens": most}
    top = _whole(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS["chat"])
    logprobs = top if _flag(body, "logprobs") else None
    if top and logprobs is None:
        raise ApiError("top_logprobs needs logprobs: true.", param="top_logprobs")
    return _request(body, [checked], limits, max_tokens=limits.max_tokens, logprobs=logprobs)


def completion(request: Request, model: str, choices: list[dict[str, Any]], usage: Any, *, chat: bool) -> Any:
    """The body of a complete answer."""
    kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
    head = {"id": f"{prefix}-{request.id}", "object": kind, "created": request.created, "model": model}
    return {**head, "choices": choices, "usage": usage}


def chunk(
    request: Request, model: str, choices: list[dict[str, Any]], usage: Any = None, *, chat: bool
) -> Any:
    """One event of a stream; `usage` comes in an event of its own, the last, if requested."""
    event = completion(request, model, choices, usage, chat=chat)
    if chat:
        event["object"] = "chat.completion.chunk"
    if not request.include_usage:
        del event["usage"]
    return event


def logprobs(found: Sequence[TokenLogprob], *, chat: bool) -> dict[str, Any]:
    """The object `logprobs` of a choice, or of a part of it in a stream."""
    if chat:
        content = [
            {**_chance(each.text, each.logprob), "top_logprobs": [_chance(*one) for one in each.top]}
            for each in found
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [each.text for each in found],
        "token_logprobs": [_finite(each.logprob) for each in found],
        "top_logprobs": [
            {text: _finite(logprob) for text, logprob in (*each.top, (each.text, each.logprob))}
            for each in found
        ],
        "text_offset": [each.offset for each in found],
    }


def _chance(text: str, logprob: float) -> dict[str, Any]:
    """A token of chat; where its bytes are not those of whole characters they are not known."""
    size = None if UNFINISHED in text else list(text.encode(errors="replace"))
    return {"token": text, "logprob": _finite(logprob), "bytes": size}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The tokens of an answer, under OpenAI's names."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _request(
    body: Mapping[str, Any], prompts: list[Any], limits: Limits, *, max_tokens: int, logprobs: int | None
) -> Request:
    for name, harmless in UNSUPPORTED.items():
        if name in body and not any(body[name] == value for value in harmless):
            raise ApiError(f"{name} is not supported by this server; leave it out.", param=name)
    if unknown := sorted(body.keys() - UNSUPPORTED.keys() - HONOURED - IGNORED):
        raise ApiError(
            f"{_short(unknown[0])} is not a field that this server knows; leave it out.",
            param=unknown[0][:80].encode(errors="replace").decode(),  # a name may hold half a surrogate pair
        )
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError("model must be a string.", param="model")
    choices = _whole(body, "n", 1, 1, MAX_CHOICES)
    if len(prompts) * choices > limits.waiting:
        raise ApiError(
            f"{len(prompts) * choices} answers in one request; at most {limits.waiting} are taken, so ask for fewer.",
            param="prompt" if choices == 1 else "n",
        )
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise ApiError("stream_options must be an object.", param="stream_options")
    sampling = Sampling(
        max_tokens=_whole(body, "max_tokens", min(max_tokens, limits.max_tokens), 1, limits.max_tokens),
        may_be_shorter=body.get("max_tokens") is None,
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        top_k=_top_k(body),
        min_p=_number(body, "min_p", 0.0, 0.0, 1.0),
        presence_penalty=_number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        seed=None if body.get("seed") is None else _whole(body, "seed", 0, -(1 << 63), (1 << 63) - 1),
        stop=_stops(body.get("stop")),
        logprobs=logprobs,
    )
    return Request(
        model=model,
        prompts=prompts,
        sampling=sampling,
        schema=_schema(body.get("response_format")),
        choices=choices,
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
    )


def _top_k(body: Mapping[str, Any]) -> int | None:
    """Elsewhere 0 and -1 mean all tokens, so they do here."""
    value = _whole(body, "top_k", 0, -1, 1 << 31)
    return value if value > 0 else None


def _schema(wanted: Any) -> Mapping[str, Any] | None:
    """The JSON schema that `response_format` asks for; None: any text."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = wanted.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ApiError(
            "response_format must have type text, json_object, or json_schema with json_schema: {name, schema}.",
            param="response_format",
        )
    return schema


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ApiError(f"{where} must be an object with a role and a content.", param=where)
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise ApiError(f"{where}.{name} is not supported; this model reads text only.", param=where)
    content = message.get("content")
    if isinstance(content, list):  # parts; only text can be read
        if not all(
            isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str)
            for p in content
        ):
            raise ApiError(
                f"{where}.content has a part that is not text; this model reads text only.", param=where
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ApiError(f"{where}.content must be a string.", param=where)
    return {"role": message["role"], "content": content}


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ApiError("stop must be a string or a list of strings, none of them empty.", param="stop")
    if len(stops) > MAX_STOPS:
        raise ApiError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are taken.", param="stop")
    return tuple(stops)


def _whole(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise ApiError(
            f"{name} is {_short(value)}; it takes a whole number from {low} to {high}.", param=name
        )
    return value


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:  # NaN is not
        raise ApiError(f"{name} is {_short(value)}; it takes a number from {low:g} to {high:g}.", param=name)
    return float(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if type(value) is not bool:
        raise ApiError(f"{name} must be true or false.", param=name)
    return value


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _short(value: Any) -> str:
    """`repr`, cut to 40 characters: an untrusted value may be long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
