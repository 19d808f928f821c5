"""The tall kernel of Hopper: weights are decoded while the tensor cores multiply the ones before them.

Written in Gluon, the dialect of Triton in which layouts and waits are ours to write: Triton itself waits for every product
whose left operand comes from registers. A program owns 16 W R rows and N tokens; its warps decode R tiles each, a piece of
64 columns at a time (`gemm_sm90_ptx.py`), and hand it to wgmma, which runs on while the next piece is decoded. Two blocks of
activations are under way in shared memory, copied by the tensor memory accelerator; one block of words is, in registers.

Activations come in the order of the words (`activations.py`); the columns are split among programs, and partial sums are
added in a fixed order by a launch of their own. Residuals do not depend on the number of tokens: the entries of a piece
(`entries.py`) are written to their places in a cleared tile of shared memory that belongs to the warp, every lane takes what
belongs to its weights from there as addends, and clears the places. No warp waits for another for that.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from functools import cache

import triton.language as tl
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

from requant_kernels.scalar import gemm_sm90_ptx

CLEAR, PUT = gl.constexpr(gemm_sm90_ptx.CLEAR), gl.constexpr(gemm_sm90_ptx.PUT)
PUT_MORE, PUT_MORE_BF16 = gl.constexpr(gemm_sm90_ptx.PUT_MORE), gl.constexpr(gemm_sm90_ptx.PUT_MORE_BF16)
TAKE, TAKE_CONSTRAINTS = gl.constexpr(gemm_sm90_ptx.TAKE), gl.constexpr(gemm_sm90_ptx.TAKE_CONSTRAINTS)
TO_BF16, TILE_BYTES = gl.constexpr(gemm_sm90_ptx.TO_BF16), gl.constexpr(gemm_sm90_ptx.TILE_BYTES)
FOUR, SIXTEEN = gl.constexpr((gl.int32,) * 4), gl.constexpr((gl.int32,) * 16)


@gluon.constexpr_function
def words_layout(W, R):
    """`[R, W, lane, (kh rh)]`: a lane has the 16 bytes of a word that it will multiply."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *[[1 << i, 0, 0, 0] for i in range(R.bit_length() - 1)]],
        lane_bases=[[0, 0, 1 << i, 0] for i in range(5)],
        warp_bases=[[0, 1 << i, 0, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[R, W, 32, 4],
    )


@gluon.constexpr_function
def rows_layout(W, R):
    """`[R, W, lane]`: what a lane has once a tile."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << i, 0, 0] for i in range(R.bit_length() - 1)],
        lane_bases=[[0, 0, 1 << i] for i in range(5)],
        warp_bases=[[0, 1 << i, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[R, W, 32],
    )


@gluon.constexpr_function
def _transposed_layout(W, R):
    """Of a tile on its way out: eight neighbouring rows a lane."""
    lanes = min(32, 2 * W * R)
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, W], [0, 1])


@gluon.jit
def _halves(pair, dtype):
    """int32 -> the two 16-bit floats that it holds, in a new last dimension."""
    low, high = pair.to(gl.int16), (pair >> 16).to(gl.int16)
    return gl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))


@gluon.jit
def _like_words(low, high, W: gl.constexpr, R: gl.constexpr):
    """What belongs to rows g and g + 8, each `[R, W, 32]` -> `[R, W, 32, (kh rh)]`."""
    both = gl.reshape(gl.join(low, high), [R, W, 32, 1, 2])
    both = both + gl.zeros([R, W, 32, 2, 2], gl.int32, layout=gl.AutoLayout())
    return gl.convert_layout(gl.reshape(both, [R, W, 32, 4]), words_layout(W, R))


@gluon.jit
def _load_words(w_ptr, tiles, block, blocks, end, BITS: gl.constexpr, W: gl.constexpr, R: gl.constexpr):
    """The words of a block. Beyond `end` whatever stands there: it meets activations that are zero."""
    L: gl.constexpr = words_layout(W, R)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    at = (tiles * blocks + block) * (BITS * 128) + lane * 4 + four
    loaded = ()
    for i in gl.static_range(BITS):
        loaded = loaded + (gl.load(w_ptr + at + i * 128, mask=block < end, eviction_policy="evict_first"),)
    return loaded


@gluon.jit
def _load_groups(p_ptr, tiles, lane, block, blocks, end, GROUP: gl.constexpr):
    """Scales (or zero points) of a block: both rows of a lane in one register, `[R, W, 32]` a group."""
    A_BLOCK: gl.constexpr = 256 // GROUP if GROUP < 256 else 1
    A_GROUP: gl.constexpr = GROUP // 256 if GROUP > 256 else 1
    groups = gl.cdiv(blocks, A_GROUP) * A_BLOCK
    loaded = ()
    for i in gl.static_range(A_BLOCK):
        at = (tiles * groups + block // A_GROUP * A_BLOCK + i) * 8 + lane // 4
        loaded = loaded + (gl.load(p_ptr + at, mask=block < end, other=0),)
    return loaded


@gluon.jit
def _pairs(packed, PAIRS: gl.constexpr, WHICH: gl.constexpr, W: gl.constexpr, R: gl.constexpr):
    low, high = gl.inline_asm_elementwise(
        PAIRS[WHICH], "=r,=r,r", [packed], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return _like_words(low, high, W, R)


@gluon.jit
def _decode(words, operands, dtype, TEXTS: gl.constexpr, Q: gl.constexpr, CONSTRAINTS: gl.constexpr, A: gl.constexpr,
            W: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """Piece Q of every tile -> weights `[16 W R, 64]` in the layout of the left operand."""
    a, b, c, d = gl.inline_asm_elementwise(
        TEXTS[Q], CONSTRAINTS, words + operands, dtype=FOUR, is_pure=True, pack=1
    )
    low = gl.join(_halves(a, dtype), _halves(b, dtype))
    high = gl.join(_halves(c, dtype), _halves(d, dtype))
    weight = gl.reshape(gl.join(low, high), [R, W, 8, 4, 2, 2, 2, 2, 2])  # r w g t kh rh e j slab
    weight = gl.permute(weight, (0, 1, 5, 2, 8, 7, 4, 3, 6))  # r w rh g slab j kh t e
    return gl.convert_layout(gl.reshape(weight, [16 * W * R, 64]), A, assert_trivial=True)


@gluon.jit
def _load_bounds(b_ptr, tiles, block, blocks, end):
    """Where the entries of a block begin and end."""
    at = tiles * (blocks + 1) + block
    return gl.load(b_ptr + at, mask=block < end, other=0), gl.load(b_ptr + at + 1, mask=block < end, other=0)


@gluon.jit
def _load_entries(e_ptr, bounds, lane):
    """The first two rounds of a block's entries, `[R, W, 32]` each."""
    NONE: gl.constexpr = 1 << 30  # belongs to no piece
    at = bounds[0] + lane
    first = gl.load(e_ptr + at, mask=at < bounds[1], other=NONE)
    return first, gl.load(e_ptr + at + 32, mask=at + 32 < bounds[1], other=NONE)


@gluon.jit
def _targets(entries, base, dtype):
    """Entries as `PUT` takes them: place in shared memory, piece, value; twice."""
    made = ()
    for i in gl.static_range(2):
        value = entries[i]
        if dtype == gl.bfloat16:
            value = gl.inline_asm_elementwise(TO_BF16, "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1)
        made = made + (base + (entries[i] >> 15 & 0x7FE), entries[i] >> 26, value)
    return made


@gluon.jit
def _put(targets, e_ptr, bounds, lane, base, q, dtype, VALUES: gl.constexpr):
    """The residuals of a piece to their places, or zeros where they were."""
    piece = gl.full_like(base, q)
    for i in gl.static_range(2):
        value = targets[3 * i + 2] if VALUES else gl.full_like(base, 0)
        gl.inline_asm_elementwise(
            PUT,
            "=r,r,r,r,r",
            [targets[3 * i], targets[3 * i + 1], piece, value],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    pointer = (lane * 0).to(gl.int64) + e_ptr.to(gl.int64)
    gl.inline_asm_elementwise(
        PUT_MORE_BF16 if dtype == gl.bfloat16 else PUT_MORE, "=r,l,r,r,r,r,r",
        [pointer, bounds[0] + lane, bounds[1], base, piece, gl.full_like(base, -1 if VALUES else 0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _residuals(targets, e_ptr, bounds, lane, base, q, dtype, W: gl.constexpr, R: gl.constexpr):
    """The residuals of a piece as operands of its decoder."""
    _put(targets, e_ptr, bounds, lane, base, q, dtype, True)
    r = gl.inline_asm_elementwise(
        TAKE, TAKE_CONSTRAINTS, [base + lane * 16], dtype=SIXTEEN, is_pure=False, pack=1
    )
    _put(targets, e_ptr, bounds, lane, base, q, dtype, False)
    taken = ()
    for i in gl.static_range(4):
        both = gl.join(gl.join(r[4 * i], r[4 * i + 1]), gl.join(r[4 * i + 2], r[4 * i + 3]))  # .. rh kh
        both = gl.reshape(gl.permute(both, (0, 1, 2, 4, 3)), [R, W, 32, 4])
        taken = taken + (gl.convert_layout(both, words_layout(W, R), assert_trivial=True),)
    return taken


@gluon.jit
def _fetch(x_desc, token, block, blocks, end, barrier, stage, wanted, N: gl.constexpr):
    """Request the activations of a block; zeros beyond `end`, which is beyond the matrix for the copy."""
    mbarrier.expect(barrier, N * 512, pred=wanted)
    column = gl.where(block < end, block, blocks) * 256
    tma.async_copy_global_to_shared(x_desc, [token, column], barrier, stage, pred=wanted)


@gluon.jit(do_not_specialize=["blocks", "last_tile", "steps", "M"])
def multiply_kernel(
    x_desc, w_ptr, s_ptr, z_ptr, e_ptr, b_ptr, bias_ptr, out_ptr, blocks, last_tile, steps, n_rows, width, M, n, stride_y,
    TEXTS: gl.constexpr, CONSTRAINTS: gl.constexpr, PAIRS: gl.constexpr, CODEBOOK: gl.constexpr, BITS: gl.constexpr,
    TABLES: gl.constexpr, GROUP: gl.constexpr, UNIT: gl.constexpr, RESERVE: gl.constexpr, N: gl.constexpr,
    W: gl.constexpr, R: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr,
    DIRECT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out: partial products `[splits, rows, width]`; grid: (row tiles / (W R), splits of `steps` blocks, tokens / N).

    s_ptr, z_ptr: pairs of float16 as int32. Words are requested while piece AHEAD of the block before is decoded. DIRECT,
    with one split and rows in their own order: out is y `[M, n]`, with the bias. STAGES: `gemm_sm90_ptx.stages`.
    """
    dtype: gl.constexpr = x_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, N, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    LW: gl.constexpr = words_layout(W, R)
    LR: gl.constexpr = rows_layout(W, R)
    ZEROS: gl.constexpr = z_ptr is not None
    SPARSE: gl.constexpr = e_ptr is not None
    GROUPS: gl.constexpr = 0 if GROUP == 0 else (256 // GROUP if GROUP < 256 else 1)
    OWN: gl.constexpr = GROUPS // 4 if GROUPS > 4 else 1
    first_tile = gl.program_id(0) * (W * R)
    r4 = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LW))))[:, None, None, None]
    w4 = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LW))))[None, :, None, None]
    tiles = gl.minimum(first_tile + r4 * W + w4, last_tile).to(gl.int64)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LR)))[None, None, :]
    r3 = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, LR)))[:, None, None]
    w3 = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(2, LR)))[None, :, None]
    lane = lane + (r3 + w3) * 0
    own_tiles = gl.minimum(first_tile + r3 * W + w3 + lane * 0, last_tile).to(gl.int64)
    first = gl.program_id(1) * steps
    end = gl.minimum(first + steps, blocks)
    token = gl.program_id(2) * N

    staged = gl.allocate_shared_memory(dtype, [STAGES, N, 256], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()

    rows = ()  # operands that belong to a row for the whole launch
    if CODEBOOK:
        for i in gl.static_range(TABLES):
            at = (own_tiles * TABLES + i) * 16 + lane // 4 * 2
            rows = rows + (_like_words(gl.load(s_ptr + at), gl.load(s_ptr + at + 1), W, R),)
    elif GROUP == 0:
        if SPARSE:  # here the scale of a row belongs to its weights, not to its sum
            rows = rows + (_pairs(gl.load(s_ptr + own_tiles * 8 + lane // 4), PAIRS, 0, W, R),)
        if ZEROS:
            rows = rows + (_pairs(gl.load(z_ptr + own_tiles * 8 + lane // 4), PAIRS, 1, W, R),)
    words = _load_words(w_ptr, tiles, first, blocks, end, BITS, W, R)
    scales = ()
    zeros = ()
    if GROUP > 0:
        scales = _load_groups(s_ptr, own_tiles, lane, first, blocks, end, GROUP)
        if ZEROS:
            zeros = _load_groups(z_ptr, own_tiles, lane, first, blocks, end, GROUP)
    if SPARSE:
        base = gl.inline_asm_elementwise(RESERVE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        base = base + (r3 * W + w3) * TILE_BYTES + lane * 0
        gl.inline_asm_elementwise(CLEAR, "=r,r", [base + lane * 16], dtype=gl.int32, is_pure=False, pack=1)
        bounds = _load_bounds(b_ptr, own_tiles, first, blocks, end)
        next_bounds = _load_bounds(b_ptr, own_tiles, first + 1, blocks, end)
        entries = _load_entries(e_ptr, bounds, lane)
        gl.thread_barrier()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(2):
        _fetch(x_desc, token, first + i, blocks, end, full.index(i), staged.index(i), steps > i, N)

    acc = warpgroup_mma_init(gl.zeros([16 * W * R, N], gl.float32, layout=ACC))
    for step in range(steps):
        now = words
        now_scales = scales
        now_zeros = zeros
        following, stage = first + step + 1, step % 2
        if SPARSE:
            targets = _targets(entries, base, dtype)
            now_bounds = bounds
        for q in gl.static_range(4):
            if q == AHEAD:
                words = _load_words(w_ptr, tiles, following, blocks, end, BITS, W, R)
                if GROUP > 0:
                    scales = _load_groups(s_ptr, own_tiles, lane, following, blocks, end, GROUP)
                    if ZEROS:
                        zeros = _load_groups(z_ptr, own_tiles, lane, following, blocks, end, GROUP)
                if SPARSE:
                    bounds = next_bounds
                    entries = _load_entries(e_ptr, bounds, lane)
                    next_bounds = _load_bounds(b_ptr, own_tiles, following + 1, blocks, end)
            own = rows
            if GROUP > 0:
                for i in gl.static_range(OWN):
                    own = own + (_pairs(now_scales[q * GROUPS // 4 + i], PAIRS, 0, W, R),)
                if ZEROS:
                    for i in gl.static_range(OWN):
                        own = own + (_pairs(now_zeros[q * GROUPS // 4 + i], PAIRS, 1, W, R),)
            if SPARSE:
                own = own + _residuals(targets, e_ptr, now_bounds, lane, base, q, dtype, W, R)
            weight = _decode(now, own, dtype, TEXTS, q, CONSTRAINTS, A, W, R)
            if q == 0:
                mbarrier.wait(full.index(stage), step // 2 % 2)
            x = staged.index(stage).slice(64 * q, 64, dim=1).permute((1, 0))
            acc = warpgroup_mma(weight, x, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
            if q == 0:  # every warp has multiplied the block before this one: its place is free
                gl.thread_barrier()
                wanted = (following - first < steps) & (step > 0)
                _fetch(
                    x_desc,
                    token,
                    following,
                    blocks,
                    end,
                    full.index(1 - stage),
                    staged.index(1 - stage),
                    wanted,
                    N,
                )
    y = warpgroup_mma_wait(0, deps=[acc])
    row = first_tile * 16 + gl.arange(0, 16 * W * R, gl.SliceLayout(1, ACC))
    if not CODEBOOK and GROUP == 0 and not SPARSE:
        scale_ptr = s_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
        scale = gl.load(
            scale_ptr + row // 16 * 16 + row % 8 * 2 + row % 16 // 8, mask=row < n_rows, other=0.0
        )
        y = y * (scale.to(gl.float32) * (1.0 / UNIT))[:, None]
    if DIRECT:
        if bias_ptr is not None:
            y += gl.load(bias_ptr + row, mask=row < n, other=0.0).to(gl.float32)[:, None]
        L: gl.constexpr = _transposed_layout(W, R)
        y = gl.convert_layout(y.to(dtype), L)
        row = first_tile * 16 + gl.arange(0, 16 * W * R, gl.SliceLayout(1, L))
        m = token + gl.arange(0, N, gl.SliceLayout(0, L))
        at = m[None, :].to(gl.int64) * stride_y + row[:, None]
        gl.store(out_ptr + at, y, mask=(m < M)[None, :] & (row < n)[:, None])
    else:
        at = (gl.program_id(1) * n_rows + row)[:, None].to(gl.int64) * width + token
        at += gl.arange(0, N, gl.SliceLayout(0, ACC))[None, :]
        gl.store(out_ptr + at, y, mask=(row < n_rows)[:, None])


@cache
def x_layout() -> gl.NVMMASharedLayout:
    """Of a stage of activations: lines of 64 columns, swizzled."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
