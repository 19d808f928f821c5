"""Renders `eval/results/*.json` as the tables of README and `docs/`.

    python -m eval.tables          # rewrites the tables of README.md, recipes/README.md and docs/*.md

A table stands between `<!-- results:NAME -->` and `<!-- /results -->`; where its results do not exist yet it is empty.
A test keeps every page equal to what this would write.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.curve_tables import (
    best_ablation_table,
    bits_table,
    demo_ablation_table,
    own_codes_table,
    quality_table,
    trained_peers_table,
)
from eval.markdown import PEERS, RESULTS, ROOT, markdown, read
from eval.pareto import files_table
from eval.sparsity_tables import (
    pretraining_table,
    products_table,
    sparsity_ablation_table,
    sparsity_table,
)
from requant.recipe.reference import recipe_keys

PAGES = (ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- results:([a-z-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
PAPER_ERRORS = {"plain4": 1.68, "plain8": 0.82, "plain16": 0.38, "plain32": 0.16}  # its Table 3, % of dF
NODE_NAMES = {
    "midpoint": "midpoint",
    "gauss2": "Gauss 2 (default)",
    "gauss4": "Gauss 4",
    "simpson": "Simpson",
    "plain4": "plain 4",
    "plain8": "plain 8",
    "plain16": "plain 16",
    "plain32": "plain 32 (the paper's)",
}


def render(text: str, results: Path = RESULTS) -> str:
    """`text` with every block between markers made new."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise KeyError(f"a page asks for results:{name}; there are: {', '.join(TABLES)}.")
        table = TABLES[name](results)
        return match[1] + (table + "\n" if table else "") + match[3]

    return BLOCK.sub(fill, text)


def widths_of(results: Path, model: str) -> dict[str, Any]:
    """The tables of the paper by width, widest first."""
    found = read(results, f"paper_tables-{model}").get("bits", {})
    return {bits: found[bits] for bits in sorted(found, key=int, reverse=True)}


def demo_table(results: Path) -> str:
    """What the first command prints last."""
    rows = read(results, "demo").get("rows", [])
    return markdown(["", "before", "after"], [[row[""], row["before"], row["after"]] for row in rows])


def baselines_table(results: Path) -> str:
    """Ours by width, with the peers' figure for the same method; then the peers' best of the width."""
    found, peers = read(results, "baselines-bench-32m"), json.loads(PEERS.read_text(encoding="utf-8"))["rows"]
    comparable = [peer for peer in peers if peer["calibration"] == "wikitext-like.raw"]
    theirs = {(peer["bits"], peer["label"]): peer for peer in comparable}
    rows: list[list[str]] = []
    for width in dict.fromkeys(row["bits"] for row in found.get("rows", [])):
        for row in (row for row in found["rows"] if row["bits"] == width):
            peer = theirs.get((width, row["label"]))
            rows.append(
                [
                    row["label"],
                    f"{row['bits_per_weight']:.3f}",
                    f"{row['perplexity']:.2f}",
                    f"{row['kl']:.4f}",
                    f"{row['second']['kl']:.4f}",
                    "" if peer is None else f"{peer['perplexity']:.2f}",
                    "" if peer is None else f"{peer['kl']:.4f}",
                ]
            )
        best = min((peer for peer in comparable if peer["bits"] == width), key=lambda peer: peer["kl"])
        name = f"*{best['label']} (peer, {best['bits_per_weight']:.3f} bits)*"
        rows.append([name, "", "", "", "", f"{best['perplexity']:.2f}", f"{best['kl']:.4f}"])
    if not rows:
        return ""
    original = found["original"]
    rows.insert(0, ["original", "16", f"{original['perplexity']:.2f}", "0", "0", "24.35", "0"])
    columns = ["method", "bits", "perplexity", "KL", "KL on C4", "peer's perplexity", "peer's KL"]
    return markdown(columns, rows)


def gains_table(results: Path) -> str:
    """ReQuant beside SqueezeLLM's own choice of the same number of entries."""
    own = "SqueezeLLM 0.45%+0.05% sparse"
    ours = ("SqueezeLLM + ReQuant (pqi)", "SqueezeLLM + ReQuant (marginal)")
    rows = []
    for model in ("bench-32m", "demo-4m"):
        found = {
            (row["bits"], row["label"]): row for row in read(results, f"baselines-{model}").get("rows", [])
        }
        for bits in dict.fromkeys(bits for bits, label in found if label == ours[-1]):
            base = found[bits, own]
            cells = [f"{base['perplexity']:.2f} / {base['kl']:.4f}"]
            for row in (found[bits, label] for label in ours):
                change = 100 * (row["kl"] / base["kl"] - 1)
                cells.append(f"{row['perplexity']:.2f} / {row['kl']:.4f} ({change:+.1f} %)")
            rows.append([f"{model}, {bits} bits", *cells])
    columns = [
        "perplexity / KL at 0.50 % entries",
        "SqueezeLLM's own",
        "ReQuant, PQI",
        "ReQuant, marginal score",
    ]
    return markdown(columns, rows)


def predicted_table(results: Path) -> str:
    """The paper's Table 1, whole model, with the two scalings of the Hessian diagonal."""
    rows = []
    for model in ("bench-32m", "demo-4m"):
        for bits, tables in widths_of(results, model).items():
            if "predicted" not in tables:
                continue
            sums = tables["predicted"]["model"]
            exact = next(
                (row["half_dHd"] for row in tables.get("interpolation", []) if row["lambda"] == 1), None
            )
            names = ("gradient", "hessian_of_means", "hessian")
            rows.append(
                [
                    f"{model}, {bits} bits",
                    *(f"{sums[name]:.2g}" for name in names),
                    "" if exact is None else f"{exact:.4f}",
                    f"{sums['pqi']:.4f}",
                    f"{sums['measured']:.4f}",
                    f"{100 * (sums['pqi'] / sums['measured'] - 1):+.2f} %",
                ]
            )
    columns = [
        "k-means codes",
        "gradient",
        "Hessian diagonal, the paper's scaling",
        "Hessian diagonal by position",
        "1/2 d'Hd",
        "PQI, 2 nodes",
        "measured dF",
        "PQI's error",
    ]
    return markdown(columns, rows)


def embedding_table(results: Path) -> str:
    """KL with embedding and head alone quantized, by width."""
    found = {model: read(results, f"embedding-{model}").get("rows", []) for model in ("bench-32m", "demo-4m")}
    widths = [row["bits"] for row in found["bench-32m"]]
    rows = [
        [
            str(bits),
            *(cell for model in found for row in found[model] if row["bits"] == bits for cell in _costs(row)),
        ]
        for bits in widths
    ]
    columns = [
        "bits of a code",
        *(f"{model}: {what}" for model in found for what in ("real bits", "KL", "predicted")),
    ]
    return markdown(columns, rows) if rows else ""


def _costs(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['bits_per_weight']:.3f}", f"{row['kl']:.5f}", f"{row['predicted']:.5f}"]


def nodes_table(results: Path) -> str:
    """The paper's Table 3: error in % of the measured dF, by rule and width."""
    widths = widths_of(results, "bench-32m")
    tables = {bits: {row["nodes"]: row for row in t["nodes"]} for bits, t in widths.items() if "nodes" in t}
    if not tables:
        return ""
    first = next(iter(tables.values()))
    rows = [
        [
            label,
            str(first[name]["passes"]),
            *(f"{table[name]['error_percent']:+.3f}" for table in tables.values()),
            f"{PAPER_ERRORS[name]:+.2f}" if name in PAPER_ERRORS else "",
        ]
        for name, label in NODE_NAMES.items()
    ]
    return markdown(
        ["nodes", "backward passes", *(f"{bits} bits" for bits in tables), "paper (1B, 4 bits)"], rows
    )


def kinds_table(results: Path) -> str:
    """The paper's Table 4 at 3 bits."""
    table = widths_of(results, "bench-32m").get("3", {}).get("kinds", [])
    if not table:
        return ""
    kinds = [key for key in table[0] if key != "block"]
    rows = [[str(row["block"]), *(f"{row[kind]:.2e}" for kind in kinds)] for row in table]
    return markdown(["block", *(kind.removesuffix("_proj") for kind in kinds)], rows)


def shares_table(results: Path) -> str:
    """The paper's Table 5: share of the sum of |PQI| in the top weights."""
    widths = widths_of(results, "bench-32m")
    tables = {bits: t["shares"]["top"] for bits, t in widths.items() if "shares" in t}
    paper = {"0.15%": "4.53 %", "0.71%": "11.29 %", "5.25%": "34.06 %"}
    rows = [
        [share, *(f"{100 * table[share]:.1f} %" for table in tables.values()), paper.get(share, "")]
        for share in next(iter(tables.values()), {})
    ]
    return markdown(["top weights", *(f"{bits} bits" for bits in tables), "paper (1B, 4 bits)"], rows)


def ablation_table(results: Path) -> str:
    """The paper's Table 8: perplexity and KL by width."""
    widths = widths_of(results, "bench-32m")
    tables = {
        bits: {row["label"]: row for row in t["ablation"]} for bits, t in widths.items() if "ablation" in t
    }
    if not tables:
        return ""
    rows = []
    for label, row in max(tables.values(), key=len).items():
        cells = [row["outliers"], row["significant"]]
        for table in tables.values():
            other = table.get(label)
            cells.append("" if other is None else f"{other['perplexity']:.2f} / {other['kl']:.4f}")
        rows.append(cells)
    columns = [
        "outliers, 0.45 %",
        "significant, 0.05 %",
        *(f"{bits} bits: perplexity / KL" for bits in tables),
    ]
    return markdown(columns, rows)


def tasks_table(results: Path) -> str:
    """Accuracy by lm-eval, one column a model, with standard errors; in brackets the difference to the first, paired."""
    found = read(results, "tasks-bench-32m").get("rows", [])
    models = list(dict.fromkeys(row["model"] for row in found))
    cells = {
        (row["task"], row["metric"], row["model"]): row for row in found if row["metric"] != "perplexity"
    }
    rows = []
    for task, metric in dict.fromkeys((task, metric) for task, metric, _ in cells):
        values = [cells[task, metric, model] for model in models]
        rows.append([f"{task}, {metric}", *map(_accuracy, values)])
    return markdown([f"{found[0]['documents']} documents each" if found else "", *models], rows)


def _accuracy(row: Mapping[str, Any]) -> str:
    value = f"{row['value']:.3f} ± {row['stderr']:.3f}"
    if row.get("difference") is None:
        return value
    return f"{value} ({row['difference']:+.3f} ± {row['difference_stderr']:.3f})"


def speed_table(results: Path) -> str:
    """Targets beside what was measured."""
    rows: list[list[str]] = []
    cpu, gpu = read(results, "speed-cpu"), read(results, "speed-cuda")
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
            samples, steps = recipe["calibration"]["num_samples"], recipe["finetune"]["steps"]
            training = f"4 x {steps} steps" if steps else "codes without training"
            bits = f"{recipe['budget']['bits']:g}"
            what = f"bench-32m, {bits} bits, mode `best`, {samples} x 1024 tokens, {training}"
            rows.append([what, found["device"], _seconds(found[key]), _memory(found[key]), target])
    if "large_best" in gpu:
        found = gpu["large_best"]
        steps = (
            f"4 x {found['steps']} steps of {found['tokens_per_step']} tokens ({found['a step']:.2f} s each)"
        )
        what = f"1B shape, mode `best`, computed from the codes of a block, {steps} and the statistics"
        times = f"{_memory(found)}, {found['peak_in_bf16_models']:.1f} x the model"
        rows.append([what, gpu["device"], f"{found['whole run, computed']:.0f} s", times, "1200 s"])
    for shape, target in (("1b", "720 s, 24 GiB"), ("3b", ""), ("8b", "4500 s, 90 GiB"), ("70b", "")):
        for found in (row for key, row in gpu.items() if key.startswith(f"run_{shape}")):
            part = "" if found["blocks"] is None else f", its first {found['blocks']} blocks"
            steps = found["recipe"]["finetune"]["steps"]
            what = f"{shape.upper()} shape{part}, 2 bits, the whole `best` run, 4 x {steps} steps"
            machine = gpu["device"] if found["gpus"] == 1 else f"{found['gpus']} x {gpu['device']}"
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


def _predicted(found: Mapping[str, Any]) -> str:
    """Peak memory beside what the dry run says."""
    return f"{_memory(found)}, predicted {found['predicted_bytes'] / 2**30:.1f} GiB"


def decoding_table(results: Path) -> str:
    """Tokens a second of whole models, each beside bf16 by the same steps: a line for each shape and format."""
    lines: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for row in read(results, "end-to-end-h200").get("rows", []):
        if "failed" not in row:
            lines.setdefault((row["shape"], row["name"]), {})[row["batch"]] = row
    batches = sorted({batch for line in lines.values() for batch in line})

    def cell(row: Mapping[str, Any] | None, number: str) -> str:
        if row is None:
            return ""
        return f"{row[number]:,.0f}" + ("" if row["name"] == "bf16" else f" ({row[f'{number}_ratio']:.2f})")

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


def earlier_decoding_table(results: Path) -> str:
    """Decoding of whole models of random weights beside bf16 in the same setup."""
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


def _seconds(found: Mapping[str, Any]) -> str:
    return f"{found.get('wall_seconds', found.get('seconds')):.0f} s"


def _memory(found: Mapping[str, Any]) -> str:
    return f"{found['peak_bytes'] / 2**30:.1f} GiB"


def trellis_codes_table(results: Path) -> str:
    """Error of each code by width: on Gaussians, and on the rotated matrices of the model."""
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in read(results, "trellis-codes").get("rows", []):
        found.setdefault((row["code"], row["state_bits"]), {})[row["bits"]] = row
    return markdown(
        ["code", "bits of a state", "hashes a weight", "2 bits", "3 bits", "4 bits"],
        [
            [f"`{code}`", str(state_bits), f"{widths[2]['hashes_per_weight']:g}"]
            + [f"{widths[bits]['gaussian']:.3f} / {widths[bits]['model']:.3f}" for bits in (2, 3, 4)]
            for (code, state_bits), widths in found.items()
        ],
    )


def recipes_table(results: Path) -> str:
    """The recipes that ship with requant, as they were run."""
    rows = [
        [
            f"`{row['recipe']}`",
            f"{row['method']}, mode `{row['mode']}`",
            f"{row['bits_per_weight']:.3f}",
            f"{row['perplexity']['before']:.2f} to {row['perplexity']['after']:.2f}",
            f"{row['kl']:.4f}",
            f"{row['bytes']['after'] / 2**20:.1f} MiB",
            f"{row['seconds']:.0f} s",
            f"{row['peak_memory'] / 2**30:.1f} GiB",
        ]
        for row in read(results, "recipes").get("rows", [])
    ]
    return markdown(
        ["recipe", "method", "real bits", "perplexity", "KL", "weight files", "time", "memory"], rows
    )


def experts_step_table(results: Path) -> str:
    """The experts of one block, by kernel and tokens: microseconds, and how many times faster than the best of bf16."""
    found = read(results, "experts-step-h100").get("rows", [])
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


TABLES: dict[str, Callable[[Path], str]] = {
    "demo": demo_table,
    "baselines": baselines_table,
    "gains": gains_table,
    "predicted": predicted_table,
    "nodes": nodes_table,
    "kinds": kinds_table,
    "shares": shares_table,
    "ablation": ablation_table,
    "embedding": embedding_table,
    "files": files_table,
    "quality": quality_table,
    "trained-peers": trained_peers_table,
    "quality-demo": lambda results: own_codes_table(results, "demo-4m"),
    "quality-moe": lambda results: own_codes_table(results, "moe-31m"),
    "best-ablation": best_ablation_table,
    "demo-ablation": demo_ablation_table,
    "experts-step": experts_step_table,
    "recipes": recipes_table,
    "tasks": tasks_table,
    "widths": bits_table,
    "speed": speed_table,
    "decoding": decoding_table,
    "decoding-earlier": earlier_decoding_table,
    "sparsity-demo": lambda results: sparsity_table(results, "demo-4m"),
    "sparsity-bench": lambda results: sparsity_table(results, "bench-32m"),
    "sparsity-ablation": sparsity_ablation_table,
    "sparse-pretraining": pretraining_table,
    "sparse-products": products_table,
    "trellis-codes": trellis_codes_table,
}


def recipe_keys_table(_results: Path) -> str:
    """The keys of every recipe, from its classes."""
    columns = ["key", "takes", "default", "meaning"]
    rows = [key for key in recipe_keys() if key.method is None]
    return markdown(columns, [[f"`{k.key}`", k.takes, f"`{k.default}`", k.meaning] for k in rows])


def quantizer_keys_table(_results: Path) -> str:
    """The keys of `quantizer` by method, from the methods' own classes."""
    columns = ["method", "key", "takes", "default", "meaning"]
    rows = [key for key in recipe_keys() if key.method is not None]
    return markdown(
        columns, [[f"`{k.method}`", f"`{k.key}`", k.takes, f"`{k.default}`", k.meaning] for k in rows]
    )


REFERENCE = {"recipe-keys": recipe_keys_table, "quantizer-keys": quantizer_keys_table}  # read no results
TABLES |= REFERENCE


def main() -> None:
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
