"""Every key of a recipe with its values, default and meaning, read from the classes themselves.

The meaning is the string below a field in `schema.py` or in the config class of a method; a field without one fails the
tests. `requant recipes --keys` prints the list, and `docs/recipes.md` holds it.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from requant.quantizers.registry import METHODS, PRUNING_METHODS
from requant.recipe.schema import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One line of the reference."""

    key: str  # dotted: finetune.steps
    method: str | None  # of the quantizer's keys
    takes: str
    default: str
    meaning: str


def recipe_keys() -> list[Key]:
    """All keys: those of every recipe, then those of `quantizer` by method."""
    found = [key for key in _keys(Recipe, "") if key.key != "quantizer"]
    for name, method in (METHODS | PRUNING_METHODS).items():
        found += [dataclasses.replace(key, method=name) for key in _keys(method.config, "quantizer.")]
    return found


def _keys(cls: type, prefix: str) -> Iterator[Key]:
    hints, meanings = typing.get_type_hints(cls), field_docs(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _keys(typing.cast(type, kind), f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Key(
            key=prefix + field.name,
            method=None,
            takes=_takes(kind),
            default=_shown(default),
            meaning=meanings[field.name],
        )


def field_docs(cls: type) -> dict[str, str]:
    """Field -> the string literal that stands below it in the class."""
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
    found: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _takes(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return ", ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join("none" if arg is type(None) else _takes(arg) for arg in args)
    if origin is Mapping:
        return "patterns, each with keys of `quantizer`"
    if origin is tuple:
        return f"list of {_takes(args[0])}"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}.get(kind, str(kind))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return "none" if value is None else str(value)
