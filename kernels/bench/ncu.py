"""Profile every kernel once with Nsight Compute, and convert its CSV output to JSON.

    ncu --profile-from-start off --clock-control none --section SpeedOfLight --section WarpStateStats \
        --section SchedulerStats --csv --page details python kernels/bench/ncu.py 8192x8192 --launches names.json > ncu.csv
    python kernels/bench/ncu.py --read ncu.csv --launches names.json --out eval/results/ncu-h200.json

ncu flushes the caches before each launch. `table.py` prints the JSON as a table.
"""

import argparse
import csv
import io
import json
from pathlib import Path

FORMATS = (
    ("grid", 2, 1), ("grid", 3, 1), ("grid", 4, 1), ("codebook", 3, 1), ("codebook", 4, 1), ("pair", 2, 1), ("mul1", 2, 1),
    ("grid", 2, 8), ("grid", 4, 8), ("mul1", 2, 8), ("grid", 3, 64), ("codebook", 3, 64), ("grid", 3, 256),
)  # fmt: skip
METRICS = {
    "dram_percent": "DRAM Throughput",
    "l2_percent": "L2 Cache Throughput",
    "issued_percent": "One or More Eligible",
    "cycles_an_instruction": "Warp Cycles Per Issued Instruction",
}
FIRST_KERNELS = (
    "gemv_kernel",
    "gemv_int8_mma_kernel",
    "gemv_fp16_mma_kernel",
    "permute_kernel",
)  # a multiplication of a scalar format starts with one of these kernels
# A trellis multiplication is one of these, usually between two Hadamard transforms.
TRELLIS_MATMULS = ("trellis_gemv_kernel", "trellis_gemm_sm90_kernel")
HADAMARD = ("hadamard_tile_kernel", "hadamard_batched_kernel", "hadamard_butterfly_kernel")


def launch(shapes: list[str], file: Path) -> None:
    """Warm every kernel up, then launch it once with the profiler on; `file` lists the multiplications in order."""
    import torch
    from requant_kernels import linear
    from requant_kernels.random_layouts import random_layout

    names = []
    for shape in shapes:
        n, k = map(int, shape.split("x"))
        for kind, bits, tokens in FORMATS:
            layout = random_layout(kind, bits, n, k)
            x = torch.randn(tokens, k, device="cuda", dtype=torch.float16)
            linear(x, layout)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            linear(x, layout)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            names.append(f"{shape} {kind} {bits} bits {tokens} tokens")
    about = {"device": torch.cuda.get_device_name(), "command": "kernels/bench/ncu.py"}
    file.write_text(json.dumps({"about": about, "launches": names}))


def read(found: Path, launches: Path, out: Path) -> None:
    """One row per kernel, in order, with the multiplication that it belongs to."""
    data = json.loads(launches.read_text())
    text, names, rows = found.read_text(), iter(data["launches"]), []
    lines = list(csv.DictReader(io.StringIO(text[text.index('"ID"') :])))
    name, trellis, multiplied = "", False, False
    for number in dict.fromkeys(line["ID"] for line in lines):
        own = {line["Metric Name"]: line for line in lines if line["ID"] == number}
        kernel = own["Duration"]["Kernel Name"].split("(")[0]
        if kernel in FIRST_KERNELS or (kernel in TRELLIS_MATMULS + HADAMARD and not trellis):
            name, trellis, multiplied = next(names), kernel not in FIRST_KERNELS, False
        multiplied |= kernel in TRELLIS_MATMULS
        trellis &= not (multiplied and kernel in HADAMARD)
        values = {key: float(own[metric]["Metric Value"].replace(",", "")) for key, metric in METRICS.items()}
        time = float(own["Duration"]["Metric Value"].replace(",", ""))
        microseconds = time * {"ns": 1e-3, "us": 1.0, "ms": 1e3}[own["Duration"]["Metric Unit"]]
        rows.append({"launch": name, "kernel": kernel, "us": microseconds, **values})
    if next(names, None) is not None:
        raise SystemExit(f"{found} holds fewer multiplications than {launches}")
    out.write_text(json.dumps({"about": data["about"], "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=["8192x8192"])
    parser.add_argument("--launches", type=Path, required=True, help="what was launched, in order")
    parser.add_argument("--read", type=Path, help="what ncu printed")
    parser.add_argument("--out", type=Path, default=Path("ncu.json"))
    args = parser.parse_args()
    if args.read:
        read(args.read, args.launches, args.out)
    else:
        launch(args.shapes, args.launches)


if __name__ == "__main__":
    main()
