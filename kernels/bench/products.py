"""Launches of the products of a decoding step, whose activations are rotated already: alone, several in one, heads.

    python kernels/bench/products.py --out eval/results/products-h200.json --tokens 1 8

`tune.py` times whole layers. A fused step multiplies what the norm before it has rotated, and a budget gives the matrices of
a block several widths, which one launch multiplies (`trellis/gemv_group.py`). The cases are those of a model's shape at 2, 3
and 4 bits in mode `best`, and its heads in bands. Every launch is compiled first, in parallel, then timed with cold caches
in a CUDA graph; a row has the times of all, the rule's marked.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from formats import compile_in_parallel  # pyright: ignore[reportMissingImports]
from requant_kernels.common.device import H200_SMS
from requant_kernels.common.timing import cold_time, copies_needed
from requant_kernels.dispatch import dispatch, dispatch_group
from requant_kernels.random_layouts import random_layout
from requant_kernels.trellis import gemv, gemv_group
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.layout import TILE, TrellisLayout, k64_per_unit


@dataclass(frozen=True, kw_only=True)
class Case:
    """Matrices of `k` columns that one launch multiplies."""

    code: str
    k: int
    parts: tuple[tuple[float, int], ...]  # bits and rows of each
    head: bool = False  # bands of a table, whose outputs are not rotated


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a Llama, which make its cases."""

    hidden: int
    intermediate: int
    keys: int  # rows of k, and of v
    vocabulary: int = 128256

    def qkv(self, code: str, *bits: float) -> Case:
        rows = (self.hidden, self.keys, self.keys)
        return Case(code=code, k=self.hidden, parts=tuple(zip(bits, rows, strict=True)))

    def o(self, code: str, bits: float) -> Case:
        return Case(code=code, k=self.hidden, parts=((bits, self.hidden),))

    def gates(self, code: str, *bits: float) -> Case:
        """One number of bits: gate and up joined as one matrix."""
        rows = self.intermediate * (2 if len(bits) == 1 else 1)
        return Case(code=code, k=self.hidden, parts=tuple((own, rows) for own in bits))

    def down(self, code: str, bits: float) -> Case:
        return Case(code=code, k=self.intermediate, parts=((bits, self.hidden),))

    def head(self, *bits: float) -> Case:
        rows = [self.vocabulary // part for part in (8, 8, 4, 2)]  # those of a table's bands
        return Case(code="mul1", k=self.hidden, parts=tuple(zip(bits, rows, strict=True)), head=True)

    def cases(self) -> list[Case]:
        return [
            self.o("pair", 2), self.down("pair", 2.25), self.gates("pair", 2), self.gates("pair", 2, 1.75),
            self.qkv("pair", 1.5, 1.75, 2),
            self.o("mul1", 3), self.down("mul1", 3.25), self.gates("mul1", 3, 2.75), self.gates("mul1", 3.25, 3),
            self.qkv("mul1", 2.5, 3, 3.75),
            self.o("mul1", 4), self.down("mul1", 4.25), self.gates("mul1", 4, 3.75), self.gates("mul1", 4.25, 4),
            self.qkv("mul1", 3.5, 4, 4.75),
            self.head(6.5, 5.5, 5, 4.5), self.head(7.75, 6.75, 6.25, 5.75), self.head(8, 7.5, 7.25, 7),
        ]  # fmt: skip


MODELS = {
    "8b": Model(hidden=4096, intermediate=14336, keys=1024),
    "1b": Model(hidden=2048, intermediate=8192, keys=512),
}
LAUNCHES = [  # warps, tiles a CTA, k64 a step
    (16, 1, 2), (16, 1, 4), (16, 2, 1), (16, 2, 2), (16, 2, 4), (16, 4, 1), (16, 7, 1), (8, 1, 1), (8, 1, 2), (8, 1, 4),
    (8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 4, 1), (8, 4, 2), (4, 1, 2), (4, 1, 4), (4, 2, 1), (4, 2, 2), (4, 2, 4), (4, 4, 1),
    (4, 4, 2), (2, 2, 2), (2, 4, 2),
]  # fmt: skip


def layouts_of(case: Case, *, rows: int | None = None) -> list[TrellisLayout]:
    """Random matrices; `rows`: of each, in place of the case's."""
    found: list[Any] = [random_layout(case.code, bits, rows or n, case.k) for bits, n in case.parts]
    return [replace(own, rotates_output=not case.head, input_scales=found[0].input_scales) for own in found]


def configs_of(
    case: Case, launch: tuple[int, int, int], cap: int | None, early: bool
) -> list[TrellisGemvConfig]:
    return [
        TrellisGemvConfig(
            num_warps=launch[0], tiles_per_cta=launch[1], max_ctas_per_sm=cap, pdl_trigger_early=early,
            units_per_step=max(1, launch[2] // k64_per_unit(round(4 * bits))),
        )
        for bits, _ in case.parts
    ]  # fmt: skip


def rule_of(layouts: list[TrellisLayout], tokens: int) -> list[TrellisGemvConfig]:
    device = layouts[0].packed_codes.device
    found: Any = dispatch_group(layouts, tokens, device) or [dispatch(layouts[0], tokens, device)[1]]
    return found


def multiply(
    layouts: list[TrellisLayout], configs: Sequence[TrellisGemvConfig], x: Any, *, head: bool
) -> object:
    """The product alone; of a head with the rotation before it."""
    if head:
        return gemv_group.multiply_bands(x, layouts, configs)
    if len(layouts) == 1:
        return gemv.launch_gemv(x, layouts[0], configs[0])
    return gemv_group.gemv_group([x] * len(layouts), layouts, configs)


def input_of(case: Case, layouts: list[TrellisLayout], tokens: int) -> Any:
    x = torch.randn(tokens, case.k, device="cuda", dtype=torch.float16)
    return x if case.head else gemv.rotate_activations(x, layouts[0])


def compile_once(case: Case, launch: tuple[int, int, int] | None, tokens: int) -> None:
    layouts = layouts_of(case, rows=512)
    configs = rule_of(layouts_of(case), tokens) if launch is None else configs_of(case, launch, None, False)
    multiply(layouts, configs, input_of(case, layouts, tokens), head=case.head)


def copies_of(layouts: list[TrellisLayout]) -> list[list[TrellisLayout]]:
    stored = sum(own.packed_codes.numel() * 4 for own in layouts)
    return [layouts] + [
        [replace(own, packed_codes=own.packed_codes.clone()) for own in layouts]
        for _ in range(copies_needed(stored) - 1)
    ]


def time_of(
    copies: list[list[TrellisLayout]], configs: Sequence[TrellisGemvConfig], x: Any, head: bool
) -> float | None:
    """Microseconds; None for a launch that the GPU does not take."""
    try:
        calls = [lambda own=own: multiply(own, configs, x, head=head) for own in copies]
        return round(cold_time(calls, replays=5).median, 2)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        torch.cuda.synchronize()
        return None


def measure(case: Case, tokens: int) -> dict[str, Any]:
    copies = copies_of(layouts_of(case))
    x = input_of(case, copies[0], tokens)
    rule = rule_of(copies[0], tokens)
    found: list[dict[str, Any]] = [{"rule": True, "us": time_of(copies, rule, x, case.head)}]
    plain = []
    for launch in LAUNCHES:
        us = time_of(copies, configs_of(case, launch, None, False), x, case.head)
        if us is not None:
            plain.append((us, launch))
            found.append({"launch": launch, "us": us})
    for _, launch in sorted(plain)[:3]:
        ctas = sum(-(-n // (TILE * launch[1])) for _, n in case.parts)
        caps = [None, *(cap for cap in (-(-ctas // H200_SMS), -(-2 * ctas // H200_SMS)) if cap <= 8)]
        for cap, early in ((cap, early) for cap in caps for early in (False, True)):
            if cap is not None or early:
                us = time_of(copies, configs_of(case, launch, cap, early), x, case.head)
                found.append({"launch": launch, "cap": cap, "early": early, "us": us})
    found.sort(key=lambda row: row["us"] or 1e9)
    return asdict(case) | {"tokens": tokens, "launches": found, "rule": [asdict(own) for own in rule]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=MODELS, default="8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    args = parser.parse_args()
    cases = MODELS[args.shape].cases()
    jobs = [
        (case, launch, tokens) for tokens in args.tokens for case in cases for launch in (None, *LAUNCHES)
    ]
    compile_in_parallel(compile_once, jobs, args.processes)
    rows = []
    for case in cases:
        for tokens in args.tokens:
            rows.append(measure(case, tokens))
            best = rows[-1]["launches"]
            mine = next(row for row in best if "rule" in row)
            print(f"{case.code} {case.parts} {tokens}: rule {mine['us']}, best {best[:4]}", flush=True)
            about = {"device": torch.cuda.get_device_name(), "unit": "microseconds"}
            args.out.write_text(json.dumps({"about": about, "rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
