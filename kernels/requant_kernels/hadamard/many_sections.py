"""Rotation by Hadamard blocks for many tokens: sections of 4096 values as in `sections.py`, several of a block a program.

With few tokens a launch waits for its longest program; with many, for memory and for the number of programs. So here a
program that has read a block makes all sections of it, partial products of several programs are added while they are
loaded, and values can be written in the order of `trellis_wgmma.py`. Bits 8 to 11 go through Triton's own product.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard.sections import SECTION, part_factors, signs_of
from requant_kernels.hadamard.turns import turn_asm

MANY = 512  # sections from which on a program makes all of its block: what it has read serves them all


@triton.jit
def many_sections_kernel(
    x_ptr, before_ptr, after_ptr, bias_ptr, added_ptr, y_ptr, width, out_width, stride_x, stride_y,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, P: tl.constexpr, V: tl.constexpr, MASK: tl.constexpr, ROOT: tl.constexpr,
    PDL: tl.constexpr, PARTS: tl.constexpr, ARRANGED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """OWN sections, 1 or P, of one token; grid (tokens, sections / OWN), 16 warps; loads of V values; MASK: the mixed bits
    from bit 8 on.

    x is the sum of PARTS matrices one behind the other. ARRANGED: y in the order of `trellis_wgmma.py`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, section = tl.program_id(0).to(tl.int64), tl.program_id(1) * OWN
    base, own = section // P * P, section % P
    lane, warp = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 16)[None, :, None, None]
    eight = tl.arange(0, 8 // V)[None, None, :, None] * V + tl.arange(0, V)[None, None, None, :]
    place = warp * 256 + lane * 8 + eight
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    g, t = lane // 4 + eight * 0 + warp * 0, lane % 4 * 2
    own_signs = signs_of(g, t, 7) | (signs_of(g, t + 1, 7) << 16)
    signs = signs_of(row, column, MASK).to(tl.int16).to(tl.bfloat16, bitcast=True)
    factors = part_factors(before_ptr, base, own, place, width, P, ROOT)
    scale, bias = (), ()
    for o in tl.static_range(OWN):
        at = (section + o) * 4096 + row * 256 + tl.arange(0, 256)[None, :]
        if after_ptr is not None:
            scale = scale + (tl.load(after_ptr + at, mask=at < out_width, other=0.0).to(tl.float32),)
        if bias_ptr is not None:
            bias = bias + (tl.load(bias_ptr + at, mask=at < out_width, other=0.0).to(tl.float32),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = ()
    for p in tl.static_range(P):
        source = (base + p) * 4096 + place
        for part in tl.static_range(PARTS):
            matrix = x_ptr + (token + part * tl.num_programs(0)) * stride_x
            x = x + (tl.load(matrix + source, mask=source < width, other=0.0),)
    mixed = ()
    for o in tl.static_range(OWN):
        z = tl.zeros([32, 16, 8 // V, V], tl.float32)
        # always; the branch keeps the loads together, which else wait for one another's registers
        if width > 0:
            for p in tl.static_range(P):
                whole = x[p * PARTS].to(tl.float32)
                for part in tl.static_range(1, PARTS):
                    whole += x[p * PARTS + part]
                odd = (0x6996 >> (o & p)) & 1  # the signs of a program's first section are in the factors
                z += whole * (-factors[p] if odd else factors[p])
        mixed = mixed + (z,)
    for o in tl.static_range(OWN):
        z = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, (mixed[o], own_signs, own_signs), dtype=tl.float32, is_pure=False, pack=8
        )
        z = tl.reshape(tl.permute(z, (1, 0, 2, 3)), [16, 256])
        high = z.to(tl.bfloat16)
        low = (z - high.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(signs, high, tl.dot(signs, low))
        at = (section + o) * 4096 + row * 256 + tl.arange(0, 256)[None, :]
        inside = at < out_width
        if after_ptr is not None:
            y *= scale[o]
        if bias_ptr is not None:
            y += bias[o]
        if added_ptr is not None:
            y += tl.load(added_ptr + token * out_width + at, mask=inside, other=0.0)
        if ARRANGED:
            y = tl.reshape(tl.permute(tl.reshape(y, [16, 4, 4, 8, 2]), (0, 1, 3, 2, 4)), [16, 256])
        tl.store(y_ptr + token * stride_y + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def rotate_many(
    x: Tensor, y: Tensor, *, size: int, sections: int, width: int, out_width: int, pdl: bool, before: Tensor | None = None,
    after: Tensor | None = None, bias: Tensor | None = None, added: Tensor | None = None, arranged: bool = False,
) -> None:  # fmt: skip
    """Write y, rotated by blocks of `size`. x [m, width], or [parts, m, width], whose parts are added first."""
    text, names = turn_asm()
    early: dict[str, object] = {"launch_pdl": True} if pdl else {}
    blocks = max(1, size // SECTION)
    own = blocks if x.shape[-2] * sections >= MANY and sections % blocks == 0 and blocks <= 4 else 1
    launch(
        many_sections_kernel,
        (x.shape[-2], sections // own, 1),
        (x, before, after, bias, added, y, width, out_width, x.stride(-2), y.stride(0)),
        interned(
            ASM=text, CONSTRAINTS=names, P=blocks, V=16 // x.element_size() if x.element_size() > 2 else 8,
            MASK=min(size, SECTION) - 1 >> 8, ROOT=size**-0.5, PDL=pdl, PARTS=x.shape[0] if x.dim() == 3 else 1,
            ARRANGED=arranged, OWN=own, num_warps=16, num_stages=1, **early,
        ),
    )  # fmt: skip
