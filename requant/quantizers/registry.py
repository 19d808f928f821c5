"""The quantizers: one file a method, one contract.

    quantize(weight [n, k], stats, config, *, detached=None) -> QuantizedWeight

is pure: the same arguments give the same result; it edits none of them, moves nothing between devices and prints
nothing. `weight` is float32. `detached` marks places that go to the sparse part: the method leaves them out of its fit
(they cost nothing, whatever code they get) and returns their residuals in `sparse`. `config` is the method's own
frozen dataclass, the only home of its defaults; `needs` names the statistics it reads.

To add one: a file here with `quantize`, a config dataclass and `NEEDS`; a line in `METHODS`; a test file in
`tests/requant/quantizers/`; a recipe.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from requant.errors import RecipeError, did_you_mean
from requant.formats.containers import QuantizedWeight
from requant.quantizers import awq, gptq, kmeans, lut, rtn, trellis


@dataclass(frozen=True, kw_only=True)
class Method:
    """One line of the registry: the function, its config class, the fields of `LinearStats` it reads."""

    quantize: Callable[..., QuantizedWeight]
    config: type[Any]
    needs: frozenset[str]


METHODS: dict[str, Method] = {
    "rtn": Method(quantize=rtn.quantize, config=rtn.RtnConfig, needs=rtn.NEEDS),
    "kmeans": Method(quantize=kmeans.quantize, config=kmeans.KmeansConfig, needs=kmeans.NEEDS),
    "lut": Method(quantize=lut.quantize, config=lut.LutConfig, needs=lut.NEEDS),
    "gptq": Method(quantize=gptq.quantize, config=gptq.GptqConfig, needs=gptq.NEEDS),
    "awq": Method(quantize=awq.quantize, config=awq.AwqConfig, needs=awq.NEEDS),
    "trellis": Method(quantize=trellis.quantize, config=trellis.TrellisConfig, needs=trellis.NEEDS),
}


def find_method(name: Any) -> Method:
    """The method of that name. Raises RecipeError, with the nearest name, for another."""
    if not isinstance(name, str) or name not in METHODS:
        raise RecipeError(
            f"method '{name}' is unknown{did_you_mean(str(name), METHODS)}; there are: {', '.join(METHODS)}."
        )
    return METHODS[name]
