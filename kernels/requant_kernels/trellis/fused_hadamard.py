"""The prologue of `gemv.py` for one token: every CTA rotates the token itself, in shared memory, while its first codes load.

This saves the launch of a rotation: 4096 x 4096 takes 6.3 us instead of 7.3 (`pair`, 2 bits), 2048 x 2048 4.2 instead of
5.0. It costs every CTA a rotation, so it is used only up to 4096 columns, with all CTAs, of 16 warps, resident at once; at
8192 columns it saved 7 % for one matrix and cost 15 % for another. The PTX is that of `hadamard/`. The int8 activations stay
in the shared memory that the rotation used for its exchange, where `gemv.py` reads them.

A token of attention may come in parts (`SplitAttention`): then every CTA combines them first, which saves another launch.

    y = sum_i 2^(z_i - max z) o_i / sum_i 2^(z_i - max z)
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from requant_kernels.common.ptx import Ptx, PtxBuilder, inline_ptx
from requant_kernels.hadamard.registers import allocate_smem, exchange_in
from requant_kernels.hadamard.tile_builder import TF32_FACTOR
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE, sign_pair
from requant_kernels.hadamard.tile_ptx import (
    LOW_BYTES_OFFSET,
    MAX_SUM_BYTES,
    SUMS_OFFSET,
    allocate_smem_ptx,
    exchange_ptx,
    fused_smem_bytes,
    fused_transform_ptx,
    load_eight_ptx,
)
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.gemv_ptx import load_activations_ptx

NUM_WARPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """What a prologue rotates."""

    block_size: int  # of the Hadamard transform
    dtype: torch.dtype
    parts: int = 0  # of attention, whose heads have `head_dim` values; 0: it is whole
    head_dim: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedHadamard:
    """What the prologue is compiled for."""

    factor: float  # of all values: for the block size, for tf32, and 2 for `pair`
    warp_mask: int  # bits of the index above the eighth that are mixed across warps
    pair: bool  # sums and differences of neighbours are not rotated further
    low_bytes: int  # offset from the high to the low bytes, in shared memory
    sums_offset: int  # of the shared memory for the cross-warp reduction of `gemv.py`
    load_x: Ptx
    load_parts: tuple[Ptx, ...]  # empty: the token is whole
    load_logarithms: Ptx
    weights: Ptx
    head_dim: int
    dtype: str  # of the values of parts
    load_input_scales: Ptx
    allocate: Ptx
    exchange: Ptx
    rotate: Ptx


@triton.jit
def _load_eight(pointer, at, width, PTX: tl.constexpr):
    """Eight adjacent values as float32; past the end, any valid ones."""
    types: tl.constexpr = (tl.float32,) * 8
    address = (pointer + tl.minimum(at, width - 8)).to(tl.int64)
    return tl.inline_asm_elementwise(
        PTX.text, PTX.constraints, (address,), dtype=types, is_pure=False, pack=1
    )


@triton.jit
def load_factors(input_scales_ptr, lane, warp, width, FUSED: tl.constexpr):
    """The factors of a lane's activations, applied before the rotation: zero past the end."""
    LOAD: tl.constexpr = FUSED.load_input_scales
    at = warp * 256 + lane * 8
    scales = _load_eight(input_scales_ptr, at, width, LOAD)
    factors = ()
    for i in tl.static_range(8):
        factors = factors + (tl.where(at < width, scales[i] * FUSED.factor, 0.0),)
    return factors


@triton.jit
def prepare(lane, warp, FUSED: tl.constexpr):
    """What the rotation needs beside the token: a lane's signs of three products, and addresses of shared memory."""
    g, t = lane // 4 + warp * 0, lane % 4 * 2
    second = sign_pair(g, t, 7)
    first = second
    if FUSED.pair:  # bit 0 is the lowest one of a lane's registers
        first = sign_pair(g, t, 6)
    third = sign_pair(g, t, FUSED.warp_mask)
    smem = allocate_smem(lane + warp * 0, FUSED)
    exchange = exchange_in(smem, lane + warp * 0, warp + lane * 0, FUSED)
    return (first, second, third) + exchange + (smem,)


@triton.jit
def _two_values(word, FUSED: tl.constexpr):
    """Both 16-bit values of a word, the low one first, as float32."""
    if FUSED.dtype == "bf16":
        low, high = word << 16, word & -65536
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _combine_parts(values_ptr, logarithms_ptr, at, width, FUSED: tl.constexpr):
    """Eight adjacent values of attention in parts; past the end, any valid ones. All loads precede the arithmetic."""
    LOADS: tl.constexpr = FUSED.load_parts
    PARTS: tl.constexpr = len(LOADS)
    D: tl.constexpr = FUSED.head_dim
    words: tl.constexpr = (tl.int32,) * 4
    at = tl.minimum(at, width - 8)
    head = at // D
    address = (values_ptr + (head * (PARTS - 1) * D + at)).to(tl.int64)
    logarithms = tl.inline_asm_elementwise(
        FUSED.load_logarithms.text, FUSED.load_logarithms.constraints, ((logarithms_ptr + head * PARTS).to(tl.int64),),
        dtype=(tl.float32,) * PARTS, is_pure=False, pack=1,
    )  # fmt: skip
    parts = ()
    for i in tl.static_range(PARTS):
        parts = parts + tl.inline_asm_elementwise(
            LOADS[i].text, LOADS[i].constraints, (address,), dtype=words, is_pure=False, pack=1
        )
    weights = tl.inline_asm_elementwise(
        FUSED.weights.text,
        FUSED.weights.constraints,
        logarithms,
        dtype=(tl.float32,) * PARTS,
        is_pure=True,
        pack=1,
    )
    y = (0.0,) * 8
    for i in tl.static_range(PARTS):
        sums = ()
        for j in tl.static_range(4):
            low, high = _two_values(parts[4 * i + j], FUSED)
            sums = sums + (y[2 * j] + weights[i] * low, y[2 * j + 1] + weights[i] * high)
        y = sums
    return y


@triton.jit
def rotate_token(x_ptr, logarithms_ptr, factors, prepared, lane, warp, width, FUSED: tl.constexpr):
    """Rotate the token; returns the shared memory address of its high bytes, its scale and the sum of its integers."""
    LOAD: tl.constexpr = FUSED.load_x
    if len(FUSED.load_parts) > 0:
        x = _combine_parts(x_ptr, logarithms_ptr, warp * 256 + lane * 8, width, FUSED)
    else:
        x = _load_eight(x_ptr, warp * 256 + lane * 8, width, LOAD)
    values = ()
    for i in tl.static_range(8):
        values = values + (x[i] * factors[i],)
    smem = prepared[7]
    high = smem + lane // 4 * 256 + warp * 16 + lane % 4 * 4
    scale, total = tl.inline_asm_elementwise(
        FUSED.rotate.text, FUSED.rotate.constraints,
        values + prepared + (high, high + FUSED.low_bytes), dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip
    return smem, scale, total


@cache
def _load_logarithms_ptx(parts: int) -> Ptx:
    """Adjacent float32. Outputs: `parts`. Input: the address."""
    names = [f"z{i}" for i in range(parts)]
    lines = [f"ld.global.f32 ${name}, [$address + {4 * i}];" for i, name in enumerate(names)]
    return inline_ptx(lines, outputs=dict.fromkeys(names, "=&f"), inputs={"address": "l"})


@cache
def _weights_ptx(parts: int) -> Ptx:
    """2^z_i / sum_i 2^z_i. Outputs: `parts`. Inputs: as many z, not all negative infinity."""
    if parts == 0:
        return Ptx(text="", constraints="")
    ptx = PtxBuilder()
    z = [f"${parts + i}" for i in range(parts)]
    top = z[0]
    for value in z[1:]:
        top = ptx.new("top", f"max.f32 {{d}}, {top}, {value};")
    powers = [ptx.new("less", f"sub.f32 {{d}}, {value}, {top};") for value in z]
    powers = [ptx.new("power", f"ex2.approx.ftz.f32 {{d}}, {value};") for value in powers]
    total = powers[0]
    for power in powers[1:]:
        total = ptx.new("total", f"add.f32 {{d}}, {total}, {power};")
    inverse = ptx.new("inverse", f"rcp.approx.ftz.f32 {{d}}, {total};")
    ptx.emit(*(f"mul.f32 ${i}, {power}, {inverse};" for i, power in enumerate(powers)))
    return ptx.build(["=f"] * parts + ["f"] * parts)


@cache
def fused_hadamard(token: Token, *, pair: bool, row_tiles: int) -> FusedHadamard:
    """The prologue for a token, of a CTA of `row_tiles`; `pair`: as in `hadamard/`."""
    smem_bytes = fused_smem_bytes(128 * NUM_WARPS * 2 * row_tiles)
    kind = "bf16" if token.dtype == torch.bfloat16 else "fp16"
    return FusedHadamard(
        factor=TF32_FACTOR * token.block_size**-0.5 * (2 if pair else 1), warp_mask=token.block_size - 1 >> 8, pair=pair,
        low_bytes=LOW_BYTES_OFFSET, sums_offset=SUMS_OFFSET,
        load_x=load_eight_ptx(kind), load_input_scales=load_eight_ptx("fp16"),
        load_parts=tuple(load_activations_ptx(2 * token.head_dim * part) for part in range(token.parts)),
        load_logarithms=_load_logarithms_ptx(token.parts), weights=_weights_ptx(token.parts),
        head_dim=token.head_dim, dtype=kind,
        allocate=allocate_smem_ptx(smem_bytes), exchange=exchange_ptx(),
        rotate=fused_transform_ptx(token.block_size >= HADAMARD_TILE, smem_bytes),
    )  # fmt: skip


def supports(k: int, config: TrellisGemvConfig) -> bool:
    """Whether a CTA of this launch can rotate k columns: it has the warps, and enough shared memory for its sums."""
    return (
        config.num_warps == NUM_WARPS
        and k % 256 == 0
        and k <= HADAMARD_TILE
        and 128 * NUM_WARPS * 2 * config.tiles_per_cta <= MAX_SUM_BYTES
    )
