"""The measured table of `kernels/README.md`, from the JSON of `run.py`, on standard output."""

import json
import sys
from pathlib import Path


def main() -> None:
    data = json.loads(Path(sys.argv[1]).read_text())
    rows = data["rows"]
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    about = data["about"]
    print(f"One {about['device']}, torch {about['torch']}, triton {about['triton']}; {about['method']}.")
    print("Cells: microseconds (ratio to the faster of fp16 and bf16 `F.linear` of the same run).\n")
    for m in dict.fromkeys(row["m"] for row in rows if "m" in row):
        here = {(row["kernel"], row["n"], row["k"]): row for row in rows if row.get("m") == m}
        print(f"\n{m} token{'s' if m > 1 else ''}\n")
        print("| kernel | bits/weight | " + " | ".join(f"{n}x{k}" for n, k in shapes) + " |")
        print("| --- | --- |" + " --- |" * len(shapes))
        for kernel in dict.fromkeys(row["kernel"] for row in rows):
            cells, bits = [], ""
            for n, k in shapes:
                row = here.get((kernel, n, k))
                if row is None:
                    cells.append("")
                elif "failed" in row:
                    cells.append("failed")
                else:
                    bits = bits or f"{row['bits_per_weight']:.2f}"
                    cells.append(f"{row['us']:.2f} ({row['ratio']:.2f})")
            if any(cells):
                print(f"| {kernel} | {bits} | " + " | ".join(cells) + " |")
    failed = {row["kernel"]: row["failed"] for row in rows if "failed" in row}
    for kernel, reason in failed.items():
        print(f"\nFailed: {kernel}: {reason}")


if __name__ == "__main__":
    main()
