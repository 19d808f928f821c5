"""The routes: /v1/completions, /v1/chat/completions, /v1/models, /health; the key, the size limit, errors as JSON.

No other page is served, no CORS header is sent, and of a request only its outcome is logged.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from requant.server import protocol
from requant.server.engine import Engine, Job
from requant.server.protocol import ApiError, Limits, Request, TokenLogprob

logger = logging.getLogger(__name__)
DONE = "data: [DONE]\n\n"
CLIENT_LEFT = 499  # nginx's status


class KeyGuard:
    """Refuses requests without the API key, except for /health.

    A plain ASGI application: with FastAPI's middleware decorator, routes would not see that a client has disconnected.
    """

    def __init__(self, app: Any, api_key: str) -> None:
        self.app = app
        # a file of secrets ends in a line break, which is not part of the key
        self.expected = f"bearer {api_key.strip()}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._may(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            "the API key is missing or wrong; send Authorization: Bearer KEY.",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )
        await _answer(error)(scope, receive, send)

    def _may(self, scope: Any) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + key.strip(), self.expected)


def create_app(engine: Engine, *, model: str, api_key: str | None = None) -> FastAPI:
    """The application that serves `engine` under the name `model`; with `api_key`, every request must send that key."""
    app = FastAPI(title="requant", docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())
    card = {"id": model, "object": "model", "created": started, "owned_by": "requant"}
    limits = engine.limits

    if api_key is not None:
        app.add_middleware(KeyGuard, api_key=api_key)

    @app.exception_handler(ApiError)
    async def refused(_: HttpRequest, error: ApiError) -> JSONResponse:
        return _answer(error)

    @app.exception_handler(HTTPException)
    async def no_such_page(http: HttpRequest, error: HTTPException) -> JSONResponse:
        return _answer(ApiError(f"{http.method} {http.url.path}: {error.detail}.", status=error.status_code))

    @app.exception_handler(Exception)
    async def failed(_: HttpRequest, error: Exception) -> JSONResponse:
        logger.error("a request failed", exc_info=error)
        return _answer(
            ApiError("the server failed on this request; its log says why.", status=500, kind="server_error")
        )

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok", "model": model, "waiting": engine.waiting}

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Any:
        _check_model(name, model)
        return card

    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Any:
        return await respond(http, protocol.parse_completion, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: HttpRequest) -> Any:
        return await respond(http, protocol.parse_chat, chat=True)

    async def respond(
        http: HttpRequest, parse: Callable[[Mapping[str, Any], Limits], Request], *, chat: bool
    ) -> Any:
        request = parse(await _body(http, limits), limits)
        _check_model(request.model, model)
        jobs, counted = await _submitted(engine, request)
        if request.stream:
            events = _stream(request, jobs, model, counted, chat=chat)
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return await _unless_left(http, _collect(request, jobs, model, counted, chat=chat))

    return app


async def _submitted(engine: Engine, request: Request) -> tuple[list[Job], int]:
    """A job for every choice of every prompt, or none if one of them is refused; and the tokens of the prompts."""
    prompts = [await engine.tokens_of(prompt) for prompt in request.prompts]
    matcher = await engine.matcher_of(request.schema)
    jobs: list[Job] = []
    try:
        for prompt in prompts:
            for choice in range(request.choices):
                jobs.append(engine.submit(prompt, _seeded(request, choice), matcher))
    except ApiError:
        for job in jobs:
            job.cancelled.set()
        raise
    return jobs, sum(map(len, prompts))


async def _unless_left(http: HttpRequest, answer: Coroutine[Any, Any, Any]) -> Any:
    """The answer; it is cancelled, in the queue too, as soon as the client leaves."""
    # after a body nothing comes but the news that the client has left
    left = asyncio.ensure_future(http.receive())
    collected = asyncio.create_task(answer)
    try:
        await asyncio.wait((left, collected), return_when=asyncio.FIRST_COMPLETED)
        return collected.result() if collected.done() else JSONResponse({}, status_code=CLIENT_LEFT)
    finally:
        left.cancel()
        collected.cancel()


async def _collect(request: Request, jobs: list[Job], model: str, counted: int, *, chat: bool) -> Any:
    choices: list[dict[str, Any]] = []
    total = 0
    try:
        for index, job in enumerate(jobs):
            text, tokens, finish = "", 0, None
            found: list[TokenLogprob] = []
            async for piece in job.pieces():
                text, tokens, finish = text + piece.text, piece.tokens, piece.finish
                found += piece.logprobs
            total += tokens
            body: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            )
            logprobs = _logprobs(request, found, chat=chat)
            choices.append({"index": index, **body, "logprobs": logprobs, "finish_reason": finish})
    finally:
        for job in jobs:
            job.cancelled.set()
    return protocol.completion(request, model, choices, protocol.usage(counted, total), chat=chat)


async def _stream(
    request: Request, jobs: list[Job], model: str, counted: int, *, chat: bool
) -> AsyncIterator[str]:
    """Server-sent events; an error after the first byte is an event too, as in OpenAI's API."""
    total = 0
    try:
        for index, job in enumerate(jobs):
            if chat:
                first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield _event(protocol.chunk(request, model, [first], chat=True))
            tokens = 0
            async for piece in job.pieces():
                tokens = piece.tokens
                body: dict[str, Any] = {"delta": {"content": piece.text}} if chat else {"text": piece.text}
                if chat and piece.finish is not None and not piece.text:
                    body = {"delta": {}}
                logprobs = _logprobs(request, piece.logprobs, chat=chat)
                choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": piece.finish}
                yield _event(protocol.chunk(request, model, [choice], chat=chat))
            total += tokens
        if request.include_usage:
            yield _event(protocol.chunk(request, model, [], protocol.usage(counted, total), chat=chat))
        yield DONE
    except ApiError as error:
        yield _event(error.body)
    finally:
        for job in jobs:
            job.cancelled.set()


def _logprobs(request: Request, found: Sequence[TokenLogprob], *, chat: bool) -> dict[str, Any] | None:
    return None if request.sampling.logprobs is None else protocol.logprobs(found, chat=chat)


async def _body(http: HttpRequest, limits: Limits) -> Mapping[str, Any]:
    """The JSON object of a request, of bounded size, sent in bounded time."""
    received = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in http.stream():
                received += part
                if len(received) > limits.body_bytes:
                    raise ApiError(
                        f"the request is larger than {limits.body_bytes} bytes; shorten the prompt.",
                        status=413,
                    )
    except TimeoutError:
        raise ApiError(
            f"the request took longer than {limits.body_seconds:g} s to arrive; send it again.", status=408
        ) from None
    except ClientDisconnect:  # no failure of the server's; nobody reads this answer
        raise ApiError("the client left before its request had arrived.", status=CLIENT_LEFT) from None
    try:
        value = json.loads(received)
    except (ValueError, RecursionError) as error:
        raise ApiError("the request is not valid JSON.") from error
    if not isinstance(value, dict):
        raise ApiError("the request must be a JSON object.")
    return value


def _check_model(asked: str | None, served: str) -> None:
    if asked is not None and asked != served:
        raise ApiError(
            f"the model {asked[:80]!r} is not served here; there is: {served}.",
            status=404, param="model", code="model_not_found",
        )  # fmt: skip


def _seeded(request: Request, choice: int) -> Any:
    """Each choice gets its own seed, derived from the request's, so that choices differ and are reproducible."""
    seed = request.sampling.seed
    return request.sampling if seed is None else replace(request.sampling, seed=(seed + choice) % (1 << 63))


def _answer(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse(error.body, status_code=error.status, headers=headers)


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
