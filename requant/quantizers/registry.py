"""All quantization methods by name, and those of 2:4 sparsity.

To add one: a file here that ends in a `METHOD` (`method.py` says what it holds), a line in `METHODS`, a row in
`tests/requant/quantizers/cases.py`, a recipe. Command line, recipes, budget and plan read the rest from it; what they do by
name is for trellis codes, the default. What is described by hand is in CONTRIBUTING.md. A method of 2:4 sparsity is a file
and a line in `PRUNING_METHODS`; `test_pruning.py` runs over all of them.
"""

from typing import Any

from requant.errors import RecipeError, did_you_mean
from requant.quantizers import (
    alps,
    awq,
    gptq,
    hqq,
    kmeans,
    lut,
    magnitude,
    rtn,
    sparsegpt,
    trellis,
    wanda,
)
from requant.quantizers.method import Method, PruningMethod

METHODS: dict[str, Method] = {
    "rtn": rtn.METHOD,
    "hqq": hqq.METHOD,
    "kmeans": kmeans.METHOD,
    "lut": lut.METHOD,
    "gptq": gptq.METHOD,
    "awq": awq.METHOD,
    "trellis": trellis.METHOD,
}

PRUNING_METHODS: dict[str, PruningMethod] = {
    "magnitude": magnitude.METHOD,
    "wanda": wanda.METHOD,
    "sparsegpt": sparsegpt.METHOD,
    "alps": alps.METHOD,
}


def find_method(name: Any) -> Method | PruningMethod:
    """The method of that name, of either kind. Raises RecipeError, with the nearest name, for another."""
    known = METHODS | PRUNING_METHODS
    if not isinstance(name, str):
        raise RecipeError(f"method is {name!r}, but takes a name: one of {', '.join(known)}.")
    if name not in known:
        raise RecipeError(
            f"method '{name}' is unknown{did_you_mean(name, known)}; there are: {', '.join(METHODS)}, and for "
            f"`requant sparsify` {', '.join(PRUNING_METHODS)}."
        )
    return known[name]
