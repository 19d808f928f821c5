"""Renders the tables of README and `docs/` from `eval/results/*.json`.

    python -m eval.tables          # rewrites the tables of README.md, recipes/README.md and docs/*.md

A table stands between `<!-- results:NAME -->` and `<!-- /results -->`, and is empty if its results do not exist yet. A test
checks that every page is what this would write.
"""

import re
from collections.abc import Callable
from pathlib import Path

from eval.baseline_tables import (
    baselines_table,
    embedding_table,
    gains_table,
    tasks_table,
    trellis_codes_table,
)
from eval.curve_tables import (
    best_ablation_table,
    bits_table,
    demo_ablation_table,
    own_codes_table,
    quality_table,
    trained_peers_table,
)
from eval.markdown import RESULTS, ROOT, markdown, read
from eval.pareto import files_table
from eval.pqi_tables import (
    ablation_table,
    kinds_table,
    nodes_table,
    predicted_table,
    shares_table,
)
from eval.sparsity_tables import (
    pretraining_table,
    products_table,
    sparsity_ablation_table,
    sparsity_table,
)
from eval.speed_tables import (
    decoding_table,
    earlier_decoding_table,
    experts_step_table,
    speed_table,
    vllm_table,
)
from requant.recipe.reference import recipe_keys

PAGES = (ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- results:([a-z-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def render(text: str, results: Path = RESULTS) -> str:
    """`text` with every block between markers rendered again."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise KeyError(f"a page asks for results:{name}; there are: {', '.join(TABLES)}.")
        table = TABLES[name](results)
        return match[1] + (table + "\n" if table else "") + match[3]

    return BLOCK.sub(fill, text)


def demo_table(results: Path) -> str:
    """The closing table of the README's first command, without paths."""
    rows = [row for row in read(results, "demo").get("rows", []) if row[""] not in ("checkpoint", "report")]
    return markdown(["", "before", "after"], [[row[""], row["before"], row["after"]] for row in rows])


def recipes_table(results: Path) -> str:
    """The recipes that ship with requant, with the results of running them."""
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


def recipe_keys_table(_results: Path) -> str:
    """The keys of every recipe, from the recipe's classes."""
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
    "decoding-mixture": lambda results: decoding_table(results, "end-to-end-30b-a3b-h200"),
    "vllm": vllm_table,
    "decoding-earlier": earlier_decoding_table,
    "sparsity-demo": lambda results: sparsity_table(results, "demo-4m"),
    "sparsity-bench": lambda results: sparsity_table(results, "bench-32m"),
    "sparsity-ablation": sparsity_ablation_table,
    "sparse-pretraining": pretraining_table,
    "sparse-products": products_table,
    "trellis-codes": trellis_codes_table,
}
REFERENCE = {"recipe-keys": recipe_keys_table, "quantizer-keys": quantizer_keys_table}  # do not read results
TABLES |= REFERENCE


def main() -> None:
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
