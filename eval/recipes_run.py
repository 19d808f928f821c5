"""Every recipe that ships with requant, run once as a user runs it: time, memory, bytes and quality.

    python -m eval.recipes_run [--only NAME ...] [--out FOLDER]

Writes `recipes.json`, one row per recipe, after each of them; the table in `recipes/README.md` is made from it. A recipe
that is not worth this run does not ship.
"""

import json
import subprocess
import sys
import tempfile
from typing import Annotated, Any

import torch
import typer

from eval import options as opt
from eval.common import environment, write_json
from eval.markdown import RESULTS, ROOT, read
from requant.models.devices import pick_device
from requant.recipe.shipped import available_recipes
from requant.recipe.yaml_files import load_recipe


def run(name: str) -> dict[str, Any]:
    """`requant quantize --recipe NAME` in a process of its own, so that the peak memory is its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "requant", "quantize", "--recipe", name, "--json", "--quiet"]
        done = subprocess.run(
            [*command, "--output", f"{folder}/out"], cwd=ROOT, capture_output=True, text=True
        )
    if done.returncode:
        raise typer.BadParameter(f"{name} failed: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout)
    recipe = load_recipe(name)
    return {
        "recipe": name,
        "model": recipe.model,
        "mode": recipe.mode,
        "method": recipe.method,
        "bits_per_weight": found["bits_per_weight"]["after"],
        "bytes": found["bytes"],
        "perplexity": found["perplexity"],
        "kl": found["mean_kl"],
        "seconds": found["seconds"],
        "peak_memory": found["peak_memory"],
        "scored_on": {key: found["scored_on"][key] for key in ("text", "windows", "context")},
        "environment": environment(torch.device(pick_device("auto"))),
    }


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a recipe, repeatable; all by default.")
    ] = None,
    out: opt.Out = RESULTS,
) -> None:
    known = list(available_recipes())
    if unknown := sorted(set(only or ()) - set(known)):
        raise typer.BadParameter(f"{unknown[0]} is not a recipe; there are: {', '.join(known)}.")
    rows = {row["recipe"]: row for row in read(out, "recipes").get("rows", []) if row["recipe"] in known}
    for name in only or known:
        rows[name] = run(name)
        write_json(out / "recipes.json", {"rows": [rows[each] for each in known if each in rows]})
        row = rows[name]
        print(
            f"{name:24s} {row['bits_per_weight']:.3f} bits  KL {row['kl']:.4f}  {row['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
