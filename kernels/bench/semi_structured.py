"""2:4 products of 16-bit values against dense ones in bfloat16, and the table of algorithms that serving reads.

    python kernels/bench/semi_structured.py --out FILE --table kernels/requant_kernels/tuned/semi_structured.json

Every cuSPARSELt algorithm is compared with the dense product before it is timed, at every number of tokens. For every shape
the table has the fastest one, starting at the number of tokens from which a sparse product is always ahead by MARGIN.
Times are for a CUDA graph over weights that are not cached.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from requant_kernels.common.timing import cold_time, copies_needed
from requant_kernels.sparsity import products
from requant_kernels.sparsity.masks import keep2

SHAPES = ("8192x8192", "14336x4096", "4096x4096", "28672x8192")
TOKENS = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096)
ALGORITHMS = range(12)  # more than any version has; missing ones are rejected
GATE = 4e-3  # relative Frobenius distance to the dense product
MARGIN = 1.02


def measure(n: int, k: int) -> list[dict[str, Any]]:
    """One row per number of tokens: microseconds dense, and by algorithm."""
    copies = copies_needed(2 * n * k)
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    weights = [w * keep2(w.abs()) for w in weights]
    compressed = [products.compress(w) for w in weights]
    rows: list[dict[str, Any]] = []
    for tokens in TOKENS:
        x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
        dense = cold_time([lambda w=w, x=x: F.linear(x, w) for w in weights]).median
        wanted, by_algorithm, failed = F.linear(x, weights[0]).float(), {}, {}
        for algorithm in ALGORITHMS:

            def multiply(c: torch.Tensor, x: torch.Tensor = x, algorithm: int = algorithm) -> torch.Tensor:
                return products.semi_structured_linear(x, c, None, algorithm)

            try:
                error = ((multiply(compressed[0]).float() - wanted).norm() / wanted.norm()).item()
                if not error < GATE:
                    failed[algorithm] = f"relative error {error:.1e}"
                    continue
                us = cold_time([lambda c=c, multiply=multiply: multiply(c) for c in compressed]).median
                by_algorithm[algorithm] = us
            except (
                RuntimeError
            ) as problem:  # torch has no such algorithm, or cuSPARSELt rejects it for this shape
                failed[algorithm] = str(problem).splitlines()[0][:120]
        best = min(by_algorithm, key=by_algorithm.__getitem__, default=None)
        rows.append(
            {"n": n, "k": k, "tokens": tokens, "dense_us": dense, "sparse_us": by_algorithm, "failed": failed}
        )
        if best is not None:
            rows[-1] |= {"best": best, "ratio": dense / by_algorithm[best]}
            if 0 in by_algorithm:
                rows[-1]["ratio_default"] = dense / by_algorithm[0]
        print(
            f"{n}x{k} {tokens:5d} dense {dense:8.1f} us, best {best} {rows[-1].get('ratio', 0):.2f}",
            flush=True,
        )
    return rows


def table_of(rows: list[dict[str, Any]]) -> list[list[int]]:
    """[tokens, algorithm] where a sparse product is ahead at this and every larger number of tokens."""
    ahead: list[list[int]] = []
    for row in sorted(rows, key=lambda row: row["tokens"], reverse=True):
        if row.get("ratio", 0) < MARGIN:
            break
        ahead.insert(0, [row["tokens"], row["best"]])
    return ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--table", type=Path, help="file whose rows of this GPU and these shapes are made new"
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="ROWSxCOLUMNS of the weight")
    args = parser.parse_args()
    name = torch.cuda.get_device_name()
    about = {"device": name, "torch": torch.__version__, "cusparselt": torch.backends.cusparselt.version()}
    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        n, k = map(int, shape.split("x"))
        found = measure(n, k)
        rows += found
        args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        if args.table is not None:
            table = json.loads(args.table.read_text()) if args.table.exists() else {}
            table.setdefault(name, {})[shape] = table_of(found)
            args.table.write_text(json.dumps(table, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
