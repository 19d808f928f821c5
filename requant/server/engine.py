"""One model, one worker thread, a bounded queue: requests are answered one after another, in order of arrival.

Every decoding step reads all weights, whatever the batch size, so batching requests would be cheaper; that needs a paged
cache and a scheduler, for which there is vLLM. Without batching, the same seed gives the same text whatever else is
requested.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from requant.inference.decode import Decoder
from requant.server.protocol import ApiError, Limits, Sampling
from requant.server.text_stream import TextStream
from requant.text.sampling import sample_next

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Text that is final, the number of tokens generated so far, and in the last piece the reason for the end."""

    text: str
    tokens: int
    finish: Literal["stop", "length"] | None = None


class Job:
    """One answer being generated; created and read in the event loop, written by the worker thread."""

    def __init__(self, prompt: list[int], sampling: Sampling) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    def put(self, item: Piece | Exception) -> None:
        """Called from the worker thread."""
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads the answer
            self.cancelled.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces; closing the iterator early stops the worker at its next token. Raises ApiError."""
        try:
            while True:
                item = await self._pieces.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            self.cancelled.set()


class Engine:
    """`submit` puts jobs into the queue; `close` stops the running one and refuses the others."""

    def __init__(self, model: Any, tokenizer: Any, *, limits: Limits) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.limits = limits
        ends = model.generation_config.eos_token_id
        self.ends = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self._jobs: queue.Queue[Job | None] = queue.Queue(maxsize=limits.waiting)
        self._closed = threading.Event()
        self._decoder = Decoder(model, length=limits.context)
        self._thread = threading.Thread(target=self._work, name="requant-engine", daemon=True)
        self._thread.start()

    def tokens_of(self, prompt: Any) -> list[int]:
        """Tokens of a text, of chat messages, or of tokens; raises ApiError for an empty prompt or invalid tokens."""
        if isinstance(prompt, str):
            tokens = self.tokenizer(prompt)["input_ids"]
        elif prompt and isinstance(prompt[0], int):
            tokens = prompt
            if not all(0 <= token < self.vocabulary for token in tokens):
                raise ApiError(f"prompt has a token outside 0 to {self.vocabulary - 1}.", param="prompt")
        else:
            tokens = self._chat(prompt)
        if not tokens:
            raise ApiError("the prompt holds no token; give the text to go on from.", param="prompt")
        return list(tokens)

    def submit(self, prompt: list[int], sampling: Sampling) -> Job:
        """Put an answer into the queue; raises ApiError if it does not fit into the context, or the queue is full."""
        if len(prompt) + sampling.max_tokens > self.limits.context:
            raise ApiError(
                f"the prompt's {len(prompt)} tokens and max_tokens {sampling.max_tokens} exceed the context of "
                f"{self.limits.context} tokens; shorten one of them.",
                code="context_length_exceeded",
                param="max_tokens",
            )
        job = Job(prompt, sampling)
        if self._closed.is_set():
            raise _closing()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise ApiError(
                f"{self.limits.waiting} requests wait already; try again in a moment.",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
            ) from None
        return job

    @property
    def waiting(self) -> int:
        """Jobs in the queue, without the one that runs."""
        return self._jobs.qsize()

    def close(self) -> None:
        """Ask the worker to stop; the current answer ends at its next token. Safe in a signal handler."""
        self._closed.set()

    def join(self, seconds: float = 10.0) -> None:
        self._thread.join(seconds)

    def _chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(
                "this model has no chat template, so it is no chat model; use /v1/completions.",
                param="messages",
            )
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (
            Exception
        ) as error:  # the template is the model's own program, and may refuse a role or an order
            raise ApiError(
                f"the model's chat template refuses these messages ({error}).", param="messages"
            ) from error
        return self.tokenizer(text, add_special_tokens=False)[
            "input_ids"
        ]  # the template contains the special tokens

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                job = self._jobs.get(timeout=0.1)
            except queue.Empty:
                continue
            if job is None or job.cancelled.is_set():
                continue
            try:
                self._write(job)
            except ApiError as error:
                job.put(error)
            except Exception:
                logger.exception("a request failed")
                job.put(
                    ApiError(
                        "the server failed on this request; its log says why.",
                        status=500,
                        kind="server_error",
                    )
                )
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            if job is not None:
                job.put(_closing())

    @torch.no_grad()
    def _write(self, job: Job) -> None:
        sampling = job.sampling
        device = torch.device(self.model.device)
        generator = torch.Generator(device)
        generator.manual_seed(sampling.seed) if sampling.seed is not None else generator.seed()
        stream = TextStream(self.tokenizer, sampling.stop)
        self._decoder.reset()
        logits = self._decoder.prefill(torch.tensor([job.prompt], device=device))
        written = 0
        while True:
            if self._closed.is_set():
                raise _closing()
            if job.cancelled.is_set():
                return
            token = sample_next(
                logits, temperature=sampling.temperature, top_p=max(sampling.top_p, 1e-9), generator=generator
            )
            written += 1
            if int(token) in self.ends:
                job.put(Piece(text=stream.finish(), tokens=written, finish="stop"))
                return
            text = stream.push(int(token))
            if stream.stopped:
                job.put(Piece(text=text, tokens=written, finish="stop"))
                return
            if written == sampling.max_tokens:
                text += stream.finish()
                job.put(Piece(text=text, tokens=written, finish="stop" if stream.stopped else "length"))
                return
            if text:
                job.put(Piece(text=text, tokens=written))
            logits = self._decoder.step(token)


def _closing() -> ApiError:
    return ApiError("the server is shutting down.", status=503, kind="server_error", code="shutting_down")
