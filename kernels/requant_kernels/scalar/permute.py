"""Before and after the tall kernel of Hopper: activations in the order of the words, and the sum of the partial products.

A lane holds the codes of eight neighbouring columns, two of them in each of four places of the tensor cores (`words.py`), so
the columns of the activations are put into the order (slab of 32, j, kh, t, e) in which the words meet them.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import launch


@triton.jit
def arrange_kernel(
    x_ptr, xa_ptr, rows_ptr, positions_ptr, M, K, width, stride_x, n, PAIRS: tl.constexpr, T: tl.constexpr,
    S: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """xa `[M, width]` = x with columns in the order of the words, zero beyond K; T tokens and S slabs a program.

    PAIRS: every number here counts two columns, 32 bits. Where the rows of the matrix are stored in another order, the
    first tokens' programs also write the inverse of `rows`, P positions each.
    """
    token = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)[:, None, None, None]
    slab = (tl.program_id(0) * S + tl.arange(0, S))[None, :, None, None]
    part = tl.arange(0, 4)[None, None, :, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if rows_ptr is not None:  # noqa: SIM102 - known when compiled, the other when run
        if tl.program_id(1) == 0:
            position = tl.program_id(0) * P + tl.arange(0, P)
            row = tl.load(rows_ptr + position, mask=position < n, other=n)  # padding comes last
            tl.store(positions_ptr + row, position, mask=row < n)
    if PAIRS:
        at = slab * 16 + part * 4 + tl.arange(0, 4)[None, None, None, :]
        x = tl.load(x_ptr + token * stride_x + at, mask=(token < M) & (at < K), other=0)  # t (j kh)
        x = tl.permute(x, (0, 1, 3, 2))
    else:
        eight = tl.arange(0, 8)[None, None, None, :]  # t e
        column = slab * 32 + 8 * (eight // 2) + 2 * part + eight % 2
        x = tl.load(x_ptr + token * stride_x + column, mask=(token < M) & (column < K), other=0.0)
        at = slab * 32 + 8 * part + eight
    tl.store(xa_ptr + token * width + at, x, mask=(token < M) & (at < width))


@triton.jit(do_not_specialize=["M"])
def sum_kernel(
    partial_ptr, positions_ptr, bias_ptr, y_ptr, M, n, n_rows, stride_y, SPLIT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y `[M, n]` = the partial products `[SPLIT, n_rows, WIDTH]` in order, and the bias; grid: (rows, tokens).

    Every partial product is read, and without a mask: with one, nothing would be read four at a time.
    """
    row, token = (
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * TOKENS + tl.arange(0, TOKENS),
    )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = row if positions_ptr is None else tl.load(positions_ptr + row, mask=row < n, other=0)
    y = tl.zeros([ROWS, TOKENS], tl.float32)
    for i in tl.static_range(SPLIT):
        y += tl.load(partial_ptr + (i * n_rows + position)[:, None].to(tl.int64) * WIDTH + token[None, :])
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    place = y_ptr + token[None, :].to(tl.int64) * stride_y + row[:, None]
    tl.store(place, y.to(y_ptr.dtype.element_ty), mask=(token < M)[None, :] & (row < n)[:, None])


def arrange(
    x: Tensor, blocks: int, rows: Tensor | None, n: int, *, pdl: bool
) -> tuple[Tensor, Tensor | None]:
    """x [m, k], rows contiguous -> [m, 256 blocks] in the order of the words; and where each of its n rows is stored."""
    m, k = x.shape
    arranged = torch.empty(m, blocks * 256, dtype=x.dtype, device=x.device)
    positions = None if rows is None else torch.empty_like(rows)
    pairs = k % 2 == 0 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    source, target, size = (x.view(torch.int32), arranged.view(torch.int32), 2) if pairs else (x, arranged, 1)
    launch(
        arrange_kernel,
        (blocks, triton.cdiv(m, 8), 1),
        (source, target, rows, positions, m, k // size, blocks * 256 // size, source.stride(0), n),
        _arranging(pairs, triton.next_power_of_2(triton.cdiv(n, blocks)), pdl),
    )
    return arranged, positions


def add_partial(
    partial: Tensor, positions: Tensor | None, bias: Tensor | None, y: Tensor, *, pdl: bool, span: int = 16
) -> None:
    """y [m, n] = the sum of partial float32 [split, rows, width] over its first dimension, transposed, and the bias."""
    split, n_rows, width = partial.shape
    tokens = 64 if width % 64 == 0 else 32
    launch(
        sum_kernel,
        (n_rows // span, width // tokens, 1),
        (partial, positions, bias, y, *y.shape, n_rows, y.stride(0)),
        _summing(split, width, span, tokens, pdl),
    )


@cache
def _arranging(pairs: bool, rows: int, pdl: bool) -> dict[str, object]:
    return {"PAIRS": pairs, "T": 8, "S": 8, "P": rows, "PDL": pdl, "num_warps": 4, **_early(pdl)}


@cache
def _summing(split: int, width: int, rows: int, tokens: int, pdl: bool) -> dict[str, object]:
    return {
        "SPLIT": split, "WIDTH": width, "ROWS": rows, "TOKENS": tokens, "PDL": pdl, "num_warps": 4, **_early(pdl)
    }  # fmt: skip


def _early(pdl: bool) -> dict[str, object]:
    return {"launch_pdl": True} if pdl else {}
