"""Measure launch configurations and write the best in the format of `tuned/h200.json` (`requant_kernels.launch_tables`).

    python kernels/bench/tune.py 8192x8192 4096x14336 --out kernels/requant_kernels/tuned/h200.json

Every candidate is compiled first, in parallel, then timed with cold caches in a CUDA graph. The winner is stored; `--log`
receives all times.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from formats import compile_in_parallel  # pyright: ignore[reportMissingImports]
from requant_kernels.autotune import Candidate, call, candidates, kernels_to_tune, times, winners
from requant_kernels.launch_config import LaunchConfig, Shape, m_bucket
from requant_kernels.launch_tables import read_table, write_table
from requant_kernels.random_layouts import random_layout
from requant_kernels.scalar.gemm_launch import GemmConfig
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.scalar.gemv_fp16_mma_launch import Fp16MmaConfig
from requant_kernels.scalar.gemv_int8_mma_launch import Int8MmaConfig
from requant_kernels.scalar.gemv_launch import GemvConfig
from requant_kernels.scalar.gemv_sparse_mma_launch import SparseMmaConfig
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig

FORMATS = [("grid", 2), ("grid", 3), ("grid", 4), ("codebook", 2), ("codebook", 3), ("codebook", 4)]
SPARSE_FORMATS = [("grid+s", 2), ("grid+s", 3), ("grid+s", 4), ("codebook+s", 3)]  # 1 % of residuals
TRELLIS_FORMATS = [("mul1", 2), ("mul1", 2.25), ("mul1", 4), ("pair", 2)]


def layout_of(shape: Shape) -> Any:
    """A random layout; `+s` after a format: with 1 % of residuals."""
    name, _, sparse = shape.format.partition("+")
    return random_layout(name, shape.bits, shape.n, shape.k, 0.01 if sparse else 0.0)


def compiled_shape(config: LaunchConfig, shape: Shape) -> Shape:
    """A shape, as small as possible, that compiles to the same kernel: a few rows are enough, and columns in whole k_tiles,
    unless activations are in shared memory or warps do not divide the k_tiles evenly."""
    own_columns = isinstance(config, (TrellisGemvConfig, Int8MmaConfig, Fp16MmaConfig))
    if isinstance(config, (GemvConfig, SparseMmaConfig)):
        staged = isinstance(config, GemvConfig) and config.stage_activations
        own_columns = staged or shape.k % (256 * config.num_warps) != 0
    return shape._replace(n=512, k=shape.k if own_columns else 4096)


def compiled_config(config: LaunchConfig) -> LaunchConfig:
    """A launch with the same code: a cap on CTAs does not change it."""
    own: Any = config
    return replace(own, max_ctas_per_sm=None) if hasattr(own, "max_ctas_per_sm") else config


def has_own_code(config: LaunchConfig) -> bool:
    """Whether a launch compiles to a separate kernel: most splits of K share one."""
    if isinstance(config, GemmConfig):
        return config.split_k == 1
    return not isinstance(config, GemmSm90Config) or config.split_k <= 2


def compile_once(candidate: Candidate, shape: Shape, tokens: int) -> None:
    x = torch.randn(tokens, shape.k, device="cuda", dtype=torch.float16)
    call(candidate, x, layout_of(shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+", help="rows x columns, as 8192x8192")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--formats", nargs="+", help="formats and bits, as grid:2 codebook+s:3 mul1:2; by default all"
    )
    parser.add_argument("--log", type=Path, help="every time, as JSON")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new shapes after this long")
    args = parser.parse_args()
    if args.formats:
        formats = [(name, float(bits)) for name, bits in (text.split(":") for text in args.formats)]
    else:
        few = min(args.tokens) <= 16
        formats = FORMATS + TRELLIS_FORMATS + (SPARSE_FORMATS if few else [])
    device = torch.device("cuda", torch.cuda.current_device())
    jobs: list[tuple[Shape, int, list[Candidate]]] = []
    for n, k in (map(int, text.split("x")) for text in args.shapes):
        for tokens in args.tokens:
            for format, bits in formats:
                shape = Shape(format, bits, n, k, m_bucket(tokens))
                launches = [
                    Candidate(kernel, config)
                    for kernel in kernels_to_tune(layout_of(shape), tokens, device)
                    for config in candidates(kernel, shape, device)
                ]
                jobs.append((shape, tokens, launches))
    small = {
        (Candidate(kernel, compiled_config(config)), compiled_shape(config, shape), tokens)
        for shape, tokens, launches in jobs
        for kernel, config in launches
        if has_own_code(config)
    }
    compile_in_parallel(compile_once, sorted(small, key=repr), args.processes)
    if args.compile_only:
        return
    started, name = time.monotonic(), torch.cuda.get_device_name()
    table = read_table(args.out)
    best, log = table.setdefault(name, {}), []
    for shape, tokens, launches in jobs:
        if time.monotonic() - started > args.seconds:
            break
        found = times(layout_of(shape), tokens, launches)
        log += [
            shape._asdict() | {"m": tokens, "kernel": kernel} | asdict(config)
            | {"us": round(found[Candidate(kernel, config)], 3) if (kernel, config) in found else None}
            for kernel, config in launches
        ]  # fmt: skip
        if found:
            best[shape] = winners(found)
            fastest = min(found, key=found.__getitem__)
            print(f"{shape} {fastest}: {found[fastest]:.2f} us", flush=True)
        else:
            print(f"{shape}: none of {len(launches)} launches ran", flush=True)
        write_table(args.out, table)
        if args.log:
            args.log.write_text(json.dumps(log))


if __name__ == "__main__":
    main()
