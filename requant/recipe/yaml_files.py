"""Recipes as YAML: strict reading, writing, and the recipes that ship with requant.

An unknown key is answered with "did you mean", or with its new name if it was renamed; a value of the wrong type is refused;
and `load(dump(r)) == r`. The recipe is stored in the checkpoint, so `requant quantize --recipe CHECKPOINT/recipe.yaml`
reproduces it.
"""

import dataclasses
import os
import types
import typing
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from requant.errors import RecipeError, did_you_mean, first_line
from requant.files import PlainDumper, parse_yaml, path_of, read_small_file
from requant.quantizers.registry import find_method
from requant.recipe.schema import Recipe
from requant.recipe.shipped import available_recipes

RENAMED = {  # old key -> new key; an old key is refused with the new one
    "tuning": "finetune",
    "windows": "train_windows",
    "rate": "lr",
    "warm_up": "warmup_steps",
    "held_out": "val_windows",
    "check_every": "eval_every",
    "entries": "outliers",
    "share": "outlier_fraction",
}
IN_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def load_recipe(name: str | Path) -> Recipe:
    """A recipe from a YAML file, or by the name of a recipe that ships with requant."""
    path = path_of(name, "a recipe")
    name = str(name)
    if not os.path.isfile(path):  # unlike Path.is_file, false for a name too long to be one
        shipped = available_recipes()
        if name not in shipped and os.path.isfile(inside := path / "recipe.yaml"):
            raise RecipeError(
                f"'{name}' is a folder, neither a file nor a recipe; give the recipe in it, {inside}."
            )
        if name not in shipped:
            raise RecipeError(
                f"'{name}' is neither a file nor a recipe{did_you_mean(name, shipped)}; "
                f"there are: {', '.join(sorted(shipped))}."
            )
        path = shipped[name]
    try:
        data = parse_yaml(read_small_file(path).decode())
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise RecipeError(
            f"{path} is not valid YAML ({first_line(error)}); correct that, or start from a recipe of `requant recipes`."
        ) from error
    return from_dict(data, where=path.name)


def from_dict(data: Any, *, where: str = "recipe") -> Recipe:
    """Build a recipe from plain data, strictly."""
    if not isinstance(data, dict):
        raise RecipeError(f"{where} holds no mapping of keys to values; write lines like `method: gptq`.")
    method = data.get("method", Recipe.method)
    config = find_method(method).config
    quantizer = _build(config, data.get("quantizer", {}), f"{where}: quantizer")
    modules = _modules(config, data.get("modules", {}), f"{where}: modules")
    rest = {key: value for key, value in data.items() if key not in ("quantizer", "modules")}
    return _build(Recipe, {**rest, "method": method}, where, quantizer=quantizer, modules=modules)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain data that YAML and JSON can hold; tuples become lists."""
    return cast(dict[str, Any], _plain(dataclasses.asdict(recipe)))


def dump_recipe(recipe: Recipe) -> str:
    """All keys of a recipe as YAML; `load_recipe` of it gives the same recipe."""
    return yaml.dump(to_dict(recipe), Dumper=PlainDumper, sort_keys=False, allow_unicode=True)


def _modules(config: type, data: Any, where: str) -> dict[str, dict[str, Any]]:
    """Pattern -> options of the quantizer."""
    if not isinstance(data, dict) or not all(isinstance(pattern, str) for pattern in data):
        raise RecipeError(
            f"{where} must be a mapping of patterns to keys of quantizer; write it like '*.down_proj': {{bits: 4}}."
        )
    return {pattern: _values(config, options, f"{where}: '{pattern}'") for pattern, options in data.items()}


def _build(cls: type, data: Any, where: str, **given: Any) -> Any:
    return cls(**_values(cls, data, where), **given)


def _values(cls: type, data: Any, where: str) -> dict[str, Any]:
    """The fields of `cls` that `data` gives, each checked for its type."""
    if not isinstance(data, dict):
        found = "empty" if data is None else repr(data)
        raise RecipeError(f"{where} is {found}; it takes keys with their values, like {{key: value}}.")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for key in data:
        if key not in known:
            if RENAMED.get(key) in known:
                raise RecipeError(f"{where}: unknown key '{key}': it is called '{RENAMED[key]}' now.")
            raise RecipeError(
                f"{where}: unknown key '{key}'{did_you_mean(str(key), known)}; "
                f"known: {', '.join(sorted(known))}."
            )
    return {key: _coerce(hints[key], value, f"{where}: {key}") for key, value in data.items()}


def _coerce(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type, or a RecipeError that names the key and what it takes."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _build(cast(type, kind), value, where)
    if origin is Literal:
        if value not in args:
            raise RecipeError(
                f"{where} is '{value}'{did_you_mean(str(value), map(str, args))}; "
                f"it takes one of: {', '.join(map(str, args))}."
            )
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        if type(value) in args:  # of int | float
            return value
        # what takes int | float takes a number, as a text in its place is told
        inner = float if float in args else next(arg for arg in args if arg is not type(None))
        return _coerce(inner, value, where)
    if origin is tuple:
        items = [value] if isinstance(value, str | int | float) else value
        if not isinstance(items, list | tuple):
            raise RecipeError(f"{where} is {value!r}; it takes a list.")
        return tuple(_coerce(args[0], item, where) for item in items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise RecipeError(f"{where} is out of every range; give a smaller number.") from None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RecipeError(f"{where} is {value!r}; it takes {IN_WORDS.get(kind, kind.__name__)}.")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
