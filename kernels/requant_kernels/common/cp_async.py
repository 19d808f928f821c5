"""Words and scales of a grid on their way to `byte_grid.py` and `half_grid.py`: a ring in shared memory, in Gluon.

A place of the ring has, for every warp, a block of 256 columns of its R tiles: the words, 512 bytes of a word of all lanes,
then the scales and, where there are any, the zero points, 4 bytes a lane and group. Every lane copies by `cp.async` the 16
bytes that it will read itself, so no warp waits for another: `cp.async.wait_group` is all. 32 consecutive lanes read 512
consecutive bytes, without bank conflicts.

`cp.async` takes no L2 policy here: with one, ptxas of CUDA 12.8 and 13.1 may name a register that nothing has set, which the
GPU refuses as an illegal instruction.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.packing import GridLayout

PAGE = gl.constexpr(1024)  # bytes that shared memory is asked for by


def scales_of(layout: GridLayout) -> int:
    """Of a row and block, beside its words."""
    return 0 if layout.kernel_group == 0 else 2 if layout.kernel_group == 128 else 1


def pages(size: int) -> int:
    return -(-size // PAGE.value)


@cache
def request_asm(bits: int, scales: int, tiles: int, *, zeros: bool = False) -> str:
    """Begin to copy a block; a group of its own. Operands: where words and scales go, whether there are any, from where:
    words of every tile, scales of every tile, zero points of every tile."""
    lines = ["setp.ne.s32 p, $3, 0;"]
    for t in range(tiles):
        for i in range(bits):
            lines.append(
                f"@p cp.async.cg.shared.global [$1 + {512 * (bits * t + i)}], [${4 + t} + {512 * i}], 16;"
            )
    for t in range(tiles * (1 + zeros)):
        for i in range(scales):
            lines.append(
                f"@p cp.async.ca.shared.global [$2 + {128 * (scales * t + i)}], [${4 + tiles + t} + {32 * i}], 4;"
            )
    return "{ .reg .pred p;\n" + "\n".join([*lines, "cp.async.commit_group;"]) + " mov.b32 $0, 0; }"


@cache
def request_constraints(tiles: int, *, zeros: bool = False) -> str:
    return ",".join(["=r"] + ["r"] * 3 + ["l"] * ((2 + zeros) * tiles))


@gluon.jit
def sources_of(w_ptr, s_ptr, z_ptr, first, last_tile, lane, blocks, BITS: gl.constexpr, SCALES: gl.constexpr,
               A_GROUP: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """Where a lane's words of block 0 of tiles `first` on are, and its scales, with the zero points behind them."""
    words, scales, zeros = (), (), ()
    for r in gl.static_range(R):
        tile = gl.minimum(first + r, last_tile).to(gl.int64)
        words = words + (w_ptr + tile * blocks * (BITS * 128) + lane * 4,)
        groups = gl.cdiv(blocks, A_GROUP) * SCALES
        scales = scales + (s_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + tile * groups * 8 + lane // 4,)
        if z_ptr is not None:
            zeros = zeros + (
                z_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + tile * groups * 8 + lane // 4,
            )
    return words, scales + zeros


@gluon.jit
def request_block(words, scales, to_words, to_scales, block, blocks, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
             BITS: gl.constexpr, SCALES: gl.constexpr, A_GROUP: gl.constexpr):  # fmt: skip
    """Begin to copy block `block` `[warp, 1]` of every tile to a place of the ring."""
    inside = (block < blocks).to(gl.int32)
    sources = ()
    for r in gl.static_range(len(words)):
        sources = sources + ((words[r] + block * (BITS * 128)).to(gl.int64),)
    for r in gl.static_range(len(scales)):
        sources = sources + ((scales[r] + block // A_GROUP * (8 * SCALES)).to(gl.int64),)
    gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, (to_words, to_scales, inside) + sources, dtype=gl.int32, is_pure=False, pack=1
    )
