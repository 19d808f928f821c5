"""Residuals of `gemv_int8_mma.py`: sliced ELL through the pipeline stages after the last weight tile.

A slice is 16 rows x 8 slots (`common/sparse.py`), rows sorted by their number of residuals. Half a warp copies a slice: each
lane copies the eight slots of its row and gathers their activations from shared memory. Of the 2 W half-warps of a CTA of R
tiles, number h takes slices h // R, h // R + S, .. of tile h % R, with S = 2 W // R. A stage holds `slices_per_stage` slices
per half-warp, 1 KB per warp each. So residuals need no shared memory of their own, are in flight while the last weights
are multiplied, and no CTA waits for slice bounds when it starts.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none, reportAssignmentType=none

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.inline_ptx import compute_f32, compute_tuple, issue, issue_scalar, load_f32
from requant_kernels.common.packing import GridLayout
from requant_kernels.common.ptx import SYNCWARP, Ptx, inline_ptx
from requant_kernels.scalar.gemv_int8_mma_launch import Int8MmaConfig

SLICE_BYTES = 1024  # per warp: the columns of two half-warps' slices, then the values
MAX_SLICES_PER_STAGE = 8  # each is unrolled
NO_SLICE = gl.constexpr(1 << 24)  # slice index of a half-warp without one: beyond every end
EIGHT = gl.constexpr((gl.int32,) * 8)
COMMIT = gl.constexpr("cp.async.commit_group; mov.b32 $0, 0;")
WAIT_ALL = gl.constexpr("cp.async.wait_all; mov.b32 $0, 0;")
SYNC_WARP = gl.constexpr(f"{SYNCWARP} mov.b32 $0, 0;")
# reload 16 bytes of activations, over bytes that all lanes of the warp have multiplied
RELOAD_X = gl.constexpr(inline_ptx(
    f"setp.ne.s32 p, $exists, 0; {SYNCWARP}\n@p cp.async.ca.shared.global [$to], [$from], 16;",
    inputs={"to": "r", "from": "l", "exists": "r"}, registers={"pred": "p"},
))  # fmt: skip
# a lane's eight slots: 16 bytes of columns and, 512 bytes further, of values; zeros unless slice `index` is below `end`
LOAD_SLOTS = gl.constexpr(inline_ptx(
    "setp.lt.s32 p, $index, $end; " + " ".join(f"mov.b32 ${name}{i}, 0;" for name in ("columns", "values") for i in range(4))
    + "\n@p ld.shared.v4.b32 {$columns0, $columns1, $columns2, $columns3}, [$address];"
    + "\n@p ld.shared.v4.b32 {$values0, $values1, $values2, $values3}, [$address + 512];",
    outputs={f"{name}{i}": "=&r" for name in ("columns", "values") for i in range(4)},
    inputs={"address": "r", "index": "r", "end": "r"}, registers={"pred": "p"},
))  # fmt: skip
# start copying a lane's part of a slice. Comparing here, not earlier, keeps the kernel from waiting for the bounds
COPY_SLOTS = gl.constexpr(inline_ptx(
    """add.s32 index, $begin, $offset; setp.lt.s32 p, index, $end;
mad.wide.s32 column, index, 256, $columns; mad.wide.s32 value, index, 256, $values;
@p cp.async.cg.shared.global [$to], [column], 16;
@p cp.async.cg.shared.global [$to + 512], [value], 16;""",
    inputs={"to": "r", "begin": "r", "end": "r", "offset": "r", "columns": "l", "values": "l"},
    registers={"pred": "p", "b32": "index", "b64": "column, value"},
))  # fmt: skip
PREFETCH_L2 = gl.constexpr(inline_ptx("prefetch.global.L2 [$address];", inputs={"address": "l"}))


@cache
def sparse_fma_ptx(dtype: str) -> Ptx:
    """sum += eight residuals times their activations, gathered from shared memory at `x`."""
    columns, values = ([f"{name}{i}" for i in range(4)] for name in ("columns", "values"))
    lines = []
    for i in range(4):
        # two columns -> two activations; two values to float32
        lines += [
            f"and.b32 lo, $columns{i}, 0xFFFF;", f"shr.u32 hi, $columns{i}, 16;", "mad.lo.u32 lo, lo, 2, $x;",
            "mad.lo.u32 hi, hi, 2, $x;", "ld.shared.b16 x_lo, [lo];", "ld.shared.b16 x_hi, [hi];",
            f"mov.b32 {{v_lo, v_hi}}, $values{i};", "cvt.f32.f16 v0, v_lo;", "cvt.f32.f16 v1, v_hi;",
        ]  # fmt: skip
        for wide, narrow in (("x0", "x_lo"), ("x1", "x_hi")):
            if dtype == "fp16":
                lines.append(f"cvt.f32.f16 {wide}, {narrow};")
            else:
                lines += [f"cvt.u32.u16 lo, {narrow};", "shl.b32 lo, lo, 16;", f"mov.b32 {wide}, lo;"]
        lines += ["fma.rn.f32 $sum, x0, v0, $sum;", "fma.rn.f32 $sum, x1, v1, $sum;"]
    return inline_ptx(
        lines, outputs={"sum": "=&f"}, inputs={"sum_in": "0"} | dict.fromkeys((*columns, *values, "x"), "r"),
        registers={"b32": "lo, hi", "b16": "x_lo, x_hi, v_lo, v_hi", "f32": "x0, x1, v0, v1"},
    )  # fmt: skip


def slices_per_stage(layout: GridLayout, config: Int8MmaConfig, warp_bytes: int) -> int:
    """Slices per half-warp that go into the `warp_bytes` of a stage: the fewest steps that most tiles need, evenly
    filled."""
    assert layout.sparse is not None
    # for most tiles: 9/8 of the mean
    slices = -(-9 * layout.sparse.columns.shape[0] // (8 * layout.packed_codes.shape[0]))
    needed = max(1, -(-slices // (2 * config.num_warps // config.tiles_per_cta)))
    steps = -(-needed // min(MAX_SLICES_PER_STAGE, warp_bytes // SLICE_BYTES))
    return -(-needed // steps)


# Device functions.


@gluon.jit
def prefetch_slice_bounds(slice_ptr, lane, last_tile, R: gl.constexpr):
    """Prefetch them to L2: `slice_bounds` loads them after quantization, which leaves no registers to hold them."""
    near = gl.minimum(gl.program_id(0) * R + lane, last_tile + 1)
    issue(PREFETCH_L2, [(slice_ptr + near).to(gl.int64)])


@gluon.jit
def slice_bounds(slice_ptr, warp, lane, last_tile, R: gl.constexpr):
    """Begin and end of the slices of each lane's tile, and of the CTA's first tile, which has the most."""
    first_tile = gl.program_id(0) * R
    tile = gl.minimum(first_tile + (warp * 2 + lane // 16) % R, last_tile)
    return (
        gl.load(slice_ptr + tile),
        gl.load(slice_ptr + tile + 1),
        gl.load(slice_ptr + first_tile),
        gl.load(slice_ptr + first_tile + 1),
    )


@gluon.jit
def first_slice(warp, lane, W: gl.constexpr, R: gl.constexpr):
    """The first slice of its tile that each lane's half-warp takes."""
    half = warp * 2 + lane // 16
    return gl.where(half < 2 * W // R * R, half // R, NO_SLICE)


@gluon.jit
def copy_slices(ell_columns_ptr, ell_values_ptr, bounds, first, stage, lane, step, CONFIG: gl.constexpr):
    """Start copying the slices of `step` to the shared address `stage`, as one cp.async group."""
    SLICES: gl.constexpr = CONFIG.slices_per_stage
    STRIDE: gl.constexpr = 2 * CONFIG.num_warps // CONFIG.stage.tiles
    columns = (ell_columns_ptr + lane % 16 * 8).to(gl.int64)
    values = (ell_values_ptr + lane % 16 * 8).to(gl.int64)
    for i in gl.static_range(SLICES):
        offset = first + (step * SLICES + i) * STRIDE
        issue(COPY_SLOTS, [stage + i * 1024 + lane * 16, bounds[0], bounds[1], offset, columns, values])
    issue_scalar(COMMIT)


@gluon.jit
def multiply(ell_columns_ptr, ell_values_ptr, bounds, first, own, stage, x_copy, lane, L: gl.constexpr,
             CONFIG: gl.constexpr):  # fmt: skip
    """Each lane's sum of residuals times activations `[W, 32]`; slices continue through the pipeline stages."""
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = CONFIG.stage.tiles
    SLICES: gl.constexpr = CONFIG.slices_per_stage
    STAGE_BYTES: gl.constexpr = W * CONFIG.stage.bytes
    SPARSE_FMA: gl.constexpr = CONFIG.sparse_fma
    WAIT: gl.constexpr = CONFIG.wait
    sums = gl.zeros([W, 32], gl.float32, layout=L)
    if CONFIG.x_reloaded:
        issue_scalar(WAIT_ALL)
        gl.thread_barrier()
    for i in range(gl.cdiv(bounds[3] - bounds[2], SLICES * (2 * W // R))):
        copy_slices(ell_columns_ptr, ell_values_ptr, bounds, first, own + stage, lane, i + (CONFIG.num_stages - 1),
                     CONFIG)  # fmt: skip
        stage += STAGE_BYTES
        stage = gl.where(stage == CONFIG.num_stages * STAGE_BYTES, 0, stage)
        issue_scalar(WAIT)
        for j in gl.static_range(SLICES):
            index = bounds[0] + first + (i * SLICES + j) * (2 * W // R)
            slots = compute_tuple(LOAD_SLOTS, (own + stage + j * 1024 + lane * 16, index, bounds[1]), EIGHT)
            sums = compute_f32(SPARSE_FMA, (sums,) + slots + (x_copy,))
    # no lane overwrites a stage that another lane of the warp still reads
    issue_scalar(SYNC_WARP)
    return sums


@gluon.jit
def load_reduce(y, base, r, row, CONFIG: gl.constexpr):
    """y += the sums of tile `r`'s half-warps for `row`."""
    R: gl.constexpr = CONFIG.stage.tiles
    for s in gl.static_range(2 * CONFIG.num_warps // R):
        half = s * R + r
        y += load_f32(base + half // 2 * CONFIG.stage.bytes + half % 2 * 64 + row * 4)
    return y
