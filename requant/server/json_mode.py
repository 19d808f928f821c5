"""JSON mode: which tokens may come next, so that the whole answer is one JSON value that matches a schema.

llguidance keeps a parser for every answer and intersects it with the vocabulary at each token; all others lose their
probability. It bounds the time and memory of a schema itself, except for nesting, which is bounded here. Answers are
written on one line, as `json.dumps` writes them: if arbitrary white space is allowed, a model may write nothing else.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from requant.errors import first_line
from requant.extras import requirement
from requant.server.protocol import ApiError

# of a schema; llguidance's JSON reader refuses more than about 60, and thousands end the process
MAX_DEPTH = 30
LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonMode:
    """Matchers for a tokenizer, whose `vocabulary` tokens include the end tokens `ends`."""

    def __init__(self, tokenizer: Any, *, vocabulary: int, ends: frozenset[int]) -> None:
        """Raises ApiError where llguidance is missing, or knows no such tokenizer."""
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ApiError(
                "JSON answers need llguidance on the server, which is not installed: "
                f"pip install {requirement('serve')}.",
                param="response_format",
            ) from error
        try:
            self._tokenizer = from_tokenizer(
                tokenizer, n_vocab=vocabulary, eos_token=sorted(ends) if ends else None
            )
        except Exception as error:  # of llguidance, which tells them apart by their text only
            raise ApiError(
                f"JSON answers are not possible with this model's tokenizer ({first_line(error)[:200]}).",
                param="response_format",
            ) from error

    def matcher(self, schema: Mapping[str, Any]) -> Any:
        """A parser for one answer; `deep_copy` it for more. Raises ApiError for a schema that is none, or too large."""
        from llguidance import LLMatcher

        if _deeper(schema, MAX_DEPTH):
            raise _refused(f"it is nested deeper than {MAX_DEPTH} levels")
        try:
            grammar = LLMatcher.grammar_from_json_schema(dict(schema), overrides=LAYOUT)
        except ValueError as error:  # a number that JSON readers do not take
            raise _refused(first_line(error)) from error
        found = LLMatcher(self._tokenizer, grammar, log_level=0)
        found.compute_bitmask()  # where it is too large, this is where it shows
        if found.is_error():
            raise _refused(first_line(ValueError(found.get_error())))
        return found


def masked(logits: Float[Tensor, " v"], matcher: Any) -> Float[Tensor, " v"]:
    """The logits with those of all tokens that the matcher does not allow at the lowest number, float32."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.zeros(len(logits), dtype=bool)
    found = np.unpackbits(bits, bitorder="little")[: len(logits)]
    allowed[: len(found)] = found
    mask = torch.from_numpy(allowed).to(logits.device)
    return logits.float().masked_fill(~mask, torch.finfo(torch.float32).min)


def _deeper(value: Any, levels: int) -> bool:
    if levels < 0:
        return True
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(_deeper(child, levels - 1) for child in children)


def _refused(reason: str) -> ApiError:
    return ApiError(
        f"response_format has a schema that cannot be followed ({reason[:200]}); simplify it.",
        param="response_format",
    )
