"""Rotation of activations and outputs by blocks of a Hadamard matrix: y = after * H (before * x) + bias + added.

On the tensor cores, a section of 4096 values a program (`sections.py`), where lanes can load 16 bytes and there is assembly;
else by butterflies, one block a program. What goes to `byte_sums.py` becomes 16-bit fixed point on the way.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard.many_sections import rotate_many
from requant_kernels.hadamard.sections import SECTION, finish_fixed, rotate_sections

SMALLEST = 256  # block of the tensor cores
FEW = 16  # tokens, beyond which there are programs enough


@triton.jit
def butterfly_kernel(
    x_ptr, before_ptr, after_ptr, bias_ptr, added_ptr, y_ptr, scales_ptr, width, out_width, stride_x, stride_y,
    SIZE: tl.constexpr, LOG: tl.constexpr, ROOT: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr = 1, ARRANGED: tl.constexpr = False,
):  # fmt: skip
    """SIZE values, in blocks of 2^LOG, of one token; grid (tokens, programs); fixed point where there are scales.

    PARTS and ARRANGED as in `sections.py`.
    """
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < out_width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + token * stride_x + at, mask=at < width, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        own = x_ptr + (token + part * tl.num_programs(0)) * stride_x
        x += tl.load(own + at, mask=at < width, other=0.0)
    if before_ptr is not None:
        x *= tl.load(before_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    # paired: without the first stage, the rest is doubled
    for stage in tl.static_range(1 if PAIRED else 0, LOG):
        pair = tl.permute(tl.reshape(x, [SIZE >> (stage + 1), 2, 1 << stage]), (0, 2, 1))
        left, right = tl.split(pair)
        x = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 2, 1)), [SIZE])
    x *= ROOT
    if scales_ptr is not None:
        finish_fixed(
            x, at, token, tl.program_id(1), tl.num_programs(1), out_width, y_ptr, scales_ptr, stride_y
        )
    else:
        if after_ptr is not None:
            x *= tl.load(after_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if added_ptr is not None:
            x += tl.load(added_ptr + token * out_width + at, mask=inside, other=0.0)
        if ARRANGED:
            at = (at & ~63) | (at >> 1 & 7) << 3 | (at >> 4 & 3) << 1 | (at & 1)
        tl.store(y_ptr + token * stride_y + at, x.to(y_ptr.dtype.element_ty), mask=inside)


def rotate(
    x: Tensor, y: Tensor, *, width: int, rotated: int, out_width: int, asm: bool, pdl: bool, before: Tensor | None = None,
    after: Tensor | None = None, bias: Tensor | None = None, added: Tensor | None = None, scales: Tensor | None = None,
    paired: bool = False, arranged: bool = False,
) -> None:  # fmt: skip
    """Write y; x counts as zero beyond `width`, `rotated` values are rotated, a multiple of 16, and y has `out_width`.

    With `scales` y is fixed point (`rotate_fixed`); `paired`: sums and differences of neighbours instead of them.
    x [m, ..], or [parts, m, ..], whole, whose parts are added first. `arranged`: y in the order of `trellis_wgmma.py`.
    """
    size, most = rotated & -rotated, max(rotated, out_width)
    if asm and size >= SMALLEST:
        if (
            width % 16
            or x.stride(-2) % 16
            or x.data_ptr() % 16
            or (before is not None and before.data_ptr() % 16)
        ):
            x = torch.nn.functional.pad(x, (0, rotated - width)).clone(memory_format=torch.contiguous_format)
            before = None if before is None else torch.nn.functional.pad(before, (0, rotated - width)).clone()
            width = rotated
        how: dict[str, Any] = {
            "size": size, "sections": -(-most // SECTION), "width": width, "out_width": out_width, "pdl": pdl,
            "before": before, "after": after, "bias": bias, "added": added,
        }  # fmt: skip
        if scales is None and (arranged or x.shape[-2] > FEW):
            rotate_many(x, y, arranged=arranged, **how)
        else:
            rotate_sections(x, y, scales, paired=paired, **how)
        return
    part = size if scales is None else max(size, SECTION)
    launch(
        butterfly_kernel,
        (x.shape[-2], triton.cdiv(most, part), 1),
        (x, before, after, bias, added, y, scales, width, out_width, x.stride(-2), y.stride(0)),
        interned(
            SIZE=part, LOG=size.bit_length() - 1, ROOT=size**-0.5 * (2 if paired else 1), PAIRED=paired, PDL=pdl,
            PARTS=x.shape[0] if x.dim() == 3 else 1, ARRANGED=arranged, num_warps=min(16, max(1, part // 512)),
            **({"launch_pdl": True} if pdl else {}),
        ),
    )  # fmt: skip


def rotate_fixed(
    x: Tensor, before: Tensor, *, width: int, out_width: int, paired: bool, asm: bool, pdl: bool
) -> tuple[Tensor, Tensor]:
    """H (before * x) in fixed point: int8 [2 m, out_width], a token's high and low bytes, and float32 [m, sections, 2].

    A section of 4096 values has a scale and the sum of its integers.
    """
    m, sections = x.shape[0], -(-width // SECTION)
    y = torch.empty(2 * m, out_width, dtype=torch.int8, device=x.device)
    scales = torch.empty(m, sections, 2, dtype=torch.float32, device=x.device)
    rotate(
        x, y, width=width, rotated=-(-width // 16) * 16, out_width=out_width, asm=asm, pdl=pdl, before=before,
        scales=scales, paired=paired,
    )  # fmt: skip
    return y, scales
