"""Residuals of one token in `byte_grid.py`: eight of a row a lane and pass, on their way while blocks are multiplied.

As in `passes.py`, by lane: half a warp takes a chunk (`layouts.py`), a lane its row's eight slots. Of a program's 2 W
halves, half u has chunks u // R, u // R + S, .. of tile u % R, where S = 2 W // R. The first `PASSES` of them are copied
before the first block and multiplied after the last one; a tile with more reads the rest, four at a time. Activations are
gathered in shared memory, where the turn to fixed point leaves them as they came.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.layouts import Layout
from requant_kernels.rooms import MULTIPROCESSOR
from requant_kernels.settings import DecodeConfig

PASS_BYTES = 1024  # of a warp: columns of its lanes, then values
MOST_PASSES = 4
_TOGETHER = gl.constexpr(4)  # chunks whose slots are requested at once, of those that no pass takes
# $1: where 16 bytes of columns go, and 512 bytes further of values; $2: whether there are any; from $3 and $4
_REQUEST = gl.constexpr("""{ .reg .pred p; setp.ne.s32 p, $2, 0;
@p cp.async.cg.shared.global [$1], [$3], 16;
@p cp.async.cg.shared.global [$1 + 512], [$4], 16;
mov.b32 $0, 0; }""")
_ARRIVED = gl.constexpr("cp.async.wait_group 0; mov.b32 $0, 0;")
_GIVE = gl.constexpr("st.shared.f32 [$1], $2; mov.b32 $0, 0;")
_FETCH = gl.constexpr("ld.shared.f32 $0, [$1];")


def _load(space: str, pointer: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Eight registers: 16 bytes of columns at $8, of values at $9, where $10 says that there are any; else zeros."""
    columns, values = (", ".join(f"${4 * half + i}" for i in range(4)) for half in range(2))
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(8))
    text = f"{{ .reg .pred p; setp.ne.s32 p, $10, 0; {zeros}\n"
    text += f"@p ld.{space}.v4.b32 {{{columns}}}, [$8];\n@p ld.{space}.v4.b32 {{{values}}}, [$9]; }}"
    return gl.constexpr(text), gl.constexpr(",".join(["=&r"] * 8 + [pointer, pointer, "r"]))


_ARRIVE, _ARRIVE_CONSTRAINTS = _load("shared", "r")
_READ, _READ_CONSTRAINTS = _load("global", "l")
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
def slots_of(sp_ptr, warp, lane, last_tile, W: gl.constexpr, R: gl.constexpr):
    """Of every lane's half: its first chunk, and the end of its tile's."""
    S: gl.constexpr = 2 * W // R
    half = warp * 2 + lane // 16
    tile = gl.minimum(gl.program_id(0) * R + half % R, last_tile)
    end = gl.load(sp_ptr + tile + 1)
    return gl.load(sp_ptr + tile) + half // R, gl.where(half < S * R, end, 0)


@gluon.jit
def request_slots(
    si_ptr, sv_ptr, chunk, end, place, lane, PASSES: gl.constexpr, W: gl.constexpr, R: gl.constexpr
):
    """Begin to copy what the passes take, to shared address `place` and W KB further for every pass."""
    S: gl.constexpr = 2 * W // R
    at = chunk.to(gl.int64) * 128 + lane % 16 * 8
    for i in gl.static_range(PASSES):
        inside = (chunk + i * S < end).to(gl.int32)
        columns, values = (
            (si_ptr + at + i * (128 * S)).to(gl.int64),
            (sv_ptr + at + i * (128 * S)).to(gl.int64),
        )
        gl.inline_asm_elementwise(
            _REQUEST, "=r,r,r,l,l", [place + i * (1024 * W), inside, columns, values], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit
def take_slots(
    sp_ptr, si_ptr, sv_ptr, chunk, end, place, activations, lane, last_tile, sums, PRODUCTS: gl.constexpr,
    PASSES: gl.constexpr, W: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """`sums` `[W, 32]` += every lane's residuals times their activations."""
    S: gl.constexpr = 2 * W // R
    gl.inline_asm_elementwise(_ARRIVED, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for i in gl.static_range(PASSES):
        inside, mine = (chunk + i * S < end).to(gl.int32), place + i * (1024 * W)
        eight = gl.inline_asm_elementwise(
            _ARRIVE, _ARRIVE_CONSTRAINTS, (mine, mine + 512, inside), dtype=_EIGHT, is_pure=False, pack=1
        )
        sums = gl.inline_asm_elementwise(
            PRODUCTS,
            _PRODUCT_CONSTRAINTS,
            (sums,) + eight + (activations,),
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
    most = 0
    for r in gl.static_range(R):
        tile = gl.minimum(gl.program_id(0) * R + r, last_tile)
        most = gl.maximum(most, gl.load(sp_ptr + tile + 1) - gl.load(sp_ptr + tile))
    at = chunk.to(gl.int64) * 128 + lane % 16 * 8
    for i in range(PASSES, gl.cdiv(most, S), _TOGETHER):
        read = ()
        for j in gl.static_range(_TOGETHER):
            inside, there = (chunk + (i + j) * S < end).to(gl.int32), at + (i + j) * (128 * S)
            read = read + gl.inline_asm_elementwise(
                _READ, _READ_CONSTRAINTS, ((si_ptr + there).to(gl.int64), (sv_ptr + there).to(gl.int64), inside),
                dtype=_EIGHT, is_pure=False, pack=1,
            )  # fmt: skip
        for j in gl.static_range(_TOGETHER):
            sums = gl.inline_asm_elementwise(
                PRODUCTS, _PRODUCT_CONSTRAINTS, (sums,) + read[8 * j : 8 * j + 8] + (activations,), dtype=gl.float32,
                is_pure=False, pack=1,
            )  # fmt: skip
    return sums


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


def passes_of(layout: Layout, config: DecodeConfig, taken: int, processors: int) -> int:
    """Passes that most tiles need, if the programs of a multiprocessor have room for them beside the `taken` bytes of each;
    0 where there are no residuals."""
    if layout.sparse is None:
        return 0
    tiles = layout.words.shape[0]
    chunks = -(-9 * layout.sparse.columns.shape[0] // (8 * tiles))  # of most tiles
    needed = min(MOST_PASSES, -(-chunks // (2 * config.warps // config.tiles)))
    share = MULTIPROCESSOR // -(-tiles // (config.tiles * processors)) - 1024
    return min(needed, (share - taken) // (PASS_BYTES * config.warps)) if taken <= share else needed
