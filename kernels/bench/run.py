"""Benchmark of the kernels against torch's matmul and every installed peer library, after a correctness check.

    python kernels/bench/run.py --out eval/results/kernels-h200.json [--peers]
    python kernels/bench/table.py eval/results/kernels-h200.json        # the table in kernels/README.md

Ratio = time of the faster of fp16 and bf16 `F.linear` (same shape, tokens and run) / time of the kernel. The file is
written after every format, so an interrupted run keeps its measurements.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from formats import (  # pyright: ignore[reportMissingImports]
    clone,
    compile_in_parallel,
    stored_bytes,
)
from peers import PEERS, Peer, torch_linear  # pyright: ignore[reportMissingImports]
from requant_kernels import linear
from requant_kernels.common.timing import cold_time, copies_needed
from requant_kernels.fallback import reference
from requant_kernels.random_layouts import random_layout

SHAPES = [
    (8192, 8192), (28672, 8192), (4096, 4096), (14336, 4096), (4096, 14336), (2048, 8192), (8192, 2048), (2048, 2048),
]  # fmt: skip
TOKENS = (1, 8, 64, 256)
GATE = 3e-3  # relative Frobenius error against float64, fp16
# format, bits, density of residuals, numbers of tokens to time
FORMATS = [
    ("grid", 2, 0.0, TOKENS), ("grid", 3, 0.0, TOKENS), ("grid", 4, 0.0, TOKENS),
    ("codebook", 2, 0.0, (1, 8, 64)), ("codebook", 3, 0.0, (1, 8, 64)), ("codebook", 4, 0.0, (1, 8, 64)),
    ("grid", 3, 0.01, TOKENS), ("grid", 2, 0.01, (1, 8)), ("grid", 4, 0.01, (1, 8)), ("codebook", 3, 0.01, (1, 8)),
    ("mul1", 2, 0.0, TOKENS), ("pair", 2, 0.0, TOKENS), ("mul1", 2.25, 0.0, (1, 8, 64)), ("mul1", 4, 0.0, (1, 8, 64)),
    ("grid", 8, 0.0, (1,)),
]  # fmt: skip


def format_name(kind: str, bits: float, density: float) -> str:
    return f"requant {kind} {bits}-bit" + (f" + {density:.0%} sparse" if density else "")


def warm(kind: str, bits: float, n: int, k: int, density: float, tokens: tuple[int, ...]) -> None:
    """Compile every kernel that a row of the table needs."""
    layout = random_layout(kind, bits, n, k, density)
    for m in tokens:
        linear(torch.randn(m, k, device="cuda", dtype=torch.float16), layout)


class Bench:
    """The rows measured so far, and the file they are saved in."""

    def __init__(self, out: Path, tokens: Sequence[int]) -> None:
        self.out, self.tokens = out, tokens
        self.rows: list[dict[str, object]] = []

    def record(
        self, name: str, n: int, k: int, m: int, bits: float, calls: Sequence[Callable[[], object]], error: float | None
    ) -> float:  # fmt: skip
        """Time one kernel at one shape."""
        timing = min((cold_time(calls) for _ in range(2)), key=lambda found: found.median)
        self.rows.append(
            {"kernel": name, "n": n, "k": k, "m": m, "bits_per_weight": bits, "us": timing.median, "low": timing.low,
             "high": timing.high, "error": error}
        )  # fmt: skip
        return timing.median

    def fail(self, name: str, n: int, k: int, m: int, reason: str) -> None:
        self.rows.append({"kernel": name, "n": n, "k": k, "m": m, "failed": reason[:300]})
        print(f"{name} {n}x{k} {m}: {reason[:300]}", file=sys.stderr, flush=True)

    def save(self) -> None:
        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
            "method": "CUDA graph over weight copies of more than 4 x L2, programmatic dependent launch, the lower of two "
            "medians of 11",
        }  # fmt: skip
        self.out.write_text(json.dumps({"about": about, "rows": self.rows}, indent=1))

    def baseline(self, n: int, k: int) -> None:
        """Time torch in both dtypes at every number of tokens, and compute the ratios of all rows of this shape.

        It runs last: kernels timed in memory previously used by torch's weights ran up to a quarter slower.
        """
        for m in self.tokens:
            first = len(self.rows)
            for dtype in (torch.float16, torch.bfloat16):
                weights = [torch_linear(dtype)(n, k) for _ in range(copies_needed(2 * n * k))]
                x = torch.randn(m, k, device="cuda", dtype=dtype)
                calls = [lambda w=w, x=x: w(x) for w in weights]
                self.record(f"torch {dtype}".replace("torch.", ""), n, k, m, 16.0, calls, None)
            base = min(row["us"] for row in self.rows[first:])  # type: ignore[type-var]
            for row in self.rows:
                if (row["n"], row["k"], row["m"]) == (n, k, m) and "us" in row:
                    row["ratio"] = base / row["us"]  # type: ignore[operator]
        torch.cuda.empty_cache()

    def ours(self, kind: str, bits: float, density: float, n: int, k: int, tokens: tuple[int, ...]) -> None:
        """Time one format at one shape, if its first 2048 rows agree with a float64 reference."""
        name = format_name(kind, bits, density)
        layout = random_layout(kind, bits, n, k, density)
        stored = stored_bytes(layout)
        weight = reference.weight(layout, torch.float32)[:2048]
        copies = [layout] + [clone(layout) for _ in range(copies_needed(stored) - 1)]
        for m in sorted(set(tokens) & set(self.tokens)):
            x = torch.randn(m, k, device="cuda", dtype=torch.float16)
            try:
                want = x.double() @ weight.double().T
                error = ((linear(x, layout)[:, :2048].double() - want).norm() / want.norm()).item()
                if not error < GATE:
                    self.fail(name, n, k, m, f"relative error {error:.1e}")
                    continue
                calls = [lambda c=c, x=x: linear(x, c) for c in copies]
                self.record(name, n, k, m, 8 * stored / (n * k), calls, error)
            except Exception as problem:
                self.fail(name, n, k, m, f"{type(problem).__name__}: {problem}")

    def peer(self, name: str, peer: Peer, n: int, k: int) -> None:
        calls = [peer.build(n, k) for _ in range(copies_needed(int(n * k * peer.bits_per_weight / 8)))]
        for m in (1, 8, 64):
            if m <= peer.tokens and m in self.tokens:
                x = torch.randn(m, k, device="cuda", dtype=peer.dtype)
                self.record(name, n, k, m, peer.bits_per_weight, [lambda c=c, x=x: c(x) for c in calls], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", action="store_true", help="also time the peers that are installed")
    parser.add_argument("--shapes", nargs="+", help="ROWSxCOLUMNS of the weight; default: all")
    parser.add_argument("--formats", nargs="+", help="FORMAT:BITS, such as grid:2 mul1:2.25; default: all")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new row after this many seconds")
    parser.add_argument(
        "--processes", type=int, default=1, help="number of processes that compile the kernels first"
    )
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    shapes = [tuple(map(int, text.split("x"))) for text in args.shapes] if args.shapes else SHAPES
    formats = [f for f in FORMATS if not args.formats or f"{f[0]}:{f[1]:g}" in args.formats]
    jobs = [
        (kind, bits, n, k, density, tuple(m for m in tokens if m in args.tokens))
        for n, k in shapes
        for kind, bits, density, tokens in formats
    ]
    compile_in_parallel(warm, jobs, args.processes)
    if args.compile_only:
        return
    started, bench = time.monotonic(), Bench(args.out, args.tokens)
    for n, k in shapes:
        if time.monotonic() - started > args.seconds:
            break
        for kind, bits, density, tokens in formats:
            if time.monotonic() - started < args.seconds:
                bench.ours(kind, bits, density, n, k, tokens)
                bench.save()
        for name, peer in PEERS.items() if args.peers else ():
            try:
                bench.peer(name, peer, n, k)
            except Exception as error:  # a peer may fail in any way; the report says how
                bench.fail(name, n, k, 1, f"{type(error).__name__}: {error}")
        bench.baseline(n, k)
        bench.save()
    print(f"{len(bench.rows)} rows in {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
