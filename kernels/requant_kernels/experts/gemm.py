"""Products of groups of tokens with their expert's matrix, all in one launch, whatever the bit widths; in Gluon.

    CTA    row tiles of a matrix,   a part (gates, ups),   a group: up to N tokens of one expert

A CTA reads its expert on the device, and where that expert's matrix is (`ExpertStack.locations`), and branches to the code
for its width, as `gemv.py` does for a step. A launch for each of a layer's widths would be too small for the GPU, and most
of its CTAs would only find that their matrix is of another width.

The loop is that of `trellis/gemm_sm90.py`; registers are those of the most demanding width.

Imported only where it runs: Gluon is part of Triton from 3.6 on.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportAttributeAccessIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none, reportOperatorIssue=none

from functools import cache
from typing import Any

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from requant_kernels.common.launch import launch
from requant_kernels.common.wgmma import lane_and_tiles, x_layout
from requant_kernels.experts.stack import ExpertStack
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis.gemm_sm90 import (
    K_TILE,
    activation_buffers,
    first_codes,
    gemm_codes,
    gemm_cta,
    is_whole,
    max_registers,
    multiply_tiles,
    store_sums,
    takes_half_sums,
)
from requant_kernels.trellis.layout import TILE, k64_per_unit, words_per_load
from requant_kernels.trellis.operands import PARTIAL_SUM_SCALE


@gluon.jit(do_not_specialize=["k_tiles", "M"])
def experts_gemm_kernel(
    x_desc, codes_ptrs, out_ptr, groups_ptr, locations_ptr, columns, k_tiles, rows, M,
    WIDTHS: gl.constexpr, CTA: gl.constexpr, EXPERTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out `[parts, M, rows]`; grid: (row tiles / (W R), parts, groups).

    A group is int32 `[expert, first token, end]`, its expert -1 where no tokens are left. `locations_ptr`: int32
    `[parts EXPERTS, 2]`. `codes_ptrs`, `columns` (of whole units) and WIDTHS: of every width.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    group = groups_ptr + gl.program_id(2) * 3
    expert, token, end = gl.load(group), gl.load(group + 1), gl.load(group + 2)
    if expert < 0:
        return
    location = locations_ptr + 2 * (gl.program_id(1) * EXPERTS + expert)
    width, index = gl.load(location), gl.load(location + 1)
    first_tile = gl.program_id(0) * (CTA.num_warps * CTA.tiles_per_warp)
    last_tile = rows // 16 - 1
    lane, _, tiles = lane_and_tiles(first_tile, last_tile, CTA.num_warps, CTA.tiles_per_warp)
    tiles += index.to(gl.int64) * (last_tile + 1)
    smem, full = activation_buffers(x_desc, CTA)
    for i in gl.static_range(len(WIDTHS)):
        if width == i:
            CODES: gl.constexpr = WIDTHS[i]
            SCALE: gl.constexpr = CODES.scale
            units = columns[i] // (64 * CODES.k64_per_unit)
            address, words = first_codes(codes_ptrs[i], tiles, lane, 0, units, CODES)
            y = multiply_tiles(x_desc, token, smem, full, address, words, lane, 0, k_tiles, units, CODES, CTA)
            store_sums(y, None, out_ptr, gl.program_id(1), first_tile, token, end, rows, M, SCALE, CTA)


def experts_gemm(
    rotated: Tensor, stack: ExpertStack, out: Tensor, groups: Tensor, config: GemmSm90Config
) -> None:
    """Write V times rotated activations [m, columns], sorted by expert, over PARTIAL_SUM_SCALE to out [parts, m, rows].

    groups: int32 [g, 3]: the expert of up to `tokens_per_cta` rows (-1: none), the first of these rows, and the end.
    """
    parts, m, rows = out.shape
    columns, constants = _program(stack.layout.code, stack.widths, stack.k, config, stack.experts)
    cta = gemm_cta(config)
    launch(
        experts_gemm_kernel,
        (-(-rows // (TILE * config.num_warps * config.tiles_per_warp)), parts, len(groups)),
        (
            TensorDescriptor.from_tensor(rotated, [cta.tokens, cta.stage_columns], x_layout()), stack.codes_of_widths(), out,
            groups, stack.locations, columns, -(-stack.k // K_TILE), rows, m,
        ),
        constants,
    )  # fmt: skip


@cache
def _program(
    code: str, widths: tuple[float, ...], k: int, config: GemmSm90Config, experts: int
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Columns of whole units of every width, and the constants of the kernel."""
    sums = takes_half_sums(code, config.tokens_per_cta)
    quads = [round(4 * bits) for bits in widths]
    scale = 1 / PARTIAL_SUM_SCALE
    codes = tuple(
        gemm_codes(code, q, words_per_load(q), whole=is_whole(q, k), sums=sums, scale=scale) for q in quads
    )
    columns = tuple(-(-k // (64 * k64_per_unit(q))) * 64 * k64_per_unit(q) for q in quads)
    registers = [max_registers(config, q) for q in quads]
    return columns, {
        "WIDTHS": codes, "CTA": gemm_cta(config), "EXPERTS": experts, "PDL": True, "num_warps": config.num_warps,
        "launch_pdl": True, "maxnreg": None if None in registers else max(registers),
    }  # fmt: skip
