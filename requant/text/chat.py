"""Chat messages rendered as a prompt by the model's chat template, in a separate process.

A template is a program by the model's author (Jinja): two nested loops can run forever, `'x' * 10**10` takes all memory,
and `10**10**8` does not even let other threads run. So a child process with limited memory renders it (`chat_process.py`),
and is killed when its time is up; the next messages get a new process.
"""

import contextlib
import json
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from requant.errors import TextError, first_line

PROGRAM = Path(__file__).with_name("chat_process.py")
SECONDS = 5.0  # to render once
START_SECONDS = 60.0  # to import the template engine on a busy machine
MEMORY = 256 << 20  # bytes beyond those of the imported engine
MAX_CHARACTERS = 1 << 22


class ChatTemplate:
    """The chat template of a tokenizer; `render` may be called from any thread, one call at a time proceeds."""

    def __init__(
        self, tokenizer: Any, *, seconds: float = SECONDS, max_characters: int = MAX_CHARACTERS
    ) -> None:
        """Raises TextError for a tokenizer without a template."""
        if not getattr(tokenizer, "chat_template", None):
            raise TextError(
                "this model has no chat template, so it is not a chat model; give it a plain prompt."
            )
        try:
            self.template = str(tokenizer.get_chat_template())
        except ValueError as error:
            raise TextError(f"the model's chat template cannot be used ({first_line(error)}).") from error
        self.special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self.seconds, self.max_characters = seconds, max_characters
        self._lock = threading.Lock()
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt that ends where the answer begins; raises TextError for what the template refuses or exceeds."""
        with self._lock:
            _, connection = self._child or self._started()
            try:
                connection.send_bytes(json.dumps([self.template, messages, self.special_tokens]).encode())
                if not connection.poll(self.seconds):
                    raise TextError(
                        f"the model's chat template ran longer than {self.seconds:g} s; do not use this model for chat."
                    )
                kind, text = json.loads(connection.recv_bytes(12 * self.max_characters + 4000))
            except (OSError, EOFError) as error:  # the kernel ended it, or it answered at too great a length
                self._kill()
                raise TextError(
                    "the model's chat template takes too much memory or writes too much; do not use this model for chat."
                ) from error
            # Ctrl-C too: what this child still answers does not answer the next messages
            except BaseException:
                self._kill()
                raise
        if kind != "text":
            raise TextError(f"the model's chat template refuses these messages ({text}).")
        return text

    def close(self) -> None:
        """End the child process; `render` would start another."""
        with self._lock:
            self._kill()

    def _started(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        ours, theirs = Pipe()
        arguments = [theirs.fileno(), self.max_characters, MEMORY]
        # -P: the folder of the program is not a place to import modules from
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), *map(str, arguments)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._child = process, ours
        try:
            if not ours.poll(START_SECONDS) or ours.recv_bytes() != b"ready":
                raise EOFError
        except (OSError, EOFError) as error:
            self._kill()
            raise TextError("the process that renders chat templates did not start; try again.") from error
        except BaseException:
            self._kill()
            raise
        return self._child

    def _kill(self) -> None:
        if self._child is not None:
            process, connection = self._child
            self._child = None
            process.kill()
            process.wait()
            connection.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end modules may be gone
            self._kill()
