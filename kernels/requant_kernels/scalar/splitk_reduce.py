"""Split-K reduction of the sm_90 GEMM: sums the partial products in a fixed order, and adds the bias.

Without atomics the result is the same in every run. The kernel also undoes the row permutation of the packed matrix.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch

ROWS_OF_CTA = 16


@triton.jit(do_not_specialize=["M"])
def splitk_reduce_kernel(
    partial_ptr, inverse_perm_ptr, bias_ptr, y_ptr, M, n, n_rows, stride_y, SPLIT_K: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y `[M, n]` = the sum of partial `[SPLIT_K, n_rows, WIDTH]` in order, plus the bias; grid: (rows, tokens).

    Padding is read too: a mask would keep the loads from being vectorized.
    """
    row, token = (
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * TOKENS + tl.arange(0, TOKENS),
    )
    wait_for_previous_launch(PDL, True)
    position = row if inverse_perm_ptr is None else tl.load(inverse_perm_ptr + row, mask=row < n, other=0)
    y = tl.zeros([ROWS, TOKENS], tl.float32)
    for i in tl.static_range(SPLIT_K):
        y += tl.load(partial_ptr + (i * n_rows + position)[:, None].to(tl.int64) * WIDTH + token[None, :])
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + token[None, :].to(tl.int64) * stride_y + row[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(token < M)[None, :] & (row < n)[:, None])


def splitk_reduce(
    partial: Tensor, inverse_perm: Tensor | None, bias: Tensor | None, y: Tensor, *, pdl: bool
) -> None:
    """Write y [m, n] = the sum of partial float32 [splits, n_rows, width] over splits, transposed, plus the bias.

    `inverse_perm`: int32 [n_rows], row -> position, or None. n_rows is a multiple of 16.
    """
    splits, n_rows, width = partial.shape
    tokens = 64 if width % 64 == 0 else 32
    launch(
        splitk_reduce_kernel,
        (n_rows // ROWS_OF_CTA, width // tokens, 1),
        (partial, inverse_perm, bias, y, *y.shape, n_rows, y.stride(0)),
        _constants(splits, width, tokens, pdl),
    )


@cache
def _constants(splits: int, width: int, tokens: int, pdl: bool) -> dict[str, object]:
    return {
        "SPLIT_K": splits, "WIDTH": width, "ROWS": ROWS_OF_CTA, "TOKENS": tokens, "PDL": pdl, "num_warps": 4,
        **pdl_option(pdl),
    }  # fmt: skip
