"""The end of a step in two launches: stores the logits, and takes their argmax as the next step's token.

    key(i) = 2^32 order(logit_i) + (2^31 - 1 - i)        the largest key gives the token

`order` maps the float32's bits to an integer that grows with the number, so one integer maximum finds the largest logit
and, among equal ones, the first, as torch.argmax does; NaN is the largest. torch uses one SM per row, 29 us for 128 thousand
tokens. Here a CTA handles PART of them; the second launch has a CTA per row, and counts the step.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportAttributeAccessIssue=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch

PART = 2048
LEAST_KEY = -(2**63)


@triton.jit
def part_kernel(
    logits_ptr,
    kept_ptr,
    largest_ptr,
    v,
    logits_row,
    PART: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest key of PART logits of one row, and a copy of them; grid (parts, rows)."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    at = part * PART + tl.arange(0, PART)
    wait_for_previous_launch(PDL, True)
    logit = tl.load(logits_ptr + row * logits_row + at, mask=at < v, other=0.0)
    tl.store(kept_ptr + row * v + at, logit, mask=at < v)
    number = logit.to(tl.float32)
    bits = tl.where(number == 0.0, 0.0, number).to(tl.int32, bitcast=True)  # both zeros are equal
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(number != number, 0x7FFFFFFF, order)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)
    key = tl.where(at < v, key, LEAST)
    tl.store(largest_ptr + row * tl.num_programs(0) + part, tl.max(key, 0))


@triton.jit
def token_kernel(
    largest_ptr, tokens_ptr, length_ptr, parts, PARTS: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr
):
    """The token of one row; grid (rows). `length`, if given, is incremented."""
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    wait_for_previous_launch(PDL, False)
    key = tl.max(tl.load(largest_ptr + row * parts + p, mask=p < parts, other=LEAST), 0)
    tl.store(tokens_ptr + row, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    if length_ptr is not None:
        tl.store(length_ptr, tl.load(length_ptr) + 1, mask=row == 0)


def choose_tokens(logits: Tensor, kept: Tensor, tokens: Tensor, length: Tensor | None = None) -> None:
    """Copy logits [b, v] to `kept`, their argmax to `tokens`, and add one to `length`.

    Args:
        logits: each row contiguous; float16, bfloat16 or float32.
        kept: [b, v] of the same type, contiguous.
        tokens: int64 [b, 1], contiguous.
        length: int64, a single number.
    """
    b, v = logits.shape
    pdl, parts = supports_pdl(logits.device), triton.cdiv(v, PART)
    largest = torch.empty(b, parts, dtype=torch.int64, device=logits.device)
    launch(part_kernel, (parts, b, 1), (logits, kept, largest, v, logits.stride(0)), _part_constants(pdl))
    launch(
        token_kernel,
        (b, 1, 1),
        (largest, tokens, length, parts),
        _token_constants(triton.next_power_of_2(parts), pdl),
    )


@cache
def _part_constants(pdl: bool) -> dict[str, object]:
    return {"PART": PART, "LEAST": LEAST_KEY, "PDL": pdl, "num_warps": 4, **pdl_option(pdl)}


@cache
def _token_constants(parts: int, pdl: bool) -> dict[str, object]:
    return {"PARTS": parts, "LEAST": LEAST_KEY, "PDL": pdl, "num_warps": 1, **pdl_option(pdl)}
