"""Slots: products of single tokens with single matrices of a stack, many in one launch.

    slot j of 2 S:   token j % S // s,   matrix (j / S) E + expert[j % S]          S = m s slots of m tokens, s experts each

so the gates of all slots come first, then the ups; downs have one part, with a row of activations per slot. A CTA reads its
expert on the device, so the host never learns it, and a step can be captured as a CUDA graph.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportAttributeAccessIssue=none

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """How a slot is located; constants of a launch."""

    parts: int  # matrices per expert in the stack: 2 for gate and up
    experts: int
    per_token: int  # slots of a part that read the same row of x


@triton.jit
def slot_of(experts_ptr, matrices_ptr, SLOTS: tl.constexpr):
    """Row of x and index in the stack for slot `program_id(1)`, int64; negative if another launch has the matrix."""
    own = tl.program_id(1) % (tl.num_programs(1) // SLOTS.parts)
    expert = tl.load(experts_ptr + own).to(tl.int64)
    part = tl.program_id(1) // (tl.num_programs(1) // SLOTS.parts)
    index = tl.load(matrices_ptr + part * SLOTS.experts + expert)
    return (own // SLOTS.per_token).to(tl.int64), index.to(tl.int64)
