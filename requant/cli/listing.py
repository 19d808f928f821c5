"""`requant recipes` and `requant methods`."""

import dataclasses
import json
from typing import Annotated

import typer

from requant.cli import options as opt
from requant.cli.common import table


def recipes(
    keys: Annotated[bool, typer.Option("--keys", help="List every key of a recipe instead.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """List the recipes that ship with requant. With --keys every key that a recipe may hold."""
    if keys:
        from requant.recipe.reference import recipe_keys

        known = [dataclasses.asdict(key) for key in recipe_keys()]
        print(json.dumps(known, indent=2) if as_json else table(known))
        return
    from requant.recipe.options import budget_name
    from requant.recipe.shipped import available_recipes
    from requant.recipe.yaml_files import load_recipe

    rows: list[dict[str, object]] = []
    for name in available_recipes():
        found = load_recipe(name)
        rows.append(
            {
                "recipe": name,
                "model": found.model,
                "mode": found.mode,
                "method": found.method,
                "bits": budget_name(found),
            }
        )
    print(json.dumps(rows, indent=2) if as_json else table(rows))


def methods(as_json: opt.AsJson = False) -> None:
    """List the methods: what each does, and the bits it takes. Also the statistics that it needs."""
    from requant.quantizers.registry import METHODS, PRUNING_METHODS

    rows = [
        {
            "method": name,
            "bits": f"{method.bits[0]:g} to {method.bits[-1]:g}",
            "calibration": ", ".join(sorted(method.needs)) or "none",
            "what it does": method.summary,
        }
        for name, method in METHODS.items()
    ]
    rows += [
        {
            "method": name,
            "bits": "2 to 8, 16",
            "calibration": ", ".join(sorted(method.needs)) or "none",
            "what it does": f"`requant sparsify`: {method.summary}",
        }
        for name, method in PRUNING_METHODS.items()
    ]
    print(json.dumps(rows, indent=2) if as_json else table(rows))
