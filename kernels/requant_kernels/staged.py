"""The decode kernel of Hopper for up to 8 tokens of a matrix with residuals: activations are gathered from shared memory.

As in `decode.py` a warp multiplies its own blocks of columns and nothing is exchanged before the end; but a program is 16
warps, WARPS of them to every tile, so that all tiles of a program share the activations. While it multiplies, it leaves them
in shared memory, column by column (`columns.py`). When all are there, its residuals follow: one `ldmatrix` gathers 32
activations of eight tokens, and a product with a diagonal matrix multiplies and adds them up. Nothing is transposed before,
and no residual takes a line of the cache of its own.

In Gluon, which gives a program more shared memory than what assembly can declare; every tensor is `[warp, lane]` or `[warp,
lane, 4]`.
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

from requant_kernels import columns
from requant_kernels.blocks import dense_tokens, operands, sparse_operands
from requant_kernels.layouts import Layout
from requant_kernels.pieces import zero_bias
from requant_kernels.words import UNIT as UNITS

FOUR, EIGHT = gl.constexpr((gl.int32,) * 4), gl.constexpr((gl.int32,) * 8)
SLAB_CONSTRAINTS, SCALE_CONSTRAINTS = (
    gl.constexpr(columns.SLAB_CONSTRAINTS),
    gl.constexpr(columns.SCALE_CONSTRAINTS),
)
SCALE, ZERO_CONSTRAINTS = gl.constexpr(columns.SCALE), gl.constexpr(columns.ZERO_CONSTRAINTS)
BASE, STAGE, STAGE_CONSTRAINTS = (
    gl.constexpr(columns.BASE),
    gl.constexpr(columns.STAGE),
    gl.constexpr(columns.STAGE_CONSTRAINTS),
)
CHUNK_CONSTRAINTS, GIVE = gl.constexpr(columns.CHUNK_CONSTRAINTS), gl.constexpr(columns.GIVE)
GIVE_CONSTRAINTS, FETCH = gl.constexpr(columns.GIVE_CONSTRAINTS), gl.constexpr(columns.FETCH)
MOST_SHARED = 227 << 10  # bytes of a program
RESULT_BYTES = gl.constexpr(columns.RESULT_BYTES)


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
def _load_chunk(si_ptr, sv_ptr, chunk, end, lane, four):
    """A chunk of slots: this lane's columns; the values of the diagonals, rows g and g + 8, slots 0..3 and 4..7."""
    lane4 = gl.expand_dims(lane, 2)
    inside, start = chunk < end, gl.expand_dims(chunk.to(gl.int64) * 128, 2)
    column_at = start + lane4 % 16 * 8 + lane4 // 16 * 4 + four
    column = gl.load(
        si_ptr + column_at, mask=gl.expand_dims(inside, 2), other=0, eviction_policy="evict_first"
    )
    loaded = (column,)
    diagonal = gl.expand_dims(inside & (lane % 4 == lane // 8), 2)
    value_at = start + lane4 // 4 * 8 + four
    for i in gl.static_range(4):
        value = gl.load(
            sv_ptr + value_at + (i % 2 * 64 + i // 2 * 4),
            mask=diagonal,
            other=0,
            eviction_policy="evict_first",
        )
        loaded = loaded + (value,)
    return loaded


@gluon.jit
def _add_chunk(sums, loaded, base, lane, dtype, CHUNK: gl.constexpr):
    """sums `[warp, lane, 4]` += a chunk of residuals times what stands in shared memory."""
    column = loaded[0].to(gl.int32) & 0xFFFF
    given = ((column ^ (column >> 2 & 6)) * 16 + base,)
    shift = gl.expand_dims(lane // 4 % 2 * 16, 2)
    for i in gl.static_range(4):
        value = loaded[1 + i].to(gl.float32).to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        given = given + (value << shift,)
    return gl.inline_asm_elementwise(
        CHUNK, CHUNK_CONSTRAINTS, given + (sums,), dtype=gl.float32, is_pure=False, pack=4
    )


@gluon.jit
def _begin(w_ptr, s_ptr, z_ptr, sp_ptr, si_ptr, sv_ptr, tile, sub, lane, four, blocks, ZERO: gl.constexpr,
           CODEBOOK: gl.constexpr, BITS: gl.constexpr, TABLES: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr,
           WARPS: gl.constexpr, DEPTH: gl.constexpr):  # fmt: skip
    """What is requested before a tile begins: the ring of words, what belongs to its rows, the first slots of every warp."""
    lane4 = gl.expand_dims(lane, 2)
    rows = ()
    if CODEBOOK:
        for i in gl.static_range(TABLES):
            table_at = (gl.expand_dims(tile, 2) * TABLES + i) * 16 + lane4 // 4 * 2 + four % 2
            rows = rows + (gl.load(s_ptr + table_at),)
    elif z_ptr is not None and GROUP == 0:
        zero = gl.load(z_ptr + tile * 8 + lane // 4)
        rows = (
            gl.inline_asm_elementwise(
                ZERO, ZERO_CONSTRAINTS, [_four(zero)], dtype=gl.int32, is_pure=True, pack=4
            ),
        )
    ring = ()
    for u in gl.static_range(DEPTH):
        ring = ring + (
            _load_block(w_ptr, s_ptr, z_ptr if GROUP > 0 else None, tile, u * WARPS + sub, blocks, lane4 * 4 + four, lane,
                        BITS, GROUP, EVEN and u == 0),
        )  # fmt: skip
    first, end = gl.load(sp_ptr + tile), gl.load(sp_ptr + tile + 1)
    chunk = first + sub
    now_slots = _load_chunk(si_ptr, sv_ptr, chunk, end, lane, four)
    next_slots = _load_chunk(si_ptr, sv_ptr, chunk + WARPS, end, lane, four)
    return ring, rows, chunk, end, now_slots, next_slots


@gluon.jit(do_not_specialize=["last_tile", "chunks", "M", "groups"])
def staged_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, z_ptr, rows_ptr, sp_ptr, si_ptr, sv_ptr, sr_ptr, bias_ptr, y_ptr,
    M, K, n, last_tile, chunks, groups, stride_x, stride_xs, stride_y,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, SLAB: gl.constexpr, CHUNK: gl.constexpr, ZERO: gl.constexpr,
    CODEBOOK: gl.constexpr, BITS: gl.constexpr, TABLES: gl.constexpr, GROUP: gl.constexpr, UNIT: gl.constexpr,
    EVEN: gl.constexpr, FULL: gl.constexpr, W: gl.constexpr, WARPS: gl.constexpr, UNROLL: gl.constexpr,
    LOOP: gl.constexpr, PIECES: gl.constexpr, RESULTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ weight^T; a program takes groups of W / WARPS tiles of 16 rows, one or (LOOP) several.

    x_ptr, xs_ptr: pairs, divided by column scales and plain; s_ptr, z_ptr: pairs of float16, or tables. RESULTS: where the
    sums of the warps are put; 0: over the activations, which are then no longer needed.
    """
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    L: gl.constexpr = lanes_layout(W)
    LR: gl.constexpr = gl.SliceLayout(2, L)
    ZEROS: gl.constexpr = z_ptr is not None
    DEPTH: gl.constexpr = UNROLL - 1 if UNROLL > 1 else 1
    TILES: gl.constexpr = W // WARPS
    S: gl.constexpr = 8 * WARPS // W if 8 * WARPS > W else 1  # slabs that a warp stages beside a block
    OUT: gl.constexpr = (
        4 // WARPS if WARPS < 4 else 1
    )  # results of a thread: WARPS warps share the 128 of a tile
    warp = gl.arange(0, W, gl.SliceLayout(1, LR))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, LR))[None, :] + warp * 0
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    lane4 = gl.expand_dims(lane, 2)
    own_tile, sub = warp // WARPS + lane * 0, warp % WARPS + lane * 0
    blocks = gl.cdiv(K, 256)
    region = gl.allocate_shared_memory(gl.int8, [PIECES, 1, 4096], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    base = gl.inline_asm_elementwise(BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    # of the columns that a lane's address stands for, by slab: 8 t + 2 (j kh) + e
    own_column = lane % 8 // 2 * 8 + lane // 8 * 2 + lane % 2
    own_place = (own_column ^ (own_column >> 2 & 6)) * 16 + base
    pairs = gl.cdiv(K, 2)
    lane_pair = lane4 % 4 * 4 + four
    z_groups = z_ptr if GROUP > 0 else None

    if LOOP:
        tile = gl.minimum(gl.program_id(0) * TILES + own_tile, last_tile).to(gl.int64)
        begun = _begin(w_ptr, s_ptr, z_ptr, sp_ptr, si_ptr, sv_ptr, tile, sub, lane, four, blocks, ZERO, CODEBOOK, BITS,
                       TABLES, GROUP, EVEN, WARPS, DEPTH)  # fmt: skip
    for group in range(gl.program_id(0), groups, gl.num_programs(0)):
        tile = gl.minimum(group * TILES + own_tile, last_tile).to(gl.int64)
        if LOOP:
            now = begun
        else:
            now = _begin(w_ptr, s_ptr, z_ptr, sp_ptr, si_ptr, sv_ptr, tile, sub, lane, four, blocks, ZERO, CODEBOOK, BITS,
                           TABLES, GROUP, EVEN, WARPS, DEPTH)  # fmt: skip
        ring, rows, chunk, chunk_end, now_slots, next_slots = now
        # the longest tile is the first one
        rounds = gl.cdiv(gl.load(sp_ptr + group * TILES + 1) - gl.load(sp_ptr + group * TILES), WARPS)
        # what the end needs
        out = tile * 16 + lane % 16
        if rows_ptr is not None:
            out = gl.load(rows_ptr + out).to(gl.int64)
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + out, mask=out < n, other=0.0)
        tile4 = gl.expand_dims(tile, 2)
        if sr_ptr is not None:
            row_scale = gl.load(sr_ptr + tile4 * 16 + lane4 // 4 + four // 2 * 8)
        if not CODEBOOK and GROUP == 0:
            scale_ptr = s_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
            grid_scale = gl.load(scale_ptr + tile4 * 16 + lane4 // 4 * 2 + four // 2)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        token = gl.minimum(lane4 // 4, M - 1).to(gl.int64)
        offset, plain_offset = token * stride_x, token * stride_xs
        slab = warp * S
        staged = ()
        for i in gl.static_range(S):
            own_slab = gl.minimum(slab + i, blocks * 8 - 1) + lane * 0
            own_pair = gl.expand_dims(own_slab * 16, 2) + lane_pair
            staged = staged + ((own_slab, _load_slab(xs_ptr, plain_offset, own_pair, pairs, FULL)),)
        acc = gl.zeros([W, 32, 4], gl.float32, layout=L)
        for c in range(chunks):
            for u in gl.static_range(UNROLL):
                block = (c * UNROLL + u) * WARPS + sub
                ring = ring + (
                    _load_block(w_ptr, s_ptr, z_groups, tile, block + DEPTH * WARPS, blocks, lane4 * 4 + four, lane, BITS,
                                GROUP, False),
                )  # fmt: skip
                slab += W * S
                arrived, staged = staged, ()
                for i in gl.static_range(S):
                    gl.inline_asm_elementwise(
                        STAGE, STAGE_CONSTRAINTS, [_four(own_place + arrived[i][0] * 512), arrived[i][1]],
                        dtype=gl.int32, is_pure=False, pack=4,
                    )  # fmt: skip
                    own_slab = gl.minimum(slab + i, blocks * 8 - 1) + lane * 0
                    own_pair = gl.expand_dims(own_slab * 16, 2) + lane_pair
                    staged = staged + ((own_slab, _load_slab(xs_ptr, plain_offset, own_pair, pairs, FULL)),)
                tokens = _load_tokens(x_ptr, offset, block, blocks, lane_pair, pairs, EVEN)
                if (
                    c * UNROLL + u
                ) * WARPS < blocks:  # always; without the branch the compiler sinks the loads below
                    acc = _multiply_block(acc, ring[0], rows, tokens, ASM, CONSTRAINTS, SLAB, ZERO, CODEBOOK, BITS, GROUP,
                                          ZEROS)  # fmt: skip
                ring = ring[1:]
        if LOOP:  # the next tiles' words are under way while this one ends
            following = gl.minimum(group + gl.num_programs(0), groups - 1) * TILES + own_tile
            following = gl.minimum(following, last_tile).to(gl.int64)
            begun = _begin(w_ptr, s_ptr, z_ptr, sp_ptr, si_ptr, sv_ptr, following, sub, lane, four, blocks, ZERO, CODEBOOK,
                           BITS, TABLES, GROUP, EVEN, WARPS, DEPTH)  # fmt: skip
        if not CODEBOOK:
            if GROUP == 0:
                acc = acc * grid_scale.to(gl.float32)
            acc = acc * (1.0 / UNIT)
        gl.thread_barrier()  # all activations are there
        sums = gl.zeros([W, 32, 4], gl.float32, layout=L)
        for _ in range(rounds):
            arrived_slots, now_slots = now_slots, next_slots
            chunk += WARPS
            next_slots = _load_chunk(si_ptr, sv_ptr, chunk + WARPS, chunk_end, lane, four)
            sums = _add_chunk(sums, arrived_slots, base, lane, dtype, CHUNK)
        if sr_ptr is not None:
            sums = sums * row_scale.to(gl.float32)
        acc = acc + sums
        if RESULTS == 0:
            gl.thread_barrier()  # and no longer needed
        result_at = base + RESULTS + warp * RESULT_BYTES + lane * 16
        gl.inline_asm_elementwise(
            GIVE, GIVE_CONSTRAINTS, [_four(result_at), acc], dtype=gl.int32, is_pure=False, pack=4
        )
        gl.thread_barrier()
        for i in gl.static_range(OUT):
            m = (
                sub + i * WARPS
            ) * 2 + lane // 16  # result `32 (sub + i WARPS) + lane` of the tile: token, then row
            at = base + RESULTS + own_tile * (WARPS * RESULT_BYTES)
            at += (lane % 8 * 4 + m // 2 % 4) * 16 + (lane % 16 // 8 * 2 + m % 2) * 4
            y = gl.zeros([W, 32], gl.float32, layout=LR)
            for w in gl.static_range(WARPS):
                y += gl.inline_asm_elementwise(
                    FETCH, "=f,r", [at + w * RESULT_BYTES], dtype=gl.float32, is_pure=False, pack=1
                )
            if bias_ptr is not None:
                y += bias.to(gl.float32)
            gl.store(y_ptr + m.to(gl.int64) * stride_y + out, y.to(dtype), mask=(m < M) & (out < n))
    if M < 0:  # never: Triton declares, and keeps, shared memory that it sees used
        region.index(0).store(
            gl.zeros([1, 4096], gl.int8, layout=gl.BlockedLayout([1, 8], [1, 32], [1, W], [1, 0]))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedConfig:
    """`warps` of a tile, of `program`; the words of `unroll` - 1 blocks (one at least) are under way; `programs` at most."""

    warps: int = 4
    program: int = 16
    unroll: int = 3
    programs: int = 132
    pdl: bool = True
    max_registers: int | None = 128


def shared_memory(k: int, program: int, *, loop: bool) -> tuple[int, int]:
    """Of a program, in 4096 bytes: the activations of eight tokens and the sums of its warps; and where these begin."""
    columns_of, results = -(-k // 256), -(-program * columns.RESULT_BYTES // 4096)
    return (columns_of + results, columns_of * 4096) if loop else (max(columns_of, results), 0)


def fits(k: int, program: int, *, loop: bool) -> bool:
    """Whether a program's shared memory is what Hopper has."""
    return shared_memory(k, program, loop=loop)[0] * 4096 <= MOST_SHARED


def staged_constants(
    layout: Layout, dtype: torch.dtype
) -> tuple[tuple[Tensor | None, ...], dict[str, object]]:
    """The weight's arguments and constants: `blocks.operands`, with scales and zero points in pairs."""
    (words, scales, zeros, _), constants = operands(layout, dtype, True)
    name = "fp16" if dtype == torch.float16 else "bf16"
    assert words is not None and scales is not None
    unit = UNITS[name]
    own = {k: v for k, v in constants.items() if k != "POSITIONS"}
    own |= {
        "SLAB": columns.slab_asm(name), "CHUNK": columns.chunk_asm(name),
        "ZERO": columns.zero_asm(name, -unit, -unit * zero_bias(layout.bits, name)) if zeros is not None else None,
    }  # fmt: skip
    return (words, scales.view(torch.int32), None if zeros is None else zeros.view(torch.int32)), own


def launch_constants(k: int, config: StagedConfig, *, loop: bool) -> dict[str, object]:
    """The constants that follow from the launch."""
    pieces, results = shared_memory(k, config.program, loop=loop)
    return {
        "EVEN": k % (256 * config.warps) == 0, "FULL": k % 256 == 0, "W": config.program, "WARPS": config.warps,
        "UNROLL": config.unroll, "LOOP": loop, "PIECES": pieces, "RESULTS": results,
        "PDL": config.pdl,
    }  # fmt: skip


def in_pairs(x: Tensor) -> Tensor:
    """Activations as the kernel reads them, two at a time."""
    if x.shape[1] % 2 or x.stride(0) % 2 or x.data_ptr() % 4:
        x = torch.nn.functional.pad(x, (0, x.shape[1] % 2)).clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def staged(x: Tensor, layout: Layout, bias: Tensor | None, config: StagedConfig) -> Tensor:
    """y [m, n] of x [m, k], 1 <= m <= 8, rows contiguous."""
    m, k = x.shape
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    tensors, constants = staged_constants(layout, x.dtype)
    dense, plain = dense_tokens(x, layout), in_pairs(x)
    divided = plain if dense is x else in_pairs(dense)
    tiles, blocks = layout.words.shape[:2]
    groups = triton.cdiv(tiles, config.program // config.warps)
    loop = groups > config.programs and fits(k, config.program, loop=True)
    launch = {"launch_pdl": True} if config.pdl else {}
    if config.max_registers:
        launch["maxnreg"] = config.max_registers
    staged_kernel[(config.programs if loop else groups,)](
        divided, plain, *tensors, *sparse_operands(layout), bias, y, m, k, layout.n, tiles - 1,
        triton.cdiv(triton.cdiv(blocks, config.warps), config.unroll), groups, divided.stride(0), plain.stride(0),
        y.stride(0), **constants, **launch_constants(k, config, loop=loop), num_warps=config.program, num_stages=1,
        **launch,
    )  # fmt: skip
    return y
