"""The loss of distillation: how far the outputs and the last hidden states are from the original's.

    mean_t [ KL( p_original(. | x_<t) || p(. | x_<t) ) + c |h_t - h_original,t|^2 / |h_original,t|^2 ]

where h are the last hidden states and c is `finetune.hidden_weight` in the rounds of mode `best`, 10 by default (5 to 100
do equally well), and 0 elsewhere (matching states as well as outputs: TinyBERT; Jiao et al. 2020, arXiv 1909.10351). The
second term constrains all directions of the state, not only those that tell the text's tokens apart, and needs no pass of
its own, because the original's states are kept. Both terms fall to a quarter with every bit of the codes. Recovery after
pruning may mix in the cross-entropy of the text (`recovery.distillation`).
"""

import logging
from contextlib import nullcontext

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.batches import rounds
from requant.calibration.hidden_states import body_of
from requant.calibration.passes import tensor_cores
from requant.finetune.divergence import hidden_error, kl
from requant.finetune.teacher import Teacher, logits_of_states, why_states_do_not_suffice
from requant.models.mixed_precision import mixed_precision

logger = logging.getLogger(__name__)


def loss_sum(
    model: PreTrainedModel,
    teacher: Teacher,
    tokens: Int64[Tensor, "b t"],
    states: Float[Tensor, "b t d"] | None = None,
    *,
    distillation: float = 1.0,
    hidden_weight: float = 0.0,
) -> Float[Tensor, ""]:
    """Sum of `distillation D + (1 - distillation) (-log p_model(text))` over the positions of a batch, nats.

    D is KL(teacher || model), and with a `hidden_weight` that times the relative squared error of the last hidden states
    beside it. Under autocast if gradients are enabled.
    """
    error: float | Tensor = 0.0
    with mixed_precision(tokens) if torch.is_grad_enabled() else nullcontext():
        if hidden_weight:
            states = teacher.last_states(tokens) if states is None else states
            output = body_of(model)(input_ids=tokens, use_cache=False)
            found = logits_of_states(model, type(output), tokens, output.last_hidden_state)
            error = hidden_weight * hidden_error(output.last_hidden_state, states)
        else:
            found = model(input_ids=tokens, use_cache=False).logits
        expected = teacher.logits(tokens, states)
    divergence = kl(found, expected) + error
    if distillation == 1:
        return divergence
    surprise = functional.cross_entropy(
        found[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum"
    )
    return distillation * divergence + (1 - distillation) * surprise


def usable_hidden_weight(hidden_weight: float, teacher: Teacher) -> float:
    """The weight, or 0 where the logits do not follow from the last hidden states."""
    reason = why_states_do_not_suffice(teacher.model, teacher.windows[:1].to(teacher.model.device))
    if reason is None:
        return hidden_weight
    logger.warning("hidden states are not matched: %s", reason)
    return 0.0


@torch.no_grad()
def mean_kl(model: PreTrainedModel, teacher: Teacher, windows: Int64[Tensor, "b t"]) -> float:
    """Mean KL over all positions, nats. On a GPU products are in TF32, since no matrix learns from them; autocast would need
    compiled blocks, which training alone runs.
    """
    own = [tokens for _, tokens in rounds(windows, model, label=None) if tokens is not None]
    with tensor_cores(model.device):
        sums = [loss_sum(model, teacher, batch).double().item() for batch in own]
    return sum(ranks.merged(sums)) / windows.numel()
