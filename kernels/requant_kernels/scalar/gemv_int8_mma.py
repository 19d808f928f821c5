"""One token of a 2- to 4-bit grid on int8 tensor cores, with or without 16-bit residuals; sm_90.

Why it exists: decoding one token becomes issue-bound, not memory-bound, once unpacking takes more than about two
instructions per weight. `gemv.py` needs one LOP3 and one HFMA2 for two weights; here one AND leaves four weights in an
operand register of `mma.m16n8k32`, and nothing else is done to them (`gemv_int8_mma_ptx.py` has the equations). It is the
fastest kernel for one token at 2 and 3 bits, and with residuals at 2 to 4. Without residuals at 4 bits `gemv_fp16_mma.py`
is faster for half of the tuned shapes: this kernel's stages leave shared memory for too few CTAs.

A CTA owns `tiles` x 16 rows; its warps split the columns, one k_tile of 256 at a time, and synchronize twice:

    cp.async     codes and scales of the first num_stages - 1 k_tiles, before the PDL wait (weights do not depend on x)
    quantize     activations to 16-bit fixed point, one scale per 128, up to four k_tiles per warp interleaved:
                 one after the other took 6 to 11 % of the whole time
    barrier      quantized activations are in shared memory
    loop         cp.async of a later k_tile, wait for this one, MMA
    sparse       slices of residuals (below)
    barrier      the cross-warp reduction uses the pipeline buffer, not Triton's

On the inputs of a trained model the error is 1.6e-4 with float16 and fixed point, 1.5e-4 with float16 alone
(`eval/results/trials.json`).

*Residuals* use the pipeline stages after the last weight tile (`gemv_int8_mma_residuals.py`): they are in flight while the
last weights are multiplied, and need no shared memory of their own.

The gather also needs unquantized activations. They get a separate buffer. Where that would cost a resident CTA per SM
(28672 x 8192, 3 bits: 74 KB and three CTAs, or 90 KB and two), they are instead copied again, over quantized bytes that
have already been multiplied, and registers are capped to fit as many CTAs.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none, reportAssignmentType=none, reportPossiblyUnboundVariable=none

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.cp_async import (
    WeightStage,
    load_k_tile,
    supports_grid,
    weight_pointers,
    weight_stage,
)
from requant_kernels.common.device import num_sms, supports_pdl
from requant_kernels.common.fragment_dequant import sparse_operands
from requant_kernels.common.inline_ptx import (
    allocate_smem,
    allocated_bytes,
    compute_f32,
    compute_tuple,
    issue,
    issue_scalar,
    keep_smem,
    smem_units,
)
from requant_kernels.common.launch import aligned, interned, launch
from requant_kernels.common.occupancy import CTA_SMEM_BYTES, SM_SMEM_BYTES, fits_cta, padded_smem_bytes
from requant_kernels.common.packing import GridLayout, Layout
from requant_kernels.common.pdl import pdl_option
from requant_kernels.common.ptx import Ptx, ptx_dtype
from requant_kernels.scalar import gemv_int8_mma_ptx as ptx
from requant_kernels.scalar import gemv_int8_mma_residuals as residuals
from requant_kernels.scalar.gemv_int8_mma_launch import Int8MmaConfig

REGISTERS_PER_SM = 65536
MIN_REGISTERS, MAX_REGISTERS = 80, 255  # per thread: what two tiles need; the hardware limit
MAX_K_TILES_PER_STEP = 4  # k_tiles of activations that a warp quantizes interleaved
X_TILE_BYTES = gl.constexpr(ptx.X_TILE_BYTES)
STORE_ZEROS, LOAD_X = gl.constexpr(ptx.STORE_ZEROS), gl.constexpr(ptx.LOAD_X)
LOAD_REDUCE, STORE_F32 = gl.constexpr(ptx.LOAD_REDUCE), gl.constexpr(ptx.STORE_F32)
FOUR = gl.constexpr((gl.int32,) * 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """The compile-time constants of one launch. Offsets are bytes from the start of shared memory:

    pipeline stages | 512 zeros | quantized activations, 2 K | sums of activations | scales | unquantized activations, 2 K
    """

    stage: WeightStage
    num_warps: int
    num_stages: int
    smem_units: int
    zeros_offset: int
    x_copy_offset: int  # unquantized activations that residuals gather
    slices_per_stage: int
    k_tiles_per_step: int
    rescale: tuple[float, ...]  # by shift class
    quantize: Ptx
    multiply: Ptx
    wait: str
    sparse_fma: Ptx | None
    pdl: bool

    @property
    def x_offset(self) -> int:
        """Offset of the quantized activations."""
        return self.zeros_offset + ptx.X_TILE_BYTES

    @property
    def x_reloaded(self) -> bool:
        """Whether unquantized activations overwrite the quantized ones."""
        return self.x_copy_offset == self.x_offset


@gluon.jit(do_not_specialize=["last_tile"])
def gemv_int8_mma_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, row_perm_ptr, slice_ptr, ell_columns_ptr, ell_values_ptr, bias_ptr, y_ptr,
    K, n, last_tile, CONFIG: gl.constexpr,
):  # fmt: skip
    """y `[n]` = weight @ x `[K]`, K a multiple of 256. Grid: one CTA per `CONFIG.stage.tiles` row tiles of 16."""
    STAGE: gl.constexpr = CONFIG.stage
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = STAGE.tiles
    STAGE_BYTES: gl.constexpr = W * STAGE.bytes
    IN_FLIGHT: gl.constexpr = CONFIG.num_stages - 1
    BUFFER_BYTES: gl.constexpr = CONFIG.num_stages * STAGE_BYTES
    MULTIPLY: gl.constexpr = CONFIG.multiply
    WAIT: gl.constexpr = CONFIG.wait
    SMEM_UNITS: gl.constexpr = CONFIG.smem_units
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    k_tiles = K // 256
    warp = gl.arange(0, W, gl.SliceLayout(1, L))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, L))[None, :]
    region, base = allocate_smem(SMEM_UNITS)
    codes, scales = weight_pointers(
        codes_ptr, scales_ptr, zeros_ptr, gl.program_id(0) * R, last_tile, lane, k_tiles, STAGE
    )
    own = base + warp * STAGE.bytes  # this warp's part of stage 0
    for s in gl.static_range(IN_FLIGHT):
        load_k_tile(codes, scales, own + s * STAGE_BYTES + lane * 16, own + s * STAGE_BYTES + STAGE.code_bytes + lane * 4,
                    warp + s * W, k_tiles, STAGE)  # fmt: skip
    if slice_ptr is not None:
        residuals.prefetch_slice_bounds(slice_ptr, lane, last_tile, R)
    if CONFIG.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # zeros: read by lanes whose columns of the right operand belong to another shift class
    issue(STORE_ZEROS, [base + CONFIG.zeros_offset + lane * 16 + warp * 0])
    # the sums of activations for zero points, 16 bytes per 128 columns
    x_sums = base + CONFIG.x_offset + K * 2
    x_scales = x_sums + K // 8
    x_copy = base + CONFIG.x_copy_offset
    _quantize_activations(
        x_ptr, base, x_sums, x_scales, x_copy, warp, lane, k_tiles, slice_ptr is not None, CONFIG
    )
    gl.thread_barrier()
    # issue the epilogue's loads here: later, their latency would be exposed
    rows = _output_rows(row_perm_ptr, warp, lane, last_tile, W, R)
    if slice_ptr is not None:
        bounds, first = (
            residuals.slice_bounds(slice_ptr, warp, lane, last_tile, R),
            residuals.first_slice(warp, lane, W, R),
        )
    x, x_step = _class_addresses(base, warp, lane, W, CONFIG)
    acc = ()
    for _ in gl.static_range(2 * R):
        acc = acc + (gl.zeros([W, 32], gl.float32, layout=L),)
    stage = IN_FLIGHT * STAGE_BYTES  # the stage that was read last
    iterations = gl.cdiv(k_tiles, W)
    for i in range(iterations):
        k_tile = i * W + warp
        if slice_ptr is not None and i + IN_FLIGHT >= iterations:
            residuals.copy_slices(ell_columns_ptr, ell_values_ptr, bounds, first, own + stage, lane,
                                  i + IN_FLIGHT - iterations, CONFIG)  # fmt: skip
        else:
            load_k_tile(codes, scales, own + stage + lane * 16, own + stage + STAGE.code_bytes + lane * 4,
                        k_tile + IN_FLIGHT * W, k_tiles, STAGE)  # fmt: skip
        stage += STAGE_BYTES
        stage = gl.where(stage == BUFFER_BYTES, 0, stage)
        issue_scalar(WAIT)
        acc = gl.inline_asm_elementwise(
            MULTIPLY.text, MULTIPLY.constraints,
            acc + ((k_tile < k_tiles).to(gl.int32), own + stage + lane * 16, own + stage + STAGE.code_bytes + lane * 4)
            + x + (x_sums + k_tile * 32 + lane % 4 * 4, x_scales + k_tile * 8),
            dtype=(gl.float32,) * (2 * R), is_pure=False, pack=1,
        )  # fmt: skip
        if slice_ptr is not None and CONFIG.x_reloaded:
            issue(
                residuals.RELOAD_X,
                [x_copy + k_tile * X_TILE_BYTES + lane * 16, (x_ptr + k_tile * 256 + lane * 8).to(gl.int64),
                 (k_tile < k_tiles).to(gl.int32)],
            )  # fmt: skip
        moved = ()
        for c in gl.static_range(4):
            moved = moved + (x[c] + x_step[c],)
        x = moved
    if slice_ptr is not None:
        sparse = residuals.multiply(
            ell_columns_ptr, ell_values_ptr, bounds, first, own, stage, x_copy, lane, L, CONFIG
        )
        _store_f32(sparse, own + 256 * R, lane)
    _reduce_and_store(acc, rows, scales_ptr, bias_ptr, y_ptr, n, base, own, warp, lane, last_tile, slice_ptr is not None, L,
                      CONFIG)  # fmt: skip
    keep_smem(region, K < 0, W)


@gluon.jit
def _quantize_activations(x_ptr, base, x_sums, x_scales, x_copy, warp, lane, k_tiles, SPARSE: gl.constexpr,
                          CONFIG: gl.constexpr):  # fmt: skip
    """Quantize all activations to fixed point in shared memory, `k_tiles_per_step` k_tiles per warp at once: a branch
    between their loads would serialize them."""
    STEP: gl.constexpr = CONFIG.k_tiles_per_step
    W: gl.constexpr = CONFIG.num_warps
    QUANTIZE: gl.constexpr = CONFIG.quantize
    for i in range(gl.cdiv(k_tiles, W * STEP)):
        raw = ()
        for f in gl.static_range(STEP):
            k_tile = (i * STEP + f) * W + warp
            raw = raw + compute_tuple(
                LOAD_X,
                [(x_ptr + k_tile * 256 + lane * 8).to(gl.int64), (k_tile < k_tiles).to(gl.int32)],
                FOUR,
            )
        for f in gl.static_range(STEP):
            k_tile = (i * STEP + f) * W + warp
            group = k_tile * 2 + lane // 16
            to_bytes = base + CONFIG.x_offset + k_tile * X_TILE_BYTES + lane // 4 * 64 + lane % 4 * 8
            to_sums = x_sums + group * 16 + lane % 4 * 4
            where = ((k_tile < k_tiles).to(gl.int32), to_bytes, to_sums, x_scales + group * 4)
            if SPARSE and not CONFIG.x_reloaded:
                where = where + (x_copy + k_tile * 512 + lane * 16,)
            issue(QUANTIZE, raw[4 * f : 4 * f + 4] + where)


@gluon.jit
def _output_rows(row_perm_ptr, warp, lane, last_tile, W: gl.constexpr, R: gl.constexpr):
    """The rows of y that this thread writes at the end, one of every 32 W."""
    rows = ()
    for i in gl.static_range((16 * R + 32 * W - 1) // (32 * W)):
        o = (i * W + warp) * 32 + lane
        row = gl.minimum(gl.program_id(0) * R + gl.minimum(o // 16, R - 1), last_tile) * 16 + o % 16
        rows = rows + (row if row_perm_ptr is None else gl.load(row_perm_ptr + row),)
    return rows


@gluon.jit
def _class_addresses(base, warp, lane, W: gl.constexpr, CONFIG: gl.constexpr):
    """For each shift class: where this lane reads its part of the right operand, and the address step per iteration.

    Column g = lane // 4 of the operand belongs to class g // 2; for other classes the lane reads the zeros.
    """
    mine = base + CONFIG.x_offset + warp * X_TILE_BYTES + lane // 4 % 2 * 32 + lane % 4 * 8
    zeros = base + CONFIG.zeros_offset + lane % 4 * 8
    x, step = (), ()
    for c in gl.static_range(4):
        own = lane // 8 == c
        x = x + (gl.where(own, mine, zeros),)
        step = step + (gl.where(own, W * X_TILE_BYTES, 0) + warp * 0,)
    return x, step


@gluon.jit
def _reduce_and_store(acc, rows, scales_ptr, bias_ptr, y_ptr, n, base, own, warp, lane, last_tile, SPARSE: gl.constexpr,
                      L: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """Rescale by shift class, sum over lanes and warps through the pipeline buffer, apply row scales and bias, write y."""
    R: gl.constexpr = CONFIG.stage.tiles
    W: gl.constexpr = CONFIG.num_warps
    rescale = gl.where(lane % 4 == 0, CONFIG.rescale[0], 0.0)
    for c in gl.static_range(1, 4):
        rescale += gl.where(lane % 4 == c, CONFIG.rescale[c], 0.0)
    for i in gl.static_range(2 * R):
        _store_f32(acc[i] * rescale, own + i * 128, lane)
    gl.thread_barrier()
    for i in gl.static_range(len(rows)):
        o = (i * W + warp) * 32 + lane
        r, g, upper = gl.minimum(o // 16, R - 1), o % 8, o // 8 % 2
        tile = gl.minimum(gl.program_id(0) * R + r, last_tile)
        y = gl.zeros([W, 32], gl.float32, layout=L)
        for w in gl.static_range(W):
            y += compute_f32(LOAD_REDUCE, [base + w * CONFIG.stage.bytes + (2 * r + upper) * 128 + g * 16])
        if CONFIG.stage.group == 0:
            y *= gl.load(scales_ptr + tile * 16 + g * 2 + upper).to(gl.float32)
        if SPARSE:
            y = residuals.load_reduce(y, base + 256 * R, r, o % 16, CONFIG)
        row = rows[i]
        if bias_ptr is not None:
            y += gl.load(bias_ptr + row, mask=row < n, other=0.0).to(gl.float32)
        gl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=(o < 16 * R) & (row < n))


@gluon.jit
def _store_f32(values, address, lane):
    """Store a float32 per lane to shared memory."""
    issue(STORE_F32, [address + lane * 4, values])


# Host side.


@dataclass(frozen=True, kw_only=True, slots=True)
class SmemLayout:
    """Shared memory of a CTA in bytes: the number of stages, their end, the total. With residuals also the offset of the
    unquantized activations, slices per stage, and the register cap if those activations are loaded twice."""

    num_stages: int
    pipeline: int
    size: int
    x_copy_offset: int = 0
    slices_per_stage: int = 0
    max_registers: int | None = None


def smem_layout(layout: GridLayout, config: Int8MmaConfig, num_sms: int) -> SmemLayout:
    """Stages that no k_tile reaches are not allocated. Activations for residuals are reloaded if that fits one more CTA per
    SM."""
    warps, tiles = config.num_warps, config.tiles_per_cta
    iterations = -(-layout.k // (256 * warps))
    num_stages, sparse = min(config.num_stages, iterations + 1), layout.sparse is not None
    warp_bytes = weight_stage(layout, tiles).bytes
    pipeline = (num_stages if sparse else min(num_stages, iterations)) * warps * warp_bytes
    size = pipeline + ptx.X_TILE_BYTES + 2 * layout.k + layout.k // 8 + -(-layout.k // 512) * 16
    if not sparse:
        return SmemLayout(num_stages=num_stages, pipeline=pipeline, size=size)
    ctas_per_sm = -(-layout.packed_codes.shape[0] // (tiles * num_sms))
    with_copy = size + 2 * layout.k
    most, fewer = (
        min(ctas_per_sm, SM_SMEM_BYTES // (allocated_bytes(bytes_) + CTA_SMEM_BYTES))
        for bytes_ in (size, with_copy)
    )
    registers = min(MAX_REGISTERS, REGISTERS_PER_SM // (32 * warps * max(1, most)) // 8 * 8)
    reload = most > fewer and registers >= MIN_REGISTERS
    return SmemLayout(
        num_stages=num_stages, pipeline=pipeline, size=size if reload else with_copy,
        x_copy_offset=pipeline + ptx.X_TILE_BYTES if reload else size,
        slices_per_stage=residuals.slices_per_stage(layout, config, warp_bytes), max_registers=registers if reload else None,
    )  # fmt: skip


def supports(layout: Layout, num_tokens: int, device: torch.device) -> bool:
    """One token of a grid accepted by `supports_grid`, without residuals or with 16-bit ones."""
    if num_tokens != 1 or not supports_grid(layout):
        return False
    return layout.sparse is None or layout.sparse.values.dtype == torch.float16


def fits(layout: GridLayout, config: Int8MmaConfig, device: torch.device) -> bool:
    """Whether a CTA of this launch fits in shared memory, and has enough warps for its residuals."""
    if config.num_stages < 2 or (layout.sparse is not None and 2 * config.num_warps < config.tiles_per_cta):
        return False
    smem = smem_layout(layout, config, num_sms(device))
    return fits_cta(allocated_bytes(smem.size), device)


def kernel_config(layout: GridLayout, dtype: torch.dtype, config: Int8MmaConfig) -> KernelConfig:
    bits, stage = layout.bits, weight_stage(layout, config.tiles_per_cta)
    smem = smem_layout(layout, config, num_sms(layout.packed_codes.device))
    iterations = -(-layout.k // (256 * config.num_warps))
    name, sparse = ptx_dtype(dtype), layout.sparse is not None
    return KernelConfig(
        stage=stage, num_warps=config.num_warps, num_stages=smem.num_stages, smem_units=smem_units(smem.size),
        zeros_offset=smem.pipeline, x_copy_offset=smem.x_copy_offset, slices_per_stage=smem.slices_per_stage,
        k_tiles_per_step=min(MAX_K_TILES_PER_STEP, 1 << (iterations - 1).bit_length()),
        rescale=tuple(1 / factor if factor else 0.0 for factor in ptx.CLASS_FACTOR[bits]),
        quantize=ptx.quantize_ptx(bits, name, copy=sparse and smem.max_registers is None, zeros=stage.zeros),
        multiply=ptx.multiply_ptx(bits, stage.scales, stage.tiles, zeros=stage.zeros),
        wait=f"cp.async.wait_group {smem.num_stages - 1}; mov.b32 $0, 0;",
        sparse_fma=residuals.sparse_fma_ptx(name) if sparse else None, pdl=supports_pdl(layout.packed_codes.device),
    )  # fmt: skip


def gemv_int8_mma(x: Tensor, layout: Layout, bias: Tensor | None, config: Int8MmaConfig) -> Tensor:
    """y [1, n] of x [1, k]; `supports` must hold."""
    assert isinstance(layout, GridLayout)
    x = aligned(x)
    y = torch.empty(1, layout.n, dtype=x.dtype, device=x.device)
    options = pdl_option(supports_pdl(x.device))
    registers = smem_layout(layout, config, num_sms(x.device)).max_registers
    if registers:
        options["maxnreg"] = registers
    tiles = layout.packed_codes.shape[0]
    ctas = triton.cdiv(tiles, config.tiles_per_cta)
    constants = interned(
        CONFIG=kernel_config(layout, x.dtype, config), num_warps=config.num_warps, num_stages=1, **options
    )
    launch(
        gemv_int8_mma_kernel,
        (ctas, 1, 1),
        (
            x, layout.packed_codes, layout.scales, layout.zero_points, *sparse_operands(layout)[:4], bias, y, layout.k,
            layout.n, tiles - 1,
        ),
        constants,
        smem_bytes=padded_smem_bytes(config.max_ctas_per_sm, x.device),
    )  # fmt: skip
    return y
