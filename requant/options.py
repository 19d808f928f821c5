"""Command-line options -> recipe: the recipe named, or the defaults of the method, and what the options override."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from requant.errors import RecipeError
from requant.quantizers import METHODS
from requant.recipe import (
    Calibration,
    Detach,
    Evaluation,
    Recipe,
    did_you_mean,
    from_dict,
    load_recipe,
    to_dict,
)

# The paper's r_o and r_s (Table 10), as fractions; methods it does not name get those of its scalar quantizer.
PAPER_DETACH = {
    "awq": Detach(outlier_fraction=0.0025, significant_fraction=0.0),
    "kmeans": Detach(outlier_fraction=0.0045, significant_fraction=0.0005),
    "trellis": Detach(outlier_fraction=0.0, significant_fraction=0.005),
}


def recipe_from_options(
    *,
    model: str | None,
    bits: str | None,
    recipe: str | None,
    method: str | None,
    mode: str | None,
    sensitivity: str | None,
    calibration: Sequence[str] | None,
    eval_text: Sequence[str] | None,
    num_samples: int | None,
    seq_len: int | None,
    skip: Sequence[str] | None,
    seed: int | None,
    nodes: str | None = None,
    tune: int | None = None,
) -> Recipe:
    """One checked recipe; options that are None leave what the recipe says."""
    if recipe is None and bits is None:
        raise RecipeError("say how many bits: --bits 2 to 8, or name a --recipe.")
    base = to_dict(default_recipe(model or "demo", method) if recipe is None else load_recipe(recipe))
    if method is not None and method != base["method"]:
        base |= {"method": method, "quantizer": {"bits": base["quantizer"]["bits"]}}
    if model is not None:
        base["model"] = model
    if bits is not None:
        base["quantizer"]["bits"] = whole_bits(bits)
    overrides: dict[str, dict[str, Any]] = {
        "calibration": {"text": calibration, "num_samples": num_samples, "seq_len": seq_len},
        "sensitivity": {"score": sensitivity, "nodes": nodes},
        "tuning": {"steps": tune},
        "evaluation": {"text": eval_text, "context": seq_len},
    }
    for section, values in overrides.items():
        base[section] |= {key: _plain(value) for key, value in values.items() if value is not None}
    for key, value in {"mode": mode, "skip": skip, "seed": seed}.items():
        if value is not None:
            base[key] = _plain(value)
    return from_dict(base, where="options")


def default_recipe(model: str, method: str | None) -> Recipe:
    """What `--bits` alone runs: the paper's settings of the method, sized to the demo model where that is it."""
    name = method or "kmeans"
    if name not in METHODS:
        raise RecipeError(
            f"method '{name}' is unknown{did_you_mean(name, METHODS)}; there are: {', '.join(METHODS)}."
        )
    recipe = Recipe(
        model=model, method=name, quantizer=METHODS[name].config(), detach=PAPER_DETACH.get(name, Detach())
    )
    if model != "demo":
        return recipe
    return dataclasses.replace(
        recipe,
        calibration=Calibration(num_samples=16, seq_len=512),
        evaluation=Evaluation(context=512, windows=32),
    )


def whole_bits(bits: str) -> int:
    """`--bits` as a whole number; a fraction needs the budget, which spends bits matrix by matrix."""
    try:
        value = float(bits)
    except ValueError:
        raise RecipeError(f"--bits {bits} is no number; give 2 to 8.") from None
    if not 2 <= value <= 8:  # so neither is NaN
        raise RecipeError(f"--bits {bits} is out of range; give 2 to 8.")
    if not value.is_integer():
        raise RecipeError(f"--bits {bits} is a fraction; this version takes whole bits, 2 to 8.")
    return int(value)


def output_folder(recipe: Recipe) -> Path:
    """`./MODEL-METHOD-BITSbit`."""
    path = Path(recipe.model).expanduser()
    name = path.resolve().name or "model" if path.is_dir() else path.name  # `.` and `..` have names too
    return Path(f"{name}-{recipe.method}-{recipe.quantizer.bits}bit")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
