"""Attention of a step of one token by `requant_kernels`, as an attention function of transformers.

Only what the kernel does: one query a sequence on a GPU, 16 bits, a Boolean mask or none. Prompts, biases and whatever
else a model passes go to torch's scaled dot product attention.
"""

from typing import Any

import torch
from requant_kernels import ops as _ops  # noqa: F401  # defines the operator
from torch import Tensor

NAME = "requant"
PLAIN = {
    "dropout",
    "scaling",
    "is_causal",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
}


def register() -> None:
    """Make transformers know the function; once is enough."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def use_kernel(model: Any) -> bool:
    """Let a model whose attention is torch's take the kernel for its steps; returns whether it does."""
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", NAME):
        return False
    register()
    model.config._attn_implementation = NAME
    return True


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Queries [b, h, q, d], keys and values [b, heads, length, d] -> [b, q, h, d]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    masked = attention_mask is not None
    ours = (
        query.is_cuda
        and query.shape[2] == 1
        and query.dtype in (torch.float16, torch.bfloat16)
        and key.stride(-1) == value.stride(-1) == query.stride(-1) == 1
        and (
            not masked
            or (
                attention_mask.dtype == torch.bool
                and attention_mask.shape[1] == 1
                and attention_mask.stride(-1) == 1
            )
        )
        and not any(value is not None and name not in PLAIN for name, value in options.items())
        and not options.get("dropout")
    )
    if not ours:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    mask = None
    if attention_mask is not None:
        mask = attention_mask[:, 0, 0].expand(query.shape[0], -1)
    return torch.ops.requant.attend(query, key, value, mask, float(scale)), None
