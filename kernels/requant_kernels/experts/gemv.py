"""Products of single tokens with single matrices of a stack, all in one launch, whatever the bit widths.

    slot j of 2 S:   token j % S // s,   matrix (j / S) E + expert[j % S]          S = m s slots of m tokens, s experts each

so the gates of all slots come first, then the ups; downs have one part, with a row of activations per slot. A CTA reads its
expert on the device, so the host never learns it, and a step can be captured as a CUDA graph; then it reads where the matrix
is (`ExpertStack.locations`), and branches to the code for its width, as in `trellis/gemv_group.py`. A budget gives the
experts of a layer up to thirteen widths from 1 to 4 bits: a launch for each would be most of a step's launches.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportAttributeAccessIssue=none, reportGeneralTypeIssues=none

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch
from requant_kernels.experts.stack import ExpertStack
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.launch_config import Shape
from requant_kernels.trellis.gemv_group import allocate_sums, group_constants, multiply_part
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig, trellis_slots
from requant_kernels.trellis.layout import TILE, k64_per_unit, words_per_load
from requant_kernels.trellis.operands import RotatedActivations


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """How a slot is located; constants of a launch."""

    parts: int  # matrices per expert in the stack: 2 for gate and up
    experts: int
    per_token: int  # slots of a part that read the same row of x


@triton.jit
def slot_of(experts_ptr, locations_ptr, SLOTS: tl.constexpr):
    """Row of x, number of the width, and index in its stack, for slot `program_id(1)`; the first and last int64."""
    slots = tl.num_programs(1) // SLOTS.parts
    own, part = tl.program_id(1) % slots, tl.program_id(1) // slots
    matrix = part * SLOTS.experts + tl.load(experts_ptr + own).to(tl.int64)
    width, index = tl.load(locations_ptr + 2 * matrix), tl.load(locations_ptr + 2 * matrix + 1)
    return (own // SLOTS.per_token).to(tl.int64), width, index.to(tl.int64)


@triton.jit(do_not_specialize=["tiles"])
def experts_gemv_kernel(
    x_ptr, scales_ptr, codes_ptrs, y_ptr, experts_ptr, locations_ptr, tiles, columns, hadamard_tiles, stride_x,
    PARTS: tl.constexpr, ALLOCATE: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y float32 `[slots, 16 tiles]`; grid (CTAs of a matrix, slots). x, `columns`, PARTS and ALLOCATE: as of
    `trellis_gemv_group_kernel`; `codes_ptrs` and `columns`: of every width, all of which agree in warps and tiles a CTA."""
    sums_at = allocate_sums(ALLOCATE, PARTS[0].shape.num_warps)
    wait_for_previous_launch(PDL, False)  # it may have chosen the experts
    token, width, index = slot_of(experts_ptr, locations_ptr, SLOTS)
    y_ptr += tl.program_id(1).to(tl.int64) * (16 * tiles)
    x_ptr += token * stride_x * (1 if scales_ptr is None else 2)
    if scales_ptr is not None:
        scales_ptr += token * hadamard_tiles * 4
    for i in tl.static_range(len(PARTS)):
        if width == i:
            SHAPE: tl.constexpr = PARTS[i].shape
            words = columns[i] // (64 * SHAPE.k64_per_unit) * (32 * SHAPE.words)  # of a tile
            multiply_part(
                tl.program_id(0), x_ptr, scales_ptr, codes_ptrs[i] + index * tiles * words, y_ptr, None, 16 * tiles,
                16 * tiles, tiles, columns[i], 1, hadamard_tiles, stride_x, sums_at, i, PARTS, PDL, False, False,
            )  # fmt: skip


def experts_gemv(
    x: RotatedActivations, stack: ExpertStack, experts: Tensor, *, per_token: int, config: TrellisGemvConfig | None = None
) -> Tensor:  # fmt: skip
    """V times rotated activations for every slot, float32 [parts * slots, rows]; slot i of a part reads row i / per_token of
    x. `experts`: int [slots], any of the stack's; `config`: instead of the rule's."""
    device, total, tiles = experts.device, stack.parts * len(experts), -(-stack.n // TILE)
    slots = Slots(parts=stack.parts, experts=stack.experts, per_token=per_token)
    ctas, columns, constants = _program(
        stack.layout.code, stack.widths, stack.n, stack.k, total, slots, x.scales is not None, device, config
    )
    y = torch.empty(total, TILE * tiles, dtype=torch.float32, device=device)
    launch(
        experts_gemv_kernel, (ctas, total, 1),
        (
            x.values, x.scales, stack.codes_of_widths(), y, experts, stack.locations, tiles, columns,
            x.values.shape[1] // HADAMARD_TILE, x.values.stride(0),
        ),
        constants,
    )  # fmt: skip
    return y


@cache
def _program(
    code: str, widths: tuple[float, ...], n: int, k: int, total: int, slots: Slots, int8: bool, device: torch.device,
    config: TrellisGemvConfig | None,
) -> tuple[int, tuple[int, ...], Mapping[str, object]]:  # fmt: skip
    """CTAs of a matrix, columns of whole units of every width, and the constants of the kernel."""
    config = config or trellis_slots([Shape(code, bits, n, k, 1) for bits in widths], total, device)
    parts, columns = [], []
    for bits in widths:
        quad_bits = round(4 * bits)
        unit = 64 * k64_per_unit(quad_bits)
        units = -(-k // unit)
        parts.append((code, quad_bits, words_per_load(quad_bits), config, units, int8))
        columns.append(unit * units)
    pdl = supports_pdl(device)
    constants = interned(
        **group_constants(tuple(parts), 1), SLOTS=slots, PDL=pdl, num_warps=config.num_warps, num_stages=1,
        **pdl_option(pdl),
    )  # fmt: skip
    return -(-n // (TILE * config.tiles_per_cta)), tuple(columns), constants
