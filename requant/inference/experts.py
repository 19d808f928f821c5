"""Serving mixtures of experts: all chosen experts of a layer in a few launches, which a CUDA graph can hold.

`group_experts` stacks the kernels' layouts of all experts of a layer (`requant_kernels/experts/`), and gives `Experts` the
step that multiplies them for up to 64 tokens, and on Hopper the prefill from 17 tokens on (in bfloat16 as well as float16:
its products are of float16 weights). The experts' own layers remain, as views of the stacks: elsewhere prompts run expert
by expert.

As single matrices are (`kernel_check.py`), both are checked against the experts computed one by one; if one cannot be
checked, or is wrong on this machine, it is not used, and the log says so.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Int64
from requant_kernels.common.compile_ahead import compile_ahead
from requant_kernels.experts.prefill import experts_prefill
from requant_kernels.experts.prefill import supports as supports_prefill
from requant_kernels.experts.stack import ExpertStack, stack_experts
from requant_kernels.experts.step import experts_step, input_form, supports
from requant_kernels.trellis.gemm_sm90_launch import GROUP_TOKENS
from requant_kernels.trellis.gemv_launch import MANY_SLOTS
from requant_kernels.trellis.layout import TrellisLayout
from requant_kernels.trellis.operands import RotatedActivations
from torch import Tensor

from requant.inference.kernel_check import TritonError
from requant.inference.kernel_layers import KernelLinear
from requant.inference.router import Router, router_of
from requant.models.experts import Expert, Experts

CHECKED_PROMPT, CHECKED_EXPERTS = 200, 2
# launches differ by the number of slots: of one token, of several, and of many
CHECKED_TOKENS = (1, 5, MANY_SLOTS // CHECKED_EXPERTS + 1)
# relative: one by one, three products of a prompt round to int8; a wrong index is of the order of 1
LIMIT = 5e-2
logger = logging.getLogger(__name__)


class ExpertsStep:
    """`Experts.step` of a layer by the kernels."""

    def __init__(self, layer: Experts, widths: "Widths | None" = None) -> None:
        """`widths`: of all layers of the model."""
        expert: Any = layer[0]
        if not expert.has_gate:
            raise ValueError("only experts with a gate have a step for all of them")
        gates, ups, downs = ([each.get_submodule(name) for each in layer] for name in layer.names)
        self.gate_up, self.down = (
            _stacked(linears, parts=parts, widths=widths or {})
            for linears, parts in (([*gates, *ups], 2), (downs, 1))
        )
        self.gated = None if is_silu(expert) else expert.gated
        self.input_form, self.input_scales = input_form(self.gate_up), self.gate_up.layout.input_scales
        self.router: Router | None = None  # where the kernels choose experts as the model does

    def __call__(
        self, x: Float[Tensor, "m h"], experts: Int64[Tensor, "m s"], weights: Float[Tensor, "m s"]
    ) -> Float[Tensor, "m h"]:
        return _uncompiled(x.contiguous(), self.gate_up, self.down, experts, weights, gated=self.gated)

    def add(
        self,
        x: RotatedActivations,
        experts: Int[Tensor, "m s"],
        weights: Float[Tensor, "m s"],
        *,
        into: Float[Tensor, "m h"],
    ) -> None:
        """Add what the experts make of activations that are rotated already, in `input_form` and with `input_scales`."""
        _uncompiled(x, self.gate_up, self.down, experts, weights, gated=self.gated, into=into)

    @property
    def device(self) -> torch.device:
        return self.down.output_scales.device

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides which programs run."""
        stacks = self.gate_up, self.down
        shapes = [(s.layout.code, *sorted(s.by_bits), s.n, s.k, s.biases is None) for s in stacks]
        return *shapes, self.gate_up.experts, self.gated is None


class ExpertsPrefill:
    """`Experts.prefill` of a layer, by the stacks of its step."""

    def __init__(self, step: ExpertsStep) -> None:
        self.step = step

    def __call__(
        self,
        x: Float[Tensor, "m h"],
        experts: Int64[Tensor, "m s"],
        weights: Float[Tensor, "m s"],
        *,
        into: Float[Tensor, "m h"] | None = None,
        tokens_per_cta: int | None = None,
    ) -> Float[Tensor, "m h"]:
        """`into`: what the sum is added to; `tokens_per_cta`: in place of what the kernels' rule says for so many tokens."""
        step = self.step
        return _uncompiled_prefill(
            x.contiguous(), step.gate_up, step.down, experts, weights, gated=step.gated, into=into,
            tokens_per_cta=tokens_per_cta,
        )  # fmt: skip


def _launches(*arguments: Any, **options: Any) -> Any:
    return experts_step(*arguments, **options)


def _launches_of_prefill(*arguments: Any, **options: Any) -> Any:
    return experts_prefill(*arguments, **options)


# the compiler's graph breaks here; launches can still be captured
_uncompiled: Any = torch.compiler.disable(_launches)
_uncompiled_prefill: Any = torch.compiler.disable(_launches_of_prefill)


@torch.no_grad()
def group_experts(model: Any) -> None:
    """Give every layer of experts, whose matrices are the kernels' already, its step for few tokens, and its prefill."""
    refused: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[Any, ...], str | None] = {}  # of what was checked, by kind
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    widths = widths_of(layers)
    for layer in layers:
        layer.step = layer.prefill = None
        try:
            step = ExpertsStep(layer, widths)
        except ValueError as reason:
            refused["layers of experts are", str(reason)] += 1
            continue
        key = "step", step.kind
        if key not in reasons:
            reasons[key] = _refusal(_check_step, step, layer, model.dtype)
        if (reason := reasons[key]) is not None:
            refused["layers of experts are", reason] += 1
            continue
        prefill, key = ExpertsPrefill(step), ("prefill", step.kind)
        if key not in reasons and supports_prefill(step.device):
            reasons[key] = _refusal(_check_prefill, prefill, layer, model.dtype)
        layer.step = step
        if key in reasons and reasons[key] is None:
            layer.prefill = prefill
        elif key in reasons:
            refused["prompts of layers of experts are", str(reasons[key])] += 1
    for mixture in model.modules():
        step = getattr(getattr(mixture, "experts", None), "step", None)
        if isinstance(step, ExpertsStep):
            step.router = router_of(mixture)
    for (what, reason), count in refused.items():
        logger.warning("%d %s served expert by expert, which is slow: %s", count, what, reason)


Widths = Mapping[tuple[int, int], Iterable[float]]  # rows and columns of a matrix -> bits


def widths_of(layers: Iterable[Experts]) -> Widths:
    """The bits of the experts' matrices by their size, over all layers: those share programs."""
    found: dict[tuple[int, int], set[float]] = {}
    for linear in (module for layer in layers for module in layer.modules()):
        if isinstance(linear, KernelLinear) and isinstance(linear.layout, TrellisLayout):
            layout = linear.layout
            found.setdefault((layout.n, layout.k), set()).add(layout.bits)
    return found


def _refusal(check: Callable[..., None], served: Any, layer: Experts, dtype: torch.dtype) -> str | None:
    """Why a check does not let it pass."""
    try:
        check(served, layer, dtype)
    except ValueError as reason:
        return str(reason)
    return None


def _stacked(linears: Sequence[Any], *, parts: int, widths: Widths) -> ExpertStack:
    """The stack of these layers' matrices, whose codes become views of it."""
    if not all(isinstance(linear, KernelLinear) and linear.trellis for linear in linears):
        raise ValueError("only trellis codes have a step for all experts")
    if not supports(linears[0].packed_codes.device):
        raise ValueError("this GPU takes no inline PTX")
    biases = [linear.bias for linear in linears if linear.bias is not None]
    layouts = [linear.layout for linear in linears]
    known = widths.get((layouts[0].n, layouts[0].k))
    stack = stack_experts(layouts, parts=parts, biases=biases or None, widths=known)
    for index, linear in enumerate(linears):
        linear.packed_codes, linear.held = stack.codes(index), None
    return stack


def is_silu(expert: Expert) -> bool:
    """Whether the model's gate is silu(gate) * up, by values: large ones too, for some models clamp both."""
    gate, up = torch.linspace(-4, 4, 16)[None], torch.linspace(3, -2, 16)[None]
    gate, up = torch.cat([gate, 1000 * gate], dim=1), torch.cat([up, 1000 * up], dim=1)
    return torch.allclose(expert.gated(gate, up), torch.nn.functional.silu(gate) * up)


def _check_step(step: ExpertsStep, layer: Experts, dtype: torch.dtype) -> None:
    """Raises ValueError where the step is not what the layer's experts compute one by one."""
    x, chosen, weights, wanted = _example(step, layer, dtype, CHECKED_TOKENS[-1])
    parts = [slice(0, tokens) for tokens in CHECKED_TOKENS]
    if x.is_cuda:
        compile_ahead(lambda: [step(x[part], chosen[part], weights[part]) for part in parts])
    for part in parts:
        _compare(lambda part=part: step(x[part], chosen[part], weights[part]), wanted[part])


def _check_prefill(prefill: ExpertsPrefill, layer: Experts, dtype: torch.dtype) -> None:
    """The same of the prefill, by all of its kernels."""
    x, chosen, weights, wanted = _example(prefill.step, layer, dtype, CHECKED_PROMPT)
    calls = [lambda own=own: prefill(x, chosen, weights, tokens_per_cta=own) for own in GROUP_TOKENS]
    if x.is_cuda:
        compile_ahead(lambda: [call() for call in calls])
    for call in calls:
        _compare(call, wanted)


def _example(
    step: ExpertsStep, layer: Experts, dtype: torch.dtype, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights, and what the experts make of them one by one."""
    device, generator = step.device, torch.Generator().manual_seed(0)
    count = min(CHECKED_EXPERTS, len(layer))
    chosen = torch.stack([torch.randperm(len(layer), generator=generator)[:count] for _ in range(tokens)])
    chosen, weights = chosen.to(device), torch.rand(tokens, count, generator=generator).to(device, dtype)
    x = torch.randn(tokens, step.gate_up.k, generator=generator).to(device, dtype)
    return x, chosen, weights, layer(x, chosen, weights)


def _compare(call: Callable[[], Tensor], wanted: Tensor) -> None:
    """Raises ValueError where a call does not give what is wanted."""
    try:
        found = call()
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError) as problem:
        raise ValueError(
            f"its kernels do not compile or start on this machine ({type(problem).__name__}); please report it with "
            "the GPU and the versions of torch and triton"
        ) from problem
    error = (found - wanted).float().norm() / wanted.float().norm().clamp(min=1e-30)
    if not error <= LIMIT:
        raise ValueError(
            f"its kernels are wrong on this machine (relative error {error:.2g}); please report it with the GPU and "
            "the versions of torch and triton"
        )
