"""Up to eight tokens of a matrix with residuals, multiplied on tensor cores by activations in shared memory; sm_90.

Why it exists: `gemv.py` gathers the activation of every residual through the L1 cache, one cache line each, and for several
tokens first needs a launch that transposes them. Here a warp copies the activations of its k_tile, which it has in registers
anyway, to 4 KB of its own shared memory. One `ldmatrix` gathers 32 columns of eight tokens, and one MMA multiplies sixteen
residuals (`gemv_sparse_mma_ptx.py`). It is the fastest kernel for 2 to 8 tokens with residuals, for every format with a PTX
decoder: 15.7 us at 8192 x 8192, 3 bits, 1 % and 8 tokens, where `gemv.py` took 18.6.

As in `gemv.py` a CTA owns 16 rows, its warps split the columns, one k_tile of 256 at a time, and exchange nothing before
the cross-warp reduction at the end. The packed codes of later k_tiles are in flight in registers. Residuals are COO
entries in the order of the MMA operand (`sparse.py`); those of the next k_tile are loaded while this one is
multiplied.

Written in Gluon, where every tensor is `[warp, lane]` or `[warp, lane, 4]`: inline PTX takes the four registers of a lane
(`pack=4`); of a value that a lane has once, it uses the first of four copies.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.dequant_ptx import GRID_STEP, zero_bias
from requant_kernels.common.device import supports_pdl
from requant_kernels.common.fragment_dequant import (
    DequantFormat,
    activation_pairs,
    dequant_operands,
    has_ptx_decoder,
    weight_tensors,
)
from requant_kernels.common.inline_ptx import load_f32, smem_base
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import padded_smem_bytes
from requant_kernels.common.packing import Layout
from requant_kernels.common.pdl import pdl_option
from requant_kernels.common.ptx import Ptx, ptx_dtype
from requant_kernels.scalar import gemv_sparse_mma_ptx as ptx
from requant_kernels.scalar.gemv_sparse_mma_launch import SparseMmaConfig

X_TILE_BYTES, WARP_BYTES = gl.constexpr(ptx.X_TILE_BYTES), gl.constexpr(ptx.WARP_BYTES)
NO_ENTRY = gl.constexpr(ptx.NO_ENTRY)
SCALE, STORE_X, STORE_SUMS = gl.constexpr(ptx.SCALE), gl.constexpr(ptx.STORE_X), gl.constexpr(ptx.STORE_SUMS)
FOUR, EIGHT = gl.constexpr((gl.int32,) * 4), gl.constexpr((gl.int32,) * 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """The compile-time constants of one launch."""

    format: DequantFormat
    multiply: Ptx
    gather: Ptx
    zero_points: Ptx | None
    even: bool  # whether K is a multiple of 256 num_warps: nothing is masked
    num_warps: int
    unroll: int  # k_tiles per step; the codes of `unroll` - 1, at least one, are in flight
    pdl: bool


@gluon.constexpr_function
def lanes_layout(W):
    """`[warp, lane, 4]`: four registers per lane."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2]],
        lane_bases=[[0, 1 << i, 0] for i in range(5)],
        warp_bases=[[1 << i, 0, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[W, 32, 4],
    )


@gluon.jit(do_not_specialize=["steps", "M"])
def gemv_sparse_mma_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, coo_ptr, block_ptr, row_perm_ptr, bias_ptr, y_ptr, M, K, n, steps,
    stride_x, stride_y, CONFIG: gl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ weight^T, M <= 8. Grid: row tiles of 16. x_ptr: pairs; scales_ptr, zeros_ptr: pairs too, or
    tables."""
    W: gl.constexpr = CONFIG.num_warps
    UNROLL: gl.constexpr = CONFIG.unroll
    IN_FLIGHT: gl.constexpr = UNROLL - 1 if UNROLL > 1 else 1
    L: gl.constexpr = lanes_layout(W)
    LR: gl.constexpr = gl.SliceLayout(2, L)
    warp = gl.arange(0, W, gl.SliceLayout(1, LR))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, LR))[None, :] + warp * 0
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    lane4, sub = gl.expand_dims(lane, 2), warp + lane * 0
    tile = (sub * 0 + gl.program_id(0)).to(gl.int64)
    k_tiles, pairs = gl.cdiv(K, 256), gl.cdiv(K, 2)
    own_codes, lane_pair = lane4 * 4 + four, lane4 % 4 * 4 + four
    region = gl.allocate_shared_memory(
        gl.int8, [(W * WARP_BYTES + 4095) // 4096, 1, 4096], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    base = smem_base()
    x_smem = base + sub * WARP_BYTES
    own_column = x_smem + lane * 16
    bounds = _load_bounds(block_ptr, tile, sub, k_tiles)
    next_bounds = _load_bounds(block_ptr, tile, sub + W, k_tiles)
    row_operands = _row_operands(scales_ptr, zeros_ptr, tile, lane, four, CONFIG)
    group_zeros_ptr = zeros_ptr if CONFIG.format.group_size > 0 else None
    codes = ()  # of k_tiles in flight
    for u in gl.static_range(IN_FLIGHT):
        codes = codes + (
            _load_k_tile(codes_ptr, scales_ptr, group_zeros_ptr, tile, u * W + sub, k_tiles, own_codes, lane,
                         CONFIG.even and u == 0, CONFIG),
        )  # fmt: skip
    # not for synchronization: ptxas moves no load over a barrier, so the codes are requested before the wait for the bounds
    gl.thread_barrier()
    entries = _load_entries(coo_ptr, bounds, lane)
    # the epilogue's loads
    out = tile * 16 + lane % 16
    if row_perm_ptr is not None:
        out = gl.load(row_perm_ptr + out).to(gl.int64)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + out, mask=out < n, other=0.0)
    if not CONFIG.format.codebook and CONFIG.format.group_size == 0:
        scale_ptr = scales_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
        row_scale = gl.load(scale_ptr + gl.expand_dims(tile, 2) * 16 + lane4 // 4 * 2 + four // 2)
    if CONFIG.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offset = gl.minimum(lane4 // 4, M - 1).to(gl.int64) * stride_x
    acc = gl.zeros([W, 32, 4], gl.float32, layout=L)
    sums = gl.zeros([W, 32, 4], gl.float32, layout=L)
    for step in range(steps):
        for u in gl.static_range(UNROLL):
            k_tile = (step * UNROLL + u) * W + sub
            codes = codes + (
                _load_k_tile(codes_ptr, scales_ptr, group_zeros_ptr, tile, k_tile + IN_FLIGHT * W, k_tiles, own_codes, lane,
                             False, CONFIG),
            )  # fmt: skip
            now = entries
            entries = _load_entries(coo_ptr, next_bounds, lane)
            next_bounds = _load_bounds(block_ptr, tile, k_tile + 2 * W, k_tiles)
            if (
                step * UNROLL + u
            ) * W < k_tiles:  # always true; without the branch the compiler sinks the loads below it
                x = _load_activations(x_ptr, offset, k_tile, k_tiles, lane_pair, pairs, CONFIG)
                _store_activations(x, own_column)
                acc = _multiply_k_tile(acc, codes[0], row_operands, x, zeros_ptr is not None, CONFIG)
                sums = _add_residuals(sums, now, x_smem, lane, CONFIG)
            codes = codes[1:]
    if not CONFIG.format.codebook:
        if CONFIG.format.group_size == 0:
            acc = acc * row_scale.to(gl.float32)
        acc = acc * (1.0 / CONFIG.format.grid_step)
    acc = acc + sums
    # the cross-warp reduction uses the activations' shared memory
    _issue4(STORE_SUMS, [_replicate(own_column), acc])
    gl.thread_barrier()
    for i in gl.static_range(4 // W if W < 4 else 1):
        m = (sub + i * W) * 2 + lane // 16  # result 32 (sub + i W) + lane of the tile: token, then row
        address = base + (lane % 8 * 4 + m // 2 % 4) * 16 + (lane % 16 // 8 * 2 + m % 2) * 4
        y = gl.zeros([W, 32], gl.float32, layout=LR)
        for w in gl.static_range(W):
            y += load_f32(address + w * WARP_BYTES)
        if bias_ptr is not None:
            y += bias.to(gl.float32)
        gl.store(
            y_ptr + m.to(gl.int64) * stride_y + out, y.to(y_ptr.dtype.element_ty), mask=(m < M) & (out < n)
        )
    if M < 0:  # never: makes the compiler see a use of the allocation, which it would otherwise drop
        region.index(0).store(
            gl.zeros([1, 4096], gl.int8, layout=gl.BlockedLayout([1, 8], [1, 32], [1, W], [1, 0]))
        )


@gluon.jit
def _replicate(value):
    """`[warp, lane]` -> `[warp, lane, 4]`, the same register four times."""
    return gl.expand_dims(value, 2) + gl.zeros([1, 1, 4], gl.int32, layout=gl.AutoLayout())


@gluon.jit
def _issue4(PTX: gl.constexpr, args):
    """Run PTX for its effect on memory, four registers of every operand at a time."""
    gl.inline_asm_elementwise(PTX.text, PTX.constraints, args, dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def _zero_points(zeros, CONFIG: gl.constexpr):
    """Zero points of rows g and g + 8 -> operands of the dequantization."""
    PTX: gl.constexpr = CONFIG.zero_points
    return gl.inline_asm_elementwise(
        PTX.text, PTX.constraints, [_replicate(zeros)], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.jit
def _row_operands(scales_ptr, zeros_ptr, tile, lane, four, CONFIG: gl.constexpr):
    """Per-row operands of the dequantization, for the whole launch: lookup tables, or one zero point."""
    rows = ()
    if CONFIG.format.codebook:
        TABLES: gl.constexpr = CONFIG.format.table_registers
        tile4, lane4 = gl.expand_dims(tile, 2), gl.expand_dims(lane, 2)
        for i in gl.static_range(TABLES):
            rows = rows + (gl.load(scales_ptr + (tile4 * TABLES + i) * 16 + lane4 // 4 * 2 + four % 2),)
    elif zeros_ptr is not None and CONFIG.format.group_size == 0:
        rows = (_zero_points(gl.load(zeros_ptr + tile * 8 + lane // 4), CONFIG),)
    return rows


@gluon.jit
def _load_k_tile(
    codes_ptr, scales_ptr, zeros_ptr, tile, k_tile, k_tiles, own, lane, EVEN: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """The packed codes of a k_tile per warp, its scales, and its zero points; those of both rows of a lane share one
    register."""
    BITS: gl.constexpr = CONFIG.format.bits
    SCALES: gl.constexpr = CONFIG.format.groups
    PER_SCALE: gl.constexpr = CONFIG.format.k_tiles_per_group
    start = gl.expand_dims((tile * k_tiles + k_tile) * (BITS * 128), 2) + own
    inside = k_tile < k_tiles
    loaded = ()
    for i in gl.static_range(BITS):
        if EVEN:
            word = gl.load(codes_ptr + start + i * 128, eviction_policy="evict_first")
        else:
            word = gl.load(
                codes_ptr + start + i * 128,
                mask=gl.expand_dims(inside, 2),
                other=0,
                eviction_policy="evict_first",
            )
        loaded = loaded + (word,)
    groups = gl.cdiv(k_tiles, PER_SCALE) * SCALES
    for i in gl.static_range(SCALES):
        at = (tile * groups + k_tile // PER_SCALE * SCALES + i) * 8 + lane // 4
        loaded = loaded + (gl.load(scales_ptr + at, mask=inside, other=0),)
    if zeros_ptr is not None:
        for i in gl.static_range(SCALES):
            at = (tile * groups + k_tile // PER_SCALE * SCALES + i) * 8 + lane // 4
            loaded = loaded + (gl.load(zeros_ptr + at, mask=inside, other=0),)
    return loaded


@gluon.jit
def _load_activations(x_ptr, offset, k_tile, k_tiles, lane_pair, pairs, CONFIG: gl.constexpr):
    """The activations of a k_tile per warp, in pairs: 16 bytes per lane for each of its eight mma_k32."""
    EVEN: gl.constexpr = CONFIG.even
    pair = gl.expand_dims((gl.minimum(k_tile, k_tiles - 1) if EVEN else k_tile) * 128, 2) + lane_pair
    x = ()
    for s in gl.static_range(8):
        if EVEN:
            x = x + (gl.load(x_ptr + offset + (pair + s * 16)),)
        else:
            x = x + (gl.load(x_ptr + offset + (pair + s * 16), mask=(pair + s * 16) < pairs, other=0),)
    return x


@gluon.jit
def _store_activations(x, own_column):
    """Store them transposed in shared memory, column by column."""
    for s in gl.static_range(8):
        _issue4(STORE_X, [_replicate(own_column + s * 512), x[s]])


@gluon.jit
def _multiply_k_tile(acc, loaded, rows, x, ZEROS: gl.constexpr, CONFIG: gl.constexpr):
    """acc `[warp, lane, 4]` += k_tile times activations."""
    BITS: gl.constexpr = CONFIG.format.bits
    GROUP: gl.constexpr = CONFIG.format.group_size
    SCALES: gl.constexpr = CONFIG.format.groups
    PER_HALF: gl.constexpr = SCALES // 2 if SCALES > 1 else 1
    DEQUANTIZE: gl.constexpr = CONFIG.format.ptx
    CONSTRAINTS: gl.constexpr = CONFIG.format.constraints
    MULTIPLY: gl.constexpr = CONFIG.multiply
    part = acc
    weights = ()
    for s in gl.static_range(8):
        if s % 4 == 0:  # half a k_tile: eight mma_k16
            given = rows
            if ZEROS and GROUP > 0:
                for i in gl.static_range(PER_HALF):
                    given = given + (
                        _zero_points(
                            loaded[BITS + SCALES + (s // 4 * PER_HALF if SCALES > 1 else 0) + i], CONFIG
                        ),
                    )
            weights = gl.inline_asm_elementwise(
                DEQUANTIZE[s // 4], CONSTRAINTS, loaded[:BITS] + given, dtype=EIGHT, is_pure=True, pack=1
            )
        if GROUP > 0 and s * SCALES % 8 == 0:
            part = gl.full_like(acc, 0.0)
        part = gl.inline_asm_elementwise(
            MULTIPLY.text, MULTIPLY.constraints, [weights[s % 4 * 2], weights[s % 4 * 2 + 1], x[s], part],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
        if GROUP > 0 and (s + 1) * SCALES % 8 == 0:
            acc = _scale(part, loaded[BITS + s * SCALES // 8], acc, SCALE)
    return acc if GROUP > 0 else part


@gluon.jit
def _scale(part, scales, acc, PTX: gl.constexpr):
    """acc + part times the scales of rows g and g + 8."""
    return gl.inline_asm_elementwise(
        PTX.text, PTX.constraints, [part, _replicate(scales), acc], dtype=gl.float32, is_pure=True, pack=4
    )


@gluon.jit
def _load_bounds(block_ptr, tile, k_tile, k_tiles):
    """The start of a k_tile's COO entries, and their number."""
    at, inside = tile * (k_tiles + 1) + k_tile, k_tile < k_tiles
    begin = gl.load(block_ptr + at, mask=inside, other=0)
    return begin, gl.load(block_ptr + at + 1, mask=inside, other=0) - begin


@gluon.jit
def _load_entries(coo_ptr, bounds, lane):
    """The first two rounds of a k_tile's entries, their number, and the address of this lane's first one."""
    begin, count = bounds
    at = begin + lane
    first = gl.load(coo_ptr + at, mask=lane < count, other=NO_ENTRY)
    second = gl.load(coo_ptr + at + 32, mask=lane + 32 < count, other=NO_ENTRY)
    return first, second, count, coo_ptr.to(gl.int64) + at.to(gl.int64) * 4


@gluon.jit
def _add_residuals(sums, entries, x_smem, lane, CONFIG: gl.constexpr):
    """sums `[warp, lane, 4]` += the residuals of a k_tile times its activations in shared memory."""
    GATHER: gl.constexpr = CONFIG.gather
    first, second, count, pointer = entries
    store_at, load_at = x_smem + X_TILE_BYTES + lane * 4, x_smem + X_TILE_BYTES + lane % 4 * 8
    return gl.inline_asm_elementwise(
        GATHER.text, GATHER.constraints,
        [_replicate(x_smem), _replicate(store_at), _replicate(load_at), _replicate(first), _replicate(second),
         _replicate(count), _replicate(lane // 4 * (32 * 0x10001)), sums, _replicate(pointer)],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


# Host side.


def supports(layout: Layout, num_tokens: int, device: torch.device) -> bool:
    """Up to eight tokens with residuals in COO order, for formats with a PTX decoder."""
    coo = layout.sparse is not None and layout.sparse.coo is not None
    return num_tokens <= 8 and coo and has_ptx_decoder(layout.format, layout.bits)


def kernel_config(layout: Layout, dtype: torch.dtype, config: SparseMmaConfig) -> KernelConfig:
    (_, _, zeros, _), format = dequant_operands(layout, dtype, True)
    name = ptx_dtype(dtype)
    step = GRID_STEP[name]
    zero_points = (
        None if zeros is None else ptx.zero_points_ptx(name, -step, -step * zero_bias(layout.bits, name))
    )
    return KernelConfig(
        format=format, multiply=ptx.multiply_ptx(name), gather=ptx.gather_ptx(name), zero_points=zero_points,
        even=layout.k % (256 * config.num_warps) == 0, num_warps=config.num_warps, unroll=config.num_stages,
        pdl=supports_pdl(layout.packed_codes.device),
    )  # fmt: skip


def gemv_sparse_mma(x: Tensor, layout: Layout, bias: Tensor | None, config: SparseMmaConfig) -> Tensor:
    """y [m, n] of x [m, k], 1 <= m <= 8, rows contiguous; the layout has COO residuals."""
    m, k = x.shape
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    codes, scales, zeros, _ = weight_tensors(layout, x.dtype)
    pairs, (tiles, k_tiles) = activation_pairs(x, layout), layout.packed_codes.shape[:2]
    assert layout.sparse is not None and layout.sparse.coo is not None
    options = pdl_option(supports_pdl(x.device))
    if config.max_registers:
        options["maxnreg"] = config.max_registers
    launch(
        gemv_sparse_mma_kernel,
        (tiles, 1, 1),
        (
            pairs, codes, scales.view(torch.int32), None if zeros is None else zeros.view(torch.int32), layout.sparse.coo,
            layout.sparse.block_ptr, layout.row_perm, bias, y, m, k, layout.n,
            triton.cdiv(triton.cdiv(k_tiles, config.num_warps), config.num_stages), pairs.stride(0), y.stride(0),
        ),
        interned(CONFIG=kernel_config(layout, x.dtype, config), num_warps=config.num_warps, num_stages=1, **options),
        smem_bytes=padded_smem_bytes(config.max_ctas_per_sm, x.device),
    )  # fmt: skip
    return y
