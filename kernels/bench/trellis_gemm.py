"""Launches of the trellis GEMM for Hopper, side by side, on the matrices of the 8B shape.

    python3 kernels/bench/trellis_gemm.py --out eval/results/trellis-gemm-h200.json

For every code, matrix and number of tokens: today's launch in float16, others, `pair` decoded as half sums, int8, torch in
bfloat16, and dequantizing for cuBLAS. `us` is the multiplication alone, `all_us` includes both rotations, the last of
which reduces split-K. Error: relative, of the product, against the dequantized matrix in float32. Times are microseconds,
from `common/timing.py`.

Processes compile all kernels at once. A child process measures, and is killed if it reports nothing for four seconds; a
launch that hangs is left out of all further rows.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from requant_kernels.common import compile_ahead
from requant_kernels.common.timing import cold_time, copies_needed
from requant_kernels.launch_config import Shape
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis import dequantize, gemm_int8, gemm_int8_launch, gemm_sm90, gemm_sm90_launch
from requant_kernels.trellis.layout import TrellisLayout, k64_per_unit
from requant_kernels.trellis.operands import RotatedActivations, sums_scale
from requant_kernels.trellis.rotate import rotate_input, rotate_output

MATRICES = {  # rows, columns, rows of the matrices that were joined
    "qkv": (6144, 4096, (4096, 1024, 1024)), "o": (4096, 4096, ()), "gate_up": (28672, 4096, (14336, 14336)),
    "down": (4096, 14336, ()),
}  # fmt: skip
TOKENS = (32, 64, 128, 256, 512, 1024, 4096)
CODES = {("mul1", 2): TOKENS, ("pair", 2): TOKENS, ("mul1", 3): TOKENS, ("mul1", 4): (64, 512)}
START, SILENCE, SMS = 15.0, 4.0, 132
HALF_SUM_TOKENS = gemm_sm90.HALF_SUM_TOKENS  # of the kernel, before rows change it


def candidates(m: int) -> dict[str, tuple[GemmSm90Config, int]]:
    """By name, warps x row tiles of each: a launch, and CTAs that fit on an SM."""
    tokens = min(m, 256)
    if tokens == 256:
        return {"8x1": (GemmSm90Config(tokens_per_cta=256, num_warps=8, prefetch_at=2), 1)}
    found = {"8x1": (GemmSm90Config(tokens_per_cta=tokens, num_warps=8), 2 if tokens <= 64 else 1)}
    if tokens == 64:
        found["4x2"] = GemmSm90Config(num_warps=4, tiles_per_warp=2), 2
    return found


def splits(config: GemmSm90Config, ctas_per_sm: int, n: int, k: int, m: int) -> list[int]:
    """Splits of K with which all CTAs run at once: the two largest, or one."""
    ctas = -(-n // (16 * config.num_warps * config.tiles_per_warp)) * -(-m // config.tokens_per_cta)
    k_tiles, most = k // 256, max(1, 8 * 4096 // max(4096, n & -n))
    effective = {-(-k_tiles // -(-k_tiles // s)) for s in range(1, min(most, k_tiles) + 1)}
    fitting = sorted(s for s in effective if s == 1 or ctas * s <= SMS * ctas_per_sm)
    return fitting[-2:]


def today(code: str, bits: float, n: int, k: int, m: int) -> GemmSm90Config:
    return gemm_sm90_launch.trellis_gemm_sm90(Shape(code, bits, n, k, m), torch.device("cpu"))


def random_layout(code: str, bits: int, n: int, k: int, parts: tuple[int, ...] = ()) -> TrellisLayout:
    """A layout of random bits, all of which are valid codes."""
    j = k64_per_unit(4 * bits)
    words = bits * j
    vector = words & -words if words < 4 else 4
    shape = (n // 16, k // (64 * j), words // vector, 32, vector)
    codes = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
    ones = torch.ones(max(n, k), device="cuda", dtype=torch.float16)
    return TrellisLayout(
        packed_codes=codes, input_scales=ones[:k], output_scales=ones[:n], n=n, k=k, bits=float(bits), code=code,
        parts=parts,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`config` None: dequantize for cuBLAS. `sums`: `pair` is decoded as half sums. `int8`: the product quantizes
    activations too."""

    name: str
    config: GemmSm90Config | None = None
    sums: bool = False
    int8: bool = False


only: set[str] = set()  # names of the launches that are timed, if any


def launches(matrix: str, code: str, bits: int, m: int) -> list[Launch]:
    """Everything timed for a matrix, a code and a number of tokens."""
    n, k, _ = MATRICES[matrix]
    now = today(code, bits, n, k, m)
    found = [Launch(name="dense")]
    if m <= gemm_sm90.MAX_TOKENS:
        found.append(Launch(name="now", config=now))
        for name, (config, ctas) in candidates(m).items():
            for split_k in splits(config, ctas, n, k, m):
                if (own := replace(config, split_k=split_k)) != now:
                    found.append(Launch(name=name, config=own))
    if code == "pair":
        found += [replace(launch, name=launch.name + " sums", sums=True) for launch in found if launch.config]
    if gemm_int8.suits(code, bits, n, k, m):
        config = gemm_int8_launch.trellis_gemm_int8(Shape(code, bits, n, k, m), torch.device("cpu"))
        sums = code == "pair" and m <= HALF_SUM_TOKENS
        found.append(Launch(name="int8", config=config, sums=sums, int8=True))
    return [launch for launch in found if not only or launch.name in only]


def num_splits(config: GemmSm90Config, k: int) -> int:
    k_tiles = k // 256
    return -(-k_tiles // -(-k_tiles // min(k_tiles, config.split_k)))


def jobs() -> list[tuple[Any, ...]]:
    """Every kernel once: those of products, and of the rotations that reduce their splits."""
    found: dict[tuple[Any, ...], None] = {}
    for (code, bits), tokens in CODES.items():
        found["dense", code, bits] = None
        for m in tokens:
            for matrix, (_, k, _) in MATRICES.items():
                for launch in launches(matrix, code, bits, m):
                    if launch.config is None:
                        found["rotate", matrix, m, 0] = None
                        continue
                    count = num_splits(launch.config, k)
                    config = replace(launch.config, split_k=min(count, 2))
                    found["product", code, bits, m, config, launch.sums, launch.int8] = None
                    found["input", k, m, launch.sums, launch.int8] = None
                    found["rotate", matrix, m, count] = None
    return list(found)


def compile_one(job: tuple[Any, ...]) -> str:
    """Compile one kernel into Triton's cache."""
    began = time.monotonic()
    compile_ahead._compiling = job[0] != "dense"
    try:
        if job[0] == "dense":
            dequantize.dequantize(random_layout(job[1], job[2], 256, 1024), asm=True)
        elif job[0] == "product":
            code, bits, m, config, sums, int8 = job[1:]
            gemm_sm90.HALF_SUM_TOKENS = m if sums else 0
            x = torch.zeros(m, 1024, device="cuda", dtype=torch.float16)
            kernel: Any = gemm_int8 if int8 else gemm_sm90
            kernel.product(
                RotatedActivations(values=x, scales=None), random_layout(code, bits, 256, 1024), config
            )
        elif job[0] == "input":
            k, m, sums, int8 = job[1:]
            gemm_sm90.HALF_SUM_TOKENS = m if sums else 0
            x = torch.empty(m, k, device="cuda", dtype=torch.float16)
            layout = random_layout("pair", 2, 256, k)
            given = rotated(x, layout)
            if int8:
                gemm_int8.quantize(given)
            rotate_input(x, layout, k, asm=True)
        else:
            matrix, m, count = job[1:]
            n, _, parts = MATRICES[matrix]
            shape = (count, m, n) if count else (m, n)
            product = torch.empty(shape, device="cuda", dtype=torch.float16)
            layout = random_layout("mul1", 2, n, 256, parts)
            rotate_output(
                product, torch.empty(m, 256, device="cuda", dtype=torch.float16), layout, None, asm=True
            )
    except Exception as error:  # of any kind: the row that needs the kernel meets it again
        return f"{job}: {type(error).__name__}: {str(error)[:300]}"
    finally:
        compile_ahead._compiling = False
    return f"{time.monotonic() - began:.1f} s"


def graph_time(calls: list[Callable[[], object]]) -> float:
    """Microseconds per call, with a cold L2."""
    return cold_time(calls, replays=3).median


def rotated(x: torch.Tensor, layout: TrellisLayout) -> RotatedActivations:
    """In the form of the GEMM for this many tokens."""
    if x.shape[0] <= gemm_sm90.MAX_TOKENS:
        return gemm_sm90.rotated_activations(x, layout)
    return RotatedActivations(values=rotate_input(x, layout, layout.k, asm=True), scales=None)


def total(product: torch.Tensor) -> torch.Tensor:
    """The sum over the splits."""
    return product.float().sum(0) * sums_scale(product) if product.dim() == 3 else product.float()


def measure(matrix: str, begin: int, without: set[str], say: Callable[[dict[str, Any]], None]) -> None:
    """All rows of a matrix from number `begin` on."""
    n, k, parts = MATRICES[matrix]
    number = 0
    torch.manual_seed(0)
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies_needed(2 * n * k))]
    activations = {m: torch.randn(m, k, device="cuda", dtype=torch.float16) for m in TOKENS}
    torch_us = {}
    for m in TOKENS:
        x = activations[m].bfloat16()
        torch_us[m] = graph_time([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in dense])
    del dense
    for (code, bits), tokens in CODES.items():
        layout = random_layout(code, bits, n, k, parts)
        layouts = [layout] + [
            replace(layout, packed_codes=layout.packed_codes.clone()) for _ in range(copies_needed(n * k * bits // 8) - 1)
        ]  # fmt: skip
        value = dequantize.dequantize(layout, asm=True)
        for m in tokens:
            x = activations[m]
            want = rotate_input(x, layout, k, asm=True).float() @ value.float().T
            about = {"matrix": matrix, "code": code, "bits": bits, "m": m, "torch_us": torch_us[m]}
            for launch in launches(matrix, code, bits, m):
                number += 1
                if number < begin or launch.name in without:
                    continue
                config: Any = launch.config
                gemm_sm90.HALF_SUM_TOKENS = m if launch.sums else 0
                row = about | {
                    "number": number,
                    "name": launch.name,
                    "config": asdict(config) if config else None,
                }
                say(row | {"us": None})
                try:
                    multiply: Any = gemm_int8.product if launch.int8 else gemm_sm90.product
                    whole: Any = gemm_int8.gemm_int8 if launch.int8 else gemm_sm90.gemm_sm90
                    given = rotated(x, layout)
                    if config is None:
                        multiply, whole = dequantize.product, dequantize.matmul
                        given = RotatedActivations(values=rotate_input(x, layout, k, asm=True), scales=None)
                    y, again = (total(multiply(given, layout, config)) for _ in range(2))
                    error, same = ((y - want).norm() / want.norm()).item(), torch.equal(y, again)
                    us = graph_time([partial(multiply, given, own, config) for own in layouts])
                    all_us = graph_time([partial(whole, x, own, None, config) for own in layouts])
                    say(row | {"us": us, "all_us": all_us, "error": error, "same": same})
                except Exception as failure:  # a launch may fail in any way; its row says how
                    say(row | {"us": None, "failure": f"{type(failure).__name__}: {str(failure)[:200]}"})
                    if "CUDA error" in str(failure):
                        os._exit(1)  # nothing works in this process any more


def child(matrix: str, begin: int, without: set[str], pipe: Any) -> None:
    measure(matrix, begin, without, pipe.send)
    pipe.send(None)
    pipe.close()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("trellis-gemm-h200.json"))
    parser.add_argument("--seconds", type=float, default=58)
    parser.add_argument("--only", nargs="*", default=[], help="names of launches: now, dense, int8, now sums")
    out, seconds, names = vars(parser.parse_args()).values()
    only.update(names)
    began = time.monotonic()
    fork = multiprocessing.get_context("fork")
    todo = jobs()
    with fork.Pool(min(16, os.cpu_count() or 1)) as pool:
        for said in pool.imap_unordered(compile_one, todo):
            if not said.endswith(" s"):
                print("not compiled:", said, flush=True)
    print(f"{len(todo)} kernels compiled, {time.monotonic() - began:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    hung: set[str] = set()  # names that are not retried
    for matrix in MATRICES:
        begin, ended = 1, False
        while not ended and time.monotonic() - began < seconds:
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=child, args=(matrix, begin, hung, theirs), daemon=True)
            process.start()
            theirs.close()
            waiting: dict[str, Any] | None = None
            while True:
                left = seconds - (time.monotonic() - began)
                try:
                    row = (
                        ours.recv()
                        if ours.poll(max(0.0, min(SILENCE if waiting else START, left)))
                        else waiting
                    )
                except EOFError:
                    row = waiting
                if row is None:  # the matrix is finished, or nothing was ever reported
                    ended = True
                    break
                if row is waiting:
                    print(
                        "hangs, or out of time:",
                        row["matrix"],
                        row["code"],
                        row["bits"],
                        row["m"],
                        row["name"],
                        flush=True,
                    )
                    begin = row["number"] + 1
                    hung.add(row["name"])
                    break
                if row["us"] is None and "failure" not in row:
                    waiting = row
                    continue
                rows.append(row)
                print_row(row)
            process.kill()
            process.join()
            out.write_text(json.dumps({"about": "one H200; us", "rows": rows}) + "\n")
    print(f"{len(rows)} rows, {time.monotonic() - began:.0f} s", flush=True)


def print_row(row: dict[str, Any]) -> None:
    config = row["config"] or {}
    measured = (
        f"{row['us']:7.1f} all {row['all_us']:7.1f} torch {row['torch_us']:6.1f} error {row['error']:.1e}"
        + ("" if row["same"] else " NOT THE SAME TWICE")
        if row["us"] is not None
        else row["failure"]
    )
    about = f"{row['matrix']:8}{row['code']}{row['bits']} m{row['m']:<4}{row['name']:10}"
    print(f"{about} split {config.get('split_k', '-'):<3}{measured}", flush=True)


if __name__ == "__main__":
    main()
