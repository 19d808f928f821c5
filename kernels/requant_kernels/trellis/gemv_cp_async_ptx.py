"""The PTX of `spread_sums.py`: one token, words and activations of a trellis through shared memory, no register copied.

A hash meets four copies of an activation (`mul1`), or two of two (`pair`). For one token of several tiles they are the same
for all 32 lanes but a few, so the rotation writes them *spread*, as the registers of the right operand lie: of a group of 64
columns first the hashes 0 to 3 of a row, then 4 to 7, .., of each the high bytes of the group's four tiles and then the low
ones, 16 bytes a tile:

    spread int8 [groups, 16 / weights / 4, high or low, tile, hash, 4]           512 bytes a group, or 256

A *place* of the ring is what a warp multiplies in a step: words of every tile, then activations, as they lie in memory.
"""

from functools import cache

from requant_kernels.trellis.hashes import ROW_CODES, WEIGHTS, Text, groups_of, multiply_group

COPY = 512  # bytes that a warp copies at once, 16 a lane


def group_bytes(code: str) -> int:
    """Of the activations of 64 columns."""
    return 2 * 4 * 64 // WEIGHTS[code]


def word_bytes(four: int) -> int:
    """Of the words of a unit of a tile."""
    return 128 * (four * groups_of(four) // 4)


@cache
def request_asm(words: tuple[int, ...], spread: int, *, always: bool) -> tuple[str, str]:
    """Begin to copy so many bytes of the words of every tile, and of activations behind them; a group of its own.

    Operands: an output that nobody reads; where it goes (this lane's 16 bytes), whether there is anything, which is not
    asked where `always`, the lane, from where each. A lane whose 16 bytes begin beyond the end copies none. Activations
    come through the L1 cache, for other programs of the multiprocessor read the same ones; words are read once.
    """
    lines, at, guard = ["setp.ne.s32 p, $2, 0;"], 0, "" if always else "@p "
    sizes = (*words, *([spread] if spread else []))
    rests = {size % COPY for size in sizes} - {0}
    assert len(rests) <= 1
    if always:
        lines = [f"setp.lt.s32 q, $3, {rest // 16};" for rest in rests]
    else:
        lines += [f"setp.lt.and.s32 q, $3, {rest // 16}, p;" for rest in rests]
    for source, size in enumerate(sizes):
        copy = f"cp.async.{'cg' if source < len(words) else 'ca'}.shared.global"
        lines += [
            f"{guard if i + COPY <= size else '@q '}{copy} [$1 + {at + i}], [${4 + source} + {i}], 16;"
            for i in range(0, size, COPY)
        ]
        at += size
    text = "{ .reg .pred p, q;\n" + "\n".join(lines) + "\ncp.async.commit_group;\nmov.b32 $0, 0; }"
    return text, ",".join(["=r", "r", "r", "r"] + ["l"] * len(sizes))


def wait_asm(pending: int) -> str:
    """Until no more than so many groups of copies are under way, and the whole warp has read the place before."""
    return f"cp.async.wait_group {pending}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"


@cache
def step_asm(code: str, four: int, vector: int, tiles: int, units: int) -> tuple[str, str]:
    """Sums += a place: `units` units of `tiles` x 16 rows.

    Operands: 4 accumulators a tile, the sums; then inputs: the same accumulators, the address of this lane's words, that
    of its activations, the lane that holds the bits before.
    """
    sums, groups, unit = 4 * tiles, groups_of(four), word_bytes(four)
    words_at, x_at, source = (f"${2 * sums + i}" for i in range(3))
    text, count = Text(), unit // 128
    sum_of = [[f"${sums + 4 * i + j}" for j in range(4)] for i in range(tiles)]
    for u in range(units):
        held: list[list[str]] = []
        for r in range(tiles):
            own: list[str] = []
            for i in range(0, count, vector):
                names = [text.register() for _ in range(vector)]
                text.lines.append(_load(names, words_at, (r * units + u) * unit + 128 * i))
                own += names
            held.append(own)
        for group in range(groups):
            x: list[str] = []
            for chunk in range(ROW_CODES // WEIGHTS[code] // 4):
                names = [text.register() for _ in range(4)]
                at = (u * groups + group) * group_bytes(code) + 128 * chunk
                text.lines.append(_load(names, x_at, at))
                x += names

            def operand(_: int, i: int, x: list[str] = x) -> str:
                return x[i]

            multiply_group(text, code, four, group, held, operand, sum_of, 1, source, apart=1)
    text.lines += [f"mov.b32 ${4 * i + j}, {sum_of[i][j]};" for i in range(tiles) for j in range(4)]
    return text.text(), ",".join(["=r"] * sums + ["r"] * (sums + 3))


def _load(names: list[str], address: str, offset: int) -> str:
    if len(names) == 1:
        return f"ld.shared.b32 {names[0]}, [{address} + {offset}];"
    return f"ld.shared.v{len(names)}.b32 {{{', '.join(names)}}}, [{address} + {offset}];"
