"""Options -> recipe: the named recipe, or the defaults (`defaults.py`), overridden by the options given.

The command line (`requant/cli/options.py`) and the Python calls (`requant.quantize`, `requant.score`) take the same
options, those of `Options`; `KEYS` says which keys of the recipe each of them sets.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_args

import yaml

from requant.errors import RecipeError, did_you_mean, first_line
from requant.files import parse_yaml
from requant.models.aliases import ALIASES
from requant.quantizers.registry import METHODS, PRUNING_METHODS
from requant.recipe.defaults import RECOVERY_STEPS, default_recipe, default_sparsify_recipe, trellis_code
from requant.recipe.readers import check_reader, settings_for
from requant.recipe.schema import Mode, Recipe
from requant.recipe.shipped import available_recipes
from requant.recipe.sizes import UNITS, bits_name, parse_bits, parse_size
from requant.recipe.unused import warn_of_unused
from requant.recipe.yaml_files import from_dict, load_recipe, to_dict


class Options(TypedDict, total=False):
    """What may be said beside a recipe; None, or nothing, leaves what the recipe says."""

    bits: int | float | str | None  # a weight, everything stored for the matrices counted
    code_bits: int | float | str | None  # of every code
    size: int | str | None  # bytes of the weight files: 600_000_000, "600MB"
    target: str | None  # --for: a program that must read the export of the result (`readers.py`)
    method: str | None
    mode: str | None
    group_size: int | None
    symmetric: bool | None
    code: str | None  # of `trellis`
    head_bits: int | float | None
    rotations: str | None
    finetune_steps: int | None
    own_windows: int | None
    sensitivity: str | None
    nodes: str | None
    calibration: str | Path | Sequence[str | Path] | None
    eval_text: str | Path | Sequence[str | Path] | None
    num_samples: int | None
    seq_len: int | None
    all_experts: bool | None
    skip: str | Sequence[str] | None
    modules: Mapping[str, Mapping[str, Any]] | Sequence[str] | None  # the recipe's, or as `--module` has them
    seed: int | None
    deterministic: bool | None


KEYS: dict[str, tuple[str, ...]] = {  # option -> the keys of the recipe that it sets
    "group_size": ("quantizer.group_size",),
    "symmetric": ("quantizer.symmetric",),
    "code": ("quantizer.code",),
    "head_bits": ("budget.head_bits", "budget.embedding_bits"),
    "rotations": ("rotations",),
    "finetune_steps": ("finetune.steps",),
    "own_windows": ("finetune.own_windows",),
    "sensitivity": ("sensitivity.score",),
    "nodes": ("sensitivity.nodes",),
    "calibration": ("calibration.text",),
    "eval_text": ("evaluation.text",),
    "num_samples": ("calibration.num_samples",),
    "seq_len": ("calibration.seq_len", "evaluation.context"),
    "all_experts": ("calibration.all_experts",),
    "skip": ("skip",),
    "modules": ("modules",),
    "seed": ("seed",),
    "deterministic": ("deterministic",),
}
SIZES = ("bits", "code_bits", "size")  # options that exclude one another


def recipe_from_options(
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    *,
    model: str | None = None,
    gpu: bool = False,
    **options: Any,
) -> Recipe:
    """One checked recipe.

    Args:
        recipe: the base: a recipe, its plain data as YAML holds it, a YAML file, or the name of one that ships with
            requant; None: the defaults of the model, the machine, mode and method, for which bits or a size must be given.
        model: None leaves the recipe's own.
        gpu: whether the run will have one.
        options: those of `Options`.

    Raises RecipeError.
    """
    given = {name: value for name, value in options.items() if value is not None}
    _check_names(given, model)
    program = given.pop("target", None)
    if program is not None:
        given = settings_for(program, given)
    if "bits" in given:
        given["bits"] = parse_bits(given["bits"])
    base = _choose_base(recipe, given, model=model, gpu=gpu)
    _check_prunes(base, given, f"recipe {recipe}" if isinstance(recipe, str | Path) else "the recipe")
    if "method" in given:
        _replace_method(base, given["method"])
    if "mode" in given:
        if base["mode"] == "sparse" != given["mode"]:
            base["recovery"] = {}
        base["mode"] = given["mode"]
    if model is not None:
        base["model"] = model
    bits = _replace_size(base, given)
    if recipe is None and base["method"] == "trellis":
        base["quantizer"]["code"] = trellis_code(bits)
    _apply_others(base, given)
    chosen = from_dict(base, where="options")
    _check_own_windows(chosen)
    warn_of_unused(chosen, given)
    if program is not None:
        check_reader(program, chosen)
    return chosen


def sparsify_recipe(
    recipe: str | None = None,
    *,
    model: str | None = None,
    gpu: bool = False,
    pattern: str = "2:4",
    method: str | None = None,
    recover: str | None = None,
    bits: int | None = None,
    **options: Any,
) -> Recipe:
    """One checked recipe of mode `sparse`: the named one, or the defaults of `requant sparsify`, and the options given.

    `recover` and `bits` are `recovery.method` and the bits of a kept weight; `options` are those of `Options`. Raises
    RecipeError.
    """
    if pattern != "2:4":
        raise RecipeError(f"--pattern {pattern} is not supported: GPUs multiply 2:4 matrices only; give 2:4.")
    if recipe is None:
        steps = RECOVERY_STEPS if gpu or recover is not None else 0
        base = to_dict(default_sparsify_recipe(model or "demo", method, steps=steps))
    else:
        base = to_dict(load_recipe(recipe))
        if base["mode"] != "sparse":
            raise RecipeError(f"recipe {recipe} has mode {base['mode']}, not sparse: run `requant quantize`.")
        if method is not None and method != base["method"]:
            base |= {"method": method, "quantizer": {"bits": base["quantizer"]["bits"]}}
    if bits is not None:
        base["quantizer"]["bits"] = bits
    if recover is not None:
        base["recovery"]["method"] = recover
    steps = options.get("finetune_steps")
    if recover not in (None, "fixed") and (base["finetune"]["steps"] if steps is None else steps) == 0:
        raise RecipeError(
            f"--recover {recover} changes nothing without training; leave it out, or give --finetune-steps 1 or more."
        )
    return recipe_from_options(base, model=model, **options)


def _check_names(given: Mapping[str, Any], model: str | None) -> None:
    """Raise RecipeError for an unknown option, a method or mode that is no text, and a recipe in the place of the model."""
    for name in given:
        if name not in Options.__annotations__:
            raise RecipeError(
                f"there is no option '{name}'{did_you_mean(name, Options.__annotations__)}; "
                f"there are: {', '.join(Options.__annotations__)}."
            )
    for name, example in (("method", "gptq"), ("mode", "best")):
        if not isinstance(value := given.get(name, example), str):
            raise RecipeError(f"{name} is {value!r}, but takes a name, like {example}.")
    if model is not None and _names_a_recipe(model):
        raise RecipeError(
            f"'{model}' is a recipe and no model; give it as --recipe {model}, in Python recipe='{model}'."
        )


def _names_a_recipe(model: str) -> bool:
    """Whether what was given as a model is a YAML file or a recipe that ships with requant; a folder is a model."""
    if os.path.isdir(os.path.expanduser(model)) or model in ("demo", *ALIASES):
        return False
    return model.endswith((".yaml", ".yml")) or model in available_recipes()


def _choose_base(
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    given: Mapping[str, Any],
    *,
    model: str | None,
    gpu: bool,
) -> dict[str, Any]:
    """The plain data of the recipe, or of the defaults for which bits or a size are given."""
    sizes = [name for name in SIZES if name in given]
    if recipe is not None:
        base = _as_recipe(recipe)
    elif sizes:
        base = default_recipe(model or "demo", given.get("method"), given.get("mode"), gpu=gpu)
    else:
        raise RecipeError("say how many bits: --bits 1 to 8, or --size, or name a --recipe.")
    data = to_dict(base)
    if len(sizes) > 1:
        raise RecipeError("--bits, --code-bits and --size exclude one another; give one of them.")
    return data


def _as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | Path):
        return load_recipe(recipe)
    for key in recipe if isinstance(recipe, Mapping) else ():
        if key in Options.__annotations__ and key not in Recipe.__dataclass_fields__:
            raise RecipeError(
                f"'{key}' is an option and no key of a recipe; give it as {key}=... beside the recipe."
            )
    return from_dict(dict(recipe) if isinstance(recipe, Mapping) else recipe)


def _check_prunes(base: Mapping[str, Any], given: Mapping[str, Any], name: str) -> None:
    """Raise RecipeError where the mode or method that is given prunes to 2:4 and the other one, which may be the recipe's,
    does not. Names that are unknown are refused later."""
    mode, method = given.get("mode", base["mode"]), given.get("method", base["method"])
    prunes = mode == "sparse"
    if mode not in get_args(Mode) or method not in (METHODS if prunes else PRUNING_METHODS):
        return
    fitting = ", ".join(PRUNING_METHODS if prunes else METHODS)
    if mode != base["mode"]:
        instead = "leave --mode out" if prunes else "run `requant sparsify`"
        problem = f"and method {method} does not go with mode {mode}"
        remedy = f"{instead}, or choose --method too, from {fitting}"
    else:
        modes = "best, paper or dense" if prunes else "sparse"
        problem = f"which does not go with method {method}"
        remedy = f"choose --method from {fitting}, or give --mode {modes} too"
    raise RecipeError(f"{name} has mode {base['mode']}, {problem}; {remedy}.")


def _replace_method(base: dict[str, Any], method: str) -> None:
    """Another method comes with its own settings; the bits of a code stay, unless a budget decides them."""
    if method != base["method"]:
        budget = base["budget"]["bits"] or base["budget"]["size"]
        base |= {"method": method, "quantizer": {} if budget else {"bits": base["quantizer"]["bits"]}}


def _replace_size(base: dict[str, Any], given: Mapping[str, Any]) -> float | None:
    """Whichever of `SIZES` is given replaces the recipe's; returns the bits given, of a weight or of a code, if any."""
    bits = given.get("bits")
    if any(name in given for name in SIZES):
        size = parse_size(given["size"]) if "size" in given else None
        base["budget"] |= {"bits": bits, "size": size}
    if "code_bits" in given:
        bits = parse_bits(given["code_bits"], option="--code-bits")
        base["quantizer"]["bits"] = int(bits) if bits.is_integer() else bits
    return bits


def _apply_others(base: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Set the keys of the options in `KEYS`."""
    if "modules" in given and not isinstance(given["modules"], Mapping):
        given = {**given, "modules": parse_modules(given["modules"])}
    for name, value in given.items():
        for key in KEYS.get(name, ()):
            _set(base, key, _plain(value), option=name)


def _set(base: dict[str, Any], key: str, value: Any, *, option: str) -> None:
    """Set a dotted key of a recipe's plain data."""
    section, _, name = key.rpartition(".")
    if section == "quantizer":
        known = METHODS if base["method"] in METHODS else PRUNING_METHODS
        takers = [name for name, method in known.items() if option in method.config.__dataclass_fields__]
        if base["method"] not in takers:
            raise RecipeError(
                f"--{option.replace('_', '-')} has no meaning for method '{base['method']}'; "
                f"choose one of: {', '.join(takers)}."
            )
    (base[section] if section else base)[name] = value


def _check_own_windows(chosen: Recipe) -> None:
    """Raise RecipeError for own windows where nothing is trained."""
    if chosen.finetune.own_windows and not chosen.finetune.trains:
        raise RecipeError(
            f"--own-windows {chosen.finetune.own_windows} are to train on, and this run does not train; leave it out, or "
            "give --finetune-steps."
        )


def parse_modules(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--module` as the recipe's `modules`: `*.down_proj:bits=4,group_size=64`, any number of them."""
    if isinstance(given, str) or not (
        isinstance(given, Sequence) and all(isinstance(text, str) for text in given)
    ):
        raise RecipeError(
            f"modules must be a list of texts, or of patterns with settings, not {given!r}; "
            "give one like ['*.down_proj:bits=4']."
        )
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        pattern, _, settings = text.rpartition(":")
        pairs = [pair.partition("=") for pair in settings.split(",")]
        if not pattern or not all(key.strip() and value.strip() for key, _, value in pairs):
            raise RecipeError(
                f"--module {text} is not a pattern with settings; give one like '*.down_proj:bits=4,group_size=64'."
            )
        if twice := [key for key, count in Counter(key.strip() for key, _, _ in pairs).items() if count > 1]:
            raise RecipeError(f"--module {text} sets {twice[0]} twice; give it once.")
        try:
            values = {key.strip(): parse_yaml(value) for key, _, value in pairs}
        except (yaml.YAMLError, ValueError) as error:
            raise RecipeError(
                f"--module {text} has a value that cannot be read ({first_line(error)}); give numbers, words, true or "
                "false, as in '*.down_proj:bits=4,group_size=64'."
            ) from error
        if pattern in found and pattern != next(reversed(found)):
            raise RecipeError(
                f"--module '{pattern}' is given twice with another pattern in between, and the last one wins where several "
                f"match; give it once, like '{pattern}:bits=4,group_size=64', before those that are to override it."
            )
        found.setdefault(pattern, {}).update(values)
    return found


def output_folder(recipe: Recipe) -> Path:
    """`./MODEL-METHOD-BITSbit`, `./MODEL-METHOD-SIZE`, or `./MODEL-METHOD-BITSbit-codes`."""
    path = Path(os.path.expanduser(recipe.model))
    name = path.resolve().name or "model" if os.path.isdir(path) else path.name  # `.` and `..` have names too
    return Path(f"{name}-{recipe.method}-{budget_name(recipe)}")


def budget_name(recipe: Recipe) -> str:
    """What was asked for, short: 2.25bit, 600MB, and 4bit-codes where only the codes have 4 bits."""
    budget = recipe.budget
    if budget.bits is not None:
        return bits_name(budget.bits)
    if budget.size is None:
        return f"{recipe.quantizer.bits:g}bit-codes"
    unit = next(name for name in ("GB", "MB", "KB", "B") if budget.size >= UNITS[name.lower()])
    return f"{budget.size / UNITS[unit.lower()]:.6g}{unit}"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
