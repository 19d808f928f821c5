"""How to pass a model its cache of keys and values when it continues a text: as `cache` from transformers 5.24 on, as
`past_key_values` before that (`cache_params` for state-space models), and in models of remote code that still use those
names.

A few models of transformers accept none: GPT-1 keeps nothing, RWKV has its own state. They would ignore a cache, and
continue without what came before.
"""

import functools
import inspect
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

NAMES = ("cache", "past_key_values", "cache_params")


@functools.cache
def _argument(kind: type) -> str | None:
    """A wrapper that passes on whatever it is given is called like models of transformers itself."""
    named = inspect.signature(kind.forward).parameters.keys()
    if not kind.__module__.startswith("transformers.") and not named & set(NAMES):
        named = CausalLMOutputWithPast.__dataclass_fields__.keys()
    return next((name for name in NAMES if name in named), None)


def positions(model: Any, first: int, count: int) -> dict[str, Any]:
    """`position_ids` of so many tokens after others, for a model that takes them.

    Bamba would count its text by its first layer, a state, which does not know how long the text is.
    """
    if not _takes_positions(type(model)):
        return {}
    return {"position_ids": torch.arange(first, first + count, device=model.device)[None]}


@functools.cache
def _takes_positions(kind: type) -> bool:
    return "position_ids" in inspect.signature(kind.forward).parameters


def takes_cache(model: Any) -> bool:
    """Whether the model's forward has an argument for a cache; without one it is given the whole text at every step."""
    return _argument(type(model)) is not None


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Keyword arguments of `model.forward` by which it reads `cache`, a `transformers.Cache`, and adds to it; None: by which
    it has none."""
    name = _argument(type(model))
    return {"use_cache": False} if cache is None or name is None else {name: cache, "use_cache": True}
