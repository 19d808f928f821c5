"""The original's logits on the scored windows, available after its matrices have been overwritten.

    logits_i = head(h_i),   h_i: the last hidden states of window i, kept on the host

A GPU has no room for a second model beside the first. The last hidden states are a few hundred megabytes, and to compute
logits from them it takes only the parts of the model outside its blocks, which are copied. If that does not reproduce the
model's own logits bit for bit, the whole model is copied after all; or the logits themselves are kept, if the model's
matrices are on the host.
"""

import copy
import logging

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.hidden_states import after_blocks, body_of
from requant.errors import is_out_of_memory
from requant.finetune.teacher import logits_of_states
from requant.models.hosted import hosted_blocks
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
        self.logits: dict[int, Tensor] = {}  # window -> logits, on the host, where states do not suffice
        self.model: PreTrainedModel = copy.deepcopy(model, {id(find_blocks(model)[1]): nn.ModuleList()})
        own = ranks.mine(range(len(windows)))
        at = after_blocks(model, windows, [windows[index : index + 1] for index in own], label=label)
        for number, index in enumerate(tracked(own, label=label, unit="windows")):
            with at(number):
                if self.logits or (number == 0 and not self._suffices(model, index)):
                    self.states = {}
                    if hosted_blocks(model) is None:
                        self._copy_whole(model)
                        break
                    self.logits[index] = model(self._tokens(index), use_cache=False).logits.cpu()
                elif number > 0:
                    self._keep(model, index)

    def _copy_whole(self, model: PreTrainedModel) -> None:
        logger.info("the original is copied whole: its logits do not follow from its last hidden states")
        self.model = copy.deepcopy(model)

    def __getitem__(self, window: int) -> Float[Tensor, "1 t v"]:
        tokens = self._tokens(window)
        if self.logits:
            return self.logits[window].to(tokens.device)
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
        output = body_of(model)(input_ids=self._tokens(window), use_cache=False)
        self.output_class, self.states[window] = type(output), output.last_hidden_state.cpu()

    def _tokens(self, window: int) -> Int64[Tensor, "1 t"]:
        return self.windows[window : window + 1].to(self.model.device)
