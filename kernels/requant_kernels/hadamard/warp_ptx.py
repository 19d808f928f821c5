"""The PTX that the transforms of `warp.py` inline: vectors of 16 bytes, sums of pairs of float16, and the two products."""

from dataclasses import dataclass

from requant_kernels.common.ptx import Ptx, PtxBuilder, inline_ptx, mma_k16_types, mma_line


def _mix_ptx(*, pair: bool) -> Ptx:
    """Eight values of a lane, of bits 0, 1 and the pairs' bit, from four pairs of float16 of bits 0 and 1.

    Outputs: float32, the pairs' bit fastest, then 0, then 1. Inputs: pairs, bit 0 fastest; the signs of the first product,
    these negated, and both of the second. `pair`: bit 0 is left alone.
    """
    ptx, types = PtxBuilder(), mma_k16_types("fp16")
    s, n, zeros, halves = "$12", "$13", ["0f00000000"] * 4, []
    other_s, other_n = "$14", "$15"
    first = (s, s, s, n)
    if pair:
        none = ptx.new("none", "mov.b32 {d}, 0;")
        first = (s, none, none, s)
    for one in range(2):
        sums = [ptx.register("sum") for _ in range(4)]
        ptx.emit(mma_line("m16n8k16", types, sums, first, (f"${8 + 2 * one}", f"${9 + 2 * one}"), zeros))
        for zero in range(2):
            both = sums[2 * zero + 1], sums[2 * zero]
            halves.append(ptx.new("half", f"cvt.rn.f16x2.f32 {{d}}, {', '.join(both)};"))
    for one in range(2):
        outputs = [f"${4 * one + i}" for i in range(4)]
        ptx.emit(mma_line("m16n8k16", types, outputs, halves, (other_s, other_n if one else other_s), zeros))
    return ptx.build(["=f"] * 8 + ["r"] * 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarpAssembly:
    """The PTX of these transforms, and conversions of two neighbours at a time."""

    load: Ptx
    load_constant: Ptx
    store: Ptx
    store_words: Ptx  # 16 bytes apart
    mix: Ptx
    mix_of_pairs: Ptx  # not bit 0
    low_halves: Ptx
    high_halves: Ptx
    add: Ptx
    subtract: Ptx
    multiply: Ptx
    to_fp16: Ptx
    to_bf16: Ptx
    add_lanes: tuple[Ptx, ...]  # a lane's number and that of the lane whose bit i differs


WORDS = ("a", "b", "c", "d")


def _load(kind: str) -> Ptx:
    """Each vector is read by one warp, or is a constant that all read."""
    return inline_ptx(
        f"ld.global.{kind}.v4.b32 {{$a, $b, $c, $d}}, [$address];", outputs=dict.fromkeys(WORDS, "=r"),
        inputs={"address": "l"},
    )  # fmt: skip


def _of_two(instruction: str, kind: str, more: str = "") -> Ptx:
    return inline_ptx(f"{instruction} $y, $a, $b{more};", outputs={"y": "=r"}, inputs={"a": kind, "b": kind})


ASM = WarpAssembly(
    load=_load("L1::no_allocate"),
    load_constant=_load("nc"),
    store=inline_ptx(
        "setp.ne.b32 p, $inside, 0; @p st.global.v4.b32 [$address], {$a, $b, $c, $d};",
        inputs={"address": "l", **dict.fromkeys(WORDS, "r"), "inside": "r"},
        registers={"pred": "p"},
    ),
    store_words=inline_ptx(
        "setp.ne.b32 p, $inside, 0; "
        + " ".join(f"@p st.global.b32 [$address + {16 * i}], ${word};" for i, word in enumerate(WORDS)),
        inputs={"address": "l", **dict.fromkeys(WORDS, "r"), "inside": "r"},
        registers={"pred": "p"},
    ),
    mix=_mix_ptx(pair=False),
    mix_of_pairs=_mix_ptx(pair=True),
    low_halves=_of_two("prmt.b32", "r", ", 0x5410"),
    high_halves=_of_two("prmt.b32", "r", ", 0x7632"),
    add=_of_two("add.rn.f16x2", "r"),
    subtract=_of_two("sub.rn.f16x2", "r"),
    multiply=_of_two("mul.rn.f16x2", "r"),
    to_fp16=_of_two("cvt.rn.f16x2.f32", "f"),  # the first in the high half
    to_bf16=_of_two("cvt.rn.bf16x2.f32", "f"),
    add_lanes=tuple(
        inline_ptx(
            f"shfl.sync.bfly.b32 other0, $x, {1 << bit}, 0x1f, 0xffffffff; add.f32 $y, $x, other0;",
            outputs={"y": "=f"},
            inputs={"x": "f"},
            registers={"f32": "other0"},
        )
        for bit in range(5)
    ),
)
