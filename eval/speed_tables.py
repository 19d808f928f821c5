"""Tables of time and memory: runs and their targets, tokens per second of whole models, experts of one block."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.markdown import markdown, read


def speed_table(results: Path) -> str:
    """What was measured, next to the targets."""
    rows: list[list[str]] = []
    cpu, gpu, h100, scaling = (
        read(results, name) for name in ("speed-cpu", "speed-cuda", "speed-1b-h100", "scaling-h100")
    )
    for found, target in ((cpu, "480 s"), (gpu, "60 s")):
        if "run" in found:
            samples = found["run"]["recipe"]["calibration"]["num_samples"]
            what = f"bench-32m, 3 bits, k-means, `paper`, {samples} x 1024 tokens"
            rows.append([what, found["device"], _seconds(found["run"]), _memory(found["run"]), target])
    if "nodes" in gpu:
        ratio = gpu["nodes"]["plain32"]["seconds"] / gpu["nodes"]["gauss2"]["seconds"]
        what = "the same model, PQI: 2 Gauss nodes against 32 plain ones"
        rows.append([what, gpu["device"], f"{ratio:.1f} times cheaper", "", "12 times"])
    for key, what, target in (
        ("large_pqi", "1B shape, PQI over 128 x 2048 tokens", "30 s"),
        ("large_run", "1B shape, the whole `paper` run", "300 s"),
    ):
        if key in gpu:
            found = gpu[key].get("gauss2", gpu[key])
            times = f"{_memory(found)}, {found['peak_in_bf16_models']:.1f} x the model"
            rows.append([what, gpu["device"], _seconds(found), times, target])
    for found, target in ((gpu, "180 s"), (cpu, "1800 s")):
        for key in sorted(key for key in found if key.startswith("best_run")):
            recipe = found[key]["recipe"]
            samples, settings = recipe["calibration"]["num_samples"], recipe["finetune"]
            steps = found[key].get(
                "steps", settings["steps"]
            )  # the recipe may leave this to the model's size
            training = _phases(settings, steps) if steps else "codes without training"
            bits = f"{recipe['budget']['bits']:g}"
            what = f"bench-32m, {bits} bits, mode `best`, {samples} x 1024 tokens, {training}"
            rows.append([what, found["device"], _seconds(found[key]), _memory(found[key]), target])
    if "large_best" in gpu:
        found = gpu["large_best"]
        what = f"1B shape, a step of `best` of {found['tokens_per_step']} tokens"
        memory = f"{_memory(found)}, {found['peak_in_bf16_models']:.1f} x the model"
        rows.append([what, gpu["device"], f"{found['a step']:.2f} s", memory, ""])
    for shape, target in (("1b", "720 s, 24 GiB"), ("3b", ""), ("8b", "4500 s, 90 GiB"), ("70b", "")):
        runs = [
            (row, str((rows_of.get("about") or rows_of)["device"]))
            for rows_of in (gpu, h100, scaling)
            for key, row in rows_of.items()
            if key.startswith(f"run_{shape}")
        ]
        for found, device in runs:
            part = "" if found.get("blocks") is None else f", its first {found['blocks']} blocks"
            if found.get("share", 1) > 1:
                part = f", an equal part of {found['share']}"
            phases = _phases(found["recipe"]["finetune"], found["steps"])
            what = f"{shape.upper()} shape{part}, 2 bits, the whole `best` run, {phases}"
            machine = device if found["gpus"] == 1 else f"{found['gpus']} x {device}"
            aim = "" if part or found["gpus"] > 1 else target
            rows.append([what, machine, _seconds(found), _predicted(found), aim])
        if (key := f"parts_{shape}") in gpu:
            found = gpu[key]
            eager = "" if found["compiled"] else ", not compiled"
            what = (
                f"{shape.upper()} shape, 2 bits, a step of `best` in its fullest phase{eager}; no whole run"
            )
            rows.append([what, gpu["device"], f"{found['a step']:.2f} s", _predicted(found), "90 GiB"])
    return markdown(["what", "machine", "measured", "peak memory", "target"], rows)


def _phases(finetune: Mapping[str, Any], steps: int) -> str:
    """Training phases and steps as text; rows older than `rounds` had four phases."""
    return f"{finetune.get('rounds', 4)} x {steps} steps"


def decoding_table(results: Path, name: str = "end-to-end-h200") -> str:
    """Tokens per second of whole models and the ratio to bf16 with the same steps: one line per shape and format."""
    lines: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for row in read(results, name).get("rows", []):
        if "failed" not in row:
            lines.setdefault((row["shape"], row["name"]), {})[row["batch"]] = row
    batches = sorted({batch for line in lines.values() for batch in line})

    def cell(row: Mapping[str, Any] | None, number: str) -> str:
        if row is None or number not in row:
            return ""
        ratio = None if row["name"] == "bf16" else row.get(f"{number}_ratio")  # none where bf16 failed
        return f"{row[number]:,.0f}" + ("" if ratio is None else f" ({ratio:.2f})")

    def cells(line: Mapping[int, Mapping[str, Any]], number: str, batches: Sequence[int]) -> list[str]:
        return [cell(line.get(batch), number) for batch in batches]

    rows = [
        [
            shape,
            name.removesuffix(", widths of mode best"),
            *cells(line, "decode_tokens_per_s", batches),
            *cells(line, "prefill_tokens_per_s", batches[:2]),
        ]
        for (shape, name), line in lines.items()
    ]
    columns = ["shape", "weights", *(f"{batch} at once" for batch in batches)]
    columns += [f"prefill of {batch} x 512" for batch in batches[:2]]
    return markdown(columns, rows)


VLLMS_OWN = {"bf16": "bf16", "gptq:4": "vLLM's int4 (GPTQ, groups of 128)"}


def vllm_table(results: Path) -> str:
    """Tokens per second in vLLM's engine and the ratio to its bf16, one line per format and way to run the engine."""
    lines: dict[tuple[bool, str], dict[int, float]] = {}
    for row in read(results, "vllm-h200").get("rows", []):
        if "decode_tokens_per_s" in row:
            name = VLLMS_OWN.get(row["name"]) or row["name"].replace(":", " ") + "-bit"
            if row["fused_layers"] is False and row["name"] not in VLLMS_OWN:
                name += ", `REQUANT_VLLM_FUSE=0`"
            lines.setdefault((row["served"], name), {})[row["batch"]] = row["decode_tokens_per_s"]
    batches = sorted({batch for line in lines.values() for batch in line})

    def cell(served: bool, batch: int, speed: float) -> str:
        return f"{speed:,.0f} ({speed / lines[served, 'bf16'][batch]:.2f})"

    rows = [
        [
            name if served else f"{name}, no torch.compile",
            *(cell(served, batch, line[batch]) for batch in batches),
        ]
        for (served, name), line in sorted(lines.items(), key=lambda item: not item[0][0])
    ]
    return markdown(["8B shape in vLLM", *(f"{batch} at once" for batch in batches)], rows) if rows else ""


def earlier_decoding_table(results: Path) -> str:
    """Decoding of whole models with random weights, next to bf16 in the same setup."""
    found = [
        row
        for name in ("attention-h200", "end-to-end-compiled-h200")
        for row in read(results, name).get("rows", [])
    ]
    rows = [
        [
            row["shape"],
            row["name"],
            str(row["batch"]),
            "torch.compile" if row["compiled"] else "",
            "requant's" if row["attention"] == "kernel" else "torch's",
            f"{row['decode_tokens_per_s'] / row['times_bf16']:.0f}",
            f"{row['decode_tokens_per_s']:.0f}",
            f"{row['times_bf16']:.2f}",
        ]
        for row in found
        if "failed" not in row and row["name"] != "bf16"
    ]
    columns = [
        "shape",
        "weights",
        "sequences",
        "compiled",
        "attention",
        "bf16, tokens/s",
        "requant, tokens/s",
        "ratio",
    ]
    return markdown(columns, rows)


def experts_step_table(results: Path) -> str:
    """The experts of one block by kernel and number of tokens: microseconds, and the speed-up over the best of bf16."""
    found = read(results, "experts-step-h200").get("rows", [])
    tokens = sorted({row["m"] for row in found})
    cells = {
        (row["kernel"], row["bits"], row["m"]): f"{row['us']:.1f} ({row['ratio']:.2f} x)" for row in found
    }
    kinds = dict.fromkeys((row["kernel"], row["bits"]) for row in found)
    rows = [
        [
            kernel if bits == 16 else f"trellis `{kernel}`, {bits:g} bits",
            *(cells.get((kernel, bits, m), "") for m in tokens),
        ]
        for kernel, bits in kinds
    ]
    return markdown(["", *(f"{m} token{'s' * (m > 1)}" for m in tokens)], rows)


def _predicted(found: Mapping[str, Any]) -> str:
    """Peak memory, with the dry run's prediction."""
    return f"{_memory(found)}, predicted {found['predicted_bytes'] / 2**30:.1f} GiB"


def _seconds(found: Mapping[str, Any]) -> str:
    return f"{found.get('wall_seconds', found.get('seconds')):.0f} s"


def _memory(found: Mapping[str, Any]) -> str:
    return f"{found['peak_bytes'] / 2**30:.1f} GiB"
