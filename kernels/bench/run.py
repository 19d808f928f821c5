"""Correctness first, then time: our kernels beside torch's matmul and every peer that is installed.

    python kernels/bench/run.py --out eval/results/kernels-h200.json [--peers]
    python kernels/bench/table.py eval/results/kernels-h200.json        # the table in kernels/README.md

Ratio = the faster of fp16 and bf16 `F.linear` of the same shape and tokens in the same run, over ours.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch
import triton
from peers import PEERS, Peer, torch_linear  # pyright: ignore[reportMissingImports]
from requant_kernels import (
    Layout,
    TrellisLayout,
    linear,
    naive,
    pack_codebook,
    pack_grid,
    pack_trellis,
)
from timing import cold_time, copies_needed  # pyright: ignore[reportMissingImports]
from torch import Tensor

SHAPES = [
    (28672, 8192), (8192, 8192), (14336, 4096), (4096, 14336), (4096, 4096), (2048, 8192), (8192, 2048), (2048, 2048),
]  # fmt: skip
TOKENS = (1, 8, 16, 64, 256)
GATE = 3e-3  # relative Frobenius error against float64, fp16


def random_sparse(n: int, k: int, density: float) -> tuple[Tensor, Tensor, Tensor, None]:
    """CSR of random places, fp16 values."""
    places = torch.rand(n, k, device="cuda") < density
    rows, columns = places.nonzero(as_tuple=True)
    indptr = torch.zeros(n + 1, dtype=torch.int64, device="cuda")
    indptr[1:] = places.sum(1).cumsum(0)
    return indptr, columns.int(), torch.randn(len(rows), device="cuda").half() * 0.1, None


def random_layout(kind: str, bits: int, n: int, k: int, density: float) -> Layout | TrellisLayout:
    """A packed matrix of random codes; groups of 128 for a grid; `kind` may name a trellis code."""
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device="cuda")
    if kind in ("mul1", "pair"):
        scales = [(torch.randn(width, device="cuda").sign() * 0.02).half() for width in (k, n)]
        return pack_trellis(codes, *scales, bits=bits, code=kind)
    sparse = random_sparse(n, k, density) if density else None
    if kind == "codebook":
        levels = torch.randn(n, 1 << bits, device="cuda").sort(1).values.half()
        return pack_codebook(codes, levels, bits=bits, sparse=sparse)
    scales = torch.rand(n, k // 128, device="cuda").half() + 0.1
    return pack_grid(codes, scales, None, bits=bits, group_size=128, sparse=sparse)


def tensors_of(layout: Layout | TrellisLayout) -> list[Tensor]:
    """Every tensor that a call reads (the unused dtype's tables and the row counts are not read)."""
    own = [getattr(layout, f.name) for f in fields(layout) if f.name not in ("levels", "sparse")]
    if not isinstance(layout, TrellisLayout) and layout.sparse is not None:
        own += [getattr(layout.sparse, f.name) for f in fields(layout.sparse) if f.name != "counts"]
    return [value for value in own if isinstance(value, Tensor)]


def clone(layout: Layout | TrellisLayout) -> Layout | TrellisLayout:
    """A copy with memory of its own."""
    copied = {
        f.name: getattr(layout, f.name).clone()
        for f in fields(layout)
        if isinstance(getattr(layout, f.name), Tensor)
    }
    if not isinstance(layout, TrellisLayout) and layout.sparse is not None:
        values = {f.name: getattr(layout.sparse, f.name) for f in fields(layout.sparse)}
        copied["sparse"] = replace(
            layout.sparse, **{name: v.clone() for name, v in values.items() if isinstance(v, Tensor)}
        )
    return replace(layout, **copied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", action="store_true", help="also time the peers that are installed")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new rows after this long")
    args = parser.parse_args()
    started = time.monotonic()
    rows: list[dict[str, object]] = []
    base: dict[tuple[int, int, int], float] = {}

    def record(
        name: str, n: int, k: int, m: int, bits: float, calls: list[Callable[[], object]], error: float | None
    ):
        timing = cold_time(calls)
        rows.append(
            {"kernel": name, "n": n, "k": k, "m": m, "bits_per_weight": bits, "us": timing.median, "low": timing.low,
             "high": timing.high, "error": error, "ratio": base.get((n, k, m), timing.median) / timing.median}
        )  # fmt: skip
        return timing.median

    for n, k in SHAPES:
        for m in TOKENS:
            times = []
            for dtype in (torch.float16, torch.bfloat16):
                weights = [torch_linear(dtype)(n, k) for _ in range(copies_needed(2 * n * k))]
                x = torch.randn(m, k, device="cuda", dtype=dtype)
                times.append(
                    record(
                        f"torch {dtype}"[6:], n, k, m, 16.0, [lambda w=w, x=x: w(x) for w in weights], None
                    )
                )
            base[n, k, m] = min(times)
    for row in rows:
        row["ratio"] = base[row["n"], row["k"], row["m"]] / row["us"]  # type: ignore[index,operator]
    formats = [(kind, bits, 0.0) for kind in ("grid", "codebook") for bits in (2, 3, 4)]
    formats += [("mul1", 2, 0.0), ("pair", 2, 0.0), ("mul1", 4, 0.0)]
    formats += [("grid", 2, 0.01), ("grid", 3, 0.01), ("grid", 4, 0.01), ("codebook", 3, 0.01)]
    for n, k in SHAPES:
        for kind, bits, density in formats:
            if time.monotonic() - started > args.seconds:
                break
            name = f"requant {kind} {bits}-bit" + (f" + {density:.0%} sparse" if density else "")
            layout = random_layout(kind, bits, n, k, density)
            stored = sum(t.numel() * t.element_size() for t in tensors_of(layout))
            weight = naive.weight(layout, torch.float32)
            copies = [layout] + [clone(layout) for _ in range(copies_needed(stored) - 1)]
            for m in (
                TOKENS if (n, k) in SHAPES[:2] and not density else TOKENS[:1] if density else (1, 8, 64)
            ):
                x = torch.randn(m, k, device="cuda", dtype=torch.float16)
                want = x.double() @ weight[:2048].double().T
                error = ((linear(x, layout)[:, :2048].double() - want).norm() / want.norm()).item()
                if not error < GATE:
                    rows.append(
                        {"kernel": name, "n": n, "k": k, "m": m, "failed": f"relative error {error:.1e}"}
                    )
                    continue
                record(
                    name,
                    n,
                    k,
                    m,
                    8 * stored / (n * k),
                    [lambda c=c, x=x: linear(x, c) for c in copies],
                    error,
                )
    for name, peer in PEERS.items() if args.peers else ():
        for n, k in SHAPES:
            try:
                _time_peer(name, peer, n, k, record)
            except Exception as error:  # a peer may fail in any way; the report says how
                rows.append(
                    {"kernel": name, "n": n, "k": k, "failed": f"{type(error).__name__}: {error}"[:200]}
                )
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "method": "CUDA graph over weight copies of more than 4 x L2, programmatic dependent launch, median of 11",
    }  # fmt: skip
    args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    print(f"{len(rows)} rows in {time.monotonic() - started:.0f} s", file=sys.stderr)


def _time_peer(name: str, peer: Peer, n: int, k: int, record: Callable[..., float]) -> None:
    calls = [peer.build(n, k) for _ in range(copies_needed(int(n * k * peer.bits_per_weight / 8)))]
    for m in (1, 8):
        x = torch.randn(m, k, device="cuda", dtype=peer.dtype)
        record(name, n, k, m, peer.bits_per_weight, [lambda c=c, x=x: c(x) for c in calls], None)


if __name__ == "__main__":
    main()
