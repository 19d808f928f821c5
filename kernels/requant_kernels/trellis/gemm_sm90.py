"""The trellis GEMM for Hopper, 9 to 1024 tokens, in Gluon: decoding overlaps with the wgmma of the previous weights.

    y = V x_rot        V float16, exactly; x_rot float16, rotated and permuted by `hadamard/`; or both int8 (`gemm_int8.py`)

The K loop runs over k64 stages, 16 rows x 64 columns per row tile (`layout.py`), which are decoded in registers, as the
left operand of wgmma (`wgmma_operand.py`). Activations go through shared memory, by TMA, in NUM_STAGES buffers of
STAGE_COLUMNS columns. Triton waits for every wgmma whose left operand is in registers; Gluon lets the kernel wait only
when it needs the result, so wgmma runs while the next k64 is decoded. The following rotation reduces the split-K partial
sums, which saves a launch.

`multiply_tiles` and `store_sums` are also those of the experts of a prompt (`experts/gemm.py`).

Two weights w0, w1 of `pair` need not be decoded individually. Their product with two activations is

    w0 x0 + w1 x1  =  (w0 + w1) / 2 (x0 + x1)  +  (w0 - w1) / 2 (x0 - x1)

and the half sums take fewer instructions (`code_ptx.py`). Sums and differences of rotated activations are the rotation
without its first stage. `pair` is multiplied this way up to HALF_SUM_TOKENS tokens.

Imported only where it runs: Gluon is part of Triton from 3.6 on.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from requant_kernels.common.device import num_sms
from requant_kernels.common.launch import launch
from requant_kernels.common.wgmma import lane_and_tiles, x_layout
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis import gemm_sm90_launch
from requant_kernels.trellis.code_ptx import (
    INTEGER_SCALES,
    SUM_SCALE,
    decode_ptx,
    integers_ptx,
    load_codes_ptx,
)
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.gemm_sm90_launch import ALONE, PdlPosition
from requant_kernels.trellis.layout import TrellisLayout, k64_per_unit
from requant_kernels.trellis.operands import PARTIAL_SUM_SCALE, ActivationForm, RotatedActivations
from requant_kernels.trellis.rotate import rotate_output
from requant_kernels.trellis.wgmma_operand import decode, decode_int8, sums_layout

MAX_TOKENS = 1024  # above, decoding once for all tokens and cuBLAS are faster
K64, K_TILE = 64, 256  # columns
K64_PER_K_TILE = K_TILE // K64
# Limit for `pair` as half sums: the products of an 8B block take 14 % less time at 32 tokens, 8 at 64, 3 at 128.
HALF_SUM_TOKENS = 128


def activation_stages(tokens: int, *, int8: bool = False) -> tuple[int, int]:
    """Columns per stage of activations, and the number of stages."""
    if int8:
        return K_TILE, 3
    return (K_TILE, 2) if tokens <= 128 else (K_TILE // 2, 3)


def max_registers(config: GemmSm90Config, quad_bits: int) -> int | None:
    """Register limit per thread where 16 warps should fit an SM; None: as many as the compiler wants."""
    return 128 if config.tokens_per_cta <= 64 and config.tiles_per_warp == 1 and quad_bits <= 16 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCodes:
    """What the loop over codes is compiled for. A k_tile of 256 columns is `units` units."""

    decode: tuple[Any, ...]  # PTX of each k64 of a unit
    loads: tuple[Any, ...]  # of each unit of a k_tile if units end with one (`whole`), otherwise one for all
    words: int  # per lane and unit
    vector: int  # words per load
    k64_per_unit: int
    units: int  # per k_tile
    whole: bool
    scale: float  # of the sums


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCta:
    """What the rest of the kernel is compiled for."""

    tokens: int
    num_warps: int
    tiles_per_warp: int
    prefetch_at: int  # the k64 of a k_tile during which the codes of the next one are loaded
    stage_columns: int  # of activations
    num_stages: int


@gluon.jit
def _load_codes(address, k_tile, units, CODES: gl.constexpr):
    """The words of the units of a k_tile, at a lane's base addresses; past the end, those of the last k_tile."""
    COUNT: gl.constexpr = CODES.words
    UNITS: gl.constexpr = CODES.units
    WHOLE: gl.constexpr = CODES.whole
    LOADS: gl.constexpr = CODES.loads
    types: gl.constexpr = (gl.int32,) * COUNT
    found = ()
    for u in gl.static_range(UNITS):
        unit = (
            gl.minimum(k_tile * UNITS, units - UNITS) if WHOLE else gl.minimum(k_tile * UNITS + u, units - 1)
        )
        at = address + unit.to(gl.int64) * (128 * COUNT)
        found = found + gl.inline_asm_elementwise(
            LOADS[u if WHOLE else 0].text, LOADS[0].constraints, (at,), dtype=types, is_pure=False, pack=1
        )
    return found


@gluon.jit
def first_codes(codes_ptr, tiles, lane, first, units, CODES: gl.constexpr):
    """Base addresses of these lanes and row tiles, and the words of k_tile `first`: what `multiply_tiles` begins with."""
    address = codes_ptr.to(gl.int64) + (tiles * units * (32 * CODES.words) + lane * CODES.vector) * 4
    return address, _load_codes(address, first, units, CODES)


@gluon.jit
def activation_buffers(x_desc, CTA: gl.constexpr):
    """Shared memory of the stages of activations, and the barrier of each."""
    NUM_STAGES: gl.constexpr = CTA.num_stages
    smem = gl.allocate_shared_memory(x_desc.dtype, [NUM_STAGES, CTA.tokens, CTA.stage_columns], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    return smem, full


@gluon.jit
def _load_activations(x_desc, token, column, barrier, stage, pred, CTA: gl.constexpr):
    """Start the TMA copy of a stage; zeros beyond the matrix."""
    mbarrier.expect(
        barrier, CTA.tokens * CTA.stage_columns * (x_desc.dtype.primitive_bitwidth // 8), pred=pred
    )
    tma.async_copy_global_to_shared(x_desc, [token, column], barrier, stage, pred=pred)


@gluon.jit
def multiply_tiles(x_desc, token, smem, full, address, words, lane, first, count, units, CODES: gl.constexpr,
                   CTA: gl.constexpr):  # fmt: skip
    """Sums `[16 W R, N]`, float32 or int32, in the layout of `store_sums`, over `count` k_tiles from `first`, of the tokens
    from `token` on. `address`, `words`: of `first_codes`; `smem`, `full`: of `activation_buffers`."""
    N: gl.constexpr = CTA.tokens
    W: gl.constexpr = CTA.num_warps
    R: gl.constexpr = CTA.tiles_per_warp
    PREFETCH_AT: gl.constexpr = CTA.prefetch_at
    DECODE: gl.constexpr = CODES.decode
    COUNT: gl.constexpr = CODES.words
    J: gl.constexpr = CODES.k64_per_unit
    INT8: gl.constexpr = x_desc.dtype == gl.int8
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, min(N, 128), 32] if INT8 else [16, N, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=4 if INT8 else 2)
    STAGE_COLUMNS: gl.constexpr = CTA.stage_columns
    NUM_STAGES: gl.constexpr = CTA.num_stages
    PER: gl.constexpr = STAGE_COLUMNS // 64  # k64 per stage
    previous_lane = (lane + 28) % 32
    stages = count * (4 // PER)
    for i in gl.static_range(NUM_STAGES):
        _load_activations(
            x_desc, token, first * 256 + i * STAGE_COLUMNS, full.index(i), smem.index(i), stages > i, CTA
        )

    acc = warpgroup_mma_init(gl.zeros([16 * W * R, N], gl.int32 if INT8 else gl.float32, layout=ACC))
    stage = 0
    next_words = words
    for step in range(count):
        words = next_words
        for q in gl.static_range(4):
            if q == PREFETCH_AT:
                next_words = _load_codes(address, first + step + 1, units, CODES)
            if INT8:
                weight = decode_int8(words, previous_lane, DECODE, q, COUNT, J, A, W, R)
            else:
                weight = decode(words, previous_lane, DECODE, q, COUNT, J, A, W, R)
            slot = stage % NUM_STAGES
            if q % PER == 0:
                mbarrier.wait(full.index(slot), stage // NUM_STAGES % 2)
            x = smem.index(slot).slice(64 * (q % PER), 64, dim=1).permute((1, 0))
            acc = warpgroup_mma(weight, x, acc, is_async=True)
            # wait for the previous k64: the next one is decoded into its registers
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
            if q % PER == 0:  # all warps have multiplied the previous stage: its buffer is free
                gl.thread_barrier()
                last = stage + NUM_STAGES - 1
                free = last % NUM_STAGES
                pred = (stage > 0) & (last < stages)
                _load_activations(
                    x_desc, token, first * 256 + last * STAGE_COLUMNS, full.index(free), smem.index(free), pred, CTA
                )  # fmt: skip
            if q % PER == PER - 1:
                stage += 1
    y = warpgroup_mma_wait(0, deps=[acc])
    y = gl.reshape(gl.permute(gl.reshape(y, [W * R, 2, 8, N]), (0, 2, 1, 3)), [16 * W * R, N])  # tile g h
    return gl.convert_layout(y, sums_layout(N, W, R), assert_trivial=True)


@gluon.jit
def store_sums(
    y, x_scales_ptr, out_ptr, part, first_tile, token, end, rows, M, SCALE: gl.constexpr, CTA: gl.constexpr
):
    """Write to out `[parts, M, rows]` the sums of row tiles from `first_tile` on, of tokens from `token` to `end`, times
    SCALE and, where there are any, the scales of tokens."""
    N: gl.constexpr = CTA.tokens
    ROWS: gl.constexpr = 16 * CTA.num_warps * CTA.tiles_per_warp
    S: gl.constexpr = sums_layout(N, CTA.num_warps, CTA.tiles_per_warp)
    row = first_tile * 16 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    m = token + gl.arange(0, N, gl.SliceLayout(0, S))
    if x_scales_ptr is not None:
        y = y.to(gl.float32) * gl.load(x_scales_ptr + m, mask=m < end, other=0.0)[None, :]
    y = (y * SCALE).to(out_ptr.dtype.element_ty)
    at = (part * M + m)[None, :].to(gl.int64) * rows + row[:, None]
    gl.store(out_ptr + at, y, mask=(m < end)[None, :] & (row < rows)[:, None])


@gluon.jit(do_not_specialize=["k_tiles", "steps", "M", "units", "skipped"])
def trellis_gemm_sm90_kernel(
    x_desc, x_scales_ptr, codes_ptr, out_ptr, units, k_tiles, steps, rows, M, skipped,
    CODES: gl.constexpr, CTA: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out of any float type `[splits, M, rows]`; grid: (row tiles / (W R), splits of `steps` k_tiles of 256 columns,
    tokens / N). `skipped`: row tiles before these, which another launch computes.

    x float16, or int8 with a scale float32 per token, `x_scales_ptr`; weights are decoded to the same type. PDL: see
    `PdlPosition`; empty: without it.
    """
    first_tile = skipped + gl.program_id(0) * (CTA.num_warps * CTA.tiles_per_warp)
    lane, _, tiles = lane_and_tiles(first_tile, rows // 16 - 1, CTA.num_warps, CTA.tiles_per_warp)
    first = gl.program_id(1) * steps
    count = gl.minimum(steps, k_tiles - first)
    smem, full = activation_buffers(x_desc, CTA)
    address, words = first_codes(codes_ptr, tiles, lane, first, units, CODES)
    if PDL != "":
        if PDL != "first":
            tl.extra.cuda.gdc_launch_dependents()
        if PDL != "later":
            tl.extra.cuda.gdc_wait()
        if PDL == "first":
            tl.extra.cuda.gdc_launch_dependents()
    token = gl.program_id(2) * CTA.tokens
    y = multiply_tiles(x_desc, token, smem, full, address, words, lane, first, count, units, CODES, CTA)
    store_sums(y, x_scales_ptr, out_ptr, gl.program_id(1), first_tile, token, M, rows, M, CODES.scale, CTA)
    if PDL == "later":
        tl.extra.cuda.gdc_wait()


@cache
def gemm_codes(
    code: str, quad_bits: int, vector: int, *, whole: bool, sums: bool = False, int8: bool = False, scale: float = 1.0
) -> GemmCodes:  # fmt: skip
    """`whole`: columns are a multiple of the k_tile; `sums`: half sums are decoded; `int8`: to int8; `scale`: of the sums,
    besides the code's own."""
    k64_count = k64_per_unit(quad_bits)
    words, units = quad_bits * k64_count // 4, K64_PER_K_TILE // k64_count
    ptx, own = (integers_ptx, INTEGER_SCALES[sums]) if int8 else (decode_ptx, SUM_SCALE if sums else 1.0)
    return GemmCodes(
        decode=tuple(ptx(code, quad_bits, k64, sums=sums) for k64 in range(k64_count)),
        loads=tuple(load_codes_ptx(words, vector, 128 * words * unit) for unit in range(units if whole else 1)),
        words=words, vector=vector, k64_per_unit=k64_count, units=units, whole=whole, scale=scale * own,
    )  # fmt: skip


@cache
def gemm_cta(config: GemmSm90Config, *, int8: bool = False) -> GemmCta:
    columns, stages = activation_stages(config.tokens_per_cta, int8=int8)
    return GemmCta(
        tokens=config.tokens_per_cta, num_warps=config.num_warps, tiles_per_warp=config.tiles_per_warp,
        prefetch_at=config.prefetch_at, stage_columns=columns, num_stages=stages,
    )  # fmt: skip


def is_whole(quad_bits: int, k: int) -> bool:
    """Whether the units of a row of k columns end with a k_tile."""
    return -(-k // (k64_per_unit(quad_bits) * K64)) * k64_per_unit(quad_bits) * K64 % K_TILE == 0


def supports(layout: TrellisLayout, num_tokens: int, device: torch.device) -> bool:
    """Up to 1024 tokens."""
    return num_tokens <= MAX_TOKENS


def gemm_sm90(x: Tensor, layout: TrellisLayout, bias: Tensor | None, config: GemmSm90Config) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous: rotate, multiply, rotate."""
    return rotate_output(product(x, layout, config), x, layout, bias, asm=True)


def takes_half_sums(code: str, num_tokens: int) -> bool:
    """Whether the code's weights are decoded as half sums, and activations written as sums, for this many tokens per matrix,
    or per CTA of experts."""
    return num_tokens <= HALF_SUM_TOKENS and CODES[code].byte_sums and CODES[code].weights_per_hash == 2


def activation_form(layout: TrellisLayout, num_tokens: int) -> ActivationForm:
    """What `product` reads for this many tokens, `group_product` for this many per CTA."""
    sums = takes_half_sums(layout.code, num_tokens)
    return ActivationForm(columns=-(-layout.k // K64) * K64, pair=sums, permute=True)


def rotated_activations(
    x: Tensor, layout: TrellisLayout, tokens_per_cta: int | None = None
) -> RotatedActivations:
    """H (input_scales * x) of x [m, k], as `product` reads it, or `group_product` with this many tokens per CTA."""
    form = activation_form(layout, tokens_per_cta or x.shape[0])
    found = form.empty(x.shape[0], x.device)
    hadamard_transform(
        x, found.values, in_width=layout.k, columns=-(-layout.k // 16) * 16, out_width=found.values.shape[1],
        input_scales=layout.input_scales, pair=form.pair, permute=True, asm=True, pdl=True,
        rotate=layout.input_scales is not None,
    )  # fmt: skip
    return found


def product(
    x: Tensor | RotatedActivations,
    layout: TrellisLayout,
    config: GemmSm90Config,
    position: PdlPosition = ALONE,
) -> Tensor:
    """V H (input_scales * x) of x [m, k], or of x already rotated: split-K partial sums, float16 [splits, m, rows] over
    PARTIAL_SUM_SCALE (`operands.py`)."""
    rotated = (x if isinstance(x, RotatedActivations) else rotated_activations(x, layout)).values
    sums = takes_half_sums(layout.code, rotated.shape[0])
    return multiply(rotated, None, layout, config, position, sums=sums)


def multiply(
    rotated: Tensor, x_scales: Tensor | None, layout: TrellisLayout, config: GemmSm90Config, position: PdlPosition, *,
    sums: bool,
) -> Tensor:  # fmt: skip
    """`product` of what the kernel reads: float16 [m, columns], or int8 with `x_scales` [m]; `sums`: as half sums."""
    int8 = x_scales is not None
    m, (tiles, units, _, _, vector) = rotated.shape[0], layout.packed_codes.shape
    k_tiles = -(-layout.k // K_TILE)
    steps = -(-k_tiles // min(k_tiles, config.split_k))
    splits = -(-k_tiles // steps)
    out = torch.empty(splits, m, tiles * 16, dtype=torch.float16, device=rotated.device)
    before = 0  # row tiles of the previous launches
    parts = gemm_sm90_launch.launches(config, tiles, m, num_sms(rotated.device), position)
    for own, own_tiles in parts:
        box = [own.tokens_per_cta, activation_stages(own.tokens_per_cta, int8=int8)[0]]
        ctas = -(-own_tiles // (own.num_warps * own.tiles_per_warp))
        launch(
            trellis_gemm_sm90_kernel,
            (ctas, splits, -(-m // own.tokens_per_cta)),
            (
                TensorDescriptor.from_tensor(rotated, box, x_layout(8 if int8 else 16)), x_scales, layout.packed_codes, out,
                units, k_tiles, steps, tiles * 16, m, before,
            ),
            _launch_constants(
                layout.code, layout.quad_bits, vector, is_whole(layout.quad_bits, layout.k), own, sums, int8,
                position.of_launch(first=before == 0, last=before + own_tiles == tiles),
            ),
        )  # fmt: skip
        before += own_tiles
    return out


@cache
def _launch_constants(
    code: str,
    quad_bits: int,
    vector: int,
    whole: bool,
    config: GemmSm90Config,
    sums: bool,
    int8: bool,
    position: str,
) -> dict[str, object]:
    scale = 1 / PARTIAL_SUM_SCALE
    return {
        "CODES": gemm_codes(code, quad_bits, vector, whole=whole, sums=sums, int8=int8, scale=scale),
        "CTA": gemm_cta(config, int8=int8), "PDL": position, "num_warps": config.num_warps, "launch_pdl": True,
        "maxnreg": max_registers(config, quad_bits),
    }  # fmt: skip
