"""The trellis kernel of Hopper for more tokens than the byte sums take: weights are decoded while the one before multiplies.

    y = V x_rot        V float16, exactly; x_rot float16, as `hadamard.py` rotates and arranges it

A piece is a group of 16 rows x 64 columns a tile (`rings.py`), of which a lane `4 g + t` decodes rows 2 g and 2 g + 1 of 16
columns: 16 registers of pairs (`values_asm`). wgmma wants from it rows g and g + 8, and two pairs of columns a row and step
of 16 columns. Which row and which column that is, is ours to choose, so the registers are its operand as they lie:

    of the product             of the group
    row h g                    row 2 g + h                      undone where sums are stored
    column s i t e             column 16 t + 4 s + 2 i + e      the order in which activations are written

Nothing is moved between lanes but the 32 bits before a part, and no weight sees shared memory. Activations come through it,
STAGES times C columns, copied by the tensor memory accelerator; as in `wgmma.py` wgmma runs on while the next piece is
decoded. Rows 2 g and 2 g + 1 of a token lie in one lane when the sums are stored. Sums of several programs that share the
columns of a row are added by the rotation that follows.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

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

from requant_kernels.scalar.gemm_sm90_kernel import rows_layout

SIXTEEN = gl.constexpr((gl.int32,) * 16)


@gluon.constexpr_function
def sums_layout(N, W, R):
    """`[16 W R, N]`, rows as the tiles have them: the accumulator, two neighbouring rows of a token first."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            [1, 0], [0, 1], *[[0, 1 << i] for i in range(3, N.bit_length() - 1)],
            *[[16 * W << i, 0] for i in range(R.bit_length() - 1)],
        ],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16 << i, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[16 * W * R, N],
    )  # fmt: skip


@gluon.jit
def _load_words(address, block, units, LOADS: gl.constexpr, CONSTRAINTS: gl.constexpr, COUNT: gl.constexpr,
                UNITS: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """The words of the UNITS units of a block, from the addresses of a lane's first ones; beyond the end those of the last.

    LOADS: one text a unit where units end with a block (EVEN), else one for all.
    """
    types: gl.constexpr = (gl.int32,) * COUNT
    found = ()
    for u in gl.static_range(UNITS):
        unit = gl.minimum(block * UNITS, units - UNITS) if EVEN else gl.minimum(block * UNITS + u, units - 1)
        at = address + unit.to(gl.int64) * (128 * COUNT)
        found = found + gl.inline_asm_elementwise(
            LOADS[u if EVEN else 0], CONSTRAINTS, (at,), dtype=types, is_pure=False, pack=1
        )
    return found


@gluon.jit
def _halves(pair):
    """int32 -> the two float16 that it holds, in a new last dimension."""
    low, high = pair.to(gl.int16), (pair >> 16).to(gl.int16)
    return gl.join(low.to(gl.float16, bitcast=True), high.to(gl.float16, bitcast=True))


@gluon.jit
def _decode(words, before, VALUES: gl.constexpr, CONSTRAINTS: gl.constexpr, Q: gl.constexpr, COUNT: gl.constexpr,
            J: gl.constexpr, A: gl.constexpr, W: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """Piece Q of every tile -> weights `[16 W R, 64]` in the layout of the left operand."""
    unit: gl.constexpr = Q // J * COUNT
    p = gl.inline_asm_elementwise(
        VALUES[Q % J],
        CONSTRAINTS,
        words[unit : unit + COUNT] + (before,),
        dtype=SIXTEEN,
        is_pure=False,
        pack=1,
    )
    rows = ()
    for h in gl.static_range(2):
        steps = ()
        for s in gl.static_range(4):
            steps = steps + (gl.join(_halves(p[8 * h + 2 * s]), _halves(p[8 * h + 2 * s + 1])),)  # e i
        rows = rows + (gl.join(gl.join(steps[0], steps[1]), gl.join(steps[2], steps[3])),)  # e i s0 s1
    weight = gl.reshape(gl.join(rows[0], rows[1]), [R, W, 8, 4, 2, 2, 2, 2, 2])  # r w g t e i s0 s1 h
    weight = gl.permute(weight, (0, 1, 8, 2, 7, 6, 5, 3, 4))  # r w h g s1 s0 i t e
    return gl.convert_layout(gl.reshape(weight, [16 * W * R, 64]), A, assert_trivial=True)


@gluon.jit
def _fetch(x_desc, token, column, barrier, stage, wanted, N: gl.constexpr, C: gl.constexpr):
    """Request C columns of activations; zeros beyond the matrix."""
    mbarrier.expect(barrier, N * C * 2, pred=wanted)
    tma.async_copy_global_to_shared(x_desc, [token, column], barrier, stage, pred=wanted)


@gluon.jit(do_not_specialize=["blocks", "last_tile", "steps", "M", "units"])
def trellis_multiply_kernel(
    x_desc, words_ptr, out_ptr, units, blocks, last_tile, steps, rows, M,
    VALUES: gl.constexpr, VALUES_CONSTRAINTS: gl.constexpr, LOADS: gl.constexpr, LOAD_CONSTRAINTS: gl.constexpr,
    COUNT: gl.constexpr, V: gl.constexpr, J: gl.constexpr, EVEN: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
    R: gl.constexpr, AHEAD: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out float32 `[splits, M, rows]`; grid: (row tiles / (W R), splits of `steps` blocks of 256 columns, tokens / N).

    A block is 4 / J units. The words of the next one are requested while piece AHEAD of a block is decoded.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, N, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    L: gl.constexpr = rows_layout(W, R)
    PER: gl.constexpr = C // 64  # pieces of a stage
    UNITS: gl.constexpr = 4 // J
    first_tile = gl.program_id(0) * (W * R)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    r3 = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    w3 = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    lane = lane + (r3 + w3) * 0
    tiles = gl.minimum(first_tile + r3 * W + w3 + lane * 0, last_tile).to(gl.int64)
    before = (lane + 28) % 32
    first = gl.program_id(1) * steps
    count = gl.minimum(steps, blocks - first)
    token = gl.program_id(2) * N

    staged = gl.allocate_shared_memory(gl.float16, [STAGES, N, C], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    address = words_ptr.to(gl.int64) + (tiles * units * (32 * COUNT) + lane * V) * 4
    words = _load_words(address, first, units, LOADS, LOAD_CONSTRAINTS, COUNT, UNITS, EVEN)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    stages = count * (4 // PER)
    for i in gl.static_range(STAGES):
        _fetch(x_desc, token, first * 256 + i * C, full.index(i), staged.index(i), stages > i, N, C)

    acc = warpgroup_mma_init(gl.zeros([16 * W * R, N], gl.float32, layout=ACC))
    stage = 0
    for step in range(count):
        now = words
        for q in gl.static_range(4):
            if q == AHEAD:
                words = _load_words(
                    address, first + step + 1, units, LOADS, LOAD_CONSTRAINTS, COUNT, UNITS, EVEN
                )
            weight = _decode(now, before, VALUES, VALUES_CONSTRAINTS, q, COUNT, J, A, W, R)
            slot = stage % STAGES
            if q % PER == 0:
                mbarrier.wait(full.index(slot), stage // STAGES % 2)
            x = staged.index(slot).slice(64 * (q % PER), 64, dim=1).permute((1, 0))
            acc = warpgroup_mma(weight, x, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
            if q % PER == 0:  # every warp has multiplied the stage before this one: its place is free
                gl.thread_barrier()
                last = stage + STAGES - 1
                free = last % STAGES
                wanted = (stage > 0) & (last < stages)
                _fetch(
                    x_desc, token, first * 256 + last * C, full.index(free), staged.index(free), wanted, N, C
                )
            if q % PER == PER - 1:
                stage += 1
    y = warpgroup_mma_wait(0, deps=[acc])
    S: gl.constexpr = sums_layout(N, W, R)
    y = gl.reshape(gl.permute(gl.reshape(y, [W * R, 2, 8, N]), (0, 2, 1, 3)), [16 * W * R, N])  # tile g h
    y = gl.convert_layout(y, S, assert_trivial=True)
    row = first_tile * 16 + gl.arange(0, 16 * W * R, gl.SliceLayout(1, S))
    m = token + gl.arange(0, N, gl.SliceLayout(0, S))
    at = (gl.program_id(1) * M + m)[None, :].to(gl.int64) * rows + row[:, None]
    gl.store(out_ptr + at, y, mask=(m < M)[None, :] & (row < rows)[:, None])
