"""The original on the windows that train: its blocks run once for each window, its head whenever it is asked.

    logits_i = head(h_i),   h_i: last hidden states of window i, kept once computed

Windows come again in every epoch and in every round, and the original does not change; its blocks are a fifth of a step's
arithmetic. Logits would be tens of times larger than the states (vocabulary over width), so the head stays in the step.
What a model does behind its blocks, scales or caps of logits, stays its own: its whole forward pass runs, in which the base
model answers with the states. A model for which that gives other logits, or memory without a quarter of its room to
spare for the states, has its blocks run every time.
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

SHARE_OF_MEMORY = 0.25  # of what is free, for the states
AGREE = 1e-2  # relative Frobenius distance of logits: 16 bits of a state, rounded once more or not
logger = logging.getLogger(__name__)


class Teacher:
    """Logits of the original; `windows` are those whose states may be kept."""

    def __init__(self, model: PreTrainedModel, windows: Int64[Tensor, "b t"]) -> None:
        self.model, self.windows = model, windows
        self.states: Float[Tensor, "b t d"] | None = None
        self.known = torch.zeros(len(windows), dtype=torch.bool)
        head, device = model.get_output_embeddings(), model.device
        width = 0 if head is None else head.weight.shape[1]
        self.needed = windows.numel() * width * (2 if device.type == "cuda" else 4)  # bytes of all states
        fits = 0 < self.needed <= SHARE_OF_MEMORY * free_memory(device)
        together = len({p.device for p in model.parameters()}) == 1
        self.keeps: bool | None = None if fits and together else False  # None: not tried yet

    @property
    def awaited(self) -> int:
        """Bytes that states will take and do not take yet."""
        return 0 if self.keeps is False or self.states is not None else self.needed

    def parts(self, chosen: Int64[Tensor, " c"], windows_each: int | None) -> list[tuple[Tensor, ...]]:
        """Tokens of the chosen windows in parts (`batches`), each with its states where they are kept."""
        batched = list(batches(self.windows[chosen], self.model, label=None, windows_each=windows_each))
        members = chosen.split(len(batched[0]))
        return [(tokens, *self._kept(m, tokens)) for m, tokens in zip(members, batched, strict=True)]

    @torch.no_grad()
    def logits(
        self, tokens: Int64[Tensor, "c t"], states: Float[Tensor, "c t d"] | None = None
    ) -> Float[Tensor, "c t v"]:
        """The original's logits; with `states` its blocks do not run."""
        if states is None:
            return self.model(input_ids=tokens, use_cache=False).logits
        answer = self.output(last_hidden_state=states)
        with replaced_forward(self.model.base_model, lambda *_, **__: answer):
            return self.model(input_ids=tokens, use_cache=False).logits

    @torch.no_grad()
    def _kept(self, members: Int64[Tensor, " c"], tokens: Int64[Tensor, "c t"]) -> tuple[Tensor, ...]:
        """States of a part, which is computed whole if one is missing: compiled blocks know its shape."""
        with precision_of_learning(tokens):
            if self.keeps is None:
                self.keeps = self._tried(tokens)
            if not self.keeps:
                return ()
            assert self.states is not None
            if not self.known[members].all():
                self.states[members] = self._computed(tokens)
                self.known[members] = True
            return (self.states[members],)

    def _computed(self, tokens: Int64[Tensor, "c t"]) -> Float[Tensor, "c t d"]:
        found = self.model.base_model(input_ids=tokens, use_cache=False)
        self.output = type(found)
        # on a GPU the head would round them itself, by autocast
        return found.last_hidden_state.to(torch.bfloat16 if tokens.is_cuda else torch.float32)

    def _tried(self, tokens: Int64[Tensor, "c t"]) -> bool:
        """Whether the states say all, by a first part."""
        try:
            states = self._computed(tokens)
            given, whole = self.logits(tokens, states), self.logits(tokens)
            # blocks that run all the same would not notice
            blind = self.logits(tokens, torch.zeros_like(states))
            if (given - whole).norm() <= AGREE * whole.norm() < (blind - whole).norm():
                self.states = states.new_empty(*self.windows.shape, states.shape[-1])
                return True
            reason = "its head asks for more than their last states"
        except Exception as error:  # whatever a model of another kind raises
            reason = first_line(error)
        logger.info("the original's blocks run at every step: %s", reason)
        return False


def precision_of_learning(tokens: Tensor) -> torch.autocast:
    """Products of training: bfloat16 on a GPU."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=tokens.is_cuda)
