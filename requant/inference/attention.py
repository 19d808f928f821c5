"""Attention of a decoding step by `requant_kernels`, as an attention function of transformers.

The kernel takes one query per sequence, on a GPU, in float16 or bfloat16, with a Boolean mask or none. Prompts,
biases and whatever else a model passes go to torch's scaled dot product attention.

Like every kernel, it is compiled on the user's machine, so it is compared there with torch's attention before it is used.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from requant_kernels import ops as _ops  # noqa: F401  # defines the operator
from torch import Tensor

from requant.inference.kernel_check import LIMIT, TritonError
from requant.models.attention_sizes import attention_sizes

NAME = "requant"
LONGEST_CHECK = 8192  # positions
PLAIN = {
    "dropout",
    "scaling",
    "is_causal",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
}
logger = logging.getLogger(__name__)


def register() -> None:
    """Register the function with transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def supports(model: Any, length: int) -> bool:
    """Whether the kernel can take the steps of `model` with a cache of `length` tokens, and is right on this machine."""
    if (
        torch.device(model.device).type != "cuda"
        or model.dtype not in (torch.float16, torch.bfloat16)
        or model.config.get_text_config()._attn_implementation != "sdpa"
    ):
        return False
    sizes = set(attention_sizes(model.config))
    # lengths up to the same power of two run the same program, longer ones the same as LONGEST_CHECK
    positions = min(LONGEST_CHECK, 1 << max(6, (length - 1).bit_length()))
    return bool(sizes) and all(
        is_right(*size, positions, model.dtype, torch.device(model.device)) for size in sizes
    )


@contextmanager
def use_kernel(model: Any) -> Iterator[None]:
    """Calls of `model` use the kernel where it applies; its config is afterwards what it was."""
    register()
    config = model.config.get_text_config()
    usual = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


@lru_cache
def is_right(
    heads: int, key_heads: int, head_dim: int, length: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the operator agrees with torch's attention in float32, on random numbers; the log says where it does not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, count, rows, head_dim, generator=generator).to(device, dtype)
        for count, rows in ((heads, 1), (key_heads, length), (key_heads, length))
    )
    mask = torch.rand(2, length, generator=generator) < 0.8
    mask[:, 0] = True
    mask = mask.to(device)
    group = heads // key_heads
    wanted = F.scaled_dot_product_attention(
        q.float(),
        k.float().repeat_interleave(group, 1),
        v.float().repeat_interleave(group, 1),
        mask[:, None, None],
    ).transpose(1, 2)
    try:
        y = torch.ops.requant.attend(q, k, v, mask, head_dim**-0.5)
        error = ((y.float() - wanted).norm() / wanted.norm()).item()
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError, ImportError) as problem:
        reason = f"does not compile or start on this machine ({type(problem).__name__})"
    else:
        if error <= LIMIT:
            return True
        reason = f"is wrong on this machine (relative error {error:.2g})"
    logger.warning(
        "the attention kernel for %d query and %d key heads of size %d %s, so torch's attention is used; please report it "
        "with the GPU and the versions of torch and triton",
        heads,
        key_heads,
        head_dim,
        reason,
    )
    return False


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
        and query.shape[-1] == value.shape[-1]
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
