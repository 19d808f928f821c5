"""Measure launch shapes and write the best as `measured.json` holds them (`requant_kernels.heuristics`).

    python kernels/bench/tune.py 8192x8192 4096x14336 --out kernels/requant_kernels/tuned/h200.json

Every candidate is compiled first, in parallel, then timed with cold caches in a CUDA graph, beside the rule's own choice.
The winner is stored; all times go to `--log`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from formats import compile_in_parallel, random_layout  # pyright: ignore[reportMissingImports]
from requant_kernels.autotune import Setting, call, candidates, times, width_of, winners, write_table
from requant_kernels.launch_config import MASKED, SHARES, STAGED
from requant_kernels.trellis import layout

FORMATS = [("grid", 2), ("grid", 3), ("grid", 4), ("codebook", 2), ("codebook", 3), ("codebook", 4)]
SPARSE = [("grid+s", 2), ("grid+s", 3), ("grid+s", 4), ("codebook+s", 3)]  # 1 % of residuals
CODES = [("mul1", 2), ("mul1", 2.25), ("mul1", 4), ("pair", 2)]


def layout_of(kind: str, bits: int, n: int, k: int) -> Any:
    """`+s` after a kind: with 1 % of residuals."""
    name, _, sparse = kind.partition("+")
    return random_layout(name, bits, n, k, 0.01 if sparse else 0.0)


def compiled_shape(kernel: str, n: int, k: int, setting: Setting) -> tuple[int, int]:
    """A shape, small where it may be, whose kernel is that of n x k: a few rows do, and columns of whole blocks are alike.

    Of the decode kernel, columns count where activations are in shared memory, and where warps do not share the blocks
    evenly.
    """
    if kernel == "trellis":
        return 512, k
    if kernel != "decode":
        return 512, 4096
    own_columns = setting[3] & MASKED != 0 or setting[3] & STAGED != 0 or k % (256 * setting[0]) != 0
    return 512, k if own_columns else 4096


def compiled_setting(kernel: str, setting: Setting) -> Setting:
    """The setting of the same code: what a launch takes beside it is no part of it."""
    return (*setting[:3], setting[3] & ~SHARES, *setting[4:]) if kernel in ("decode", "trellis") else setting


def own_kernel(kernel: str, setting: Setting) -> bool:
    """Whether a setting is compiled to a multiplication of its own: most splits are alike."""
    return setting[1] == 1 if kernel == "tall" else kernel != "hopper" or setting[4] <= 2


def compile_once(kernel: str, kind: str, bits: int, n: int, k: int, tokens: int, setting: Setting) -> None:
    x = torch.randn(tokens, k, device="cuda", dtype=torch.float16)
    call(kernel, x, layout_of(kind, bits, n, k), setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+", help="rows x columns, as 8192x8192")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--formats", nargs="+", help="kinds and bits, as grid:2 codebook+s:3 mul1:2; by default all"
    )
    parser.add_argument("--log", type=Path, help="every time, as JSON")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop starting new settings after this long"
    )
    args = parser.parse_args()
    shapes = [tuple(map(int, text.split("x"))) for text in args.shapes]
    many = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "tall"
    jobs, formats = [], {"decode": FORMATS + SPARSE, many: FORMATS, "trellis": CODES}
    if args.formats:
        chosen = {(kind, float(bits)) for kind, bits in (text.split(":") for text in args.formats)}
        formats = {kernel: [f for f in own if f in chosen] for kernel, own in formats.items()}
        formats["trellis"] = sorted(f for f in chosen if f[0] in layout.CODES)  # of any width
    for n, k in shapes:
        for tokens in args.tokens:
            kernels = ("decode", "trellis") if tokens <= 16 else (many,)
            for kernel in kernels:
                for kind, bits in formats[kernel]:
                    settings = candidates(kernel, kind, bits, n, k, width_of(kernel, tokens))
                    jobs.append((kernel, kind, bits, n, k, tokens, settings))
    small = {
        (
            kernel,
            kind,
            bits,
            *compiled_shape(kernel, n, k, setting),
            tokens,
            compiled_setting(kernel, setting),
        )
        for kernel, kind, bits, n, k, tokens, settings in jobs
        for setting in settings
        if own_kernel(kernel, setting)
    }
    compile_in_parallel(compile_once, sorted(small), args.processes)
    if args.compile_only:
        return
    started, name = time.monotonic(), torch.cuda.get_device_name()
    table = json.loads(args.out.read_text()) if args.out.exists() else {}
    best, log = table.setdefault(name, {}), []
    for kernel, kind, bits, n, k, tokens, settings in jobs:
        if time.monotonic() - started > args.seconds:
            break
        found = times(kernel, layout_of(kind, bits, n, k), tokens, settings)
        where = {"kernel": kernel, "kind": kind, "bits": bits, "n": n, "k": k, "m": tokens}
        log += [where | {"setting": s, "us": round(found[s], 3) if s in found else None} for s in settings]
        if found:
            winner = min(found, key=found.__getitem__)
            held = winners(kernel, kind, bits, n, k, width_of(kernel, tokens), found)
            best |= {name: list(setting) for name, setting in held.items()}
            print(f"{kernel} {kind} {bits} {n}x{k} {tokens}: {winner} {found[winner]:.2f} us", flush=True)
        write_table(args.out, table)
        if args.log:
            args.log.write_text(json.dumps(log))


if __name__ == "__main__":
    main()
