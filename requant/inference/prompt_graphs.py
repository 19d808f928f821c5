"""Prompts as replays of CUDA graphs of a few padded lengths, where the GPU is faster than Python.

    tokens [b, t]  ->  [b, n], n the next of LENGTHS       logits of row t - 1, an index on the device

A prompt is some 400 launches, which Python issues in 17 to 47 ms on hosts of an H200, whatever their size. For 512 tokens
of an 8B model the GPU runs them in 14.6 ms (bf16: 11.8), while prompts launched one by one took 24.8 (25.7). So if the GPU
would wait for Python (`most_rows`), a prompt is padded and captured, and the added rows cost only time that would have
been idle: of the 1B shape eight prompts of 512 tokens together, of 8B one of 1024. Longer prompts, and prompts that follow
tokens in the cache, are run as usual.

Prompts of mixtures are captured as long as their experts do not ask the device where tokens go: on Hopper all of them,
elsewhere those as short as a step (`experts.py`). Experts are computed for the padding too, and the result discarded.

Padding is never visible. No token of the prompt sees a later one, logits are those of its last token, and the cache counts
t tokens: a step, or the next part of the text, overwrites the rows after these before it reads them.

The second prompt of a length pays for the capture, which is compared with the same prompt read launch by launch. There are
at most as many graphs as LENGTHS, since a cache has one number of sequences, and they share their memory: they are replayed
one at a time, and their logits are copied before the next.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from requant.errors import first_line
from requant.inference.cuda_graph import captured, side_stream
from requant.models.experts import STEP_TOKENS, Experts

BY_DEFAULT = True  # whether decoders replay prompts where nothing else is said
LENGTHS = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
MOST_ROWS = 4096  # of a replay: they bound the memory that all share
# of a block, that an H200 makes while Python issues the block's launches, 0.8 to 1.7 ms
MULTIPLICATIONS = 2.5e11
# of the logits, relative: the products of more rows may be divided otherwise, or round activations to int8
TOLERANCE = 1e-1
logger = logging.getLogger(__name__)

# logits after tokens [b, n], or after those up to an index int64 [1], on the device
Read = Callable[[Int64[Tensor, "b n"], Int64[Tensor, "1"] | None], Float[Tensor, "b v"]]


class PromptGraphs:
    """The graphs of prompts that begin a text of one cache, into which they write keys and values."""

    def __init__(self) -> None:
        self.prompts: Counter[int] = Counter()  # by padded length, until there is a graph
        self.graphs: dict[int, PromptGraph] = {}
        self.bytes = 0  # of the memory that they share
        self.failed = False
        self._pool: Any = None

    def __call__(self, tokens: Int64[Tensor, "b t"], length: int, read: Read) -> Float[Tensor, "b v"] | None:
        """Logits after prompts that are padded to `length`, valid until the next call; None where the caller should read
        them: the first of a length, and all once a capture has failed."""
        if self.failed:
            return None
        if length in self.graphs:
            return self.graphs[length](tokens)
        self.prompts[length] += 1
        return self._capture(tokens, length, read) if self.prompts[length] > 1 else None

    def _capture(self, tokens: Tensor, length: int, read: Read) -> Tensor | None:
        """A graph, if its first replay gives the logits of the prompt read launch by launch, which are returned."""
        shape, wanted = f"{len(tokens)} x {length}", None
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = PromptGraph(len(tokens), length, read, tokens.device, self._pool)
            got = graph(tokens).float()
            wanted = read(tokens, None)  # last: what it writes into the cache stays
            error = ((got - wanted.float()).norm() / wanted.float().norm()).item()
            if not error <= TOLERANCE:
                raise ValueError(f"other logits, relative error {error:.2g}")
        except Exception as problem:  # it is a shortcut: whatever stops it, prompts can be read without
            self.failed = True
            self.graphs.clear()
            logger.warning(
                "prompts of %s tokens cannot be replayed as a CUDA graph, so they run without: %s",
                shape,
                first_line(problem),
            )
            return wanted
        self.graphs[length] = graph
        self.bytes += graph.bytes
        logger.info(
            "prompts of up to %s tokens are replays of a CUDA graph from now on (%d MiB)",
            shape,
            self.bytes >> 20,
        )
        return wanted


class PromptGraph:
    """One of them: prompts of `length` tokens, padding included."""

    def __init__(self, sequences: int, length: int, read: Read, device: torch.device, pool: Any) -> None:
        self.tokens = torch.zeros(sequences, length, dtype=torch.int64, device=device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = torch.empty(0)

        def run() -> None:
            self.logits = read(self.tokens, self.last)

        with side_stream(device):
            run()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        self.graph = captured(run, device, pool=pool)
        self.bytes = torch.cuda.memory_reserved(device) - before

    def __call__(self, tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Logits after the prompts, in a tensor that the next replay of any graph overwrites."""
        t = tokens.shape[1]
        self.tokens.copy_(F.pad(tokens, (0, self.tokens.shape[1] - t)))
        self.last.fill_(t - 1)
        self.graph.replay()
        return self.logits


def padded_length(sequences: int, tokens: int, *, room: int, rows: int) -> int | None:
    """The length that such prompts are padded to, within `room` tokens of a cache and so many rows together; None: none."""
    return next((n for n in LENGTHS if tokens <= n <= room and sequences * n <= rows), None)


def most_rows(model: Any) -> int:
    """Rows that a GPU multiplies in less time than Python takes for their launches, by the weights of a block; at most
    MOST_ROWS. Of models made of Llama's modules; of mixtures by the weights that a token meets, and no more rows than their
    experts take without a question to the device."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    if any(module.step is None for module in experts):
        return 0
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    intermediate = config.intermediate_size
    if experts:
        intermediate = config.num_experts_per_tok * getattr(config, "moe_intermediate_size", intermediate)
    weights = config.hidden_size * (2 * (heads + key_heads) * head_dim + 3 * intermediate)
    most = MOST_ROWS if all(module.prefill is not None for module in experts) else STEP_TOKENS
    return min(most, int(MULTIPLICATIONS / weights))
