"""Up to eight tokens of a 2- to 4-bit grid on fp16 tensor cores, where one mask makes two weights; sm_90, no residuals.

Why it exists: for several tokens `gemv.py` spends a LOP3 and an HFMA2 on two weights, and activations fill its registers.
Here one AND makes an operand register of `mma.m16n8k16`, two weights, and nothing else is done to them
(`gemv_fp16_mma_ptx.py` has the equations). It is the fastest kernel for 2 to 8 tokens of such a grid, and at 4 bits for one
token in half of the tuned shapes. With residuals `gemv_int8_mma.py` (one token) and `gemv_sparse_mma.py` (up to
eight) take over.

A CTA has `num_groups` warp groups. Each owns `tiles` x 16 rows; its warps split the columns, one k_tile of 256 at a time,
and warp c of every group has the same columns. Codes and scales go through the multistage buffer of `cp_async.py`. The
activations of eight tokens are as many bytes as 4-bit codes of 32 rows, so the warps with the same columns copy them
together, each some of the tokens, into separate stages, and synchronize at a named barrier before they multiply. The
cross-warp reduction of a group uses the first pipeline stage.
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
from requant_kernels.common.device import supports_pdl
from requant_kernels.common.inline_ptx import (
    allocate_smem,
    allocated_bytes,
    issue,
    keep_smem,
    load_f32,
    smem_units,
)
from requant_kernels.common.launch import aligned, interned, launch
from requant_kernels.common.occupancy import fits_cta, padded_smem_bytes
from requant_kernels.common.packing import GridLayout, Layout
from requant_kernels.common.pdl import pdl_option
from requant_kernels.common.ptx import Ptx, ptx_dtype
from requant_kernels.scalar import gemv_fp16_mma_ptx as ptx
from requant_kernels.scalar.gemv_fp16_mma_launch import Fp16MmaConfig

TOKENS = 8  # columns of the right operand
X_TILE_BYTES = gl.constexpr(TOKENS * 512)  # the activations of a k_tile
STORE_SUMS = gl.constexpr(ptx.STORE_SUMS)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """The compile-time constants of one launch."""

    stage: WeightStage
    num_warps: int
    num_groups: int  # warp groups
    num_stages: int
    smem_units: int
    prefetch: bool  # whether the codes of a later k_tile are copied before this one is waited for
    unit: float  # the value of one grid step in the sums
    copy_x: Ptx  # in the loop
    copy_x_first: Ptx  # before the loop, as separate cp.async groups
    wait: Ptx
    multiply: Ptx
    pdl: bool


@gluon.jit(do_not_specialize=["last_tile", "M"])
def gemv_fp16_mma_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, M, K, n, last_tile, stride_x, stride_y,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ weight^T, M <= 8, K a multiple of 256. Grid: one CTA per `num_groups` x `tiles` row
    tiles."""
    STAGE: gl.constexpr = CONFIG.stage
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = STAGE.tiles
    NUM_STAGES: gl.constexpr = CONFIG.num_stages
    STAGE_BYTES: gl.constexpr = W * STAGE.bytes
    C: gl.constexpr = W // CONFIG.num_groups  # warps that split the columns
    COPY_X: gl.constexpr = CONFIG.copy_x
    COPY_X_FIRST: gl.constexpr = CONFIG.copy_x_first
    WAIT: gl.constexpr = CONFIG.wait
    MULTIPLY: gl.constexpr = CONFIG.multiply
    SMEM_UNITS: gl.constexpr = CONFIG.smem_units
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    k_tiles = K // 256
    warp = gl.arange(0, W, gl.SliceLayout(1, L))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, L))[None, :]
    group, column = warp // C, warp % C
    region, base = allocate_smem(SMEM_UNITS)
    first_tile = gl.program_id(0) * (CONFIG.num_groups * R) + group * R
    codes, scales = weight_pointers(
        codes_ptr, scales_ptr, zeros_ptr, first_tile, last_tile, lane, k_tiles, STAGE
    )
    own = base + warp * STAGE.bytes
    to_codes, to_scales = own + lane * 16, own + STAGE.code_bytes + lane * 4
    for s in gl.static_range(NUM_STAGES - 1):
        load_k_tile(codes, scales, to_codes + s * STAGE_BYTES, to_scales + s * STAGE_BYTES, column + s * C, k_tiles,
                    STAGE)  # fmt: skip
    # a warp copies its group's share of the tokens of its columns. Odd tokens have the two mma_k32 of a pair swapped, so
    # that the eight lanes that read at once hit all banks
    first_token = group * (8 // CONFIG.num_groups)
    x_smem = base + NUM_STAGES * STAGE_BYTES + column * X_TILE_BYTES
    even, odd = x_smem + first_token * 512 + lane * 16, x_smem + first_token * 512 + (lane ^ 4) * 16
    stride = (warp * 0 + lane * 0 + stride_x).to(gl.int64) * 2
    x = (x_ptr + first_token.to(gl.int64) * stride_x + lane * 8).to(gl.int64)
    if CONFIG.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for s in gl.static_range(NUM_STAGES - 1):
        _copy_tokens(x, stride, even + s * (C * X_TILE_BYTES), odd + s * (C * X_TILE_BYTES), column + s * C, k_tiles,
                     M - first_token, COPY_X_FIRST)  # fmt: skip
    # this lane's part of the right operand: token g, part t of the mma_k32
    mine = x_smem + lane // 4 * 512 + lane % 4 * 16
    swap = lane // 4 % 2 * 64
    acc = ()
    for _ in gl.static_range(4 * R):
        acc = acc + (gl.zeros([W, 32], gl.float32, layout=L),)
    free, stage = (NUM_STAGES - 1), 0  # the stage that was read last, and the one that is read now
    for i in range(gl.cdiv(k_tiles, C)):
        k_tile = i * C + column
        later = k_tile + (NUM_STAGES - 1) * C
        if CONFIG.prefetch:
            load_k_tile(codes, scales, to_codes + free * STAGE_BYTES, to_scales + free * STAGE_BYTES, later, k_tiles,
                        STAGE)  # fmt: skip
        issue(WAIT, [column + lane * 0])  # after it, all warps of these columns are done with stage `free`
        _copy_tokens(x, stride, even + free * (C * X_TILE_BYTES), odd + free * (C * X_TILE_BYTES), later, k_tiles,
                     M - first_token, COPY_X)  # fmt: skip
        if not CONFIG.prefetch:
            load_k_tile(codes, scales, to_codes + free * STAGE_BYTES, to_scales + free * STAGE_BYTES, later, k_tiles,
                        STAGE)  # fmt: skip
        acc = gl.inline_asm_elementwise(
            MULTIPLY.text, MULTIPLY.constraints,
            acc + ((k_tile < k_tiles).to(gl.int32), to_codes + stage * STAGE_BYTES, to_scales + stage * STAGE_BYTES,
                   mine + stage * (C * X_TILE_BYTES) + swap, mine + stage * (C * X_TILE_BYTES) - swap),
            dtype=(gl.float32,) * (4 * R), is_pure=False, pack=1,
        )  # fmt: skip
        free = stage
        stage = gl.where(stage == NUM_STAGES - 1, 0, stage + 1)
    _reduce_and_store(
        acc, scales_ptr, bias_ptr, y_ptr, M, n, base, own, warp, lane, last_tile, stride_y, L, CONFIG
    )
    keep_smem(region, K < 0, W)


@gluon.jit
def _copy_tokens(x, stride, even, odd, k_tile, k_tiles, tokens, COPY: gl.constexpr):
    """Start copying this warp's tokens of `k_tile` `[warp, 1]`; `x`: this lane's address of the first token in k_tile 0."""
    address, exists = x + k_tile.to(gl.int64) * 512, (k_tile < k_tiles).to(gl.int32)
    issue(COPY, (even, odd, exists, tokens, address, stride))


@gluon.jit
def _reduce_and_store(acc, scales_ptr, bias_ptr, y_ptr, M, n, base, own, warp, lane, last_tile, stride_y, L: gl.constexpr,
                      CONFIG: gl.constexpr):  # fmt: skip
    """Sum over the warps of each group through the first pipeline stage, apply row scales and bias, write y."""
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = CONFIG.stage.tiles
    WARP_BYTES: gl.constexpr = CONFIG.stage.bytes
    C: gl.constexpr = W // CONFIG.num_groups
    T: gl.constexpr = CONFIG.num_groups * R  # tiles of the CTA
    for r in gl.static_range(R):
        issue(STORE_SUMS, (own + r * 512 + lane * 16,) + acc[4 * r : 4 * r + 4])
    gl.thread_barrier()
    for i in gl.static_range((4 * T + W - 1) // W):
        o = (i * W + warp) * 32 + lane  # tile, token, row
        t, m, row = gl.minimum(o // 128, T - 1), o // 16 % 8, o % 16
        address = (
            base
            + t // R * (C * WARP_BYTES)
            + t % R * 512
            + (row % 8 * 4 + m // 2) * 16
            + (row // 8 * 2 + m % 2) * 4
        )
        y = gl.zeros([W, 32], gl.float32, layout=L)
        for c in gl.static_range(C):
            y += load_f32(address + c * WARP_BYTES)
        y *= CONFIG.unit
        tile = gl.minimum(gl.program_id(0) * T + t, last_tile)
        if CONFIG.stage.group == 0:
            y *= gl.load(scales_ptr + tile * 16 + row % 8 * 2 + row // 8).to(gl.float32)
        out = tile * 16 + row
        if bias_ptr is not None:
            y += gl.load(bias_ptr + out, mask=out < n, other=0.0).to(gl.float32)
        inside = (o < 128 * T) & (m < M) & (out < n)
        gl.store(y_ptr + m.to(gl.int64) * stride_y + out, y.to(y_ptr.dtype.element_ty), mask=inside)


# Host side.


def smem_bytes(layout: GridLayout, config: Fp16MmaConfig) -> int:
    """Per CTA: the stages of every warp's codes and scales, and of every column's activations."""
    codes = config.num_warps * weight_stage(layout, config.tiles_per_warp_group).bytes
    return config.num_stages * (codes + config.num_warps // config.warp_groups * X_TILE_BYTES.value)


def supports(layout: Layout, num_tokens: int, device: torch.device) -> bool:
    """Up to eight tokens of a grid accepted by `supports_grid`, without residuals."""
    return num_tokens <= TOKENS and layout.sparse is None and supports_grid(layout)


def fits(layout: GridLayout, config: Fp16MmaConfig, device: torch.device) -> bool:
    """Whether the warps divide into their groups, and the CTA's stages fit in shared memory."""
    if config.num_stages < 2 or config.warp_groups not in (1, 2, 4) or config.num_warps % config.warp_groups:
        return False
    return fits_cta(allocated_bytes(smem_bytes(layout, config)), device)


def kernel_config(layout: GridLayout, dtype: torch.dtype, config: Fp16MmaConfig) -> KernelConfig:
    bits, stage = layout.bits, weight_stage(layout, config.tiles_per_warp_group)
    name, own_tokens = ptx_dtype(dtype), TOKENS // config.warp_groups
    return KernelConfig(
        stage=stage, num_warps=config.num_warps, num_groups=config.warp_groups, num_stages=config.num_stages,
        smem_units=smem_units(smem_bytes(layout, config)), prefetch=config.prefetch, unit=1 / ptx.unit_of(bits, name),
        copy_x=ptx.copy_tokens_ptx(own_tokens, commit=config.prefetch),
        copy_x_first=ptx.copy_tokens_ptx(own_tokens, commit=True),
        wait=ptx.wait_ptx(config.num_stages - (1 if config.prefetch else 2), config.warp_groups),
        multiply=ptx.multiply_ptx(bits, name, stage.scales, stage.tiles, zeros=stage.zeros),
        pdl=supports_pdl(layout.packed_codes.device),
    )  # fmt: skip


def gemv_fp16_mma(x: Tensor, layout: Layout, bias: Tensor | None, config: Fp16MmaConfig) -> Tensor:
    """y [m, n] of x [m, k], m <= 8; `supports` must hold."""
    assert isinstance(layout, GridLayout)
    x, m = aligned(x), x.shape[0]
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    options = pdl_option(supports_pdl(x.device))
    tiles = layout.packed_codes.shape[0]
    ctas = triton.cdiv(tiles, config.tiles_per_warp_group * config.warp_groups)
    constants = interned(
        CONFIG=kernel_config(layout, x.dtype, config), num_warps=config.num_warps, num_stages=1, **options
    )
    launch(
        gemv_fp16_mma_kernel,
        (ctas, 1, 1),
        (
            x, layout.packed_codes, layout.scales, layout.zero_points, bias, y, m, layout.k, layout.n, tiles - 1,
            x.stride(0), y.stride(0),
        ),
        constants,
        smem_bytes=padded_smem_bytes(config.max_ctas_per_sm, x.device),
    )  # fmt: skip
    return y
