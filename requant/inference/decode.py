"""Tokens from a model, one step after another: a cache and, on a GPU, the captured graph of a step.

A step of one token is hundreds of small launches, which Python issues more slowly than a GPU runs them. So on a GPU keys and
values live in a static cache, the step is captured once as a CUDA graph, and a token is one replay: embed, blocks, head,
argmax, which is the next step's input. If the model allows it, the operations between the matrices are fused as well, in
prompts too (`fused_step.py`, `fused_prefill.py`). Elsewhere, and for models whose cache counts its positions on the host
(sliding windows), the same steps run one by one. A model that takes no cache, or fails with one, is given the whole text
again for every token, which is slow but correct.
"""

import logging
from contextlib import nullcontext
from math import gcd
from typing import Any

import torch
from jaxtyping import Float, Int64
from requant_kernels.common.device import supports_pdl
from torch import Tensor
from transformers import DynamicCache

from requant.errors import first_line, is_out_of_memory
from requant.inference import prompt_graphs
from requant.inference.attention import supports, use_kernel
from requant.inference.cuda_graph import captured, side_stream
from requant.inference.prompt_graphs import PromptGraphs
from requant.inference.static_cache import SharedLengthCache, static_cache
from requant.text.kv_cache import positions, takes_cache, with_cache
from requant.text.sampling import sample_next

PARTS = 512  # of a row of logits
logger = logging.getLogger(__name__)


class Decoder:
    """A model with room for `length` tokens in each of its sequences; `reset` makes it forget them.

    `graph` None captures a step wherever that is possible. `step_model` is what runs a step, for instance a compiled
    form of the model; the prompt always goes through the model itself. `kernel_attention`: steps on a GPU use the
    attention kernel (`requant.inference.attention`) where the model would use torch's; the model's config stays as it is.
    `fused`: prompts and captured steps are fused where the model allows it (steps need that kernel); `fuses_rotations`: with
    the rotations of its matrices. `graphs_prompts`: short fused prompts are graphs too (`prompt_graphs.py`).
    """

    def __init__(
        self,
        model: Any,
        *,
        length: int,
        graph: bool | None = None,
        step_model: Any = None,
        kernel_attention: bool = True,
        fused: bool = True,
        fuses_rotations: bool = True,
        graphs_prompts: bool = prompt_graphs.BY_DEFAULT,
    ) -> None:
        self.model, self.step_model = model, model if step_model is None else step_model
        self.length = length
        self.device = torch.device(model.device)
        self.captured: torch.cuda.CUDAGraph | None = None
        self.wants_graph = self.device.type == "cuda" if graph is None else graph
        self.wants_cache = takes_cache(model)
        if not self.wants_cache:
            logger.info(
                "%s takes no cache, so it reads the whole text again for every token", type(model).__name__
            )
        self.kernel_attention = kernel_attention and supports(model, length)
        self.wants_fused = fused and self.kernel_attention and step_model is None
        self.fuses_rotations = fuses_rotations
        self.fused: Any = None  # a FusedStep, once it was compared with the model
        self.fuses_prompts = fused and self.device.type == "cuda" and takes_fused_prompts(model)
        self.fused_prefill: Any = None  # a FusedPrefill, once there was a prompt
        self.graphs_prompts = graphs_prompts and self.wants_graph
        self.tokens = torch.empty(0)
        self.logits = torch.empty(0)
        self.count = 0  # of the tokens so far, where the host runs every step
        self.text = torch.empty(0)  # prompts, and without a cache all tokens so far
        self.reset()

    def reset(self) -> None:
        """Forget all tokens; a captured step stays."""
        self.count, self.text = 0, torch.empty(0)
        if self.captured is not None:
            self.cache.reset()
            return
        self.cache: Any = None
        if self.wants_graph:
            self.cache = static_cache(self.model, self.length)
        self.prompt_graphs = PromptGraphs() if self.graphs_prompts else None  # they write into this cache
        if self.cache is None:
            self.wants_graph = False
            self.cache = DynamicCache(config=self.model.config) if self.wants_cache else None

    @torch.no_grad()
    def prefill(self, tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """Logits after the last token of the prompts, all of one length; the argmax is the next step's input."""
        if self.fuses_prompts and isinstance(self.cache, SharedLengthCache):
            logits = self._fused_prompts()(tokens, self.cache, self.prompt_graphs)
        else:
            logits = self._prompt(tokens)
        self._count(tokens.shape[1])
        self._keep(logits)
        return self.logits

    def _prompt(self, tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "b v"]:
        """The last logits of the prompts, by the model itself."""
        before = self.count
        self.text = torch.cat([self.text, tokens], dim=1) if before else tokens
        return (
            self._through_model(tokens, before)
            if self.cache is not None
            else self._through_model(self.text, 0)
        )

    def _through_model(self, tokens: Int64[Tensor, "b t"], before: int) -> Float[Tensor, "b v"]:
        """The last logits of a prompt after `before` tokens; with less of a cache where the model fails with this one."""
        where = with_cache(self.model, self.cache) | self._where(before, tokens.shape[1])
        try:
            return self.model(tokens, **where, logits_to_keep=1).logits[:, -1]
        except Exception as error:  # a stranger's code
            whole = self.text.shape[1] == before + tokens.shape[1]
            if self.cache is None or not whole or is_out_of_memory(error):
                raise
            return self._with_less_cache(error)

    def _with_less_cache(self, error: Exception) -> Float[Tensor, "b v"]:
        """The whole text with a cache that grows in place of one of fixed size, or with none in place of that.

        What works is used from now on, and the log says why. Where nothing does the input is at fault: that raises, and the
        decoder stays as it is.
        """
        own, static = self.cache, isinstance(self.cache, SharedLengthCache)
        self.cache = DynamicCache(config=self.model.config) if static else None
        try:
            logits = self._through_model(self.text, 0)
        except Exception:
            self.cache = own
            raise
        self.wants_graph, self.wants_cache = False, self.cache is not None  # after a reset too
        logger.warning(
            "%s fails with a cache %s (%s: %s), so %s, which is slower",
            type(self.model).__name__,
            "of fixed size" if static else "of keys and values",
            type(error).__name__,
            first_line(error),
            "it reads the whole text again for every token" if self.cache is None else "its cache grows",
        )
        return logits

    def _fused_prompts(self) -> Any:
        if self.fused_prefill is None:
            from requant.inference.fused_prefill import FusedPrefill  # needs Triton

            self.fused_prefill = FusedPrefill.of(self.model, rotations=self.fuses_rotations)
        return self.fused_prefill

    @torch.no_grad()
    def step(self, tokens: Int64[Tensor, "b 1"] | None = None) -> Float[Tensor, "b v"]:
        """Logits after one more token of each sequence: `tokens`, or the argmax of the last logits."""
        if tokens is not None:
            self.tokens.copy_(tokens)
        if self.wants_graph and self.captured is None:
            self._capture()
        if self.captured is None:
            self._step()
        else:
            self.captured.replay()
        return self.logits

    def _step(self) -> None:
        if self.fused is not None:
            self.fused.advance(self.tokens, self.cache, self.logits)
            return
        tokens = self.tokens
        if self.cache is None:
            tokens = self.text = torch.cat([self.text, tokens], dim=1)
        with use_kernel(self.model) if self.kernel_attention else nullcontext():
            where = with_cache(self.model, self.cache) | self._where(self.count, 1)
            output = self.step_model(tokens, **where)
        self._count(1)
        self._keep(output.logits[:, -1])

    def _where(self, first: int, count: int) -> dict[str, Any]:
        """Positions of tokens after `first` others, where the host counts them."""
        growing = isinstance(self.cache, DynamicCache) and first and self.step_model is self.model
        return positions(self.model, first, count) if growing else {}

    def _count(self, tokens: int) -> None:
        self.count += tokens
        if isinstance(self.cache, SharedLengthCache):
            self.cache.add(tokens)

    def _keep(self, logits: Tensor) -> None:
        """Copy logits, and their argmax, to the tensors that a graph reads and writes."""
        if self.logits.shape != logits.shape:
            self.logits, self.tokens = logits.clone(), argmax_by_parts(logits)
        else:
            self.logits.copy_(logits)
            self.tokens.copy_(argmax_by_parts(logits))

    def _capture(self) -> None:
        """Warm up and capture a step, and take back what both did to the cache."""
        before = self.cache.length.clone(), self.tokens.clone(), self.logits.clone()
        with side_stream(self.device):
            self._fuse(before)
            for _ in range(3):
                self._step()
                self._restore(*before)
        try:
            self.captured = captured(self._step, self.device)
        except RuntimeError as error:
            self.wants_graph = False
            logger.warning(
                "a step of this model cannot be captured as a CUDA graph, so it runs without: %s", error
            )
        self._restore(*before)

    def _fuse(self, before: tuple[Tensor, Tensor, Tensor]) -> None:
        """Fuse the steps from now on, if one that is fused gives the logits of one that is not."""
        if not self.wants_fused:
            return
        from requant.inference.fused_step import fused_steps  # needs Triton

        steps = fused_steps(self.model, len(self.tokens), self.length, rotations=self.fuses_rotations)
        if not steps:
            logger.info(
                "steps of %s are not fused: not all its modules are Llama's", type(self.model).__name__
            )
            return
        self._step()
        wanted = self.logits.clone()
        self._restore(*before)
        self.fused = next((step for step in steps if step.agrees(self.tokens, self.cache, wanted)), None)

    def _restore(self, length: Tensor, tokens: Tensor, logits: Tensor) -> None:
        self.cache.length.copy_(length)
        self.tokens.copy_(tokens)
        self.logits.copy_(logits)


def takes_fused_prompts(model: Any) -> bool:
    """Whether a model computes as the kernels of fused prompts do: in 16 bits, with torch's attention."""
    return (
        model.dtype in (torch.float16, torch.bfloat16)
        and model.config.get_text_config()._attn_implementation == "sdpa"
    )


def argmax_by_parts(logits: Float[Tensor, "b v"]) -> Int64[Tensor, "b 1"]:
    """The argmax of every row, first within parts: torch gives a row to one SM, 29 us for 128 thousand tokens."""
    b, v = logits.shape
    width = v // gcd(v, PARTS)
    top, index = logits.view(b, -1, width).max(-1)
    part = top.argmax(-1, keepdim=True)
    return part * width + index.gather(1, part)


def compiled_step(model: Any) -> Any:
    """torch.compile of a step, its kernels too launched before their predecessors have ended where the GPU can."""
    from torch._inductor import config  # slow to import, and only needed here

    early = supports_pdl(torch.device(model.device)) and hasattr(config.triton, "enable_pdl")
    return torch.compile(model, dynamic=False, options={"triton.enable_pdl": True} if early else None)


def generate_tokens(
    model: Any,
    prompt: Int64[Tensor, "1 t"],
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    end: frozenset[int] = frozenset(),
) -> list[int]:
    """The prompt's continuation, to `max_new_tokens` or a token of `end`, which is not part of it."""
    decoder = Decoder(model, length=prompt.shape[1] + max_new_tokens)
    logits, written = decoder.prefill(prompt), []
    while True:
        token = sample_next(logits, temperature=temperature, generator=generator)
        if int(token) in end:
            return written
        written.append(int(token))
        if len(written) == max_new_tokens:
            return written
        logits = decoder.step(token)
