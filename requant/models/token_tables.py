"""Further tables of rows by token, besides the embedding: the per-layer embeddings of Gemma 3n and of Gemma 4's small
models.

    x_l = x_l + f_l(gate_l(x_l) * E_l[token])        E = (E_1, .., E_L), one table `[V, L p]`, a third of all weights

No architecture is named here. A token table is an `nn.Embedding` of the decoder that is about as long as the vocabulary and
that the model, when it is run, calls with the ids of its tokens; a table of positions is called with other numbers.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant.models.hosted import hosted_blocks
from requant.models.row_scale import row_scale

FEWEST_ROWS = 0.5  # as many as the embedding has, at least
SMALLEST = 0.05  # of the embedding's weights, at least: a smaller table is not worth its codes
ASKED = (5, 2, 7, 3, 6)  # tokens, in eighths of the vocabulary: no positions
_found: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


def token_tables(model: PreTrainedModel) -> dict[str, nn.Embedding]:
    """The token tables by dotted path, in the model's order; of most models none.

    A model without weights (on the meta device) cannot be asked: there a table's shape decides alone. Any other is asked
    once, and only if it has a table of such a shape.
    """
    if model.device.type == "meta":
        return long_tables(model)
    if model not in _found:
        candidates = long_tables(model)
        _found[model] = tuple(_called_with_tokens(model, candidates) if candidates else ())
    return {name: model.get_submodule(name) for name in _found[model]}  # type: ignore[misc]


def lookup_obstacle(module: nn.Module) -> str | None:
    """Why rows of codes cannot take the place of an embedding's; None if they can."""
    if not isinstance(module, nn.Embedding):
        return f"is a {type(module).__name__}"
    if module.max_norm is not None:
        return "renormalizes its rows"
    if type(module) is not nn.Embedding and row_scale(module) is None:
        return f"is a {type(module).__name__}"
    return None


def long_tables(model: PreTrainedModel) -> dict[str, nn.Embedding]:
    """Embeddings of the decoder that are long and large enough, by dotted path."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    taken = {
        id(module.weight) for module in (embedding, head) if isinstance(module, nn.Embedding | nn.Linear)
    }
    inside = set(model.get_decoder().modules())
    if not isinstance(embedding, nn.Embedding):
        return {}
    rows, weights = FEWEST_ROWS * embedding.num_embeddings, SMALLEST * embedding.weight.numel()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module in inside and id(module.weight) not in taken
        if lookup_obstacle(module) is None and len(module.weight) >= rows and module.weight.numel() >= weights
    }


@torch.no_grad()
def _called_with_tokens(model: PreTrainedModel, candidates: dict[str, nn.Embedding]) -> list[str]:
    """The candidates that the model calls with most of the tokens that it is given; it may replace special ones."""
    embedding: Any = model.get_input_embeddings()
    rows = min(table.num_embeddings for table in (embedding, *candidates.values()))
    ids = torch.tensor([ASKED], device=model.device) * rows // 8
    called: set[str] = set()

    def ask(name: str, _table: nn.Module, inputs: tuple[Any, ...]) -> None:
        given = inputs[0] if inputs else None
        if isinstance(given, Tensor) and given.numel() == ids.numel():
            same = given.flatten().to(ids.device) == ids.flatten()
            if same.sum().item() > len(ASKED) / 2:
                called.add(name)

    try:
        with ExitStack() as stack:
            for name, table in candidates.items():
                hook = table.register_forward_pre_hook(partial(ask, name))
                stack.callback(hook.remove)
            model(input_ids=ids, use_cache=False)
    finally:
        if (hosted := hosted_blocks(model)) is not None:
            hosted.release()
    return [name for name in candidates if name in called]
