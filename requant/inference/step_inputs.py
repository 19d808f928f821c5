"""The inputs of a fused step: the tokens' rows of the embedding, and RoPE's cosines and sines of the position.

A model's own modules take ten launches for them. If the angles depend on the position alone, the model's own RoPE is
evaluated once for every position of the cache, and a step reads a row of the result: the same numbers, whatever scaling
made them. If a row is all that the embedding gives, one launch copies it as well (`requant_kernels/step/embed.py`); an
embedding in codes looks its own rows up, or they are a product that the first norm finishes (`trellis_ends.py`).
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from requant_kernels.step.embed import embed
from requant_kernels.trellis.operands import Product
from torch import Tensor, nn

FIXED_ROPE = {"default", "linear", "llama3", "yarn"}  # the others change with the length of the text
# x, cosines, sines, and what is still to be added to x
StepInputs = tuple[
    Float[Tensor, "b d"], Float[Tensor, "b head_dim"], Float[Tensor, "b head_dim"], Product | None
]


class RowInputs:
    """Inputs of a step from a plain embedding and fixed angles: one launch."""

    def __init__(self, model: Any, length: int) -> None:
        self.embedding = model.get_input_embeddings()
        self.cos, self.sin = angles_of(model, length)

    def __call__(self, tokens: Int64[Tensor, "b 1"], position: Int64[Tensor, ""]) -> StepInputs:
        x, cos, sin = embed(tokens, self.embedding.weight, self.cos, self.sin, position)
        return x, cos.expand(len(x), -1), sin.expand(len(x), -1), None


class AngleInputs:
    """Inputs of a step from any embedding and fixed angles: the embedding's own launches, and one more."""

    def __init__(self, model: Any, length: int) -> None:
        self.embedding = model.get_input_embeddings()
        self.angles = torch.stack(angles_of(model, length), dim=1)

    def __call__(self, tokens: Int64[Tensor, "b 1"], position: Int64[Tensor, ""]) -> StepInputs:
        x = self.embedding(tokens).flatten(0, 1)
        cos, sin = self.angles.index_select(0, position.view(1)).unbind(1)
        return x, cos.expand(len(x), -1), sin.expand(len(x), -1), None


class ModelInputs:
    """Inputs of a step by the model's own modules, whatever they are."""

    def __init__(self, model: Any) -> None:
        self.embedding, self.rotary = model.get_input_embeddings(), model.base_model.rotary_emb

    def __call__(self, tokens: Int64[Tensor, "b 1"], position: Int64[Tensor, ""]) -> StepInputs:
        x = self.embedding(tokens)
        cos, sin = (part[0].expand(len(x), -1) for part in self.rotary(x, position.view(1, 1)))
        return x.flatten(0, 1), cos, sin, None


@torch.no_grad()
def angles_of(
    model: Any, length: int
) -> tuple[Float[Tensor, "length head_dim"], Float[Tensor, "length head_dim"]]:
    """Cosines and sines of every position, in the dtype of the hidden states."""
    row = model.get_input_embeddings()(torch.zeros(1, dtype=torch.int64, device=model.device))
    cos, sin = model.base_model.rotary_emb(row[:0], torch.arange(length, device=model.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


def has_rows(model: Any) -> bool:
    """Whether the embedding gives its rows as they are, and nobody else is told."""
    embedding = model.get_input_embeddings()
    return (
        type(embedding) is nn.Embedding
        and embedding.max_norm is None
        and embedding.weight.is_contiguous()
        and not has_hooks(embedding)
    )


def has_fixed_angles(model: Any) -> bool:
    """Whether RoPE's angles depend on the position alone, not on how long the text is."""
    rope_type = getattr(model.base_model.rotary_emb, "rope_type", None)
    return isinstance(rope_type, str) and rope_type in FIXED_ROPE  # a dict: one for each kind of block


def has_hooks(module: nn.Module) -> bool:
    """Whether calls of a module are seen, or changed, by anybody."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def step_inputs(model: Any, length: int) -> RowInputs | AngleInputs | ModelInputs:
    """The fastest that gives the model's numbers, with a cache of `length` tokens."""
    if not has_fixed_angles(model) or has_hooks(model.base_model.rotary_emb):
        return ModelInputs(model)
    return RowInputs(model, length) if has_rows(model) else AngleInputs(model, length)
