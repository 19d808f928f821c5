"""A run, written down: frozen dataclasses, the one home of defaults, and their YAML form.

Loading is strict: an unknown key answers "did you mean", a value of another type is refused, `load(dump(r)) == r`.
No field is inferred from another. The recipe is stored in the checkpoint, so `requant quantize --recipe
CHECKPOINT/recipe.yaml` makes it again.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from requant.errors import RecipeError, did_you_mean, first_line
from requant.quantizers.registry import METHODS

Score = Literal["pqi", "hessian", "gradient", "marginal"]
Predictor = Literal["curvature", "measured", "pqi"]
EmbeddingBits = Literal[4, 5, 6, 8, 16]
Nodes = Literal["gauss2", "gauss4", "midpoint", "simpson", "plain32"]
RECIPES = (Path(__file__).parents[1] / "recipes", Path(__file__).parents[2] / "recipes")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The text that statistics are measured on, and the model they are measured in.

    `inputs` of a matrix come from the original model, from one whose earlier blocks are quantized (`quantized`), or from one
    in which all that comes before is quantized, with the original's outputs as the aim (`corrected`:
    `quantizers/correction.py`). Gradients are always the original's.
    """

    # Files, a datasets name, `demo` or `self`; empty: `demo` for the demo model, else the training part of WikiText-2.
    text: tuple[str, ...] = ()
    field: str = "text"
    num_samples: int = 128
    seq_len: int = 2048
    inputs: Literal["original", "quantized", "corrected"] = "original"

    def __post_init__(self) -> None:
        _require(self.num_samples >= 1, "calibration.num_samples", self.num_samples, "1 or more")
        _require(self.seq_len >= 8, "calibration.seq_len", self.seq_len, "8 or more")


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Which score ranks weights, and the nodes of the path integral."""

    score: Score = "pqi"
    nodes: Nodes = "gauss2"


@dataclass(frozen=True, kw_only=True)
class Detach:
    """The sparse part (paper: r_o, r_s and beta), as fractions of all quantized weights.

    `outlier_rule`: `adaptive` is Algorithm 1, `uniform` gives every matrix the same share, `iqr` is SqueezeLLM's
    (largest |w| over the matrix's interquartile range, over all matrices). `values`: how a residual is stored; `int8`
    saves 8 of the 24 bits of an entry.
    """

    outlier_fraction: float = 0.0045
    outlier_rule: Literal["adaptive", "uniform", "iqr"] = "adaptive"
    temperatures: tuple[float, ...] = (0.5, 1.0)  # 0.5 won on bench-32m at every width
    significant_fraction: float = 0.0005
    steps: int = 2
    values: Literal["float16", "int8"] = "float16"

    def __post_init__(self) -> None:
        for name in ("outlier_fraction", "significant_fraction"):
            _require(0 <= getattr(self, name) <= 0.2, f"detach.{name}", getattr(self, name), "0 to 0.2")
        _require(1 <= self.steps <= 64, "detach.steps", self.steps, "1 to 64")
        _require(
            len(self.temperatures) > 0 and all(t > 0 for t in self.temperatures),  # NaN is not
            "detach.temperatures",
            list(self.temperatures),
            "a list of positive numbers",
        )


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Training of all that is not code against the original's outputs (`training/loop.py`); `steps` 0 is off.

    `steps` are those of one phase: every round of mode `best`, and the last one with all codes fixed.
    """

    steps: int = 0
    windows: int = 2048  # of the calibration text, at most; statistics keep to calibration.num_samples
    tokens_per_step: int = 16384
    # of Adam at 2 bits, in units of each tensor's root mean square; half of it with every bit more
    rate: float = 3e-3
    warm_up: int = 10
    held_out: int = 8  # windows that only judge
    check_every: int = 20

    def __post_init__(self) -> None:
        _require(self.steps >= 0, "tuning.steps", self.steps, "0 or more")
        _require(self.rate > 0, "tuning.rate", self.rate, "a positive number")
        for name in ("windows", "tokens_per_step", "warm_up", "held_out", "check_every"):
            _require(getattr(self, name) >= 1, f"tuning.{name}", getattr(self, name), "1 or more")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What may be paid, in real bytes; without `bits` and `size` every matrix takes the quantizer's own width.

    `bits`: everything stored for the quantized matrices, over their weights. `size`: bytes of the weight files, all
    they hold. `head_bits` and `embedding_bits` store the head and the embedding on grids of that width (one tensor
    where they are tied); None leaves them as they are with `bits`, and to the allocator with `size`. `quarters`: a
    trellis may take 2.25, 2.5 and 2.75 bits too. `entries`: in mode `best`, weights of `kmeans` and `lut` that codes serve
    badly may hold a float of their own, where that is worth its two bytes.
    """

    bits: float | None = None
    size: int | None = None
    predictor: Predictor = "curvature"
    quarters: bool = True
    entries: bool = True
    head_bits: EmbeddingBits | None = None
    embedding_bits: EmbeddingBits | None = None

    def __post_init__(self) -> None:
        _require(self.bits is None or 1 <= self.bits <= 8, "budget.bits", self.bits, "1 to 8")  # NaN is not
        _require(self.size is None or self.size >= 1, "budget.size", self.size, "a number of bytes")
        _require(
            self.bits is None or self.size is None, "budget.size", self.size, "no value beside budget.bits"
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The text that quality is measured on."""

    # Empty: `demo-eval` for the demo model, else the last tenth of a named calibration text, else WikiText-2's test.
    text: tuple[str, ...] = ()
    field: str = "text"
    context: int = 2048
    windows: int = 20
    samples: int = 2  # beginnings of windows that both models continue, for the report; 0: none

    def __post_init__(self) -> None:
        _require(self.context >= 8, "evaluation.context", self.context, "8 or more")
        _require(self.windows >= 1, "evaluation.windows", self.windows, "1 or more")
        _require(self.samples >= 0, "evaluation.samples", self.samples, "0 or more")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run of `requant quantize`."""

    model: str = "demo"
    mode: Literal["best", "paper", "dense"] = "paper"
    method: str = "kmeans"
    quantizer: Any = field(default_factory=METHODS["kmeans"].config)  # the method's own config
    calibration: Calibration = field(default_factory=Calibration)
    sensitivity: Sensitivity = field(default_factory=Sensitivity)
    detach: Detach = field(default_factory=Detach)
    tuning: Tuning = field(default_factory=Tuning)
    budget: Budget = field(default_factory=Budget)
    evaluation: Evaluation = field(default_factory=Evaluation)
    skip: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        expected = _method(self.method).config
        if type(self.quantizer) is not expected:
            raise RecipeError(
                f"method '{self.method}' takes a {expected.__name__}, not {type(self.quantizer).__name__}."
            )
        if self.mode == "paper" and getattr(self.quantizer, "share", 0):
            raise RecipeError(
                "quantizer.share has no meaning in mode paper, whose sparse part follows detach; leave it out, or choose "
                "mode dense or best."
            )
        if self.calibration.inputs == "original":
            return
        if "hessian" not in METHODS[self.method].needs:
            readers = [name for name, method in METHODS.items() if "hessian" in method.needs]
            raise RecipeError(
                f"calibration.inputs changes nothing for method '{self.method}', which reads no Hessian of its inputs; "
                f"leave it out, or choose one of: {', '.join(readers)}."
            )
        if self.mode == "best" and self.tuning.steps:
            raise RecipeError(
                "calibration.inputs changes nothing for mode best with tuning, which measures inputs in the model as "
                "training leaves it, round by round; leave it out, or choose mode dense."
            )


def load_recipe(name: str) -> Recipe:
    """A recipe from a YAML file, or by the name of one that ships with requant."""
    path = Path(name)
    if not path.is_file():
        shipped = available_recipes()
        if name not in shipped:
            raise RecipeError(
                f"'{name}' is neither a file nor a recipe{did_you_mean(name, shipped)}; "
                f"there are: {', '.join(sorted(shipped))}."
            )
        path = shipped[name]
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise RecipeError(f"{path} is not valid YAML ({first_line(error)}).") from error
    return from_dict(data, where=path.name)


def available_recipes() -> dict[str, Path]:
    """Name -> file of every recipe that ships with requant."""
    return {
        file.stem: file for folder in RECIPES if folder.is_dir() for file in sorted(folder.glob("*.yaml"))
    }


def from_dict(data: Any, *, where: str = "recipe") -> Recipe:
    """Build a recipe from plain data, strictly."""
    if not isinstance(data, dict):
        raise RecipeError(f"{where} holds no mapping of keys to values.")
    method = data.get("method", "kmeans")
    config = _method(method).config
    quantizer = _build(config, data.get("quantizer", {}), f"{where}: quantizer")
    rest = {key: value for key, value in data.items() if key != "quantizer"}
    return dataclasses.replace(_build(Recipe, {**rest, "method": method}, where, quantizer=quantizer))


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain data that YAML and JSON can hold; tuples become lists."""
    return cast(dict[str, Any], _plain(dataclasses.asdict(recipe)))


def dump_recipe(recipe: Recipe) -> str:
    return yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True)


def _method(name: Any) -> Any:
    if not isinstance(name, str) or name not in METHODS:
        raise RecipeError(
            f"method '{name}' is unknown{did_you_mean(str(name), METHODS)}; there are: {', '.join(METHODS)}."
        )
    return METHODS[name]


def _build(cls: type, data: Any, where: str, **given: Any) -> Any:
    if not isinstance(data, dict):
        raise RecipeError(f"{where} must be a mapping, not {type(data).__name__}.")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for key in data:
        if key not in known:
            raise RecipeError(
                f"{where}: unknown key '{key}'{did_you_mean(str(key), known)}; "
                f"known: {', '.join(sorted(known))}."
            )
    values = {
        key: _coerce(hints[key], value, f"{where}: {key}") for key, value in data.items() if key not in given
    }
    return cls(**values, **given)


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
        inner = next(arg for arg in args if arg is not type(None))
        return _coerce(inner, value, where)
    if origin is tuple:
        items = [value] if isinstance(value, str | int | float) else value
        if not isinstance(items, list | tuple):
            raise RecipeError(f"{where} must be a list, not {type(value).__name__}.")
        return tuple(_coerce(args[0], item, where) for item in items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RecipeError(f"{where} is {value!r}; it takes a {kind.__name__}.")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _require(condition: bool, key: str, value: Any, takes: str) -> None:
    if not condition:
        raise RecipeError(f"{key} is {value}; it takes {takes}.")
