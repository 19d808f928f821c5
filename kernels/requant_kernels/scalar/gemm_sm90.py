"""17 to 512 tokens on Hopper, for every format with a PTX decoder: dequantization overlaps with the wgmma of the previous
weights.

Why it exists: wgmma takes the left operand from registers, so weights need no shared memory, and it runs asynchronously.
Triton waits for every such wgmma; Gluon leaves the waits to the kernel. So a warp group dequantizes a k64_stage (64
columns, `gemm_sm90_ptx.py`), issues its wgmma, waits for the *previous* one, and dequantizes the next: two stages are in
registers, one of them being multiplied. It is the fastest kernel here from 17 tokens on; above 512,
dequantizing the matrix for cuBLAS is faster.

    packed codes of k_tile b + 1    loading ........................................  (registers)
    dequantize                      b.0   b.1   b.2   b.3   b+1.0
    wgmma                                 b.0   b.1   b.2   b.3
    activations of k_tile b + 1     TMA .........                                (two stages of 256 columns in shared memory)

A CTA owns 16 W R rows and N tokens; each of its W warps dequantizes R row tiles. Group scales are applied to the weights,
since one accumulator covers all columns. Activations come in the order of the packed codes (`permute.py`). CTAs split K,
and `splitk_reduce.py` adds the partial sums in a fixed order. Without residuals and with one split, the kernel writes y
directly.

Residuals become part of the weights (`gemm_sm90_residuals.py`), so they cost the same for any number of tokens.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from dataclasses import dataclass
from functools import cache

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

from requant_kernels.common.fragment_dequant import has_ptx_decoder, scaled_activations, weight_tensors
from requant_kernels.common.inline_ptx import issue
from requant_kernels.common.launch import launch
from requant_kernels.common.packing import Layout
from requant_kernels.common.ptx import declare_smem_ptx, ptx_dtype
from requant_kernels.common.wgmma import codes_layout, lane_and_tiles, unpack_pair, x_layout
from requant_kernels.scalar import gemm_sm90_ptx as ptx
from requant_kernels.scalar import gemm_sm90_residuals as residuals
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.scalar.permute import permute_activations
from requant_kernels.scalar.splitk_reduce import splitk_reduce

FOUR = gl.constexpr((gl.int32,) * 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """The compile-time constants of one launch."""

    dequant: ptx.Dequant
    tokens: int  # N, per CTA
    num_warps: int
    tiles: int  # R, row tiles per warp
    prefetch_at: int  # the k64_stage during which the packed codes of the next k_tile are loaded
    x_stages: int  # allocated stages of activations; two are used
    residual_smem: str | None  # PTX that declares the shared memory of residuals
    direct: bool  # whether the output is y, not partial sums
    pdl: bool


@gluon.constexpr_function
def _output_layout(W, R):
    """The layout of y, transposed: eight consecutive rows per lane."""
    lanes = min(32, 2 * W * R)
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, W], [0, 1])


@gluon.jit(do_not_specialize=["k_tiles", "last_tile", "steps", "M"])
def gemm_sm90_kernel(
    x_desc, codes_ptr, scales_ptr, zeros_ptr, coo_ptr, block_ptr, bias_ptr, out_ptr, k_tiles, last_tile, steps, n_rows,
    width, M, n, stride_y, CONFIG: gl.constexpr,
):  # fmt: skip
    """out: partial sums `[splits, rows, width]`, or with CONFIG.direct y `[M, n]` with the bias.

    Grid: (row tiles / (W R), splits of `steps` k_tiles, tokens / N). scales_ptr, zeros_ptr: pairs of float16 as int32.
    """
    DEQUANT: gl.constexpr = CONFIG.dequant
    N: gl.constexpr = CONFIG.tokens
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = CONFIG.tiles
    SPARSE: gl.constexpr = coo_ptr is not None
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, N, 16]
    )
    dtype: gl.constexpr = x_desc.dtype
    first_tile = gl.program_id(0) * (W * R)
    tiles = _tiles_of_codes(first_tile, last_tile, W, R)
    lane, tile_of_cta, own_tiles = lane_and_tiles(first_tile, last_tile, W, R)
    first = gl.program_id(1) * steps
    end = gl.minimum(first + steps, k_tiles)
    token = gl.program_id(2) * N
    x_smem = gl.allocate_shared_memory(dtype, [CONFIG.x_stages, N, 256], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    rows = _row_operands(scales_ptr, zeros_ptr, own_tiles, lane, SPARSE, CONFIG)
    codes = _load_codes(codes_ptr, tiles, first, k_tiles, end, CONFIG)
    scales, zeros = _load_scales(scales_ptr, zeros_ptr, own_tiles, lane, first, k_tiles, end, DEQUANT)
    if SPARSE:
        base = residuals.declare(CONFIG) + tile_of_cta * residuals.TILE_BYTES + lane * 0
        issue(residuals.CLEAR_TILE, [base + lane * 16])
        bounds = residuals.load_bounds(block_ptr, own_tiles, first, k_tiles, end)
        next_bounds = residuals.load_bounds(block_ptr, own_tiles, first + 1, k_tiles, end)
        entries = residuals.load_entries(coo_ptr, bounds, lane)
        gl.thread_barrier()
    if CONFIG.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(2):
        _load_activations(
            x_desc, token, first + i, k_tiles, end, full.index(i), x_smem.index(i), steps > i, N
        )
    acc = warpgroup_mma_init(gl.zeros([16 * W * R, N], gl.float32, layout=ACC))
    for step in range(steps):
        now, now_scales, now_zeros = codes, scales, zeros
        following, stage = first + step + 1, step % 2
        if SPARSE:
            targets = residuals.scatter_targets(entries, base, dtype)
            now_bounds = bounds
        for q in gl.static_range(4):
            if q == CONFIG.prefetch_at:
                codes = _load_codes(codes_ptr, tiles, following, k_tiles, end, CONFIG)
                scales, zeros = _load_scales(
                    scales_ptr, zeros_ptr, own_tiles, lane, following, k_tiles, end, DEQUANT
                )
                if SPARSE:
                    bounds = next_bounds
                    entries = residuals.load_entries(coo_ptr, bounds, lane)
                    next_bounds = residuals.load_bounds(block_ptr, own_tiles, following + 1, k_tiles, end)
            operands = rows + _group_operands(now_scales, now_zeros, q, CONFIG)
            if SPARSE:
                operands = operands + residuals.addends(
                    targets, coo_ptr, now_bounds, lane, base, q, dtype, W, R
                )
            weight = _dequantize(now, operands, dtype, q, ACC, CONFIG)
            if q == 0:
                mbarrier.wait(full.index(stage), step // 2 % 2)
            x = x_smem.index(stage).slice(64 * q, 64, dim=1).permute((1, 0))
            acc = warpgroup_mma(weight, x, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
            if q == 0:  # every warp has multiplied the previous k_tile: its stage is free
                gl.thread_barrier()
                wanted = (following - first < steps) & (step > 0)
                _load_activations(x_desc, token, following, k_tiles, end, full.index(1 - stage), x_smem.index(1 - stage),
                                  wanted, N)  # fmt: skip
    y = warpgroup_mma_wait(0, deps=[acc])
    _store(y, scales_ptr, bias_ptr, out_ptr, first_tile, token, n_rows, width, M, n, stride_y, SPARSE, ACC, dtype,
           CONFIG)  # fmt: skip


@gluon.jit
def _tiles_of_codes(first_tile, last_tile, W: gl.constexpr, R: gl.constexpr):
    """`lane_and_tiles` in the layout of the codes: the tile's index in the matrix."""
    L: gl.constexpr = codes_layout(W, R)
    r = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    w = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    return gl.minimum(first_tile + r * W + w, last_tile).to(gl.int64)


@gluon.jit
def _row_operands(scales_ptr, zeros_ptr, own_tiles, lane, SPARSE: gl.constexpr, CONFIG: gl.constexpr):
    """Per-row operands of the dequantization, for the whole launch."""
    DEQUANT: gl.constexpr = CONFIG.dequant
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = CONFIG.tiles
    SCALE_PAIRS: gl.constexpr = DEQUANT.scale_pairs
    ZERO_PAIRS: gl.constexpr = DEQUANT.zero_pairs
    TABLES: gl.constexpr = DEQUANT.tables
    rows = ()
    if DEQUANT.codebook:
        for i in gl.static_range(TABLES):
            at = (own_tiles * TABLES + i) * 16 + lane // 4 * 2
            rows = rows + (_like_codes(gl.load(scales_ptr + at), gl.load(scales_ptr + at + 1), W, R),)
    elif DEQUANT.group == 0:
        if SPARSE:  # the scale of a row is applied to its weights, not to its sum
            rows = rows + (
                _broadcast_pairs(gl.load(scales_ptr + own_tiles * 8 + lane // 4), SCALE_PAIRS, W, R),
            )
        if zeros_ptr is not None:
            rows = rows + (
                _broadcast_pairs(gl.load(zeros_ptr + own_tiles * 8 + lane // 4), ZERO_PAIRS, W, R),
            )
    return rows


@gluon.jit
def _group_operands(scales, zeros, q, CONFIG: gl.constexpr):
    """Per-group operands of the dequantization of k64_stage q: scales, then zero points."""
    DEQUANT: gl.constexpr = CONFIG.dequant
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = CONFIG.tiles
    SCALE_PAIRS: gl.constexpr = DEQUANT.scale_pairs
    ZERO_PAIRS: gl.constexpr = DEQUANT.zero_pairs
    GROUPS: gl.constexpr = DEQUANT.groups
    PER_STAGE: gl.constexpr = GROUPS // 4 if GROUPS > 4 else 1
    operands = ()
    if GROUPS > 0:
        for i in gl.static_range(PER_STAGE):
            operands = operands + (_broadcast_pairs(scales[q * GROUPS // 4 + i], SCALE_PAIRS, W, R),)
        if len(zeros) > 0:
            for i in gl.static_range(PER_STAGE):
                operands = operands + (_broadcast_pairs(zeros[q * GROUPS // 4 + i], ZERO_PAIRS, W, R),)
    return operands


@gluon.jit
def _load_codes(codes_ptr, tiles, k_tile, k_tiles, end, CONFIG: gl.constexpr):
    """The packed codes of a k_tile. Past `end` the values are arbitrary: they are multiplied by zero activations."""
    BITS: gl.constexpr = CONFIG.dequant.bits
    L: gl.constexpr = codes_layout(CONFIG.num_warps, CONFIG.tiles)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    at = (tiles * k_tiles + k_tile) * (BITS * 128) + lane * 4 + four
    loaded = ()
    for i in gl.static_range(BITS):
        loaded = loaded + (
            gl.load(codes_ptr + at + i * 128, mask=k_tile < end, eviction_policy="evict_first"),
        )
    return loaded


@gluon.jit
def _load_scales(scales_ptr, zeros_ptr, tiles, lane, k_tile, k_tiles, end, DEQUANT: gl.constexpr):
    """Scales and zero points of a k_tile; none if a row has one scale."""
    scales = ()
    zeros = ()
    if DEQUANT.groups > 0:
        scales = _load_groups(scales_ptr, tiles, lane, k_tile, k_tiles, end, DEQUANT)
        if zeros_ptr is not None:
            zeros = _load_groups(zeros_ptr, tiles, lane, k_tile, k_tiles, end, DEQUANT)
    return scales, zeros


@gluon.jit
def _load_groups(pointer, tiles, lane, k_tile, k_tiles, end, DEQUANT: gl.constexpr):
    """Both rows of a lane in one register, `[R, W, 32]` per group."""
    GROUPS: gl.constexpr = DEQUANT.groups
    groups = gl.cdiv(k_tiles, DEQUANT.k_tiles_per_scale) * GROUPS
    loaded = ()
    for i in gl.static_range(GROUPS):
        at = (tiles * groups + k_tile // DEQUANT.k_tiles_per_scale * GROUPS + i) * 8 + lane // 4
        loaded = loaded + (gl.load(pointer + at, mask=k_tile < end, other=0),)
    return loaded


@gluon.jit
def _like_codes(low, high, W: gl.constexpr, R: gl.constexpr):
    """Values of rows g and g + 8, each `[R, W, 32]` -> `[R, W, 32, (kh rh)]`."""
    both = gl.reshape(gl.join(low, high), [R, W, 32, 1, 2])
    both = both + gl.zeros([R, W, 32, 2, 2], gl.int32, layout=gl.AutoLayout())
    return gl.convert_layout(gl.reshape(both, [R, W, 32, 4]), codes_layout(W, R))


@gluon.jit
def _broadcast_pairs(packed, PTX: gl.constexpr, W: gl.constexpr, R: gl.constexpr):
    """Two float16, of rows g and g + 8, as operands of the dequantization."""
    low, high = gl.inline_asm_elementwise(
        PTX.text, PTX.constraints, [packed], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return _like_codes(low, high, W, R)


@gluon.jit
def _dequantize(codes, operands, dtype, Q: gl.constexpr, ACC: gl.constexpr, CONFIG: gl.constexpr):
    """k64_stage Q of every row tile -> weights `[16 W R, 64]` in the layout of the left operand."""
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = CONFIG.tiles
    PTX: gl.constexpr = CONFIG.dequant.stages[Q]
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    a, b, c, d = gl.inline_asm_elementwise(
        PTX.text, PTX.constraints, codes + operands, dtype=FOUR, is_pure=True, pack=1
    )
    low = gl.join(unpack_pair(a, dtype), unpack_pair(b, dtype))
    high = gl.join(unpack_pair(c, dtype), unpack_pair(d, dtype))
    weight = gl.reshape(gl.join(low, high), [R, W, 8, 4, 2, 2, 2, 2, 2])  # r w g t kh rh e j mma_k32
    weight = gl.permute(weight, (0, 1, 5, 2, 8, 7, 4, 3, 6))  # r w rh g mma_k32 j kh t e
    return gl.convert_layout(gl.reshape(weight, [16 * W * R, 64]), A, assert_trivial=True)


@gluon.jit
def _load_activations(x_desc, token, k_tile, k_tiles, end, barrier, stage, pred, N: gl.constexpr):
    """Start the TMA copy of a k_tile of activations. From `end` on it reads beyond the matrix, where TMA fills in zeros."""
    mbarrier.expect(barrier, N * 512, pred=pred)
    column = gl.where(k_tile < end, k_tile, k_tiles) * 256
    tma.async_copy_global_to_shared(x_desc, [token, column], barrier, stage, pred=pred)


@gluon.jit
def _store(y, scales_ptr, bias_ptr, out_ptr, first_tile, token, n_rows, width, M, n, stride_y, SPARSE: gl.constexpr,
           ACC: gl.constexpr, dtype, CONFIG: gl.constexpr):  # fmt: skip
    """Apply row scales, then write y with the bias, or partial sums."""
    N: gl.constexpr = CONFIG.tokens
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = CONFIG.tiles
    row = first_tile * 16 + gl.arange(0, 16 * W * R, gl.SliceLayout(1, ACC))
    if not CONFIG.dequant.codebook and CONFIG.dequant.group == 0 and not SPARSE:
        scale_ptr = scales_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
        scale = gl.load(
            scale_ptr + row // 16 * 16 + row % 8 * 2 + row % 16 // 8, mask=row < n_rows, other=0.0
        )
        y = y * (scale.to(gl.float32) * (1.0 / CONFIG.dequant.grid_step))[:, None]
    if CONFIG.direct:
        if bias_ptr is not None:
            y += gl.load(bias_ptr + row, mask=row < n, other=0.0).to(gl.float32)[:, None]
        L: gl.constexpr = _output_layout(W, R)
        y = gl.convert_layout(y.to(dtype), L)
        row = first_tile * 16 + gl.arange(0, 16 * W * R, gl.SliceLayout(1, L))
        m = token + gl.arange(0, N, gl.SliceLayout(0, L))
        at = m[None, :].to(gl.int64) * stride_y + row[:, None]
        gl.store(out_ptr + at, y, mask=(m < M)[None, :] & (row < n)[:, None])
    else:
        at = (gl.program_id(1) * n_rows + row)[:, None].to(gl.int64) * width + token
        at += gl.arange(0, N, gl.SliceLayout(0, ACC))[None, :]
        gl.store(out_ptr + at, y, mask=(row < n_rows)[:, None])


# Host side.


def supports(layout: Layout, num_tokens: int, device: torch.device) -> bool:
    """Up to 512 tokens of every format with a PTX decoder, without residuals or with residuals in COO order."""
    coo = layout.sparse is None or layout.sparse.coo is not None
    return num_tokens <= 512 and coo and has_ptx_decoder(layout.format, layout.bits)


def gemm_sm90(x: Tensor, layout: Layout, bias: Tensor | None, config: GemmSm90Config) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous: permute the activations, multiply, add the partial sums."""
    m, k = x.shape
    tiles, k_tiles = layout.packed_codes.shape[0], -(-k // 256)
    steps = -(-k_tiles // min(k_tiles, config.split_k))
    split, token_tiles = -(-k_tiles // steps), -(-m // config.tokens_per_cta)
    width = token_tiles * config.tokens_per_cta
    direct, sparse = split == 1 and layout.row_perm is None, layout.sparse
    codes, scales, zeros, _ = weight_tensors(layout, x.dtype)
    coo, block_ptr = (None, None) if sparse is None else (sparse.coo, sparse.block_ptr)
    permuted, inverse_perm = permute_activations(
        scaled_activations(x, layout), k_tiles, layout.row_perm, layout.n, pdl=True
    )
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    partial = y if direct else torch.empty(split, tiles * 16, width, dtype=torch.float32, device=x.device)
    activations = TensorDescriptor.from_tensor(permuted, [config.tokens_per_cta, 256], x_layout())
    launch(
        gemm_sm90_kernel,
        (-(-tiles // (config.num_warps * config.tiles_per_warp)), split, token_tiles),
        (
            activations, codes, scales.view(torch.int32), None if zeros is None else zeros.view(torch.int32), coo, block_ptr,
            bias if direct else None, partial, k_tiles, tiles - 1, steps, tiles * 16, width, m, layout.n, y.stride(0),
        ),
        launch_constants(
            ptx.dequant(
                layout.format, layout.bits, ptx_dtype(x.dtype), layout.kernel_group, zeros=zeros is not None,
                sparse=sparse is not None,
            ),
            config,
            sparse=sparse is not None, direct=direct,
        ),
    )  # fmt: skip
    if not direct:
        splitk_reduce(partial, inverse_perm, bias, y, pdl=True)
    return y


@cache
def launch_constants(
    dequant: ptx.Dequant, config: GemmSm90Config, *, sparse: bool, direct: bool
) -> dict[str, object]:
    """The constants and options of a launch; cached, because `launch` compares them by identity."""
    tiles = config.num_warps * config.tiles_per_warp
    kernel_config = KernelConfig(
        dequant=dequant, tokens=config.tokens_per_cta, num_warps=config.num_warps, tiles=config.tiles_per_warp, 
        prefetch_at=config.prefetch_at,
        x_stages=residuals.x_stages(config.tokens_per_cta, tiles, sparse=sparse),
        residual_smem=declare_smem_ptx(tiles * residuals.TILE_BYTES.value) if sparse else None, direct=direct, pdl=True,
    )  # fmt: skip
    return {"CONFIG": kernel_config, "num_warps": config.num_warps, "launch_pdl": True}
