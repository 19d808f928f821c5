"""The activations of one token in shared memory, for `grids.py`: requested once, by the warp that will multiply them.

A block's activations from global memory would wait for the second-level cache once a block, or take 64 registers to be
asked for a block ahead. Here every warp copies the columns of its own blocks (512 bytes a block, one asynchronous copy a
lane) as soon as the token may be read, and from there on reads eight times 16 bytes a block with the latency of shared
memory. Lanes whose column has no part in a pair of planes read zeros that lie behind.

The PTX takes scalars, of which every thread has its own.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from functools import cache

import triton
import triton.language as tl

from requant_kernels.grids import chain_of

MOST_BYTES = 48 << 10  # of shared memory that a kernel may declare
LOADS = tl.constexpr(tuple(f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {64 * slab}];" for slab in range(8)))


def staged_bytes(k: int, warps: int) -> int:
    """Shared memory for a token of k columns, and 512 zeros a warp."""
    return (-(-k // (256 * warps)) + 1) * 512 * warps


@cache
def stage_asm(k: int, warps: int) -> str:
    """The address of the warp's activations, zeros behind, from the address of all. Zero beyond column k."""
    steps = -(-k // (256 * warps))
    own = (steps + 1) * 512
    lines = [f"{{ .shared .align 16 .b8 tokens[{own * warps}]; .reg .b32 t, w, d, o, s, z; .reg .b64 a;"]
    lines += ["mov.u32 t, %tid.x; mov.u32 d, tokens; shr.u32 w, t, 5;"]
    lines += [
        f"mad.lo.u32 $0, w, {own}, d; and.b32 w, t, 31; mad.lo.u32 d, w, 16, $0; shl.b32 o, t, 4; mov.b32 z, 0;"
    ]
    lines += ["cvt.u64.u32 a, o; add.u64 a, a, $1;"]
    for i in range(steps):
        source = f"[a + {512 * warps * i}]"
        if k % (256 * warps) == 0 or i < steps - 1:
            lines += [f"cp.async.cg.shared.global [d + {512 * i}], {source}, 16;"]
        else:
            lines += [f"sub.s32 s, {2 * k - 512 * warps * i}, o; max.s32 s, s, 0; min.s32 s, s, 16;"]
            lines += [f"cp.async.cg.shared.global [d + {512 * i}], {source}, 16, s;"]
    lines += [f"st.shared.v4.b32 [d + {512 * steps}], {{z, z, z, z}};"]
    lines += ["cp.async.wait_all; bar.warp.sync 0xffffffff;"]
    return "\n".join(lines) + " }"


@triton.jit
def stage_token(x_ptr, TEXT: tl.constexpr):
    """The address of the warp's activations in shared memory."""
    return tl.inline_asm_elementwise(
        TEXT, "=&r,l", [x_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def staged_tokens(place, step, STEPS: tl.constexpr, SHIFTS: tl.constexpr, W: tl.constexpr):
    """`decode.load_tokens` of the warp's block number `step`, from shared memory: eight int32 `[t, g, warp, 1, (j kh)]`."""
    t, g = tl.arange(0, 4)[:, None, None, None, None], tl.arange(0, 8)[None, :, None, None, None]
    same = tl.arange(0, W)[None, None, :, None, None] * 0 + tl.arange(0, 4)[None, None, None, None, :] * 0
    tokens = ()
    for slab in tl.static_range(8):
        at = place + tl.where(g == chain_of(SHIFTS, slab), t * 16 + step * 512, STEPS * 512) + same
        tokens = tokens + (
            tl.inline_asm_elementwise(
                LOADS[slab], "=r,=r,=r,=r,r,r,r,r", [at], dtype=tl.int32, is_pure=True, pack=4
            ),
        )
    return tokens
