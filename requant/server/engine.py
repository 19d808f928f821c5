"""One model and its worker thread, a bounded queue, and answers that are written together, one token of each at a time.

A waiting request joins the running ones at the next token, so that a short one is not held up by long ones before it
(`requant.inference.batch`). transformers' continuous batching is not used: it samples all requests from one random state,
so that seeds have no effect, does not support stop strings, reserves a share of the whole memory for its pages, and was
slower on a CPU than one request after another.

Texts are tokenized in a second thread, and chat templates are rendered in a process of their own
(`requant.text.chat`): how long either takes is up to a stranger, and the event loop must keep answering.
"""

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from requant.errors import NumericalError, TextError, first_line
from requant.inference.batch import open_sequences
from requant.models.devices import current_gpu
from requant.server.json_mode import JsonMode, masked
from requant.server.protocol import ApiError, Limits, Sampling, TokenLogprob
from requant.server.text_stream import TextStream, token_text
from requant.text.chat import ChatTemplate
from requant.text.sampling import sample_next
from requant.text.windows import check_has_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Text that is final, the number of tokens generated so far, and in the last piece the reason for the end."""

    text: str
    tokens: int
    finish: Literal["stop", "length"] | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens of this text, where they were asked for


class Job:
    """One answer being generated; created and read in the event loop, written by the worker thread."""

    def __init__(self, prompt: list[int], sampling: Sampling, matcher: Any = None) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.matcher = matcher  # of JSON mode
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


class Answer:
    """A job that is being written: its random generator, its text, the count of each token so far, logprobs to send."""

    def __init__(self, job: Job, tokenizer: Any, device: torch.device) -> None:
        self.job = job
        self.stream = TextStream(tokenizer, job.sampling.stop)
        self.counts: Counter[int] = Counter()
        self.last = -1
        self.unsent: list[TokenLogprob] = []
        self.sent = 0  # characters
        self.generator = torch.Generator(device)
        seed = job.sampling.seed
        self.generator.manual_seed(seed) if seed is not None else self.generator.seed()

    def sample(self, logits: Float[Tensor, " v"]) -> int:
        """The next token. Raises NumericalError."""
        sampling, given = self.job.sampling, logits
        if self.counts and (sampling.presence_penalty or sampling.frequency_penalty):
            logits = logits.float().clone()
            index = torch.tensor(list(self.counts), device=logits.device)
            counts = torch.tensor(list(self.counts.values()), device=logits.device)
            logits[index] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if self.job.matcher is not None:
            logits = masked(logits, self.job.matcher)
        token = sample_next(
            logits[None],
            temperature=sampling.temperature,
            top_p=max(sampling.top_p, 1e-9),
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            generator=self.generator,
        )
        self.last = int(token)
        self.counts[self.last] += 1
        if sampling.logprobs is not None:
            self.unsent.append(self._logprob(given, sampling.logprobs))
        return self.last

    def _logprob(self, logits: Float[Tensor, " v"], count: int) -> TokenLogprob:
        """The log-probability of the last token, with those of the `count` likeliest."""
        found, tokenizer = logits.float().log_softmax(-1), self.stream.tokenizer
        values, tokens = (top.tolist() for top in found.topk(min(count, len(found))))
        texts = [token_text(tokenizer, token) for token in tokens]
        return TokenLogprob(
            text=token_text(tokenizer, self.last),
            logprob=float(found[self.last]),
            top=tuple(zip(texts, values, strict=True)),
            offset=self.stream.length,
        )

    def put(self, token: int, ends: frozenset[int]) -> bool:
        """Send what is final after one more token; whether the answer goes on."""
        written, most = self.counts.total(), self.job.sampling.max_tokens
        if token in ends:
            del self.unsent[-1:]  # the end token has no text
            return self._send(self.stream.finish(), written, "stop")
        text = self.stream.push(token)
        if self.stream.stopped:
            return self._send(text, written, "stop")
        if not self._goes_on(token):
            return self._send(text + self.stream.finish(), written, "stop")
        if written == most:
            text += self.stream.finish()
            return self._send(text, written, "stop" if self.stream.stopped else "length")
        return self._send(text, written)

    def _goes_on(self, token: int) -> bool:
        """Whether JSON mode allows another token after this one. Raises NumericalError where it gave up."""
        matcher = self.job.matcher
        if matcher is None:
            return True
        matcher.consume_token(token)
        if matcher.is_error():
            raise NumericalError(f"JSON mode gave up: {first_line(ValueError(matcher.get_error()))}.")
        return not matcher.is_stopped()

    def _send(self, text: str, written: int, finish: Literal["stop", "length"] | None = None) -> bool:
        """Send what is final, with the logprobs of its tokens; whether the answer goes on."""
        self.sent += len(text)
        whole = finish is not None and not self.stream.stopped
        count = sum(whole or each.offset < self.sent for each in self.unsent)
        due, self.unsent = tuple(self.unsent[:count]), self.unsent[count:]
        if text or finish is not None:
            self.job.put(Piece(text=text, tokens=written, finish=finish, logprobs=due))
        return finish is None


class Engine:
    """`submit` puts jobs into the queue; `close` stops the running ones and refuses the others."""

    def __init__(self, model: Any, tokenizer: Any, *, limits: Limits) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.limits = limits
        ends = model.generation_config.eos_token_id
        self.ends = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self._jobs: queue.Queue[Job] = queue.Queue(maxsize=limits.waiting)
        self._closed = threading.Event()
        self._sequences = open_sequences(model, length=limits.context, capacity=limits.batch)
        self._tokenizing = 0
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="requant-tokenizer")
        self._chat: ChatTemplate | None = None
        self._json: JsonMode | None = None
        self._prompt_bytes = limits.context * _longest_token(tokenizer)
        self._thread = threading.Thread(target=self._work, name="requant-engine", daemon=True)
        self._thread.start()

    async def tokens_of(self, prompt: Any) -> list[int]:
        """Tokens of a text, of chat messages, or of tokens; raises ApiError for an empty prompt or invalid tokens."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
            if not all(0 <= token < self.vocabulary for token in prompt):
                raise ApiError(f"prompt has a token outside 0 to {self.vocabulary - 1}.", param="prompt")
            return list(prompt)
        texts = (
            [prompt] if isinstance(prompt, str) else [text for message in prompt for text in message.values()]
        )
        param = "prompt" if isinstance(prompt, str) else "messages"
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise ApiError("the prompt holds half a surrogate pair; repair it.", param=param) from error
        if size > self._prompt_bytes:
            raise ApiError(
                f"the prompt has {size} bytes, but the context of {self.limits.context} tokens holds at most "
                f"{self._prompt_bytes}; shorten it.",
                code="context_length_exceeded",
                param=param,
            )
        if self._tokenizing >= self.limits.waiting:
            raise self._full()
        self._tokenizing += 1
        try:
            tokens = await self._in_tokenizer_thread(self._tokenize, prompt)
        finally:
            self._tokenizing -= 1
        if not tokens:
            raise ApiError("the prompt holds no token; give the text to go on from.", param="prompt")
        return tokens

    async def matcher_of(self, schema: Mapping[str, Any] | None) -> Any:
        """The parser of JSON mode for a schema, None for None; raises ApiError."""
        if schema is None:
            return None
        return await self._in_tokenizer_thread(self._matcher, schema)

    async def _in_tokenizer_thread(self, call: Callable[[Any], Any], value: Any) -> Any:
        """`call(value)`; raises ApiError where the server is shutting down, and the thread may have ended."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, call, value)
        except RuntimeError as error:
            if not self._closed.is_set():
                raise
            raise _closing() from error

    def _matcher(self, schema: Mapping[str, Any]) -> Any:
        if self._json is None:
            self._json = JsonMode(self.tokenizer, vocabulary=self.vocabulary, ends=self.ends)
        return self._json.matcher(schema)

    def submit(self, prompt: list[int], sampling: Sampling, matcher: Any = None) -> Job:
        """Put an answer into the queue; raises ApiError if it does not fit into the context, or the queue is full."""
        room = self.limits.context - len(prompt)
        if sampling.may_be_shorter and 0 < room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        if sampling.max_tokens > room:
            raise ApiError(
                f"the prompt's {len(prompt)} tokens and max_tokens {sampling.max_tokens} exceed the context of "
                f"{self.limits.context} tokens; shorten one of them.",
                code="context_length_exceeded",
                param="max_tokens",
            )
        try:
            check_has_rows(torch.tensor(prompt, dtype=torch.int64), self.model)
        except TextError as error:
            raise ApiError(str(error)) from error
        job = Job(prompt, sampling, None if matcher is None else matcher.deep_copy())
        if self._closed.is_set():
            raise _closing()
        self._drop_cancelled()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise self._full() from None
        return job

    @property
    def waiting(self) -> int:
        """Jobs in the queue, without those that run."""
        self._drop_cancelled()
        return self._jobs.qsize()

    def _drop_cancelled(self) -> None:
        """A client that has left keeps no place in the queue."""
        with self._jobs.mutex:
            kept = [job for job in self._jobs.queue if not job.cancelled.is_set()]
            self._jobs.queue.clear()
            self._jobs.queue.extend(kept)

    def close(self) -> None:
        """Ask the worker to stop; running answers end at their next token. Safe in a signal handler."""
        self._closed.set()

    def join(self, seconds: float = 10.0) -> None:
        """Wait for the worker, and end the process of the chat template."""
        self._thread.join(seconds)
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)
        if self._chat is not None:
            self._chat.close()

    def _full(self) -> ApiError:
        return ApiError(
            f"{self.limits.waiting} requests wait already; try again in a moment.",
            status=429,
            kind="rate_limit_error",
            code="queue_full",
        )

    def _tokenize(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        try:
            if self._chat is None:
                self._chat = ChatTemplate(self.tokenizer, max_characters=2 * self._prompt_bytes + 100_000)
            text = self._chat.render(prompt)
        except TextError as error:
            raise ApiError(str(error), param="messages") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has them

    def _work(self) -> None:
        with current_gpu(self.model.device):  # of this thread
            self._answer_all()

    def _answer_all(self) -> None:
        answers: list[Answer] = []
        while not self._closed.is_set():
            try:
                self._turn(answers)
            except Exception:
                logger.exception("a step of the model failed")
                for answer in answers:
                    answer.job.put(_failed())
                answers.clear()
                self._sequences.keep([])
        waiting = [answer.job for answer in answers]
        while not self._jobs.empty():
            waiting.append(self._jobs.get_nowait())
        for job in waiting:
            job.put(_closing())

    def _turn(self, answers: list[Answer]) -> None:
        """One token of every answer, and the first of those that join them.

        `answers` is changed as they end and join, so that whoever catches an exception can tell all that were going on.
        """
        if answers:
            logits = self._sequences.step([answer.last for answer in answers])
            rows = [row for row, answer in enumerate(answers) if self._write(answer, logits[row])]
            if len(rows) < len(answers):
                answers[:] = [answers[row] for row in rows]
                self._sequences.keep(rows)
        while len(answers) < self._sequences.capacity and not self._closed.is_set():
            job = self._next_job(wait=not answers)
            if job is None:
                break
            if job.cancelled.is_set():
                continue
            try:
                answer = Answer(job, self.tokenizer, torch.device(self.model.device))
                logits = self._sequences.add(job.prompt)
            except Exception:
                logger.exception("a request failed")
                job.put(_failed())
                continue
            if self._write(answer, logits):
                answers.append(answer)
            else:
                self._sequences.keep(list(range(len(answers))))

    def _next_job(self, *, wait: bool) -> Job | None:
        try:
            return self._jobs.get(timeout=0.1) if wait else self._jobs.get_nowait()
        except queue.Empty:
            return None

    def _write(self, answer: Answer, logits: Float[Tensor, " v"]) -> bool:
        """Sample and send one token; whether the answer goes on."""
        if answer.job.cancelled.is_set():
            return False
        try:
            return answer.put(answer.sample(logits), self.ends)
        except Exception:  # whatever sampling raises is this answer's alone
            logger.exception("a request failed")
            answer.job.put(_failed())
            return False


def _longest_token(tokenizer: Any) -> int:
    """Bytes of text that one token can stand for, at most: those of its name, in which a byte may be a longer character."""
    return max((len(name.encode(errors="replace")) for name in tokenizer.get_vocab()), default=1)


def _failed() -> ApiError:
    return ApiError("the server failed on this request; its log says why.", status=500, kind="server_error")


def _closing() -> ApiError:
    return ApiError("the server is shutting down.", status=503, kind="server_error", code="shutting_down")
