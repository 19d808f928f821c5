"""Command-line options -> recipe: the named recipe, or the defaults (`defaults.py`), overridden by the options given."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from requant.errors import RecipeError
from requant.quantizers.registry import METHODS
from requant.recipe.defaults import default_recipe
from requant.recipe.schema import Recipe
from requant.recipe.yaml_files import from_dict, load_recipe, to_dict

logger = logging.getLogger(__name__)

UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, letter in enumerate("kmg")
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
    size: str | None = None,
    head_bits: int | None = None,
    gpu: bool = False,
) -> Recipe:
    """One checked recipe; options that are None leave what the recipe says. `gpu`: whether the run will have one."""
    if recipe is None and bits is None and size is None:
        raise RecipeError("say how many bits: --bits 1 to 8, or --size, or name a --recipe.")
    if bits is not None and size is not None:
        raise RecipeError("--bits and --size are two budgets; give one of them.")
    base = to_dict(
        default_recipe(model or "demo", method, mode, gpu=gpu) if recipe is None else load_recipe(recipe)
    )
    if method is not None and method != base["method"]:
        base |= {"method": method, "quantizer": {"bits": base["quantizer"]["bits"]}}
    if model is not None:
        base["model"] = model
    if mode is not None:
        base["mode"] = mode
    if bits is not None:
        _set_bits(base, parse_bits(bits))
    if size is not None:
        base["budget"] |= {"bits": None, "size": parse_size(size)}
    overrides: dict[str, dict[str, Any]] = {
        "calibration": {"text": calibration, "num_samples": num_samples, "seq_len": seq_len},
        "sensitivity": {"score": sensitivity, "nodes": nodes},
        "finetune": {"steps": tune},
        "budget": {"head_bits": head_bits, "embedding_bits": head_bits},
        "evaluation": {"text": eval_text, "context": seq_len},
    }
    if sensitivity is not None and base["mode"] == "best":
        logger.warning(
            "--sensitivity ranks the sparse part, which mode best does not have; give --mode paper."
        )
    for section, values in overrides.items():
        base[section] |= {key: _plain(value) for key, value in values.items() if value is not None}
    for key, value in {"skip": skip, "seed": seed}.items():
        if value is not None:
            base[key] = _plain(value)
    return from_dict(base, where="options")


def parse_bits(bits: str) -> float:
    """`--bits` as a number from 1 to 8."""
    try:
        value = float(bits)
    except ValueError:
        raise RecipeError(f"--bits {bits} is no number; give 1 to 8, like 3 or 2.25.") from None
    if not 1 <= value <= 8:  # so neither is NaN
        raise RecipeError(f"--bits {bits} is out of range; give 1 to 8, like 3 or 2.25.")
    return value


def parse_size(size: str) -> int:
    """`--size` in bytes: a number with a unit of UNITS, or without."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size, re.IGNORECASE | re.ASCII)
    unit = UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise RecipeError(
            f"--size {size} is no size; give a number of bytes, or one with KB, MB, GB, KiB, MiB or GiB, like 600MB."
        )
    value = round(float(found[1]) * unit)
    if value < 1:
        raise RecipeError(
            f"--size {size} is nothing; give the bytes that the weight files may take, like 600MB."
        )
    return value


def _set_bits(base: dict[str, Any], bits: float) -> None:
    """A whole number is the width of every code; a fraction (in mode `best` any number) is a budget of all bytes."""
    is_budget = base["mode"] == "best" or not bits.is_integer()
    base["budget"] |= {"bits": bits if is_budget else None, "size": None}
    width = int(bits)
    if is_budget:  # the allocation decides; the config must still hold a width that the method takes
        taken = METHODS[base["method"]].bits
        width = min(max(round(bits), int(taken[0])), int(taken[-1]))
    base["quantizer"]["bits"] = width


def output_folder(recipe: Recipe) -> Path:
    """`./MODEL-METHOD-BITSbit`, or `./MODEL-METHOD-SIZE`."""
    path = Path(recipe.model).expanduser()
    name = path.resolve().name or "model" if path.is_dir() else path.name  # `.` and `..` have names too
    return Path(f"{name}-{recipe.method}-{budget_name(recipe)}")


def budget_name(recipe: Recipe) -> str:
    """What was asked for, short: 2.25bit, 600MB."""
    budget = recipe.budget
    if budget.size is None:
        return f"{recipe.quantizer.bits if budget.bits is None else budget.bits:g}bit"
    unit = next(name for name in ("GB", "MB", "KB", "B") if budget.size >= UNITS[name.lower()])
    return f"{budget.size / UNITS[unit.lower()]:.6g}{unit}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
