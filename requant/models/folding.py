"""Folding rotations and norm weights into the matrices of a model (`rotations.py`), and which models allow it.

No architecture is named: what counts is that the modules of a block are those of Llama, that its norms compute what
RMSNorm does, and that the folded model gives the logits of the original. Mistral, Qwen2, Qwen3 (whose q and k norms come
after the matrices), Phi-3 (fused q, k and v; gate and up) and others built like them qualify. Gemma (which has norms after
the matrices too), models with LayerNorm and mixtures of experts do not; there every matrix keeps its own rotations.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from requant.errors import ModelError
from requant.formats.hadamard import TILE
from requant.models.rotations import Rotation, add_head_scales, rotate_stream
from requant.models.targets import QuantTarget, find_blocks

# Modules of a block that have parameters: what reads the stream, by the norm before it; what writes it; what does neither.
READERS = {
    f"{parent}.{name}": norm
    for parent, norm, names in (
        ("self_attn", "input_layernorm", ("q_proj", "k_proj", "v_proj", "qkv_proj")),
        ("mlp", "post_attention_layernorm", ("gate_proj", "up_proj", "gate_up_proj")),
    )
    for name in names
}
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
NEITHER = ("self_attn.q_norm", "self_attn.k_norm")
VALUES = ("self_attn.v_proj", "self_attn.qkv_proj")  # of the latter the last rows
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the logits, relative


def obstacle(model: PreTrainedModel) -> str | None:
    """Why rotations cannot be folded into a model; None if they can."""
    path, blocks = find_blocks(model)
    norm: Any = getattr(model.base_model, "norm", None)
    if norm is None or model.get_output_embeddings() is None:
        return f"{type(model).__name__} has no `norm` before a head"
    for index, block in enumerate(blocks):
        names = {name for name, module in block.named_modules() if has_parameters(module)}
        if unknown := sorted(names - {*READERS, *READERS.values(), *WRITERS, *NEITHER}):
            return f"{path}.{index}.{unknown[0]} is none of the modules of a Llama"
        if missing := sorted({*READERS.values(), *WRITERS} - names):
            return f"{path}.{index} has no {missing[0]}"
        for name in dict.fromkeys(READERS.values()):
            if not is_rms_norm(block.get_submodule(name)):
                return f"{path}.{index}.{name} is not an RMSNorm with a weight"
    if not is_rms_norm(norm):
        return "its final norm is not an RMSNorm with a weight"
    hidden_size, head_dim = norm.weight.shape[0], head_dim_of(model)
    widths = [
        hidden_size,
        *(block.get_submodule(WRITERS[0]).get_parameter("weight").shape[1] for block in blocks),
    ]
    if any(width % TILE for width in widths) or widths[-1] % head_dim:
        return f"its hidden size {hidden_size} or its heads are not multiples of {TILE}"
    return None


def rotated_targets(targets: Sequence[QuantTarget]) -> list[QuantTarget]:
    """The matrices of a folded model, with what is left to the quantizer: the input of `down_proj`."""

    def options(target: QuantTarget) -> dict[str, bool]:
        return {"rotate_input": target.name.endswith(WRITERS[1]), "rotate_output": False}

    return [replace(target, options={**target.options, **options(target)}) for target in targets]


def has_parameters(module: nn.Module) -> bool:
    """Whether the module has parameters of its own."""
    return next(module.parameters(recurse=False), None) is not None


def is_rms_norm(norm: nn.Module) -> bool:
    """Whether a module computes weight * x / rms(x), tried on random numbers."""
    parameters = dict(norm.named_parameters())
    if parameters.keys() != {"weight"}:
        return False
    weight = parameters["weight"]
    x = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        expected = functional.rms_norm(x.float(), (weight.shape[0],), weight.float(), 1e-6)
        return bool((norm(x).float() - expected).norm() <= 2e-2 * expected.norm())


def head_dim_of(model: PreTrainedModel) -> int:
    """Columns of an attention head."""
    config = model.config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@torch.no_grad()
def fold(model: PreTrainedModel, *, seed: int) -> Rotation:
    """Fold the rotations of `seed` into a model without an `obstacle`, in place.

    Raises ModelError where its logits change: an architecture that computes otherwise than its modules are named.
    """
    tokens = torch.arange(32, device=model.device)[None] % model.config.get_text_config().vocab_size
    before = model(input_ids=tokens, use_cache=False).logits.float()
    rotation = Rotation(seed=seed)
    norm: Any = model.base_model.norm
    for block in find_blocks(model)[1]:
        fold_block(block, rotation, model)
    head_scales = norm.weight.detach().clone()
    del norm.weight  # a parameter would be trained; its place in the file stays
    norm.register_buffer("weight", torch.ones_like(head_scales))
    add_head_scales(model, head_scales)
    rotate_stream(model, rotation)
    after = model(input_ids=tokens, use_cache=False).logits.float()
    error = ((after - before).norm() / before.norm()).item()
    if not error <= TOLERANCE.get(model.dtype, 1e-1):  # NaN is not
        raise ModelError(
            f"folding rotations changes the logits of {type(model).__name__} by {error:.1%}; leave out --rotations folded."
        )
    return rotation


def fold_block(block: nn.Module, rotation: Rotation, model: PreTrainedModel) -> None:
    """Rotate the matrices of a block, and set the weights of its norms to 1."""
    modules: dict[str, Any] = {
        name: module for name, module in block.named_modules() if has_parameters(module)
    }
    head_dim = head_dim_of(model)
    for name, norm in READERS.items():
        if name in modules:
            weight = modules[name].weight
            weight.copy_(rotation.stream(weight.float() * modules[norm].weight.float()))
    for norm in dict.fromkeys(READERS.values()):
        modules[norm].weight.fill_(1)
    for name in VALUES:
        if name in modules:
            rows = value_rows(modules[name].weight.shape[0], model, fused=name != VALUES[0])
            for tensor in modules[name].parameters():  # the bias too
                values = rotation.heads(tensor[rows].float().movedim(0, -1), head_dim)
                tensor[rows] = values.movedim(-1, 0).to(tensor.dtype)
    output = modules[WRITERS[0]].weight
    output.copy_(rotation.heads(output.float(), head_dim))
    for name in WRITERS:
        for tensor in modules[name].parameters():
            tensor.copy_(rotation.stream(tensor.float().movedim(0, -1)).movedim(-1, 0))


def value_rows(rows: int, model: PreTrainedModel, *, fused: bool) -> slice:
    """The rows of the values: all, or the last ones of a fused matrix."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return slice(rows - heads * head_dim_of(model), rows) if fused else slice(0, rows)


def unfold(
    name: str, tensor: Tensor, rotation: Rotation, tensor_of: Callable[[str], Tensor]
) -> Float[Tensor, "..."]:
    """A tensor of a folded model, by its name in the file, in the basis of the original; `tensor_of` gives the others.

    The norms before matrices have weights of 1 then, as theirs are in the matrices. Values stay rotated by head, and so do
    the columns of o_proj that meet them.
    """
    module, _, kind = name.rpartition(".")
    for reader, norm in READERS.items():
        if module.endswith(f".{reader}"):
            if kind == "bias":
                return tensor
            scales = tensor_of(f"{module.removesuffix(reader)}{norm}.weight")
            return rotation.stream_back(tensor.float() * scales.float())
        if module.endswith(f".{norm}"):
            return torch.ones_like(tensor)
    if module.endswith(tuple(f".{writer}" for writer in WRITERS)):
        return rotation.stream_back(tensor.float().movedim(0, -1)).movedim(-1, 0)
    return tensor
