"""Prints the measured tables of `kernels/README.md`, from the JSON of `run.py` and of `eval/end_to_end.py`.

python kernels/bench/table.py eval/results/kernels-h200.json eval/results/end-to-end-h200.json
"""

import json
import sys
from pathlib import Path
from typing import Any

STARS = ("¹", "²", "³")


def kernels(data: dict[str, Any]) -> None:
    """Microseconds and ratios by shape, one table per number of tokens."""
    rows, about = data["rows"], data["about"]
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    print(f"One {about['device']}, torch {about['torch']}, triton {about['triton']}; {about['method']}.")
    if "runs" in about:
        print(f"Runs: {about['runs']}.")
    print("Cells: microseconds (ratio to the faster of fp16 and bf16 `F.linear` of the same run).")
    notes = list(dict.fromkeys(row["note"] for row in rows if "note" in row))
    for i, note in enumerate(notes):
        print(f"{STARS[i]} {note}.")

    def mark(row: dict[str, Any]) -> str:
        return STARS[notes.index(row["note"])] if "note" in row else ""

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
                    ratio = f" ({row['ratio']:.2f})" if "ratio" in row else ""  # torch is timed last
                    cells.append(f"{row['us']:.2f}{ratio}{mark(row)}")
            if any(cells):
                print(f"| {kernel} | {bits} | " + " | ".join(cells) + " |")
    failed = {row["kernel"]: row["failed"] for row in rows if "failed" in row}
    for kernel, reason in failed.items():
        print(f"\nFailed: {kernel}: {reason}")


def models(data: dict[str, Any]) -> None:
    """Tokens per second of whole models."""
    first = next(row for row in data["rows"] if "failed" not in row)
    print(
        f"\nWhole models, random weights of the shape, {first['prompt_tokens']} prompt tokens and {first['new_tokens']} "
        f"generated, one CUDA graph per step; {data['about']['device']}.\n"
    )
    if "runs" in data["about"]:
        print(f"Runs: {data['about']['runs']}.\n")
    print(
        "| shape | weights | sequences | step | tokens/s | speedup over bf16 | ms per step | prefill tokens/s | "
        "memory of weights |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in data["rows"]:
        if "failed" in row:
            print(
                f"| {row['shape']} | {row['name']} | {row['batch']} | failed: {row['failed'][:80]} | | | | | |"
            )
            continue
        # rows up to 2026-11-22 say `compiled`, `attention` and `times_bf16`
        step = "compiled" if row.get("compiled") else "fused" if row.get("fused") else "as it is"
        step += ", torch's attention" if row.get("attention") == "sdpa" else ""
        ratio = row.get("decode_tokens_per_s_ratio", row.get("times_bf16"))  # none where bf16 failed
        print(
            f"| {row['shape']} | {row['name']} | {row['batch']} | {step} | {row['decode_tokens_per_s']:.0f} | "
            f"{'' if ratio is None else f'{ratio:.2f}'} | {row['ms_per_step']:.3f} | {row['prefill_tokens_per_s']:.0f} | "
            f"{row['model_bytes'] / 1e9:.2f} GB |"
        )


def profiled(data: dict[str, Any]) -> None:
    """Measurements of single launches by Nsight Compute."""
    print("| launch | us | DRAM | issued | cycles per instruction and warp |")
    print("| --- | --- | --- | --- | --- |")
    for row in data["rows"]:
        print(
            f"| {row['launch']}: `{row['kernel']}` | {row['us']:.1f} | {row['dram_percent']:.0f} % | "
            f"{row['issued_percent']:.0f} % | {row['cycles_an_instruction']:.1f} |"
        )


def main() -> None:
    for name in sys.argv[1:]:
        data = json.loads(Path(name).read_text())
        first = data["rows"][0]
        (profiled if "launch" in first else kernels if "kernel" in first else models)(data)


if __name__ == "__main__":
    main()
