"""The original's logits on the scored windows, after its matrices have been overwritten.

    logits_i = head(h_i),   h_i: the last hidden states of window i, kept on the host

A second model beside the first is what a GPU has no room for; its last hidden states are a few hundred megabytes, and all
of a model that is needed to make logits of them is what stands outside its blocks. Where that does not give the model's
own logits, bit for bit, the copy is the whole model after all.
"""

import copy
import logging

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant import ranks
from requant.errors import is_out_of_memory
from requant.finetune.teacher import logits_of_states
from requant.models.targets import find_blocks
from requant.progress import tracked

logger = logging.getLogger(__name__)


class OriginalLogits:
    """Logits of `model` as it is now, a window at a time; of several processes each has those of its share of `windows`."""

    @torch.inference_mode()
    def __init__(
        self, model: PreTrainedModel, windows: Int64[Tensor, "s t"], *, label: str | None = None
    ) -> None:
        self.windows = windows
        self.states: dict[int, Tensor] = {}  # window -> last hidden states, on the host
        self.model: PreTrainedModel = copy.deepcopy(model, {id(find_blocks(model)[1]): nn.ModuleList()})
        own = ranks.mine(range(len(windows)))
        for index in tracked(own, label=label, unit="windows"):
            if index > own[0]:
                self._keep(model, index)
            elif not self._suffices(model, index):
                logger.info(
                    "the original is copied whole: its logits do not follow from its last hidden states"
                )
                self.states, self.model = {}, copy.deepcopy(model)
                break

    def __getitem__(self, window: int) -> Float[Tensor, "1 t v"]:
        tokens = self._tokens(window)
        if not self.states:
            return self.model(tokens, use_cache=False).logits
        states = self.states[window].to(tokens.device)
        return logits_of_states(self.model, self.output_class, tokens, states)

    def _suffices(self, model: PreTrainedModel, window: int) -> bool:
        """Whether the copy gives the model's own logits on this window."""
        try:
            self._keep(model, window)
            found = self[window]
        except Exception as error:  # whatever a model of another kind raises
            if is_out_of_memory(error):
                raise
            return False
        return torch.equal(found, model(self._tokens(window), use_cache=False).logits)

    def _keep(self, model: PreTrainedModel, window: int) -> None:
        output = model.base_model(input_ids=self._tokens(window), use_cache=False)
        self.output_class, self.states[window] = type(output), output.last_hidden_state.cpu()

    def _tokens(self, window: int) -> Int64[Tensor, "1 t"]:
        return self.windows[window : window + 1].to(self.model.device)
