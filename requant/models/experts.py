"""Mixtures of experts: every expert becomes separate linears, so that whatever is done to a linear is done to an expert's.

    y_t = sum_{e in top k of t} g_te W_down_e (act(W_gate_e x_t) * W_up_e x_t)

transformers holds the experts of a layer fused, in the 3-D parameters `gate_up_proj` and `down_proj`, and its decorator
`use_experts_implementation` describes them: `is_transposed`, `is_concatenated` (otherwise gate and up are interleaved),
`has_bias`, `has_gate` (otherwise an expert is W_down act(W_up x), and `up_proj` replaces `gate_up_proj`: Nemotron-H).
`unfuse_experts` replaces each such module by `Experts`, which computes the same with one module per expert. Its linears
have the names used in the weight files (`experts.3.gate_proj`; Mixtral: `experts.3.w1`), or, if the files are fused too
(gpt-oss), those of most models. Routers stay as they are.

Llama 4 has the same parameters without the description, gives every expert all tokens, and weights the experts' inputs; a
layer of it becomes an `InputWeighted`, in which experts are called like all others.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from requant.models.stacked import stacked
from requant.models.weight_conversions import quick_conversions

USUAL_NAMES = ("gate_proj", "up_proj", "down_proj")
STEP_TOKENS = 64  # at most, that `Experts.step` takes: more are better multiplied as matrices
# At most, where there is an `Experts.prefill`: of Qwen3-30B-A3B's 128 experts, 2 bits, on an H200 the step took 73 us for 8
# tokens (prefill 93), 132 (126) for 16, 249 (177) for 32, 480 (205) for 64; of `pair` 91 (103) for 16, 321 (183) for 64.
# Both have become faster since: the step of 16 tokens takes 114 and 73.
STEP_TOKENS_BESIDE_PREFILL = 16
ALIGNMENT = 8  # of rows and columns of a matrix for `grouped_mm`: 16 bytes of bfloat16
grouped_mm: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm  # of torch 2.10, and of 2.9


class Expert(nn.Module):
    """One expert: its linears gate, up and down, or up and down, under the names in `names`; `fused` applies the model's
    own gating."""

    fused: Any

    def __init__(self, linears: Sequence[nn.Linear], names: Sequence[str], fused: Any) -> None:
        super().__init__()
        self.names = tuple(names)
        self.__dict__["fused"] = fused  # no child: every expert has the same
        for name, linear in zip(names, linears, strict=True):
            self.add_module(name, linear)

    def forward(self, x: Float[Tensor, "m h"]) -> Float[Tensor, "m h"]:
        *first, down = (self.get_submodule(name) for name in self.names)
        return down(self.activated(*(linear(x) for linear in first)))

    @property
    def has_gate(self) -> bool:
        return len(self.names) == len(USUAL_NAMES)

    def activated(self, *first: Float[Tensor, "m f"]) -> Float[Tensor, "m f"]:
        """What the model makes of the outputs of all linears but the last."""
        return self.gated(*first) if self.has_gate else self.fused.act_fn(*first)

    def gated(self, gate: Float[Tensor, "m f"], up: Float[Tensor, "m f"]) -> Float[Tensor, "m f"]:
        """Mostly act(gate) * up."""
        joined = (
            torch.cat((gate, up), -1)
            if self.fused.is_concatenated
            else torch.stack((gate, up), -1).flatten(-2)
        )
        return self.fused._apply_gate(joined)


class Experts(nn.ModuleList):
    """All experts of a layer, called as transformers calls its fused module.

    An expert is called once, with the tokens that are routed to it, and not at all where there are none. With
    `sees_all_tokens` every expert is called with all tokens, for statistics; the result is the same. With `grouped`, and
    under autocast, no expert is called: the products of one kind are one `grouped_mm`, and the host does not learn where
    tokens go. `step`, where an engine gives one, computes few tokens in its place, and `prefill` more of them
    (`inference/experts.py`).
    """

    def __init__(self, experts: Sequence[Expert], *, fused_in_files: bool) -> None:
        super().__init__(experts)
        self.names = experts[0].names
        self.fused_in_files = fused_in_files  # the original's weight files have no tensors of single experts
        self.sees_all_tokens = self.grouped = False
        self.step: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self.prefill: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(
        self,
        hidden_states: Float[Tensor, "m h"],
        top_k_index: Int64[Tensor, "m s"],
        top_k_weights: Float[Tensor, "m s"],
    ) -> Float[Tensor, "m h"]:
        few = STEP_TOKENS if self.prefill is None else STEP_TOKENS_BESIDE_PREFILL
        served = self.step if len(hidden_states) <= few else self.prefill
        if served is not None:
            return served(hidden_states, top_k_index, top_k_weights)
        if self.sees_all_tokens:
            weights = top_k_weights.new_zeros(len(hidden_states), len(self))
            weights.scatter_(1, top_k_index, top_k_weights)
            outputs = [expert(hidden_states) * weights[:, e, None] for e, expert in enumerate(self)]
            return torch.stack(outputs).sum(0).to(hidden_states.dtype)
        by_expert = top_k_index.flatten().argsort(stable=True)
        x = hidden_states[by_expert // top_k_index.shape[1]]
        if self.grouped and torch.is_autocast_enabled(x.device.type):
            found = self._grouped(x, top_k_index.flatten()[by_expert])
        else:
            counts = top_k_index.flatten().bincount(minlength=len(self)).tolist()
            found = torch.cat([
                expert(own) for expert, own in zip(self, x.split(counts), strict=True) if len(own)
            ])  # fmt: skip
        outputs = found[by_expert.argsort()].view(*top_k_index.shape, -1)
        return (outputs * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _grouped(self, x: Float[Tensor, "r h"], experts: Int64[Tensor, " r"]) -> Float[Tensor, "r h"]:
        """Row i of x through expert `experts[i]`, in autocast's type; rows are in the order of experts."""
        dtype = torch.get_autocast_dtype(x.device.type)
        ends = torch.searchsorted(experts, torch.arange(len(self), device=x.device), right=True).int()
        used = torch.diff(ends, prepend=ends.new_zeros(1))[:, None, None] > 0

        def product(x: Tensor, name: str) -> Tensor:
            linears = [getattr(expert, name) for expert in self]  # a hundred: the shortest way to them
            weight = stacked([linear.weight for linear in linears]).to(dtype)
            # on Blackwell the gradient of an expert without tokens is not zero: pytorch issue 172439
            if weight.requires_grad:
                weight.register_hook(lambda g: torch.where(used, g, 0.0))
            y = grouped_mm(x.to(dtype), weight.mT, offs=ends)
            if y.requires_grad:  # its backward pass takes no gradients of interleaved gates as they come
                y.register_hook(Tensor.contiguous)
            if linears[0].bias is None:
                return y
            return y + torch.stack([linear.bias for linear in linears]).to(dtype)[experts]

        *first, down = self.names
        expert: Any = self[0]
        return product(expert.activated(*(product(x, name) for name in first)), down)


class InputWeighted(nn.Module):
    """A layer of Llama 4: the router's sigmoid multiplies what an expert reads, not what it gives."""

    top_k: int

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.router, self.experts, self.shared_expert = layer.router, layer.experts, layer.shared_expert
        self.top_k = layer.top_k

    def forward(
        self, hidden_states: Float[Tensor, "*m h"]
    ) -> tuple[Float[Tensor, "t h"], Float[Tensor, "t e"]]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)
        chosen = logits.topk(self.top_k, dim=-1).indices
        weighed = (x[:, None] * scores.gather(1, chosen)[..., None]).flatten(0, 1)
        routed = self.experts(weighed, chosen.view(-1, 1), torch.ones_like(weighed[:, :1]))
        return self.shared_expert(x) + routed.view(len(x), self.top_k, -1).sum(1), logits


def unfuse_experts(model: nn.Module) -> None:
    """Replace every fused module of experts in `model` by `Experts`, in place, also on the meta device.

    Modules in a layout that transformers does not describe stay as they are; `targets.find_linears` refuses those. The
    fused parameters of a layer are freed before those of the next one are copied.
    """
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "Llama4TextMoe" and not isinstance(module.experts, Experts):
            _describe(module.experts)
            model.set_submodule(path, InputWeighted(module))
    fused = [(path, module) for path, module in model.named_modules() if _is_fused(module)]
    with quick_conversions(model):
        for path, module in fused:
            names = _names_in_files(model, path, module)
            usual = USUAL_NAMES[0 if module.has_gate else 1 :]
            experts = [Expert(linears, names or usual, module) for linears in _linears(module)]
            for name in dict(module.named_parameters()):
                delattr(module, name)  # what stays in it is the gating
            model.set_submodule(path, Experts(experts, fused_in_files=not names))


def routers(model: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices that choose or weigh experts, by name: those beside `Experts` with a row an expert, or a single row, and all
    of a module that is called a router (ZAYA's is an MLP, with a row more for no expert).

    They are a thousandth of the weights and decide what all others compute, so they are learnt but never quantized.
    """
    found: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            parent = path.rpartition(".")[0]
            beside = model.get_submodule(parent)
            whole = [child for child in beside.children() if "Router" in type(child).__name__]
            of_routers = {id(parameter) for child in whole for parameter in child.parameters()}
            for name, parameter in beside.named_parameters(prefix=parent):
                chooses = id(parameter) in of_routers or len(parameter) in (1, len(module))
                if parameter.dim() == 2 and chooses and not name.startswith(f"{path}."):
                    found[name] = parameter
    return found


def fused_again(layer: Experts, tensor_of: Callable[[int, str, str], Tensor]) -> dict[str, Tensor]:
    """The 3-D parameters that `layer` was made of, by name; `tensor_of(3, "up_proj", "bias")` is a tensor of one expert."""
    expert: Any = layer[0]
    fused = expert.fused
    found: dict[str, Tensor] = {}
    for kind in ("weight", "bias") if fused.has_bias else ("weight",):
        rows: tuple[list[Tensor], list[Tensor]] = [], []
        for e in range(len(layer)):
            *first, down = (tensor_of(e, name, kind) for name in layer.names)
            rows[0].append(torch.cat(first) if fused.is_concatenated else torch.stack(first, 1).flatten(0, 1))
            rows[1].append(down)
        for name, tensors in zip(_fused_names(fused), rows, strict=True):
            joined = torch.stack(tensors)
            transposed = kind == "weight" and fused.is_transposed
            found[name if kind == "weight" else f"{name}_bias"] = (
                joined.mT if transposed else joined
            ).contiguous()
    return found


def has_experts(block: nn.Module) -> bool:
    """Whether a block's MLP is a mixture of experts, unfused or as transformers holds them."""
    experts = getattr(getattr(block, "mlp", None), "experts", None)
    return isinstance(experts, Experts) or _is_fused(experts)


def fuses_experts(conversion: Any) -> bool:
    """Whether a conversion that transformers applies to weight files makes fused experts of single ones."""
    from transformers.core_model_loading import WeightConverter  # late: see `integrations/transformers.py`

    targets = conversion.target_patterns if isinstance(conversion, WeightConverter) else ()
    return any(re.search(r"experts\\?\.(gate_up|up|down)_proj$", target) for target in targets)


@contextmanager
def all_tokens_to_every_expert(model: nn.Module) -> Iterator[None]:
    """Every expert of the model sees all tokens while the context lasts; outputs do not change."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    for layer in layers:
        layer.sees_all_tokens = True
    try:
        yield
    finally:
        for layer in layers:
            layer.sees_all_tokens = False


@contextmanager
def grouped_products(model: nn.Module) -> Iterator[None]:
    """Experts of the model compute in grouped products under autocast while the context lasts, so that a step of training
    can be captured.

    Hooks on their linears are not called. Matrices that `grouped_mm` does not take stay with one call an expert.
    """
    layers = [module for module in model.modules() if isinstance(module, Experts) and _can_group(module)]
    for layer in layers:
        layer.grouped = True
    try:
        yield
    finally:
        for layer in layers:
            layer.grouped = False


def _can_group(experts: Experts) -> bool:
    weights = [parameter for parameter in experts.parameters() if parameter.dim() == 2]
    if any(size % ALIGNMENT for weight in weights for size in weight.shape):
        return False
    return not weights[0].is_cuda or torch.cuda.get_device_capability(weights[0].device) >= (8, 0)


def _is_fused(module: Any) -> bool:
    """Whether a module holds experts in 3-D parameters of a layout that its attributes describe.

    `has_post_expert_norm` is missing before the first models that have one (transformers 5.8 to 5.17, at least).
    """
    described = ("_apply_gate", "is_transposed", "is_concatenated", "has_bias", "has_gate")
    if not all(hasattr(module, name) for name in described) or getattr(module, "has_post_expert_norm", False):
        return False
    names = _fused_names(module)
    biases = {f"{name}_bias" for name in names} if module.has_bias else set()
    return set(dict(module.named_parameters())) == {*names, *biases}


def _describe(fused: Any) -> None:
    """Give Llama 4's experts the attributes by which transformers describes those of others."""
    fused.is_transposed = fused.is_concatenated = fused.has_gate = True
    fused.has_bias = fused.has_post_expert_norm = False
    fused._apply_gate = partial(_gated, fused)


def _gated(fused: Any, joined: Float[Tensor, "m g"]) -> Float[Tensor, "m f"]:
    gate, up = joined.chunk(2, dim=-1)
    return fused.act_fn(gate) * up


def _fused_names(fused: Any) -> tuple[str, str]:
    """The 3-D parameters of a module of experts."""
    return "gate_up_proj" if fused.has_gate else "up_proj", "down_proj"


def _linears(fused: Any) -> Iterator[tuple[nn.Linear, ...]]:
    """Copies of gate, up and down of every expert, or of up and down."""
    names = _fused_names(fused)
    for e in range(len(fused.down_proj)):
        first, down = (
            getattr(fused, name)[e].T if fused.is_transposed else getattr(fused, name)[e] for name in names
        )
        biases = [getattr(fused, f"{name}_bias")[e] if fused.has_bias else None for name in names]
        parts = [slice(None)]
        if fused.has_gate and fused.is_concatenated:
            parts = [slice(0, len(first) // 2), slice(len(first) // 2, None)]
        elif fused.has_gate:
            parts = [slice(0, None, 2), slice(1, None, 2)]
        bias = biases[0]
        linears = [_linear(first[part], None if bias is None else bias[part]) for part in parts]
        yield *linears, _linear(down, biases[1])


def _linear(weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None) -> nn.Linear:
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=bias is not None, device="meta")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            setattr(linear, name, nn.Parameter(copy, requires_grad=weight.requires_grad))
    return linear


def _names_in_files(model: nn.Module, path: str, module: Any) -> tuple[str, ...]:
    """What weight files call the linears of an expert of the module at `path`; empty where they are fused there."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    found: list[str] = []
    if isinstance(model, PreTrainedModel):
        for name in _fused_names(module):
            fused = torch.empty(1, 2 if name == "gate_up_proj" else 1, 1)
            found += revert_weight_conversion(model, {f"{path}.{name}": fused})
    matches = [re.search(r"\.0\.(\w+)\.weight$", name) for name in found]
    return tuple(match[1] for match in matches if match)
