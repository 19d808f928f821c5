"""Prompts in few launches: the blocks of a fused step (`fused_step.py`), with all tokens of the prompts as rows.

    x [b t, d]          rows of a sequence's tokens one after another
    RoPE, cache         token i of a sequence at row past + i
    attention           causal, by torch (`prompt_attention.py`)
    logits              of every last token

Of the fifty launches per block that transformers' small operations and the rotations of trellis codes make, 10 are left (12
for an original in bf16): a prompt of 512 tokens waits for Python a third to half as long.

The first two prompts of each kind go through the model itself. With the second, the logits of an excerpt are computed both
by the model and in the fused way, and the model's own way stays in use if the two differ: compiling and comparing take
longer than one prompt, which would be wasted if it were the only one. Kinds are numbers of rows that different kernels
multiply (`requant_kernels/dispatch.py`). Short prompts may be replays of a graph (`prompt_graphs.py`).
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from requant_kernels.common.compile_ahead import compile_ahead
from requant_kernels.dispatch import TRELLIS_BOUNDS
from torch import Tensor

from requant.inference.fused_step import Blocks, agrees, fused_blocks, normalized
from requant.inference.prompt_graphs import PromptGraphs, most_rows, padded_length
from requant.inference.static_cache import SharedLengthCache
from requant.inference.step_inputs import has_fixed_angles
from requant.text.kv_cache import with_cache

# of the logits, relative: activations in int8 are rounded otherwise where they differ a little
TOLERANCE = 1e-1
EXCERPT = 1152  # rows that are compared, at least: more than all TRELLIS_BOUNDS
MAX_ROWS = 1 << 15  # of a pass: launches have a row each along a dimension that ends at 65535
logger = logging.getLogger(__name__)


class FusedPrefill:
    """Reads prompts into the cache of a model, fused where that gives the model's own logits."""

    def __init__(self, model: Any, *, rotations: bool = True) -> None:
        """`rotations`: those of trellis codes are fused too."""
        self.model, self.rotations = model, rotations
        self.found: dict[int, Blocks | None] = {}  # by kind, once they were compared
        self.begun: set[int] = set()  # kinds that had a prompt

    @classmethod
    def of(cls, model: Any, *, rotations: bool = True) -> "FusedPrefill":
        """The model's one: what was compared once serves every decoder of the model, a request or a batch each, for as long
        as it has the same modules, without new hooks."""
        state = tuple((id(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules())
        held = model.__dict__.setdefault("_fused_prefills", {})
        if rotations not in held or held[rotations][0] != state:
            held[rotations] = state, cls(model, rotations=rotations)
        return held[rotations][1]

    @torch.no_grad()
    def __call__(
        self, tokens: Int64[Tensor, "b t"], cache: SharedLengthCache, graphs: PromptGraphs | None = None
    ) -> Float[Tensor, "b v"]:
        """Logits after the prompts, valid until the next; keys and values are written after the first `cache.length`,
        which the caller counts. `graphs`: of this cache, if there may be any."""
        b, t = tokens.shape
        kind, past = kind_of(b * t), int(cache.length)
        if graphs is not None and past == 0:
            logits = self._replayed(tokens, cache, graphs)
            if logits is not None:
                return logits
        if kind not in self.found and past == 0 and t <= MAX_ROWS:
            if kind in self.begun:
                return self._compared(tokens, cache, kind)
            self.begun.add(kind)
        blocks = self.found.get(kind)
        if blocks is None or t > MAX_ROWS:
            return own_logits(self.model, tokens, cache)[:, -1]
        return read_prompts(self.model, blocks, tokens, cache, past)

    def _replayed(
        self, tokens: Int64[Tensor, "b t"], cache: SharedLengthCache, graphs: PromptGraphs
    ) -> Float[Tensor, "b v"] | None:
        """Logits by a graph of a padded length; None where it would not pay, or no fused block takes so many rows."""
        b, t = tokens.shape
        if self.found.get(kind_of(b * t)) is None:
            return None
        length = padded_length(b, t, room=cache.layers[0].max_cache_len, rows=self._rows_of_graphs)
        if length is None or self.found.get(kind_of(b * length)) is None:
            return None

        def read(tokens: Tensor, last: Tensor | None) -> Tensor:
            blocks = self.found[kind_of(tokens.numel())]
            assert blocks is not None
            return read_prompts(self.model, blocks, tokens, cache, 0, last)

        return graphs(tokens, length, read)

    @cached_property
    def _rows_of_graphs(self) -> int:
        """0 where RoPE's angles depend on how long a text is: padding would change them."""
        return most_rows(self.model) if has_fixed_angles(self.model) else 0

    def _compared(
        self, tokens: Int64[Tensor, "b t"], cache: SharedLengthCache, kind: int
    ) -> Float[Tensor, "b v"]:
        """Logits by the model itself; the fused blocks are compared with it on an excerpt, tokens [:s, :n]."""
        b, t = tokens.shape
        n = min(t, EXCERPT)
        s = min(b, -(-EXCERPT // n))
        ways = fused_blocks(self.model, s * n, rotations=self.rotations)
        if not ways:
            logger.info(
                "prompts of %s are not fused: not all its modules are Llama's", type(self.model).__name__
            )
            self.found[kind] = None
            return own_logits(self.model, tokens, cache)[:, -1]
        logits = own_logits(self.model, tokens, cache, torch.tensor([n - 1, t - 1], device=tokens.device))
        wanted, excerpt = logits[:s, 0], tokens[:s, :n]

        def run(blocks: Blocks) -> Tensor:
            scratch = SharedLengthCache(self.model.config, n, tokens.device)
            return read_prompts(self.model, blocks, excerpt, scratch, 0)

        def compiled(blocks: Blocks) -> Tensor:
            if tokens.is_cuda:
                compile_ahead(lambda: run(blocks))
            return run(blocks)

        self.found[kind] = None
        for blocks in ways:
            if agrees(
                self.model,
                blocks,
                "prefill",
                lambda blocks=blocks: compiled(blocks),
                wanted,
                tolerance=TOLERANCE,
            ):
                self.found[kind] = blocks
                break
        return logits[:, -1]


class Held(NamedTuple):
    """Keys and values of some of the sequences in a layer of a cache."""

    keys: Tensor
    values: Tensor


def kind_of(rows: int) -> int:
    """What stands for all numbers of rows that the same kernels multiply, and that have the same form."""
    return bisect_left(TRELLIS_BOUNDS, rows)


def own_logits(
    model: Any, tokens: Int64[Tensor, "b t"], cache: Any, keep: int | Tensor = 1
) -> Float[Tensor, "b k v"]:
    """Logits by the model's own forward: of the last `keep` tokens, or of the tokens at the positions `keep`."""
    return model(tokens, **with_cache(model, cache), logits_to_keep=keep).logits


def read_prompts(
    model: Any,
    blocks: Blocks,
    tokens: Int64[Tensor, "b t"],
    cache: SharedLengthCache,
    past: int,
    last: Int64[Tensor, "1"] | None = None,
) -> Float[Tensor, "b v"]:
    """Logits after the prompts, by blocks for so many rows; `past` is `cache.length`, on the host. `last`: of the token with
    this index, where those after it are padding."""
    b, t = tokens.shape
    allocate(model, cache, b)
    logits = []
    for first in range(0, b, MAX_ROWS // t):
        own = slice(first, first + MAX_ROWS // t)
        layers: list[Any] = list(cache.layers)
        held = [Held(layer.keys[own], layer.values[own]) for layer in layers]
        logits.append(_pass(model, blocks, tokens[own], held, cache.length, past, last))
    return logits[0] if len(logits) == 1 else torch.cat(logits)


def allocate(model: Any, cache: SharedLengthCache, sequences: int) -> None:
    """Room for so many sequences in every layer that has none yet."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    like = torch.empty(sequences, key_heads, 0, head_dim, dtype=model.dtype, device=cache.length.device)
    for layer in cache.layers:
        if not layer.is_initialized:
            layer.lazy_initialization(like, like)


def _pass(
    model: Any,
    blocks: Blocks,
    tokens: Int64[Tensor, "b t"],
    layers: Sequence[Held],
    position: Tensor,
    past: int,
    last: Int64[Tensor, "1"] | None,
) -> Float[Tensor, "b v"]:
    (b, t), base = tokens.shape, model.base_model
    embedded = model.get_input_embeddings()(tokens)
    places = torch.arange(past, past + t, device=tokens.device)[None]
    cos, sin = (part.expand(b, -1, -1).flatten(0, 1) for part in base.rotary_emb(embedded, places))
    x, delta = embedded.flatten(0, 1), None
    for block, layer in zip(blocks, layers, strict=True):
        one: Any = block
        delta = one(x, delta, cos, sin, layer, position, past)
    y = normalized(x, delta, base.norm).view(b, t, -1)
    return model.get_output_embeddings()(y[:, -1] if last is None else y.index_select(1, last)[:, 0])
