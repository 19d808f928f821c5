"""All quantization methods by name.

To add one: a file here that ends in a `METHOD` (`method.py` says what it holds), a line in `METHODS`, a row in
`tests/requant/quantizers/cases.py`, a recipe. Command line, recipes, budget, plan and documentation read the rest from it.
"""

from typing import Any

from requant.errors import RecipeError, did_you_mean
from requant.quantizers import awq, gptq, hqq, kmeans, lut, rtn, trellis
from requant.quantizers.method import Method

METHODS: dict[str, Method] = {
    "rtn": rtn.METHOD,
    "hqq": hqq.METHOD,
    "kmeans": kmeans.METHOD,
    "lut": lut.METHOD,
    "gptq": gptq.METHOD,
    "awq": awq.METHOD,
    "trellis": trellis.METHOD,
}


def find_method(name: Any) -> Method:
    """The method of that name. Raises RecipeError, with the nearest name, for another."""
    if not isinstance(name, str) or name not in METHODS:
        raise RecipeError(
            f"method '{name}' is unknown{did_you_mean(str(name), METHODS)}; there are: {', '.join(METHODS)}."
        )
    return METHODS[name]
