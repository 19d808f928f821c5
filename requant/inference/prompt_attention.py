"""Attention of prompts over a static cache that already holds their keys and values, by torch.

This is torch's scaled dot product attention: on a GPU a flash kernel, which accepts fewer key heads than query heads, and
views of the cache. Token i of a prompt after `past` others sees the first past + i + 1.
"""

from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def attend_prompt(
    q: Float[Tensor, "m h d"],
    keys: Float[Tensor, "b g l d"],
    values: Float[Tensor, "b g l d"],
    scale: float,
    *,
    past: int,
) -> Float[Tensor, "m n"]:
    """Outputs of all heads, n = h d, of m / b tokens of every sequence, one sequence after the other."""
    b, t = len(keys), len(q) // len(keys)
    queries = q.unflatten(0, (b, t)).transpose(1, 2)
    keys, values = keys[:, :, : past + t], values[:, :, : past + t]
    if past:
        mask = causal_lower_right(t, past + t)
        y = scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
    else:
        y = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return y.transpose(1, 2).reshape(len(q), -1)
