"""The teacher of the distillation: the original's logits on the training windows, with its last hidden states cached.

    logits_i = head(h_i),   h_i: last hidden states of window i, computed once

Windows come again in every epoch and in every round, and the original does not change; its blocks are a fifth of a step's
arithmetic. Caching logits would take tens of times the memory (vocabulary size over hidden size), so the head runs in
every step. Whatever a model does after its blocks (scaling or capping logits) is kept: its whole forward pass runs, with a
base model that returns the cached states. Where that gives other logits, or where the states would take more than a
quarter of the free memory, the blocks run in every step.
"""

import logging

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant.calibration.passes import batches
from requant.errors import first_line
from requant.models.devices import free_memory
from requant.models.targets import replaced_forward

MAX_MEMORY_FRACTION = 0.25  # of what is free, for the states
LOGITS_TOLERANCE = 1e-2  # relative Frobenius distance: caching may round a state to 16 bits once more
logger = logging.getLogger(__name__)


class Teacher:
    """Logits of the original; `windows` are the training windows, whose states may be cached."""

    def __init__(self, model: PreTrainedModel, windows: Int64[Tensor, "b t"]) -> None:
        self.model, self.windows = model, windows
        self.states: Float[Tensor, "b t d"] | None = None
        self.cached = torch.zeros(len(windows), dtype=torch.bool)
        head, device = model.get_output_embeddings(), model.device
        hidden_size = 0 if head is None else head.weight.shape[1]
        self.cache_bytes = windows.numel() * hidden_size * (2 if device.type == "cuda" else 4)
        fits = 0 < self.cache_bytes <= MAX_MEMORY_FRACTION * free_memory(device)
        one_device = len({p.device for p in model.parameters()}) == 1
        self.caches: bool | None = None if fits and one_device else False  # None: not tried yet

    @property
    def bytes_to_come(self) -> int:
        """Bytes of states that are not allocated yet and may be."""
        return 0 if self.caches is False or self.states is not None else self.cache_bytes

    def micro_batches(
        self, chosen: Int64[Tensor, " c"], windows_each: int | None
    ) -> list[tuple[Tensor, ...]]:
        """Tokens of the chosen windows in micro-batches (`batches`), each with its states where they are cached."""
        batched = list(batches(self.windows[chosen], self.model, label=None, windows_each=windows_each))
        members = chosen.split(len(batched[0]))
        return [(tokens, *self._cached_states(m, tokens)) for m, tokens in zip(members, batched, strict=True)]

    @torch.no_grad()
    def logits(
        self, tokens: Int64[Tensor, "c t"], states: Float[Tensor, "c t d"] | None = None
    ) -> Float[Tensor, "c t v"]:
        """The original's logits; with `states` its blocks do not run."""
        if states is None:
            return self.model(input_ids=tokens, use_cache=False).logits
        output = self.output_class(last_hidden_state=states)
        with replaced_forward(self.model.base_model, lambda *_, **__: output):
            return self.model(input_ids=tokens, use_cache=False).logits

    @torch.no_grad()
    def _cached_states(
        self, members: Int64[Tensor, " c"], tokens: Int64[Tensor, "c t"]
    ) -> tuple[Tensor, ...]:
        """States of a micro-batch; if any is missing all are computed, for blocks are compiled for its shape."""
        with training_autocast(tokens):
            if self.caches is None:
                self.caches = self._caching_works(tokens)
            if not self.caches:
                return ()
            assert self.states is not None
            if not self.cached[members].all():
                self.states[members] = self._last_states(tokens)
                self.cached[members] = True
            return (self.states[members],)

    def _last_states(self, tokens: Int64[Tensor, "c t"]) -> Float[Tensor, "c t d"]:
        output = self.model.base_model(input_ids=tokens, use_cache=False)
        self.output_class = type(output)
        # on a GPU autocast would round them before the head anyway
        return output.last_hidden_state.to(torch.bfloat16 if tokens.is_cuda else torch.float32)

    def _caching_works(self, tokens: Int64[Tensor, "c t"]) -> bool:
        """Whether the logits follow from the last states alone, tried on a first micro-batch."""
        try:
            states = self._last_states(tokens)
            from_states, expected = self.logits(tokens, states), self.logits(tokens)
            # a model that ignores the replaced blocks would give the same logits for any states
            from_zeros = self.logits(tokens, torch.zeros_like(states))
            tolerance = LOGITS_TOLERANCE * expected.norm()
            if (from_states - expected).norm() <= tolerance < (from_zeros - expected).norm():
                self.states = states.new_empty(*self.windows.shape, states.shape[-1])
                return True
            reason = "its logits do not follow from its last hidden states alone"
        except Exception as error:  # whatever a model of another kind raises
            reason = first_line(error)
        logger.info("the original's blocks run at every step: %s", reason)
        return False


def training_autocast(tokens: Tensor) -> torch.autocast:
    """The precision of matrix products in training: bfloat16 on a GPU."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=tokens.is_cuda)
