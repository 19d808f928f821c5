"""The decode kernel of Hopper for up to 8 tokens of a matrix with residuals: activations are gathered in shared memory.

As in `decode.py` a program owns 16 rows, its warps share the columns, 256 at a time, and nothing is exchanged before the
end. A warp keeps the activations of its block in registers anyway; here it also leaves them in shared memory of its own,
column by column, and gathers those of the block's residuals from there (`gemv_sparse_mma_ptx.py`): 32 of eight tokens an
instruction, multiplied and added up by the tensor cores. Nothing is transposed before, and no residual takes a line of
the cache of its own. Residuals are read as entries (`entries.py`), the ones of the next block while this one is multiplied.

In Gluon, where every tensor is `[warp, lane]` or `[warp, lane, 4]`: the registers of a lane are those that assembly takes.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.bit_layout import GRID_STEP as UNITS
from requant_kernels.common.fragment_dequant import dequant_operands, scaled_activations
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import shared_room
from requant_kernels.common.packing import Layout
from requant_kernels.launch_config import DecodeConfig
from requant_kernels.scalar import gemv_sparse_mma_ptx as ptx
from requant_kernels.scalar.gemm_sm90_ptx import zero_bias

FOUR, EIGHT = gl.constexpr((gl.int32,) * 4), gl.constexpr((gl.int32,) * 8)
SCALE, SCALE_CONSTRAINTS = gl.constexpr(ptx.SCALE), gl.constexpr(ptx.SCALE_CONSTRAINTS)
SLAB_CONSTRAINTS, ZERO_CONSTRAINTS = (
    gl.constexpr(ptx.SLAB_CONSTRAINTS),
    gl.constexpr(ptx.ZERO_CONSTRAINTS),
)
STAGE, STAGE_CONSTRAINTS = gl.constexpr(ptx.STAGE), gl.constexpr(ptx.STAGE_CONSTRAINTS)
GIVE, GIVE_CONSTRAINTS = gl.constexpr(ptx.GIVE), gl.constexpr(ptx.GIVE_CONSTRAINTS)
BASE, FETCH, NONE = gl.constexpr(ptx.BASE), gl.constexpr(ptx.FETCH), gl.constexpr(ptx.NONE)
GATHER_CONSTRAINTS, WARP_BYTES = gl.constexpr(ptx.GATHER_CONSTRAINTS), gl.constexpr(ptx.WARP_BYTES)
COLUMNS_BYTES = gl.constexpr(ptx.COLUMNS_BYTES)


@gluon.constexpr_function
def lanes_layout(W):
    """`[warp, lane, 4]`: four registers a lane."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2]],
        lane_bases=[[0, 1 << i, 0] for i in range(5)],
        warp_bases=[[1 << i, 0, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[W, 32, 4],
    )


@gluon.jit
def _four(value):
    """`[warp, lane]` -> `[warp, lane, 4]`, four times the same register."""
    return gl.expand_dims(value, 2) + gl.zeros([1, 1, 4], gl.int32, layout=gl.AutoLayout())


@gluon.jit
def _load_block(w_ptr, s_ptr, z_ptr, tile, block, blocks, at, lane, BITS: gl.constexpr, GROUP: gl.constexpr,
                EVEN: gl.constexpr):  # fmt: skip
    """Words of a block a warp, its scales and zero points, those of both rows of a lane in 32 bits."""
    A_BLOCK: gl.constexpr = 0 if GROUP == 0 else (256 // GROUP if GROUP < 256 else 1)
    A_GROUP: gl.constexpr = GROUP // 256 if GROUP > 256 else 1
    start = gl.expand_dims((tile * blocks + block) * (BITS * 128), 2) + at
    inside = block < blocks
    loaded = ()
    for i in gl.static_range(BITS):
        if EVEN:
            word = gl.load(w_ptr + start + i * 128, eviction_policy="evict_first")
        else:
            word = gl.load(
                w_ptr + start + i * 128,
                mask=gl.expand_dims(inside, 2),
                other=0,
                eviction_policy="evict_first",
            )
        loaded = loaded + (word,)
    groups = gl.cdiv(blocks, A_GROUP) * A_BLOCK
    for i in gl.static_range(A_BLOCK):
        place = (tile * groups + block // A_GROUP * A_BLOCK + i) * 8 + lane // 4
        loaded = loaded + (gl.load(s_ptr + place, mask=inside, other=0),)
    if z_ptr is not None:
        for i in gl.static_range(A_BLOCK):
            place = (tile * groups + block // A_GROUP * A_BLOCK + i) * 8 + lane // 4
            loaded = loaded + (gl.load(z_ptr + place, mask=inside, other=0),)
    return loaded


@gluon.jit
def _load_slab(x_ptr, offset, pair, pairs, EVEN: gl.constexpr):
    """32 columns of the activations, in pairs: 16 bytes a lane; `pair`: the first of this lane."""
    if EVEN:
        return gl.load(x_ptr + offset + pair)
    return gl.load(x_ptr + offset + pair, mask=pair < pairs, other=0)


@gluon.jit
def _load_tokens(x_ptr, offset, block, blocks, lane_pair, pairs, EVEN: gl.constexpr):
    """Activations of one block a warp, eight slabs."""
    pair = gl.expand_dims((gl.minimum(block, blocks - 1) if EVEN else block) * 128, 2) + lane_pair
    tokens = ()
    for slab in gl.static_range(8):
        tokens = tokens + (_load_slab(x_ptr, offset, pair + slab * 16, pairs, EVEN),)
    return tokens


@gluon.jit
def _multiply_block(acc, loaded, rows, tokens, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
                    SLAB: gl.constexpr, ZERO: gl.constexpr, CODEBOOK: gl.constexpr, BITS: gl.constexpr,
                    GROUP: gl.constexpr, ZEROS: gl.constexpr):  # fmt: skip
    """acc `[warp, lane, 4]` += block times activations."""
    GROUPS: gl.constexpr = 0 if GROUP == 0 else (256 // GROUP if GROUP < 256 else 1)
    OWN: gl.constexpr = GROUPS // 2 if GROUPS > 1 else 1  # groups of a half
    part = acc
    planes = ()
    for slab in gl.static_range(8):
        if slab % 4 == 0:
            given = rows
            if ZEROS and GROUP > 0:
                for i in gl.static_range(OWN):
                    zero = loaded[BITS + GROUPS + (slab // 4 * OWN if GROUPS > 1 else 0) + i]
                    given = given + (
                        gl.inline_asm_elementwise(
                            ZERO, ZERO_CONSTRAINTS, [_four(zero)], dtype=gl.int32, is_pure=True, pack=4
                        ),
                    )
            planes = gl.inline_asm_elementwise(
                ASM[slab // 4], CONSTRAINTS, loaded[:BITS] + given, dtype=EIGHT, is_pure=True, pack=1
            )
        if GROUP > 0 and slab * GROUPS % 8 == 0:
            part = gl.full_like(acc, 0.0)
        part = gl.inline_asm_elementwise(
            SLAB, SLAB_CONSTRAINTS, [planes[slab % 4 * 2], planes[slab % 4 * 2 + 1], tokens[slab], part],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
        if GROUP > 0 and (slab + 1) * GROUPS % 8 == 0:
            scale = _four(loaded[BITS + slab * GROUPS // 8])
            acc = gl.inline_asm_elementwise(
                SCALE, SCALE_CONSTRAINTS, [part, scale, acc], dtype=gl.float32, is_pure=True, pack=4
            )
    return acc if GROUP > 0 else part


@gluon.jit
def _load_bounds(b_ptr, tile, block, blocks):
    """Where the entries of a block begin, and how many they are."""
    at, inside = tile * (blocks + 1) + block, block < blocks
    begin = gl.load(b_ptr + at, mask=inside, other=0)
    return begin, gl.load(b_ptr + at + 1, mask=inside, other=0) - begin


@gluon.jit
def _load_entries(e_ptr, bounds, lane):
    """The first two rounds of a block's entries, their number, and where this lane's first one is."""
    begin, count = bounds
    at = begin + lane
    first = gl.load(e_ptr + at, mask=lane < count, other=NONE)
    second = gl.load(e_ptr + at + 32, mask=lane + 32 < count, other=NONE)
    return first, second, count, e_ptr.to(gl.int64) + at.to(gl.int64) * 4


@gluon.jit
def _add_residuals(sums, entries, columns_at, lane, GATHER: gl.constexpr):
    """sums `[warp, lane, 4]` += the residuals of a block times its columns in shared memory."""
    first, second, count, pointer = entries
    put, get = columns_at + COLUMNS_BYTES + lane * 4, columns_at + COLUMNS_BYTES + lane % 4 * 8
    return gl.inline_asm_elementwise(
        GATHER, GATHER_CONSTRAINTS,
        [_four(columns_at), _four(put), _four(get), _four(first), _four(second), _four(count),
         _four(lane // 4 * (32 * 0x10001)), sums, _four(pointer)],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["last_tile", "chunks", "M"])
def gathered_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, e_ptr, b_ptr, rows_ptr, bias_ptr, y_ptr, M, K, n, last_tile, chunks, stride_x, stride_y,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, SLAB: gl.constexpr, GATHER: gl.constexpr, ZERO: gl.constexpr,
    CODEBOOK: gl.constexpr, BITS: gl.constexpr, TABLES: gl.constexpr, GROUP: gl.constexpr, UNIT: gl.constexpr,
    EVEN: gl.constexpr, W: gl.constexpr, UNROLL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ weight^T; grid: tiles of 16 rows. x_ptr: pairs; s_ptr, z_ptr: pairs too, or tables."""
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    L: gl.constexpr = lanes_layout(W)
    LR: gl.constexpr = gl.SliceLayout(2, L)
    ZEROS: gl.constexpr = z_ptr is not None
    DEPTH: gl.constexpr = UNROLL - 1 if UNROLL > 1 else 1
    OUT: gl.constexpr = 4 // W if W < 4 else 1  # results of a thread, of the 128 of a tile
    warp = gl.arange(0, W, gl.SliceLayout(1, LR))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, LR))[None, :] + warp * 0
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    lane4, sub = gl.expand_dims(lane, 2), warp + lane * 0
    tile = (sub * 0 + gl.program_id(0)).to(gl.int64)
    tile4, blocks, pairs = gl.expand_dims(tile, 2), gl.cdiv(K, 256), gl.cdiv(K, 2)
    word_at, lane_pair = lane4 * 4 + four, lane4 % 4 * 4 + four
    region = gl.allocate_shared_memory(
        gl.int8, [(W * WARP_BYTES + 4095) // 4096, 1, 4096], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    base = gl.inline_asm_elementwise(BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    columns_at = base + sub * WARP_BYTES
    own_place = columns_at + lane * 16

    bounds = _load_bounds(b_ptr, tile, sub, blocks)
    next_bounds = _load_bounds(b_ptr, tile, sub + W, blocks)
    rows = ()  # what belongs to the rows for the whole launch
    if CODEBOOK:
        for i in gl.static_range(TABLES):
            rows = rows + (gl.load(s_ptr + (tile4 * TABLES + i) * 16 + lane4 // 4 * 2 + four % 2),)
    elif ZEROS and GROUP == 0:
        zero = gl.load(z_ptr + tile * 8 + lane // 4)
        rows = (
            gl.inline_asm_elementwise(
                ZERO, ZERO_CONSTRAINTS, [_four(zero)], dtype=gl.int32, is_pure=True, pack=4
            ),
        )
    z_groups = z_ptr if GROUP > 0 else None
    ring = ()
    for u in gl.static_range(DEPTH):
        ring = ring + (
            _load_block(w_ptr, s_ptr, z_groups, tile, u * W + sub, blocks, word_at, lane, BITS, GROUP, EVEN and u == 0),
        )  # fmt: skip
    # Nobody waits here. But the words are requested before the bounds arrive, which the entries wait for: ptxas moves no
    # load over a barrier
    gl.thread_barrier()
    entries = _load_entries(e_ptr, bounds, lane)
    out = tile * 16 + lane % 16  # what the end needs
    if rows_ptr is not None:
        out = gl.load(rows_ptr + out).to(gl.int64)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + out, mask=out < n, other=0.0)
    if not CODEBOOK and GROUP == 0:
        scale_ptr = s_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
        grid_scale = gl.load(scale_ptr + tile4 * 16 + lane4 // 4 * 2 + four // 2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offset = gl.minimum(lane4 // 4, M - 1).to(gl.int64) * stride_x
    acc = gl.zeros([W, 32, 4], gl.float32, layout=L)
    sums = gl.zeros([W, 32, 4], gl.float32, layout=L)
    for c in range(chunks):
        for u in gl.static_range(UNROLL):
            block = (c * UNROLL + u) * W + sub
            ring = ring + (
                _load_block(w_ptr, s_ptr, z_groups, tile, block + DEPTH * W, blocks, word_at, lane, BITS, GROUP, False),
            )  # fmt: skip
            now = entries
            entries = _load_entries(e_ptr, next_bounds, lane)
            next_bounds = _load_bounds(b_ptr, tile, block + 2 * W, blocks)
            if (c * UNROLL + u) * W < blocks:  # always; without the branch the compiler sinks the loads below
                tokens = _load_tokens(x_ptr, offset, block, blocks, lane_pair, pairs, EVEN)
                for slab in gl.static_range(8):
                    gl.inline_asm_elementwise(
                        STAGE, STAGE_CONSTRAINTS, [_four(own_place + slab * 512), tokens[slab]], dtype=gl.int32,
                        is_pure=False, pack=4,
                    )  # fmt: skip
                acc = _multiply_block(acc, ring[0], rows, tokens, ASM, CONSTRAINTS, SLAB, ZERO, CODEBOOK, BITS, GROUP,
                                      ZEROS)  # fmt: skip
                sums = _add_residuals(sums, now, columns_at, lane, GATHER)
            ring = ring[1:]
    if not CODEBOOK:
        if GROUP == 0:
            acc = acc * grid_scale.to(gl.float32)
        acc = acc * (1.0 / UNIT)
    acc = acc + sums
    gl.inline_asm_elementwise(  # where this warp's columns were
        GIVE, GIVE_CONSTRAINTS, [_four(own_place), acc], dtype=gl.int32, is_pure=False, pack=4
    )
    gl.thread_barrier()
    for i in gl.static_range(OUT):
        m = (sub + i * W) * 2 + lane // 16  # result `32 (sub + i W) + lane` of the tile: token, then row
        at = base + (lane % 8 * 4 + m // 2 % 4) * 16 + (lane % 16 // 8 * 2 + m % 2) * 4
        y = gl.zeros([W, 32], gl.float32, layout=LR)
        for w in gl.static_range(W):
            y += gl.inline_asm_elementwise(
                FETCH, "=f,r", [at + w * WARP_BYTES], dtype=gl.float32, is_pure=False, pack=1
            )
        if bias_ptr is not None:
            y += bias.to(gl.float32)
        gl.store(y_ptr + m.to(gl.int64) * stride_y + out, y.to(dtype), mask=(m < M) & (out < n))
    if M < 0:  # never: Triton declares, and keeps, shared memory that it sees used
        region.index(0).store(
            gl.zeros([1, 4096], gl.int8, layout=gl.BlockedLayout([1, 8], [1, 32], [1, W], [1, 0]))
        )


def gathered_constants(
    layout: Layout, dtype: torch.dtype
) -> tuple[tuple[Tensor | None, ...], dict[str, object]]:
    """The weight's arguments and constants: `dequant_operands`, with scales and zero points in pairs."""
    (words, scales, zeros, _), format = dequant_operands(layout, dtype, True)
    name = "fp16" if dtype == torch.float16 else "bf16"
    assert words is not None and scales is not None
    unit = UNITS[name]
    own = {
        "ASM": format.ptx, "CONSTRAINTS": format.constraints, "CODEBOOK": format.codebook, "BITS": format.bits,
        "TABLES": format.table_registers, "GROUP": format.group_size, "UNIT": format.grid_step,
        "SLAB": ptx.slab_asm(name), "GATHER": ptx.gather_asm(name),
        "ZERO": ptx.zero_asm(name, -unit, -unit * zero_bias(layout.bits, name)) if zeros is not None else None,
    }  # fmt: skip
    return (words, scales.view(torch.int32), None if zeros is None else zeros.view(torch.int32)), own


def gathered(x: Tensor, layout: Layout, bias: Tensor | None, config: DecodeConfig) -> Tensor:
    """y [m, n] of x [m, k], 1 <= m <= 8, rows contiguous; the layout has entries."""
    m, k = x.shape
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    tensors, constants = gathered_constants(layout, x.dtype)
    x = scaled_activations(x, layout)
    if k % 2 or x.stride(0) % 2 or x.data_ptr() % 4:  # the kernel reads activations in pairs
        x = torch.nn.functional.pad(x, (0, k % 2)).clone(memory_format=torch.contiguous_format)
    pairs, (tiles, blocks) = x.view(torch.int32), layout.packed_codes.shape[:2]
    assert layout.sparse is not None and layout.sparse.coo is not None
    early: dict[str, object] = {"launch_pdl": True} if config.pdl else {}
    if config.max_registers:
        early["maxnreg"] = config.max_registers
    launch(
        gathered_kernel,
        (tiles, 1, 1),
        (
            pairs, *tensors, layout.sparse.coo, layout.sparse.block_ptr, layout.row_perm, bias, y, m, k, layout.n, tiles - 1,
            triton.cdiv(triton.cdiv(blocks, config.warps), config.unroll), pairs.stride(0), y.stride(0),
        ),
        interned(
            **constants, EVEN=k % (256 * config.warps) == 0, W=config.warps, UNROLL=config.unroll, PDL=config.pdl,
            num_warps=config.warps, num_stages=1, **early,
        ),
        room=shared_room(tiles, config, x.device),
    )  # fmt: skip
    return y
