"""The router of a mixture by the kernels (`requant_kernels/experts/router.py`), where they choose as the model's own does.

Whether they do is decided by numbers, not by the class: a mixture is called once, with experts that only note what they are
given. It qualifies if it adds nothing to what the experts return (as shared experts would), and if the kernels choose the
experts it chose and weight them as it did. A few tokens may differ, where two experts are about equally likely.
"""

import logging
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from requant_kernels.experts.router import choose_experts, supports
from torch import Tensor, nn

from requant.inference.kernel_check import TritonError
from requant.models.experts import Experts

TOKENS = 16
MOST_DIFFERENT = 4  # of them
LIMIT = 2e-2  # of the weights of a token, relative
logger = logging.getLogger(__name__)


class Router:
    """Chooses the experts of tokens, by the weight of a module (which may move, or be replaced)."""

    def __init__(self, gate: nn.Module, name: str, chosen: int, *, normalized: bool) -> None:
        self.gate, self.name, self.chosen, self.normalized = gate, name, chosen, normalized

    @property
    def weight(self) -> Float[Tensor, "e h"]:
        return self.gate.get_parameter(self.name)

    def __call__(self, y: Float[Tensor, "m h"]) -> tuple[Int[Tensor, "m s"], Float[Tensor, "m s"]]:
        """Experts and their weights."""
        return choose_experts(y, self.weight.detach(), self.chosen, normalized=self.normalized)


@torch.no_grad()
def router_of(mixture: Any) -> Router | None:
    """The router of a module that has one, with its weight, as `gate`, and `experts`; None where the kernels are not it."""
    gate, experts = getattr(mixture, "gate", None), mixture.experts
    if not isinstance(gate, nn.Module) or not isinstance(experts, Experts):
        return None
    if {name for name, _ in mixture.named_children()} != {"gate", "experts"} or has_hooks(mixture):
        return None
    parameters = list(gate.named_parameters())
    if len(parameters) != 1 or next(gate.buffers(), None) is not None:
        return None
    ((name, weight),) = parameters
    if weight.dim() != 2 or not weight.is_contiguous() or len(weight) != len(experts):
        return None
    if not supports(*weight.shape):
        return None
    y = torch.randn(TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    y = y.to(weight.device, weight.dtype)
    noted = _noted(mixture, experts, y)
    if noted is None:
        return None
    indices, weights = noted
    wanted = weights.float().new_zeros(TOKENS, len(experts)).scatter_(1, indices, weights.float())
    candidates = []
    for normalized in (True, False):
        router = Router(gate, name, indices.shape[1], normalized=normalized)
        try:
            found, own = router(y)
        except torch.OutOfMemoryError:
            raise
        except (TritonError, RuntimeError) as problem:
            _warn_once(type(problem).__name__)
            return None
        got = torch.zeros_like(wanted).scatter_(1, found.long(), own.float())
        errors = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
        candidates.append((int((errors > LIMIT).sum()), float(errors.median()), router))
    different, _, router = min(candidates, key=lambda own: own[:2])
    return router if different <= MOST_DIFFERENT else None


def _noted(
    mixture: Any, experts: Experts, y: Float[Tensor, "m h"]
) -> tuple[Int64[Tensor, "m s"], Float[Tensor, "m s"]] | None:
    """The experts and weights that a mixture chooses for y; None where it does more than call its experts."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    outputs = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)

    def note(*given: Tensor) -> Tensor:
        calls.append(given)  # pyright: ignore[reportArgumentType]
        return outputs

    step, prefill = experts.step, experts.prefill
    experts.step = experts.prefill = note
    try:
        found = mixture(y[None])
    finally:
        experts.step, experts.prefill = step, prefill
    if len(calls) != 1 or not isinstance(found, Tensor) or found.shape != (1, *y.shape):
        return None
    hidden, indices, weights = calls[0]
    if not torch.equal(hidden, y) or not torch.equal(found[0], outputs) or indices.dtype != torch.int64:
        return None
    return indices, weights


@cache
def _warn_once(problem: str) -> None:
    logger.warning(
        "routers of mixtures are the model's own, which is slower: their kernels do not compile or start on this machine "
        "(%s); please report it with the GPU and the versions of torch and triton",
        problem,
    )


def has_hooks(mixture: Any) -> bool:
    """Whether a hook hangs on a mixture, its router or its experts, so that their modules must be called."""
    modules = mixture, mixture.gate, mixture.experts
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)
