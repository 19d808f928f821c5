"""transformers' conversions between a model's tensors and those of its weight files, found in little time.

In a model that it has not loaded itself transformers looks for conversions among all modules, whenever one is asked for:
minutes where there are thousands of experts. Only models within the model have any.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quick_conversions(model: Any) -> Iterator[None]:
    """While the context lasts, `model.named_modules` yields only the models within it."""
    from transformers import PreTrainedModel  # late: see `integrations/transformers.py`

    inner = [(path, each) for path, each in model.named_modules() if isinstance(each, PreTrainedModel)]
    vars(model)["named_modules"] = lambda: iter(inner)
    try:
        yield
    finally:
        del vars(model)["named_modules"]
