"""Residuals of one token in `byte_grid.py`: turns of the ring behind the last words.

Half a warp takes a chunk (`layouts.py`), a lane its row's eight slots. Of a program's 2 W halves, half u has chunks u // R,
u // R + S, .. of tile u % R, where S = 2 W // R. A *pass* is one chunk of every half, 1 KB of a warp, and a place of the
ring holds `PASSES` of them. So slots take no room of their own, are on their way while the last words are multiplied,
however many there are, and nothing waits for their bounds when a program begins. Rows are sorted by their number of
residuals: the first tile of a program has the most chunks. Activations are gathered in shared memory, as they came.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.packing import Layout
from requant_kernels.launch_config import DecodeConfig

PASS_BYTES = 1024  # of a warp: columns of its lanes, then values
MOST_PASSES = 8  # of a place: each has code of its own
NEVER = gl.constexpr(1 << 24)  # which of a tile's chunks a half has that has none
_PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
# $1: where 16 bytes of columns go, and 512 bytes further of values; $2 and $3: where the tile's chunks begin and end; $4:
# which of them; $5 and $6: where this lane's part of chunk 0 is. All of it here: computed sooner, bounds would be waited for
_REQUEST = gl.constexpr("""{ .reg .pred p; .reg .b32 c; .reg .b64 i, v; add.s32 c, $2, $4; setp.lt.s32 p, c, $3;
mad.wide.s32 i, c, 256, $5; mad.wide.s32 v, c, 256, $6;
@p cp.async.cg.shared.global [$1], [i], 16;
@p cp.async.cg.shared.global [$1 + 512], [v], 16;
mov.b32 $0, 0; }""")
_COMMIT = gl.constexpr("cp.async.commit_group; mov.b32 $0, 0;")
_JOIN = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")
_GIVE = gl.constexpr("st.shared.f32 [$1], $2; mov.b32 $0, 0;")
_FETCH = gl.constexpr("ld.shared.f32 $0, [$1];")


# eight registers: 16 bytes of columns at $8 and, 512 bytes further, of values, where $9 is the place of a chunk before $10
_TAKE = gl.constexpr(f"""{{ .reg .pred p; setp.lt.s32 p, $9, $10; {" ".join(f"mov.b32 ${i}, 0;" for i in range(8))}
@p ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$8];
@p ld.shared.v4.b32 {{$4, $5, $6, $7}}, [$8 + 512]; }}""")
_TAKE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 3))
_EIGHT, _PRODUCT_CONSTRAINTS = gl.constexpr((gl.int32,) * 8), gl.constexpr(",".join(["=&f", "0"] + ["r"] * 9))


@cache
def products_asm(dtype: str) -> str:
    """$0 = $1 + eight residuals, columns $2 to $5 and values $6 to $9, times activations at shared address $10."""
    lines = []
    for i in range(4):
        lines += [
            f"and.b32 l, ${2 + i}, 0xFFFF;", f"shr.u32 h, ${2 + i}, 16;", "mad.lo.u32 l, l, 2, $10;",
            "mad.lo.u32 h, h, 2, $10;", "ld.shared.b16 a, [l];", "ld.shared.b16 b, [h];", f"mov.b32 {{d, e}}, ${6 + i};",
            "cvt.f32.f16 u, d;", "cvt.f32.f16 w, e;",
        ]  # fmt: skip
        for wide, narrow in (("x", "a"), ("y", "b")):
            if dtype == "fp16":
                lines.append(f"cvt.f32.f16 {wide}, {narrow};")
            else:
                lines += [f"cvt.u32.u16 l, {narrow};", "shl.b32 l, l, 16;", f"mov.b32 {wide}, l;"]
        lines += ["fma.rn.f32 $0, x, u, $0;", "fma.rn.f32 $0, y, w, $0;"]
    head = "{ .reg .b32 l, h; .reg .b16 a, b, d, e; .reg .f32 x, y, u, w;\n"
    return head + "\n".join(lines) + " }"


@gluon.jit
def prefetch_bounds(sp_ptr, lane, last_tile, R: gl.constexpr):
    """`bounds_of` will find them in L2: registers that wait for memory while activations are turned would be too many."""
    near = gl.minimum(gl.program_id(0) * R + lane, last_tile + 1)
    gl.inline_asm_elementwise(
        _PREFETCH, "=r,l", [(sp_ptr + near).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bounds_of(sp_ptr, warp, lane, last_tile, R: gl.constexpr):
    """Where the chunks of every lane's tile begin and end, and those of the tile that has the most."""
    most = gl.program_id(0) * R
    tile = gl.minimum(most + (warp * 2 + lane // 16) % R, last_tile)
    return (
        gl.load(sp_ptr + tile),
        gl.load(sp_ptr + tile + 1),
        gl.load(sp_ptr + most),
        gl.load(sp_ptr + most + 1),
    )


@gluon.jit
def first_of(warp, lane, W: gl.constexpr, R: gl.constexpr):
    """Which of its tile's chunks every lane's half has first."""
    half = warp * 2 + lane // 16
    return gl.where(half < 2 * W // R * R, half // R, NEVER)


@gluon.jit
def request_slots(
    si_ptr, sv_ptr, bounds, first, place, lane, turn, PASSES: gl.constexpr, W: gl.constexpr, R: gl.constexpr
):
    """Begin to copy the slots of a turn to shared address `place`; a group of its own."""
    columns, values = (si_ptr + lane % 16 * 8).to(gl.int64), (sv_ptr + lane % 16 * 8).to(gl.int64)
    for i in gl.static_range(PASSES):
        gl.inline_asm_elementwise(
            _REQUEST, "=r,r,r,r,r,l,l",
            [place + i * 1024 + lane * 16, bounds[0], bounds[1], first + (turn * PASSES + i) * (2 * W // R), columns,
             values],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    gl.inline_asm_elementwise(_COMMIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_slots(
    sums, bounds, first, place, activations, lane, turn, PRODUCTS: gl.constexpr, PASSES: gl.constexpr, W: gl.constexpr,
    R: gl.constexpr,
):  # fmt: skip
    """`sums` `[W, 32]` += every lane's residuals of a turn, which have come, times their activations."""
    for i in gl.static_range(PASSES):
        chunk = bounds[0] + first + (turn * PASSES + i) * (2 * W // R)
        eight = gl.inline_asm_elementwise(
            _TAKE,
            _TAKE_CONSTRAINTS,
            (place + i * 1024 + lane * 16, chunk, bounds[1]),
            dtype=_EIGHT,
            is_pure=False,
            pack=1,
        )
        sums = gl.inline_asm_elementwise(
            PRODUCTS,
            _PRODUCT_CONSTRAINTS,
            (sums,) + eight + (activations,),
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
    return sums


@gluon.jit
def join_lanes():
    """No lane goes on before all of its warp have read what others may write over."""
    gl.inline_asm_elementwise(_JOIN, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def give_sums(sums, place, lane):
    """Leave every lane's sum at shared address `place`."""
    gl.inline_asm_elementwise(
        _GIVE, "=r,r,f", [place + lane * 4, sums], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fetch_sums(y, base, r, row, APART: gl.constexpr, W: gl.constexpr, R: gl.constexpr):
    """y += the sums of a row of tile r, whose places are APART bytes from warp to warp."""
    for s in gl.static_range(2 * W // R):
        half = s * R + r
        y += gl.inline_asm_elementwise(
            _FETCH,
            "=f,r",
            [base + half // 2 * APART + half % 2 * 64 + row * 4],
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
    return y


def passes_of(layout: Layout, config: DecodeConfig, own: int) -> int:
    """Passes of a turn, whose slots come to the `own` bytes of a warp in a place of the ring: as few turns as most tiles
    need, and alike; 0 where there are no residuals."""
    if layout.sparse is None:
        return 0
    chunks = -(-9 * layout.sparse.columns.shape[0] // (8 * layout.packed_codes.shape[0]))  # of most tiles
    needed = max(1, -(-chunks // (2 * config.warps // config.tiles)))
    turns = -(-needed // min(MOST_PASSES, own // PASS_BYTES))
    return -(-needed // turns)
