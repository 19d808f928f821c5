"""The recipe: one run of `requant quantize`, as frozen dataclasses with the default of every field.

No field is inferred from another. What depends on the method, the mode or the machine is in `defaults.py`; a method's own
options and their defaults are its config class (`requant.quantizers`); YAML is read and written by `yaml_files.py`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from requant.errors import RecipeError
from requant.quantizers.registry import METHODS, find_method

Mode = Literal["best", "paper", "dense"]
Score = Literal["pqi", "hessian", "gradient", "marginal"]
Predictor = Literal["curvature", "measured", "pqi"]
EmbeddingBits = Literal[4, 5, 6, 8, 16]
Nodes = Literal["gauss2", "gauss4", "midpoint", "simpson", "plain32"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The text that statistics are measured on, and the model they are measured in.

    `inputs`: the model whose activations are a matrix's inputs: the original, one with all earlier blocks quantized
    (`quantized`), or one with all earlier matrices quantized, where the weight is corrected to restore the original's
    outputs (`corrected`: `quantizers/correction.py`). Gradients are always the original's.
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

    `outlier_rule`: `adaptive` is Algorithm 1, `uniform` gives every matrix the same fraction, `iqr` is SqueezeLLM's
    (largest |w| over the matrix's interquartile range, over all matrices). `values`: how a residual is stored; `int8`
    saves 8 of the 24 bits of an entry.
    """

    outlier_fraction: float = 0.0045
    outlier_rule: Literal["adaptive", "uniform", "iqr"] = "adaptive"
    temperatures: tuple[float, ...] = (0.5, 1.0)  # both are tried; 0.5 won on bench-32m at all bits
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
class Finetune:
    """Training everything except the codes to match the original's outputs (`requant/finetune/`); `steps` 0: off.

    `steps` are those of one phase: each round of mode `best`, and the final phase with all codes fixed.
    """

    steps: int = 0
    train_windows: int = 2048  # of the calibration text, at most; statistics use calibration.num_samples
    tokens_per_step: int = 16384
    # of Adam at 2 bits, in units of each tensor's root mean square; halved with every further bit
    lr: float = 3e-3
    warmup_steps: int = 10
    val_windows: int = 8  # held out from training; they choose the best step
    eval_every: int = 20  # steps between two evaluations on the validation windows

    def __post_init__(self) -> None:
        _require(self.steps >= 0, "finetune.steps", self.steps, "0 or more")
        _require(self.lr > 0, "finetune.lr", self.lr, "a positive number")
        for name in ("train_windows", "tokens_per_step", "warmup_steps", "val_windows", "eval_every"):
            _require(getattr(self, name) >= 1, f"finetune.{name}", getattr(self, name), "1 or more")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A budget of stored bytes; without `bits` and `size` every matrix takes the quantizer's own bits.

    `bits`: all bytes stored for the quantized matrices, in bits a weight. `size`: all bytes of the weight files.
    `head_bits` and `embedding_bits` quantize the head and the embedding to grids of these bits (one tensor where they are
    tied); None: not quantized with `bits`, chosen by the allocation with `size`. `quarters`: methods
    that take quarters of a bit may use them (2.25, 2.5, 2.75). `outliers`: in mode `best`, a codebook may store the weights
    that its levels represent worst as floats, where that is worth their two bytes.
    """

    bits: float | None = None
    size: int | None = None
    predictor: Predictor = "curvature"
    quarters: bool = True
    outliers: bool = True
    head_bits: EmbeddingBits | None = None
    embedding_bits: EmbeddingBits | None = None

    def __post_init__(self) -> None:
        _require(self.bits is None or 1 <= self.bits <= 8, "budget.bits", self.bits, "1 to 8")  # NaN is not
        _require(self.size is None or self.size >= 1, "budget.size", self.size, "a number of bytes")
        _require(
            self.bits is None or self.size is None,
            "budget.size",
            self.size,
            "no value together with budget.bits",
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The text that quality is measured on."""

    # Empty: `demo-eval` for the demo model, else the last tenth of a named calibration text, else WikiText-2's test.
    text: tuple[str, ...] = ()
    field: str = "text"
    context: int = 2048
    windows: int = 20
    samples: int = 2  # window beginnings that both models continue, for the report; 0: none

    def __post_init__(self) -> None:
        _require(self.context >= 8, "evaluation.context", self.context, "8 or more")
        _require(self.windows >= 1, "evaluation.windows", self.windows, "1 or more")
        _require(self.samples >= 0, "evaluation.samples", self.samples, "0 or more")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run of `requant quantize`."""

    model: str = "demo"
    mode: Mode = "paper"
    method: str = "kmeans"
    quantizer: Any = field(default_factory=METHODS["kmeans"].config)  # the method's own config
    calibration: Calibration = field(default_factory=Calibration)
    sensitivity: Sensitivity = field(default_factory=Sensitivity)
    detach: Detach = field(default_factory=Detach)
    finetune: Finetune = field(default_factory=Finetune)
    budget: Budget = field(default_factory=Budget)
    evaluation: Evaluation = field(default_factory=Evaluation)
    skip: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        expected = find_method(self.method).config
        if type(self.quantizer) is not expected:
            raise RecipeError(
                f"method '{self.method}' takes a {expected.__name__}, not {type(self.quantizer).__name__}."
            )
        if self.mode == "paper" and getattr(self.quantizer, "outlier_fraction", 0):
            raise RecipeError(
                "quantizer.outlier_fraction has no meaning in mode paper, whose sparse part follows detach; leave it out, "
                "or choose mode dense or best."
            )
        if self.calibration.inputs == "original":
            return
        if "hessian" not in METHODS[self.method].needs:
            readers = [name for name, method in METHODS.items() if "hessian" in method.needs]
            raise RecipeError(
                f"calibration.inputs changes nothing for method '{self.method}', which reads no Hessian of its inputs; "
                f"leave it out, or choose one of: {', '.join(readers)}."
            )
        if self.mode == "best" and self.finetune.steps:
            raise RecipeError(
                "calibration.inputs changes nothing for mode best with fine-tuning, which measures inputs in the model as "
                "training leaves it, round by round; leave it out, or choose mode dense."
            )


def _require(condition: bool, key: str, value: Any, takes: str) -> None:
    if not condition:
        raise RecipeError(f"{key} is {value}; it takes {takes}.")
