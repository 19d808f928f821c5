"""What a fused step begins with: the tokens' rows of the embedding, and RoPE's cosines and sines of the position.

A model's own modules take ten launches for it. Where a row is all that the embedding gives, and the angles depend on the
position alone, the model's own RoPE is asked once for every position of the cache, and a step begins with one launch that
copies rows (`requant_kernels/step/embed.py`): the same numbers, whatever scaling made them.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from requant_kernels.step.embed import embed
from torch import Tensor, nn

FIXED_ROPE = {"default", "linear", "llama3", "yarn"}  # the others change with the length of the text
Inputs = tuple[Float[Tensor, "b d"], Float[Tensor, "b head_dim"], Float[Tensor, "b head_dim"]]


class TableInputs:
    """For models of which `has_tables`, with a cache of `length` tokens."""

    @torch.no_grad()
    def __init__(self, model: Any, length: int) -> None:
        self.embedding = model.get_input_embeddings()
        weight = self.embedding.weight
        positions = torch.arange(length, device=weight.device)[None]
        cos, sin = model.base_model.rotary_emb(weight[:0], positions)
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()

    def __call__(self, tokens: Int64[Tensor, "b 1"], position: Int64[Tensor, ""]) -> Inputs:
        """x, cosines and sines."""
        x, cos, sin = embed(tokens, self.embedding.weight, self.cos, self.sin, position)
        return x, cos.expand(len(x), -1), sin.expand(len(x), -1)


class ModelInputs:
    """By the model's own modules, whatever they are."""

    def __init__(self, model: Any) -> None:
        self.embedding, self.rotary = model.get_input_embeddings(), model.base_model.rotary_emb

    def __call__(self, tokens: Int64[Tensor, "b 1"], position: Int64[Tensor, ""]) -> Inputs:
        """x, cosines and sines."""
        x = self.embedding(tokens)
        cos, sin = (part[0].expand(len(x), -1) for part in self.rotary(x, position.view(1, 1)))
        return x.flatten(0, 1), cos, sin


def has_tables(model: Any) -> bool:
    """Whether the embedding gives its rows as they are, the angles depend on the position alone, and neither has hooks."""
    embedding, rotary = model.get_input_embeddings(), model.base_model.rotary_emb
    return (
        type(embedding) is nn.Embedding
        and embedding.max_norm is None
        and embedding.weight.is_contiguous()
        and has_fixed_angles(model)
        and not any(part._forward_hooks or part._forward_pre_hooks for part in (embedding, rotary))
    )


def has_fixed_angles(model: Any) -> bool:
    """Whether RoPE's angles depend on the position alone, not on how long the text is."""
    rope_type = getattr(model.base_model.rotary_emb, "rope_type", None)
    return isinstance(rope_type, str) and rope_type in FIXED_ROPE  # a dict: one for each kind of block


def step_inputs(model: Any, length: int) -> TableInputs | ModelInputs:
    """The faster of the two that gives the model's numbers."""
    return TableInputs(model, length) if has_tables(model) else ModelInputs(model)
