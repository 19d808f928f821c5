"""Times of the 2:4 mask kernels compared with one read and one write of the matrix, and with the formulas in torch.

    python -m eval.mask_kernels --out eval/results/masks-h100.json

Each kernel is first checked against its formula on the same matrix. `copy` is `y.copy_(x)`: one read and one write.
"""

from typing import Any

import torch
import triton
import typer
from requant_kernels.common.timing import cold_time, copies_needed
from requant_kernels.sparsity import masks as kernels

from eval import options as opt
from eval.common import environment, write_json
from requant.sparsity import masks

NAMES = ("keep2", "keep2_transposable", "soft_threshold", "least_squares_scale")
SHAPES = ((14336, 4096), (4096, 4096))
DTYPES = (torch.float32, torch.bfloat16)


def rows_of(n: int, k: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One row per kernel for a shape and dtype; times in microseconds."""
    count = copies_needed(n * k * dtype.itemsize)
    matrices = [torch.randn(n, k, device="cuda", dtype=dtype).abs() for _ in range(count)]
    target = torch.empty_like(matrices[0])
    copy = cold_time([lambda m=m: target.copy_(m) for m in matrices]).median
    found: list[dict[str, Any]] = []
    for name in NAMES:
        kernel, formula = getattr(kernels, name), getattr(masks, f"_{name}")
        mine, theirs = kernel(matrices[0]).double(), formula(matrices[0]).double()
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=0), f"{name} differs from torch"
        del mine, theirs
        us = cold_time([lambda m=m, kernel=kernel: kernel(m) for m in matrices]).median
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        formula(matrices[1])
        end.record()
        end.synchronize()
        row = {"kernel": name, "n": n, "k": k, "dtype": str(dtype).removeprefix("torch."), "us": us}
        found.append(
            row | {"copy_us": copy, "times_copy": us / copy, "torch_us": 1e3 * start.elapsed_time(end)}
        )
        print(
            f"{name:20s} {n}x{k} {row['dtype']:9s} {us:8.1f} us, {us / copy:.2f} copies of {copy:.1f} us",
            flush=True,
        )
        torch.cuda.empty_cache()
    return found


def main(out: opt.OutFile) -> None:
    about = environment(torch.device("cuda")) | {"triton": triton.__version__}
    rows: list[dict[str, Any]] = []
    for n, k in SHAPES:
        for dtype in DTYPES:
            rows += rows_of(n, k, dtype)
            write_json(out, {"about": about, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
