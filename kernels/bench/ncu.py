"""One launch of every kernel between the profiler's start and stop, for Nsight Compute.

    ncu --profile-from-start off --clock-control none --section SpeedOfLight --section WarpStateStats \
        --section SchedulerStats --csv --page details python kernels/bench/ncu.py 8192x8192 --out FILE > ncu.csv
    python kernels/bench/ncu.py --read ncu.csv

`--read` prints a line a kernel: microseconds, percent of DRAM and of issue slots, and what warps wait for most. Caches are
cold, as ncu flushes them.
"""

import argparse
import csv
import io
from pathlib import Path

FORMATS = (
    ("grid", 2, 1), ("grid", 3, 1), ("grid", 4, 1), ("codebook", 3, 1), ("codebook", 4, 1), ("pair", 2, 1), ("mul1", 2, 1),
    ("mul1", 2, 8), ("grid", 3, 64), ("codebook", 3, 64), ("grid", 3, 256),
)  # fmt: skip
METRICS = {
    "Duration": "us",
    "DRAM Throughput": "DRAM %",
    "L2 Cache Throughput": "L2 %",
    "Issue Slots Busy": "issue %",
    "One or More Eligible": "eligible %",
    "Warp Cycles Per Issued Instruction": "cycles an instruction",
}


def launch(shapes: list[str], names: Path) -> None:
    """Warm every kernel up, then launch it once inside the profiler's window; the order goes to `names`."""
    import torch
    from formats import random_layout  # pyright: ignore[reportMissingImports]
    from requant_kernels import linear

    lines = []
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
            lines.append(f"{shape} {kind} {bits} bits {tokens} tokens")
    names.write_text("\n".join(lines))


def read(file: Path) -> None:
    """A line a launch, in order."""
    text = file.read_text()
    rows = list(csv.DictReader(io.StringIO(text[text.index('"ID"') :])))
    for number in dict.fromkeys(row["ID"] for row in rows):
        own = [row for row in rows if row["ID"] == number]
        cells = [own[0]["Kernel Name"][:40]]
        for metric, unit in METRICS.items():
            found = [row for row in own if row["Metric Name"] == metric]
            if found:
                cells.append(
                    f"{unit} {found[0]['Metric Value']}{' ' + found[0]['Metric Unit'] if unit == 'us' else ''}"
                )
        reasons = [row["Rule Description"] for row in own if row.get("Rule Name") == "CPIStall"]
        print("; ".join(cells + [reason[:160] for reason in reasons[:1]]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=["8192x8192"])
    parser.add_argument("--out", type=Path, default=Path("launches.txt"), help="what was launched, in order")
    parser.add_argument("--read", type=Path, help="print what ncu found")
    args = parser.parse_args()
    read(args.read) if args.read else launch(args.shapes, args.out)


if __name__ == "__main__":
    main()
