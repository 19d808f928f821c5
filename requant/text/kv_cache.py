"""How a model that continues a text is given its cache of keys and values: as `cache` from transformers 5.24 on, as
`past_key_values` before, and by models of remote code that still say so.
"""

import dataclasses
import functools
import inspect
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

OLD, NEW = "past_key_values", "cache"


@functools.cache
def _argument(kind: type) -> str:
    """A wrapper that passes on whatever it is given is called like models of transformers itself."""
    named = {OLD, NEW} & inspect.signature(kind.forward).parameters.keys()
    named = named or {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
    return NEW if NEW in named else OLD


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Keyword arguments of `model.forward` by which it reads `cache`, a `transformers.Cache`, and adds to it."""
    return {_argument(type(model)): cache, "use_cache": True}
