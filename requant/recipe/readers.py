"""`--for PROGRAM`: recipe settings for a program that does not know requant's format, so that it can read the export.

All these programs read only uniform grids without a sparse part: mode `dense`, a method that makes grids, the same bits for
all matrices. Without zero points every version of them can read the grids, and the blocks of llama.cpp need one bit less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from requant.errors import RecipeError, did_you_mean
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Recipe

METHODS_OF_GRIDS = sorted(name for name, method in METHODS.items() if method.plain_grid)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One program: the export that it reads, and the grids that suit it."""

    export: str  # `requant export --to`
    group_size: int
    method: str = "gptq"


READERS: dict[str, Reader] = {
    "vllm": Reader(export="compressed-tensors", group_size=128),
    "transformers": Reader(export="compressed-tensors", group_size=128),
    "llama.cpp": Reader(export="gguf", group_size=32),
}


def find_reader(name: str) -> Reader:
    """Raises RecipeError, with the nearest name, for an unknown one."""
    if not isinstance(name, str) or name not in READERS:
        raise RecipeError(
            f"--for {name} is unknown{did_you_mean(str(name), READERS)}; there are: {', '.join(READERS)}."
        )
    return READERS[name]


def settings_for(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the program asks for, under those that were given."""
    reader = find_reader(name)
    chosen: dict[str, Any] = {"mode": "dense", "method": reader.method}
    method = given.get("method", reader.method)
    if method in METHODS_OF_GRIDS:  # of others the method is refused, and not options that nobody gave
        chosen["group_size"] = reader.group_size
        if hasattr(METHODS[method].config, "symmetric"):  # of `hqq` grids always have zero points
            chosen["symmetric"] = True
    return chosen | dict(given)


def check_reader(name: str, recipe: Recipe) -> None:
    """Raise RecipeError for a recipe that gives what no version of the program reads."""
    if recipe.method not in METHODS_OF_GRIDS:
        raise RecipeError(
            f"--for {name} takes a method of uniform grids, not '{recipe.method}'; "
            f"choose one of: {', '.join(METHODS_OF_GRIDS)}."
        )
    if recipe.mode != "dense":
        raise RecipeError(f"--for {name} takes mode dense, not '{recipe.mode}': it reads no sparse part.")
    if recipe.modules:
        raise RecipeError(
            f"--for {name} takes the same bits for all matrices; leave modules out, or --skip some."
        )
    if recipe.budget.bits is not None or recipe.budget.size is not None:
        raise RecipeError(f"--for {name} takes --code-bits, the same for all matrices, no budget.")
