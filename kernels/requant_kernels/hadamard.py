"""Rotation of activations and outputs by blocks of a Hadamard matrix: y = after * H (before * x) + bias + added.

H of size S1 S2 is a Kronecker product, so a block seen as a matrix X [S1, S2] becomes `H_S1 X H_S2`: two products on the
tensor cores in tf32, whose signs are made in registers. Sixteen rows of the result a program, so that one token keeps
several multiprocessors busy. Blocks below 2048 take the butterfly, one program each.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

import torch
import triton
import triton.language as tl
from torch import Tensor

RIGHT = 128  # S2
SMALLEST = 16 * RIGHT  # block of the product form
FEW = 16  # tokens; more of them keep the GPU busy by themselves, and the butterfly does less arithmetic


@triton.jit
def _signs(i, j):
    """H[i, j] without its factor: -1 to the number of ones in i & j, below 2^8."""
    bits = i & j
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return (1 - 2 * (bits & 1)).to(tl.float32)


@triton.jit
def _finish(y, at, token, inside, after_ptr, bias_ptr, added_ptr, y_ptr, out_width, stride_y):
    """Scale, add, round, store; returns what was stored, zero outside."""
    if after_ptr is not None:
        y *= tl.load(after_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if added_ptr is not None:
        y += tl.load(added_ptr + token * out_width + at, mask=inside, other=0.0)
    rounded = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * stride_y + at, rounded, mask=inside)
    return tl.where(inside, rounded.to(tl.float32), 0.0)


@triton.jit
def product_kernel(
    x_ptr, before_ptr, after_ptr, bias_ptr, added_ptr, y_ptr, sums_ptr, width, out_width, stride_x, stride_y,
    S1: tl.constexpr, S2: tl.constexpr, ROOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of one block of one token; grid (tokens, blocks, S1 / 16); sums `[tokens, blocks S1 / 16]`."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j, own = tl.arange(0, S1), tl.arange(0, S2), tl.program_id(2) * 16 + tl.arange(0, 16)
    at = block * (S1 * S2) + i[:, None] * S2 + j[None, :]
    left, right = _signs(own[:, None], i[None, :]), _signs(j[:, None], j[None, :])
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * stride_x + at, mask=at < width, other=0.0).to(tl.float32)
    if before_ptr is not None:
        x *= tl.load(before_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    y = tl.dot(tl.dot(left, x, input_precision="tf32"), right, input_precision="tf32") * ROOT
    at = block * (S1 * S2) + own[:, None] * S2 + j[None, :]
    stored = _finish(y, at, token, at < out_width, after_ptr, bias_ptr, added_ptr, y_ptr, out_width, stride_y)
    if sums_ptr is not None:
        part = (token * tl.num_programs(1) + block) * tl.num_programs(2) + tl.program_id(2)
        tl.store(sums_ptr + part, tl.sum(stored))


@triton.jit
def butterfly_kernel(
    x_ptr, before_ptr, after_ptr, bias_ptr, added_ptr, y_ptr, sums_ptr, width, out_width, stride_x, stride_y,
    SIZE: tl.constexpr, LOG: tl.constexpr, ROOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of one token; grid (tokens, blocks)."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * stride_x + at, mask=at < width, other=0.0).to(tl.float32)
    if before_ptr is not None:
        x *= tl.load(before_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    for stage in tl.static_range(LOG):
        pair = tl.permute(tl.reshape(x, [SIZE >> (stage + 1), 2, 1 << stage]), (0, 2, 1))
        left, right = tl.split(pair)
        x = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 2, 1)), [SIZE])
    stored = _finish(
        x * ROOT, at, token, at < out_width, after_ptr, bias_ptr, added_ptr, y_ptr, out_width, stride_y
    )
    if sums_ptr is not None:
        tl.store(sums_ptr + token * tl.num_programs(1) + tl.program_id(1), tl.sum(stored))


def rotate(
    x: Tensor,
    y: Tensor,
    *,
    width: int,
    out_width: int,
    pdl: bool,
    before: Tensor | None = None,
    after: Tensor | None = None,
    bias: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Write y; x counts as zero beyond `width`, y is cut at `out_width`. The larger one, padded to 16, is rotated.

    Returns float32 [m, parts], whose sums over parts are those of the stored y (what a trellis takes off again).
    """
    padded = -(-max(width, out_width) // 16) * 16
    size = padded & -padded
    blocks, m = padded // size, x.shape[0]
    arguments = (width, out_width, x.stride(0), y.stride(0))
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    if SMALLEST <= size <= 128 * RIGHT and m <= FEW:
        rows = size // RIGHT
        sums = torch.empty(m, blocks * rows // 16, dtype=torch.float32, device=x.device)
        product_kernel[(m, blocks, rows // 16)](
            x, before, after, bias, added, y, sums, *arguments, S1=rows, S2=RIGHT, ROOT=size**-0.5, PDL=pdl,
            num_warps=8, num_stages=1, **launch,
        )  # fmt: skip
        return sums
    sums = torch.empty(m, blocks, dtype=torch.float32, device=x.device)
    butterfly_kernel[(m, blocks)](
        x, before, after, bias, added, y, sums, *arguments, SIZE=size, LOG=size.bit_length() - 1, ROOT=size**-0.5,
        PDL=pdl, num_warps=min(16, max(1, size // 512)), **launch,
    )  # fmt: skip
    return sums
