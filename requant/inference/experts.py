"""Mixtures of experts served: for few tokens all chosen experts of a layer in a few launches, which a CUDA graph can hold.

`group_experts` stacks the kernels' layouts of all experts of a layer (`requant_kernels/experts/`), and gives `Experts` the
step that multiplies them. The experts' own layers stay, as views of the stacks, for prompts: those run expert by expert. The
step is checked, as single matrices are (`kernel_check.py`), against the experts one by one; where it cannot be, or is wrong
on this machine, nothing changes, and the log says so.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from requant_kernels.experts.stack import ExpertStack, stack_experts
from requant_kernels.experts.step import experts_step, supports
from torch import Tensor

from requant.inference.convert import KernelLinear
from requant.inference.kernel_check import LIMIT, TritonError
from requant.models.experts import Expert, Experts

CHECKED_TOKENS, CHECKED_EXPERTS = 5, 2
logger = logging.getLogger(__name__)


class ExpertsStep:
    """`Experts.step` of a layer by the kernels."""

    def __init__(self, layer: Experts) -> None:
        expert: Any = layer[0]
        gates, ups, downs = ([each.get_submodule(name) for each in layer] for name in layer.names)
        self.gate_up, self.down = _stacked([*gates, *ups], parts=2), _stacked(downs, parts=1)
        self.gated = None if _is_silu(expert) else expert.gated

    def __call__(
        self, x: Float[Tensor, "m h"], experts: Int64[Tensor, "m s"], weights: Float[Tensor, "m s"]
    ) -> Float[Tensor, "m h"]:
        return _uncompiled(x.contiguous(), self.gate_up, self.down, experts, weights, gated=self.gated)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides which programs run."""
        stacks = self.gate_up, self.down
        shapes = [(s.layout.code, *sorted(s.by_bits), s.n, s.k, s.biases is None) for s in stacks]
        return *shapes, self.gate_up.experts, self.gated is None


def _launches(*arguments: Any, **options: Any) -> Any:
    return experts_step(*arguments, **options)


_uncompiled: Any = torch.compiler.disable(
    _launches
)  # the compiler's graph breaks here; launches can still be captured


@torch.no_grad()
def group_experts(model: Any) -> None:
    """Give every layer of experts, whose matrices are the kernels' already, its step for few tokens."""
    refused: Counter[str] = Counter()
    checked: set[tuple[Any, ...]] = set()
    for layer in (module for module in model.modules() if isinstance(module, Experts)):
        try:
            step = ExpertsStep(layer)
            if step.kind not in checked:
                _check(step, layer, model.dtype)
                checked.add(step.kind)
        except ValueError as reason:
            refused[str(reason)] += 1
        else:
            layer.step = step
    for reason, count in refused.items():
        logger.warning("%d layers of experts are served expert by expert, which is slow: %s", count, reason)


def _stacked(linears: Sequence[Any], *, parts: int) -> ExpertStack:
    """The stack of these layers' matrices, whose codes become views of it."""
    if not all(isinstance(linear, KernelLinear) and linear.trellis for linear in linears):
        raise ValueError("only trellis codes have a step for all experts")
    if not supports(linears[0].packed_codes.device):
        raise ValueError("this GPU takes no inline PTX")
    biases = [linear.bias for linear in linears if linear.bias is not None]
    stack = stack_experts([linear.layout for linear in linears], parts=parts, biases=biases or None)
    for index, linear in enumerate(linears):
        linear.packed_codes, linear.held = stack.codes(index), None
    return stack


def _is_silu(expert: Expert) -> bool:
    """Whether the model's gate is silu(gate) * up, by values."""
    gate, up = torch.linspace(-4, 4, 16)[None], torch.linspace(3, -2, 16)[None]
    return torch.allclose(expert.gated(gate, up), torch.nn.functional.silu(gate) * up)


def _check(step: ExpertsStep, layer: Experts, dtype: torch.dtype) -> None:
    """Raises ValueError where the step is not what the layer's experts compute one by one."""
    device, generator = step.down.output_scales.device, torch.Generator().manual_seed(0)
    tokens, count = CHECKED_TOKENS, min(CHECKED_EXPERTS, len(layer))
    chosen = torch.stack([torch.randperm(len(layer), generator=generator)[:count] for _ in range(tokens)])
    weights = torch.rand(tokens, count, generator=generator).to(device, dtype)
    x = torch.randn(tokens, step.gate_up.k, generator=generator).to(device, dtype)
    wanted = layer(x, chosen.to(device), weights)
    for part in (slice(0, 1), slice(None)):  # launches of one token differ from those of several
        try:
            found = step(x[part], chosen[part].to(device), weights[part])
        except torch.OutOfMemoryError:
            raise
        except (TritonError, RuntimeError) as problem:
            raise ValueError(
                f"its kernels do not compile or start on this machine ({type(problem).__name__}); please report it with "
                "the GPU and the versions of torch and triton"
            ) from problem
        error = (found - wanted[part]).float().norm() / wanted[part].float().norm().clamp(min=1e-30)
        if not error <= LIMIT:
            raise ValueError(
                f"its kernels are wrong on this machine (relative error {error:.2g}); please report it with the GPU and "
                "the versions of torch and triton"
            )
