"""Several trellis matrices that read the same activations, in one launch, whatever their bit widths and codes.

A size budget gives every matrix its own bit width, so q, k and v can rarely be packed as one matrix, nor gate and up. But
the CTAs of `gemv.py` are independent: here one grid holds the CTAs of all parts, part after part, and each CTA branches on
its index to the code of its part. The results equal those of separate launches bit for bit.

    CTAs    [ part 0 | part 1 | part 2 ]        most bits first, because those CTAs take the longest

Outputs that are not rotated are finished in the epilogue and stored side by side: the bands of a head.

The fixed cost of a launch is paid once, and the CTAs of small parts fill the SMs that the large one leaves idle: a step of
the 8B shape takes 7 % less on an H200, with eight sequences 10 to 15 %. All parts have the same number of warps; registers
and shared memory are those of the most demanding part.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportGeneralTypeIssues=none

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import padded_smem_bytes
from requant_kernels.common.pdl import pdl_option
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.hadamard.tile_ptx import allocate_smem_ptx
from requant_kernels.trellis.gemv import activation_form, rotate_activations
from requant_kernels.trellis.gemv_kernel import GemvPtx, GemvShape, gemv_constants, multiply_tiles
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.layout import TILE, TrellisLayout, k64_per_unit
from requant_kernels.trellis.operands import RotatedActivations, common_form


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPart:
    """What `gemv_kernel.py` is compiled for, for one of the matrices."""

    shape: GemvShape
    ptx: GemvPtx


@triton.jit
def multiply_part(
    cta, x_ptr, scales_ptr, codes_ptr, y_ptr, output_scales_ptr, rows, stride_y, tiles, columns, M, hadamard_tiles, stride_x,
    sums_at, INDEX: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """`multiply_tiles` of part INDEX."""
    SHAPE: tl.constexpr = PARTS[INDEX].shape
    PTX: tl.constexpr = PARTS[INDEX].ptx
    units = columns // (64 * SHAPE.k64_per_unit)
    steps = tl.cdiv(units, SHAPE.num_warps * SHAPE.units_per_step)
    multiply_tiles(
        cta, x_ptr, scales_ptr, None, codes_ptr, y_ptr, output_scales_ptr, None, None, M, units, rows, stride_y, tiles - 1,
        steps, hadamard_tiles, stride_x, sums_at, SHAPE, PTX, None, PDL, EARLY_TRIGGER, WAIT,
    )  # fmt: skip


@triton.jit
def allocate_sums(ALLOCATE: tl.constexpr, W: tl.constexpr):
    """What `multiply_tiles` takes as `sums_at`, in a kernel of W warps."""
    sums_at = ()
    if ALLOCATE is not None:
        thread = tl.arange(0, 32)[None, :] + tl.arange(0, W)[:, None] * 0
        sums_at = (
            tl.inline_asm_elementwise(
                ALLOCATE.text, ALLOCATE.constraints, (thread,), dtype=tl.int32, is_pure=False, pack=1
            ),
        )
    return sums_at


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["M"])
def trellis_gemv_group_kernel(
    x_ptrs, scales_ptrs, codes_ptrs, y_ptrs, output_scales_ptrs, rows, tiles, columns, M, hadamard_tiles, stride_x, stride_y,
    PARTS: tl.constexpr, ALLOCATE: tl.constexpr, PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr,
):  # fmt: skip
    """y of every part; operands as in `trellis_gemv_kernel`, each a tuple; grid: the CTAs of all parts.

    Without output scales y is float32 `[M, 16 tiles]`; with them it is finished, with the `rows` of a part, tokens
    `stride_y` apart. ALLOCATE: shared memory for the cross-warp reduction; None if Triton does that. `columns` counts
    columns of whole units, not units: Triton makes every 1 in a tuple a constant, and without a loop over steps the layout
    differs.
    """
    W: tl.constexpr = PARTS[0].shape.num_warps
    sums_at = allocate_sums(ALLOCATE, W)
    cta = tl.program_id(0)
    for i in tl.static_range(len(PARTS)):
        ctas = tl.cdiv(tiles[i], PARTS[i].shape.row_tiles)
        if (cta >= 0) & (cta < ctas):
            if output_scales_ptrs is None:
                multiply_part(
                    cta, x_ptrs[i], scales_ptrs[i], codes_ptrs[i], y_ptrs[i], None, tiles[i] * 16, tiles[i] * 16, tiles[i],
                    columns[i], M, hadamard_tiles, stride_x, sums_at, i, PARTS, PDL, EARLY_TRIGGER, True,
                )  # fmt: skip
            else:
                multiply_part(
                    cta, x_ptrs[i], scales_ptrs[i], codes_ptrs[i], y_ptrs[i], output_scales_ptrs[i], rows[i], stride_y,
                    tiles[i], columns[i], M, hadamard_tiles, stride_x, sums_at, i, PARTS, PDL, EARLY_TRIGGER, True,
                )  # fmt: skip
        cta -= ctas


@cache
def group_constants(
    parts: tuple[tuple[str, int, int, TrellisGemvConfig, int, bool], ...], tokens: int
) -> dict[str, object]:
    """PARTS and ALLOCATE of the kernel. `parts`: code, quad bits, words per load, launch config and units of each, and
    whether its activations are int8.

    Raises ValueError if a launch config does not divide its matrix.
    """
    found = []
    for code, quad_bits, vector, config, units, int8 in parts:
        own: Any = gemv_constants(
            code, quad_bits, vector, config, tokens, units, int8=int8, given_memory=True
        )
        found.append(GroupPart(shape=own["SHAPE"], ptx=own["PTX"]))
    words = [part.shape.num_warps * part.shape.results for part in found if part.ptx.sum_warps is not None]
    return {"PARTS": tuple(found), "ALLOCATE": allocate_smem_ptx(128 * max(words)) if words else None}


def gemv_group(
    inputs: Sequence[RotatedActivations],
    layouts: Sequence[TrellisLayout],
    configs: Sequence[TrellisGemvConfig],
) -> list[Tensor]:
    """V times rotated activations, float32 [m, rows] for every matrix. `inputs`: the activations of each, in its form;
    matrices that read the same ones share them. `configs` agree in warps; the first decides the rest of the launch."""
    m, device = inputs[0].num_tokens, layouts[0].packed_codes.device
    outputs = [
        torch.empty(m, TILE * layout.packed_codes.shape[0], dtype=torch.float32, device=device)
        for layout in layouts
    ]
    _launch(inputs, layouts, configs, outputs)
    return outputs


def multiply_bands(
    x: Tensor | RotatedActivations,
    layouts: Sequence[TrellisLayout],
    configs: Sequence[TrellisGemvConfig],
    dtype: torch.dtype,
) -> Tensor:
    """y [m, sum of n] of x [m, k], rows contiguous, or already rotated: side by side, the outputs of matrices that do not
    rotate them and share the rotation of x (`shares_form`)."""
    if isinstance(x, Tensor):
        x = rotate_activations(
            x, layouts[0], common_form([activation_form(layout, x.shape[0]) for layout in layouts])
        )
    sizes = [layout.n for layout in layouts]
    y = torch.empty(x.num_tokens, sum(sizes), dtype=dtype, device=x.values.device)
    _launch([x] * len(layouts), layouts, configs, y.split(sizes, 1), finish=True)
    return y


def _launch(
    inputs: Sequence[RotatedActivations],
    layouts: Sequence[TrellisLayout],
    configs: Sequence[TrellisGemvConfig],
    outputs: Sequence[Tensor],
    *,
    finish: bool = False,
) -> None:
    """`finish`: apply the output scales and store in the type of `outputs`, which share one stride."""
    order = sorted(range(len(layouts)), key=lambda i: -layouts[i].quad_bits)
    first, m, device = configs[0], inputs[0].num_tokens, layouts[0].packed_codes.device
    tiles, units = zip(*(layout.packed_codes.shape[:2] for layout in layouts), strict=True)
    parts = (
        (
            layouts[i].code,
            layouts[i].quad_bits,
            layouts[i].packed_codes.shape[-1],
            configs[i],
            units[i],
            inputs[i].scales is not None,
        )
        for i in order
    )
    constants = group_constants(tuple(parts), m)
    columns = [64 * k64_per_unit(layout.quad_bits) * own for layout, own in zip(layouts, units, strict=True)]
    pdl = supports_pdl(device)
    values = inputs[0].values
    scales, rows, stride = None, None, None
    if finish:
        scales, rows = tuple(layouts[i].output_scales for i in order), tuple(layouts[i].n for i in order)
        stride = outputs[0].stride(0)
    launch(
        trellis_gemv_group_kernel,
        (sum(-(-own // config.tiles_per_cta) for own, config in zip(tiles, configs, strict=True)), 1, 1),
        (
            tuple(inputs[i].values for i in order), tuple(inputs[i].scales for i in order),
            tuple(layouts[i].packed_codes for i in order), tuple(outputs[i] for i in order), scales, rows,
            tuple(tiles[i] for i in order), tuple(columns[i] for i in order), m,
            values.shape[1] // HADAMARD_TILE, values.stride(0), stride,
        ),
        interned(**constants, PDL=pdl, EARLY_TRIGGER=first.pdl_trigger_early, num_warps=first.num_warps, num_stages=1,
                 **pdl_option(pdl)),
        smem_bytes=padded_smem_bytes(first.max_ctas_per_sm, device),
    )  # fmt: skip
