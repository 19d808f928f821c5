"""Put the activations into the column order of the packed codes, for the sm_90 GEMM.

A lane holds the codes of eight consecutive columns, two of them in each of four MMA fragments (`common/bit_layout.py`). TMA
copies contiguous rows to shared memory, so the columns are permuted beforehand, within each mma_k32 of 32, to the fragments'
order (j, kh, t, e).
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch


@triton.jit
def permute_kernel(
    x_ptr, xp_ptr, row_perm_ptr, inverse_perm_ptr, M, K, width, stride_x, n, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    K32: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """xp `[M, width]` = x permuted, zero beyond K; TOKENS tokens and K32 units of 32 columns per CTA.

    PAIRS: columns are counted in pairs, 32 bits. If the rows of the matrix are permuted, the CTAs of the first tokens
    also write the inverse of `row_perm`, ROWS positions each.
    """
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None, None]
    k32 = (tl.program_id(0) * K32 + tl.arange(0, K32))[None, :, None, None]
    quarter = tl.arange(0, 4)[None, None, :, None]
    wait_for_previous_launch(PDL, True)
    if row_perm_ptr is not None:  # noqa: SIM102 - known at compile time, the other at run time
        if tl.program_id(1) == 0:
            position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
            row = tl.load(row_perm_ptr + position, mask=position < n, other=n)  # padding comes last
            tl.store(inverse_perm_ptr + row, position, mask=row < n)
    if PAIRS:
        at = k32 * 16 + quarter * 4 + tl.arange(0, 4)[None, None, None, :]
        x = tl.load(x_ptr + token * stride_x + at, mask=(token < M) & (at < K), other=0)  # t (j kh)
        x = tl.permute(x, (0, 1, 3, 2))
    else:
        eight = tl.arange(0, 8)[None, None, None, :]  # t e
        column = k32 * 32 + 8 * (eight // 2) + 2 * quarter + eight % 2
        x = tl.load(x_ptr + token * stride_x + column, mask=(token < M) & (column < K), other=0.0)
        at = k32 * 32 + 8 * quarter + eight
    tl.store(xp_ptr + token * width + at, x, mask=(token < M) & (at < width))


def permute_activations(
    x: Tensor, k_tiles: int, row_perm: Tensor | None, n: int, *, pdl: bool
) -> tuple[Tensor, Tensor | None]:
    """x [m, k], rows contiguous -> [m, 256 k_tiles] permuted; and the inverse of `row_perm`, row -> position, of n rows."""
    m, k = x.shape
    permuted = torch.empty(m, k_tiles * 256, dtype=x.dtype, device=x.device)
    inverse_perm = None if row_perm is None else torch.empty_like(row_perm)
    pairs = k % 2 == 0 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    source, target, size = (x.view(torch.int32), permuted.view(torch.int32), 2) if pairs else (x, permuted, 1)
    launch(
        permute_kernel,
        (k_tiles, triton.cdiv(m, 8), 1),
        (source, target, row_perm, inverse_perm, m, k // size, k_tiles * 256 // size, source.stride(0), n),
        _constants(pairs, triton.next_power_of_2(triton.cdiv(n, k_tiles)), pdl),
    )
    return permuted, inverse_perm


@cache
def _constants(pairs: bool, rows: int, pdl: bool) -> dict[str, object]:
    return {
        "PAIRS": pairs,
        "TOKENS": 8,
        "K32": 8,
        "ROWS": rows,
        "PDL": pdl,
        "num_warps": 4,
        **pdl_option(pdl),
    }
