"""One token rotated by every program of the product for itself, in shared memory, while its first words are on their way.

It saves the launch of a rotation, and costs every multiprocessor what that launch cost one: for at most 4096 columns, by
programs of 16 warps, all of which run at once. The PTX is that of `sections.py`; the bytes stay where values were.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.hadamard.sections import SECTION, signs_of
from requant_kernels.hadamard.turns import (
    MOST_SUMS,
    PLANE,
    SUMS,
    eight_asm,
    room_asm,
    room_bytes,
    shared_section_asm,
)
from requant_kernels.heuristics import multiprocessors
from requant_kernels.launch_config import TrellisConfig
from requant_kernels.trellis.layout import TrellisLayout

WARPS = 16


@triton.jit
def _eight(pointer, at, width, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """Eight neighbours as floats; beyond the end, any that are there."""
    types: tl.constexpr = (tl.float32,) * 8
    address = (pointer + tl.minimum(at, width - 8)).to(tl.int64)
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, (address,), dtype=types, is_pure=False, pack=1)


@triton.jit
def token_factors(
    before_ptr, lane, warp, width, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr, ROOT: tl.constexpr
):
    """What a lane's activations are multiplied by before they are rotated: zero beyond the end."""
    at = warp * 256 + lane * 8
    got = _eight(before_ptr, at, width, TEXT, CONSTRAINTS)
    found = ()
    for i in tl.static_range(8):
        found = found + (tl.where(at < width, got[i] * ROOT, 0.0),)
    return found


@triton.jit
def rotate_token(
    x_ptr, factors, lane, warp, width, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr, SHARED: tl.constexpr,
    SHARED_CONSTRAINTS: tl.constexpr, TURN: tl.constexpr, TURN_CONSTRAINTS: tl.constexpr, PLANE: tl.constexpr,
    MASK: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """The address of shared memory, where high and low bytes are, PLANE apart; scale and sum."""
    g, t = lane // 4 + warp * 0, lane % 4 * 2
    second = signs_of(g, t, 7) | (signs_of(g, t + 1, 7) << 16)
    first = second
    if PAIRED:  # without bit 0, which is the lowest of a lane's registers
        first = signs_of(g, t, 6) | (signs_of(g, t + 1, 6) << 16)
    third = signs_of(g, t, MASK) | (signs_of(g, t + 1, MASK) << 16)
    room = tl.inline_asm_elementwise(
        SHARED, SHARED_CONSTRAINTS, (lane + warp * 0,), dtype=tl.int32, is_pure=False, pack=1
    )
    x = _eight(x_ptr, warp * 256 + lane * 8, width, TEXT, CONSTRAINTS)
    values = ()
    for i in tl.static_range(8):
        values = values + (x[i] * factors[i],)
    high = room + lane // 4 * 256 + warp * 16 + lane % 4 * 4
    scale, total = tl.inline_asm_elementwise(
        TURN, TURN_CONSTRAINTS, values + (first, second, third, room, high, high + PLANE),
        dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip
    return room, scale, total


def token_kind(x: Tensor) -> tuple[int, str]:
    """What the rotation of a token is compiled for: the size of a block, and the type of activations."""
    return x.shape[1] & -x.shape[1], "bf16" if x.dtype == torch.bfloat16 else "fp16"


def token_constants(kind: tuple[int, str] | None, *, paired: bool, tiles: int) -> dict[str, object]:
    """The kernel's constants of it; `kind` None: another launch rotates."""
    size, activations = kind or (1, "fp16")
    own = room_bytes(128 * WARPS * 2 * tiles)
    x, before, room, turn = (
        eight_asm(activations), eight_asm("fp16"), room_asm(own), shared_section_asm(size >= SECTION, own)
    )  # fmt: skip
    return {
        "FUSED": kind is not None, "EIGHT": x[0], "EIGHT_CONSTRAINTS": x[1], "BEFORE": before[0],
        "BEFORE_CONSTRAINTS": before[1], "SHARED": room[0], "SHARED_CONSTRAINTS": room[1], "TURN": turn[0],
        "TURN_CONSTRAINTS": turn[1], "PLANE": PLANE, "SUMS": SUMS, "MASK": size - 1 >> 8,
        "ROOT": size**-0.5 * (2 if paired else 1), "PAIRED": paired,
    }  # fmt: skip


def can_fuse(x: Tensor, layout: TrellisLayout, config: TrellisConfig) -> bool:
    """Whether every program can rotate x by itself, and all programs run at once."""
    programs = -(-layout.packed_codes.shape[0] // config.tiles)
    return (
        x.shape[0] == 1
        and config.warps == WARPS
        and layout.k % 256 == 0
        and layout.k <= SECTION
        and 128 * WARPS * 2 * config.tiles <= MOST_SUMS
        and programs <= multiprocessors(x.device)
        and x.data_ptr() % 16 == 0
        and layout.input_scales.data_ptr() % 16 == 0
    )
