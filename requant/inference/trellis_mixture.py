"""The second half of a trellis block that is a mixture of experts (`trellis_block.py`).

    y, rotated y = rotated norm(x += finished product of o)      1 launch, for the router and for the experts
    experts, weights = router(y)                                 2         (`requant_kernels/experts/router.py`)
    x += sum_j w_j expert_j(y)                                   5         (`requant_kernels/experts/step.py`)

Through the mixture's own modules it takes more than twenty. For more tokens than a step has, y is not rotated by the norm,
and the experts take eight launches (`requant_kernels/experts/prefill.py`).
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from requant_kernels.step.rotated_norm import rotated_norm, supports
from requant_kernels.trellis.operands import Product, RotatedActivations
from torch import Tensor, nn

from requant.inference.experts import ExpertsPrefill, ExpertsStep
from requant.inference.router import Router, has_hooks
from requant.models.experts import STEP_TOKENS, STEP_TOKENS_BESIDE_PREFILL, Experts


class TrellisMixture:
    """The experts of a block, with their router, after o."""

    def __init__(
        self, block: Any, step: ExpertsStep | None, prefill: tuple[Router, ExpertsPrefill] | None
    ) -> None:
        """`step`: of few tokens; `prefill`: of more, with the router; None of both: the mixture's own modules are called."""
        self.norm, self.mixture = block.post_attention_layernorm, block.mlp
        self.step, self.prefill = step, prefill

    def __call__(self, x: Float[Tensor, "b d"], delta: Product) -> None:
        """x becomes x + delta, and what the experts make of that is added."""
        norm, step = self.norm, self.step
        y = torch.empty_like(x) if step is not None else None
        given = {} if step is None else {"input_scales": step.input_scales, "form": step.input_form}
        found = rotated_norm(x, delta, norm.weight, norm.variance_epsilon, plain=y, **given)
        if step is None or y is None:
            if self.prefill is None:
                x += called(self.mixture, cast(Tensor, found))
            else:
                router, experts = self.prefill
                experts(cast(Tensor, found), *router(cast(Tensor, found)), into=x)
            return
        assert step.router is not None
        step.add(cast(RotatedActivations, found), *step.router(y), into=x)


def trellis_mixture(block: nn.Module, rows: int) -> TrellisMixture | None:
    """The experts of a block for activations of so many rows; None where its norm is too wide for a launch."""
    if not supports(len(block.get_submodule("post_attention_layernorm").get_parameter("weight"))):
        return None
    mixture: Any = block.get_submodule("mlp")
    layer = mixture.experts
    if not isinstance(layer, Experts) or not isinstance(layer.step, ExpertsStep) or has_hooks(mixture):
        return TrellisMixture(block, None, None)
    step, prefill, router = layer.step, layer.prefill, layer.step.router
    if router is not None and rows <= (STEP_TOKENS if prefill is None else STEP_TOKENS_BESIDE_PREFILL):
        return TrellisMixture(block, step, None)
    if router is not None and isinstance(prefill, ExpertsPrefill):
        return TrellisMixture(block, None, (router, prefill))
    return TrellisMixture(block, None, None)


def called(mixture: nn.Module, y: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    """What a mixture's own modules make of tokens; some return the router's logits beside it."""
    found = mixture(y[None])
    return (found[0] if isinstance(found, tuple) else found).flatten(0, 1)
