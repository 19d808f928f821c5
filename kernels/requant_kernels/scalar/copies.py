"""Words on their way through shared memory, where no register holds them: LDGSTS (`cp.async`), each lane for itself.

A lane copies the 16 bytes that it will read, and reads nothing that another lane has copied, so no warp waits for another:
`cp.async.wait_group` is all. 32 consecutive lanes read 512 consecutive bytes, which no two banks share.

    request(block + depth - 1)    commit    wait(depth - 1)    read(block)    multiply
    place of a block: its number modulo `depth`; the one that is written was read, and multiplied, a turn before

`cp.async` takes no policy of L2 here: with one, ptxas of CUDA 12.8 and 13.1 may name a register that nothing has set, which
the GPU refuses as an illegal instruction.

Where one token is multiplied, only the lanes of its column need activations: `take` gives the others nothing. From shared
memory (`stage`) or a block ahead that is faster by 2 %, otherwise it is not.

Every text is for the four registers that a lane has of `[lane, warp, tile, 4]` (`pack=4`); of addresses, which are those
of the first of the four, it takes the first. `anchor` gives tensors of that shape the layout in which a lane has 16 bytes:
Triton gives it to loads alone, so there is one, of which no lane ever loads anything.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none

from functools import cache

import triton
import triton.language as tl

FREE = 47 << 10  # bytes of a program that it need not ask for, with Triton's own for the sum over the warps

_REQUEST = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $12, 0;\n@p cp.async.cg.shared.global [$4], [$8], 16;\n"
    "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
)
_REQUEST_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 4 + ["l"] * 4 + ["r"] * 4))
_COMMIT = tl.constexpr("cp.async.commit_group; mov.b32 $0, 0;")
_WAITS = tl.constexpr(tuple(f"cp.async.wait_group {i}; mov.b32 $0, 0;" for i in range(32)))
_READ = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_READ_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 4))


def _take(space: str) -> tl.constexpr:
    """Eight loads of 16 bytes, 64 bytes apart, or none."""
    loads = [
        f"ld.{space}.v4.b32 {{${4 * i}, ${4 * i + 1}, ${4 * i + 2}, ${4 * i + 3}}}, [$32 + {64 * i}];"
        for i in range(8)
    ]
    return tl.constexpr(
        "{ .reg .pred p; setp.eq.s32 p, $36, 0; @p bra NONE;\n" + "\n".join(loads) + "\nNONE: }"
    )


_TAKE, _TAKE_STAGED = _take("global"), _take("shared")
_TAKE_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 32 + ["l"] * 4 + ["r"] * 4))
_TAKE_STAGED_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 32 + ["r"] * 8))


@cache
def stage_asm(warps: int) -> str:
    """Four times 16 bytes a thread of `warps` from global memory $2 to shared $1, as long as $3 bytes are left."""
    step, places = 512 * warps, range(4)
    lines = [f"setp.gt.s32 p{i}, $3, {step * i};" for i in places]
    lines += [
        f"@p{i} ld.global.v4.b32 {{a{4 * i}, a{4 * i + 1}, a{4 * i + 2}, a{4 * i + 3}}}, [$2 + {step * i}];"
        for i in places
    ]
    lines += [
        f"@p{i} st.shared.v4.b32 [$1 + {step * i}], {{a{4 * i}, a{4 * i + 1}, a{4 * i + 2}, a{4 * i + 3}}};"
        for i in places
    ]
    return "{ .reg .pred p<4>; .reg .b32 a<16>;\n" + "\n".join(lines) + " mov.b32 $0, 0; }"


def room_asm(size: int) -> str:
    """`size` bytes of shared memory beside Triton's own; their address."""
    return f"{{ .shared .align 128 .b8 copies[{size}];\n mov.u32 $0, copies; }}"


@triton.jit
def room(ROOM: tl.constexpr):
    """The address of what `room_asm` says."""
    return tl.inline_asm_elementwise(ROOM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def anchor(pointer, at, never):
    """Zeros of the shape of `at` `[.., 4]`, int32, in the layout of a load of four neighbours; `never` is false."""
    return tl.load(pointer + at, mask=(at == at) & never, other=0)


@triton.jit
def request(target, source, inside):
    """Begin to copy 16 bytes a lane from `source` to the shared address `target`, where `inside` (int32) is not 0."""
    tl.inline_asm_elementwise(
        _REQUEST,
        _REQUEST_CONSTRAINTS,
        [target, source.to(tl.int64), inside],
        dtype=tl.int32,
        is_pure=False,
        pack=4,
    )


@triton.jit
def commit():
    """End a group of requests; `wait` counts groups."""
    tl.inline_asm_elementwise(_COMMIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait(LATER: tl.constexpr):
    """Until this lane's groups have come, but for the last `LATER`."""
    tl.inline_asm_elementwise(_WAITS[LATER], "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read(target):
    """The 16 bytes of every lane, int32."""
    return tl.inline_asm_elementwise(
        _READ, _READ_CONSTRAINTS, [target], dtype=tl.int32, is_pure=False, pack=4
    )


@triton.jit
def word_places(
    w_ptr, tiles, warp, blocks, never, base, BITS: tl.constexpr, W: tl.constexpr, R: tl.constexpr
):
    """Where a lane's words of a block go, `[lane, warp, tile, 4]`, and where those of block 0 are."""
    lane, four = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 4)[None, None, None, :]
    tile = tl.arange(0, R)[None, None, :, None]
    at = (tiles * blocks + warp[:, None] * 0)[None, :, :, None] * (BITS * 128) + lane * 4 + four
    place = anchor(w_ptr, at, never) + (warp[None, :, None, None] * R + tile) * (BITS * 512) + lane * 16
    return place + base, w_ptr + at


@triton.jit
def request_words(place, source, block, blocks, BITS: tl.constexpr):
    """Begin to copy one block a warp and tile to a place of the ring; a group of its own."""
    inside = (block < blocks).to(tl.int32)[None, :, None, None]
    source += block[None, :, None, None] * (BITS * 128)
    for i in tl.static_range(BITS):
        request(place + i * 512, source + i * 128, inside)
    commit()


@triton.jit
def read_words(place, LATER: tl.constexpr, BITS: tl.constexpr):
    """The words of the block in a place of the ring, when they have come."""
    wait(LATER)
    words = ()
    for i in tl.static_range(BITS):
        words = words + (read(place + i * 512),)
    return words


@triton.jit
def take(pointer, inside, STAGED: tl.constexpr):
    """Eight times 16 bytes, 64 bytes apart, where `inside` (int32) is not 0; elsewhere nothing is read: anything at all."""
    if STAGED:
        loaded = tl.inline_asm_elementwise(
            _TAKE_STAGED,
            _TAKE_STAGED_CONSTRAINTS,
            [pointer, inside],
            dtype=(tl.int32,) * 8,
            is_pure=False,
            pack=4,
        )
    else:
        loaded = tl.inline_asm_elementwise(
            _TAKE,
            _TAKE_CONSTRAINTS,
            [pointer.to(tl.int64), inside],
            dtype=(tl.int32,) * 8,
            is_pure=False,
            pack=4,
        )
    return loaded


@triton.jit
def stage(pointer, place, size, ASM: tl.constexpr, W: tl.constexpr):
    """`size` bytes, a multiple of 16, from int32 `pointer` to shared memory by all threads; ends in a barrier."""
    for i in range(tl.cdiv(size, 2048 * W)):
        at = (i * 128 * W + tl.arange(0, 32 * W)) * 16
        tl.inline_asm_elementwise(
            ASM, "=r,r,l,r", [place + at, (pointer + at // 4).to(tl.int64), size - at], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()
