"""Incremental detokenization: emits only text that no later token can change, and stops before a stop string.

A character may span tokens (its bytes), and so may a stop string. Text is therefore held back while it ends in an unfinished
character or in what may become a stop string; the next tokens, or the end, decide both.
"""

from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer decodes an incomplete character to


class TextStream:
    """The text of one answer; `stopped` is true once a stop string was generated."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        self._tokens: list[int] = []
        # index: tokens from here on are decoded together, so that spaces between words are right
        self._start = 0
        self._known = 0  # index: the text of all tokens before it is in `_pending`
        self._pending = ""  # complete characters that may begin a stop string
        self.length = 0  # complete characters, those after a stop string too

    def push(self, token: int) -> str:
        """Text that is final after one more token."""
        self._tokens.append(token)
        before = self._decode(self._start, self._known)
        now = self._decode(self._start, len(self._tokens))
        # a character that is not complete yet; none takes eight tokens
        if now.endswith(UNFINISHED) and len(self._tokens) - self._known < 8:
            return ""
        self._take(now[len(before) :])
        self._start, self._known = self._known, len(self._tokens)
        return self._settle(final=False)

    def finish(self) -> str:
        """What is left when no token follows."""
        if not self.stopped:
            before = self._decode(self._start, self._known)
            self._take(self._decode(self._start, len(self._tokens))[len(before) :])
            self._known = len(self._tokens)
        return self._settle(final=True)

    def _take(self, text: str) -> None:
        self._pending += text
        self.length += len(text)

    def _decode(self, start: int, end: int) -> str:
        return str(self.tokenizer.decode(self._tokens[start:end], skip_special_tokens=True))

    def _settle(self, *, final: bool) -> str:
        if self.stopped:
            return ""
        found = [index for stop in self.stop if (index := self._pending.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._pending = self._pending[: min(found)], ""
            return text
        held = 0 if final else self._possible_stop()
        cut = len(self._pending) - held
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def _possible_stop(self) -> int:
        """Characters at the end that begin a stop string."""
        longest = max((len(stop) - 1 for stop in self.stop), default=0)
        for length in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self.stop):
                return length
        return 0


def token_text(tokenizer: Any, token: int) -> str:
    """The text of one token inside a text, with its space before it; `UNFINISHED` for a part of a character."""
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode([*before, token]))[len(tokenizer.decode(before)) :]
