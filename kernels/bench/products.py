"""Launches of the products of a decoding step, whose activations are rotated already: alone, several in one, heads.

    python kernels/bench/products.py --out eval/results/products-h200.json --tokens 1 8

`tune.py` times whole layers. A fused step multiplies what the norm before it has rotated, and a budget gives the matrices of
a block several widths, which one launch multiplies (`trellis/gemv_group.py`). The cases are those of a model's shape at 2, 3
and 4 bits in mode `best`, and its heads in bands. Every launch is compiled first, in parallel, then timed with cold caches
in a CUDA graph; a row has the times of all, the rule's marked, and why a launch has none.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from formats import compile_in_parallel  # pyright: ignore[reportMissingImports]
from requant_kernels.autotune import RESULT_TOLERANCE, copies_of
from requant_kernels.common.device import H200_SMS
from requant_kernels.common.timing import cold_time
from requant_kernels.dispatch import dispatch, dispatch_group
from requant_kernels.launch_config import Shape, m_bucket
from requant_kernels.random_layouts import random_layout
from requant_kernels.trellis import gemv, gemv_group
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig, launch_of
from requant_kernels.trellis.layout import TILE, TrellisLayout
from requant_kernels.trellis.operands import common_form


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
    """Random matrices; `rows`: of each, instead of the case's."""
    found: list[Any] = [random_layout(case.code, bits, rows or n, case.k) for bits, n in case.parts]
    return [replace(own, rotates_output=not case.head, input_scales=found[0].input_scales) for own in found]


def configs_of(
    case: Case,
    tokens: int,
    launch: tuple[int, int, int],
    *,
    cap: int | None = None,
    early_trigger: bool = False,
) -> list[TrellisGemvConfig]:
    shapes = [Shape(case.code, bits, n, case.k, m_bucket(tokens)) for bits, n in case.parts]
    return [
        replace(launch_of(shape, *launch, max_ctas_per_sm=cap), pdl_trigger_early=early_trigger)
        for shape in shapes
    ]


def rule_of(layouts: list[TrellisLayout], tokens: int) -> list[TrellisGemvConfig]:
    device = layouts[0].packed_codes.device
    found: Any = dispatch_group(layouts, tokens, device) or [dispatch(layouts[0], tokens, device)[1]]
    return found


def multiply(
    layouts: list[TrellisLayout], configs: Sequence[TrellisGemvConfig], x: Any, *, head: bool
) -> object:
    """The product alone; of a head with the rotation before it."""
    if head:
        return gemv_group.multiply_bands(x, layouts, configs, x.dtype)
    if len(layouts) == 1:
        return gemv.launch_gemv(x, layouts[0], configs[0])
    return gemv_group.gemv_group([x] * len(layouts), layouts, configs)


def input_of(case: Case, layouts: list[TrellisLayout], tokens: int) -> Any:
    x = torch.randn(tokens, case.k, device="cuda", dtype=torch.float16)
    form = common_form([gemv.activation_form(layout, tokens) for layout in layouts])
    return x if case.head else gemv.rotate_activations(x, layouts[0], form)


def compile_once(case: Case, launch: tuple[int, int, int] | None, tokens: int) -> None:
    layouts = layouts_of(case, rows=512)
    configs = rule_of(layouts_of(case), tokens) if launch is None else configs_of(case, tokens, launch)
    multiply(layouts, configs, input_of(case, layouts, tokens), head=case.head)


class Measurement:
    """Times of one case's launches, each of which must give the rule's results."""

    def __init__(self, case: Case, tokens: int) -> None:
        layouts = layouts_of(case)
        self.case, self.tokens, self.x = case, tokens, input_of(case, layouts, tokens)
        self.copies = [list(own) for own in zip(*map(copies_of, layouts), strict=False)]
        self.rule = rule_of(layouts, tokens)
        self.wanted = self._result(self.rule)

    def _result(self, configs: Sequence[TrellisGemvConfig]) -> torch.Tensor:
        found: Any = multiply(self.copies[0], configs, self.x, head=self.case.head)
        return found.float() if isinstance(found, torch.Tensor) else torch.cat(found, 1)

    def of(self, configs: Sequence[TrellisGemvConfig]) -> dict[str, Any]:
        """`us`, or the `error` of a launch that the GPU does not take."""
        try:
            distance = (self._result(configs) - self.wanted).norm() / self.wanted.norm()
            if not distance < RESULT_TOLERANCE:
                return {"error": f"its results are off by {distance:.1e}"}
            calls = [
                lambda own=own: multiply(own, configs, self.x, head=self.case.head) for own in self.copies
            ]
            return {"us": round(cold_time(calls, replays=5).median, 2)}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # too many registers, or sums that warps cannot divide: its row says so
            torch.cuda.synchronize()
            return {"error": f"{type(error).__name__}: {error}"[:200]}


def measure(case: Case, tokens: int) -> dict[str, Any]:
    measured = Measurement(case, tokens)
    found: list[dict[str, Any]] = [{"rule": True} | measured.of(measured.rule)]
    found += [{"launch": launch} | measured.of(configs_of(case, tokens, launch)) for launch in LAUNCHES]
    for row in sorted((row for row in found[1:] if "us" in row), key=lambda row: row["us"])[:3]:
        launch = row["launch"]
        ctas = sum(-(-n // (TILE * launch[1])) for _, n in case.parts)
        caps = [None, *(cap for cap in (-(-ctas // H200_SMS), -(-2 * ctas // H200_SMS)) if cap <= 8)]
        for cap, early_trigger in itertools.product(caps, (False, True)):
            if cap is not None or early_trigger:
                configs = configs_of(case, tokens, launch, cap=cap, early_trigger=early_trigger)
                own = {"launch": launch, "cap": cap, "early_trigger": early_trigger}
                found.append(own | measured.of(configs))
    found.sort(key=lambda row: row.get("us", 1e9))
    return asdict(case) | {
        "tokens": tokens,
        "launches": found,
        "rule": [asdict(own) for own in measured.rule],
    }


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
            print(f"{case.code} {case.parts} {tokens}: {mine}, best {best[:4]}", flush=True)
            about = {"device": torch.cuda.get_device_name(), "unit": "microseconds"}
            args.out.write_text(json.dumps({"about": about, "rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
