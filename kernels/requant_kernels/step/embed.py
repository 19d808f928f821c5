"""The start of a step in one launch: the embedding row of every token, and cosines and sines of the position.

x_t = embedding[token_t],    cos, sin = row `position` of tables, a number on the device
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch

BLOCK = 1024  # values per CTA


@triton.jit(do_not_specialize=["length"])
def embed_kernel(
    tokens_ptr, table_ptr, cos_table_ptr, sin_table_ptr, position_ptr, x_ptr, cos_ptr, sin_ptr, n, k, length, head_dim,
    BLOCK: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK values of one token's row; grid (blocks of a row, tokens). The first CTA also copies cosines and sines."""
    token, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous_launch(PDL, False)
    row = tl.load(tokens_ptr + token)
    # a captured graph cannot raise; never read outside the tables
    row = tl.where((row >= 0) & (row < n), row, 0)
    x = tl.load(table_ptr + row * k + at, mask=at < k, other=0.0)
    tl.store(x_ptr + token * k + at, x, mask=at < k)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        d = tl.arange(0, D)
        angle = tl.minimum(tl.load(position_ptr), length - 1) * head_dim + d
        tl.store(cos_ptr + d, tl.load(cos_table_ptr + angle, mask=d < head_dim), mask=d < head_dim)
        tl.store(sin_ptr + d, tl.load(sin_table_ptr + angle, mask=d < head_dim), mask=d < head_dim)


def embed(
    tokens: Tensor, table: Tensor, cos_table: Tensor, sin_table: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x [b, k], cos [1, head_dim], sin [1, head_dim]; a token outside the table gets row 0, a position beyond the tables
    their last row.

    Args:
        tokens: int64 [b, 1], contiguous.
        table: [n, k], contiguous.
        cos_table, sin_table: [length, head_dim], contiguous and alike.
        position: int64, a single number on the device.
    """
    b, (n, k), (length, head_dim) = len(tokens), table.shape, cos_table.shape
    x = torch.empty(b, k, dtype=table.dtype, device=table.device)
    cos, sin = (torch.empty(1, head_dim, dtype=cos_table.dtype, device=table.device) for _ in range(2))
    launch(
        embed_kernel,
        (triton.cdiv(k, BLOCK), b, 1),
        (tokens, table, cos_table, sin_table, position, x, cos, sin, n, k, length, head_dim),
        _constants(triton.next_power_of_2(head_dim), supports_pdl(table.device)),
    )
    return x, cos, sin


@cache
def _constants(head_dim: int, pdl: bool) -> dict[str, object]:
    return {"BLOCK": BLOCK, "D": head_dim, "PDL": pdl, "num_warps": 4, **pdl_option(pdl)}
