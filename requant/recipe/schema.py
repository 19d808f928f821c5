"""The recipe: one run of `requant quantize`, as frozen dataclasses with the default of every field.

No field is inferred from another. What depends on the method, the mode or the machine is in `defaults.py`; a method's own
options and their defaults are its config class (`requant.quantizers`); YAML is read and written by `yaml_files.py`.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from requant.errors import RecipeError, did_you_mean
from requant.quantizers.checks import check_seed
from requant.quantizers.registry import METHODS, PRUNING_METHODS, find_method

Mode = Literal["best", "paper", "dense", "sparse"]
Score = Literal["pqi", "hessian", "gradient", "marginal"]
Predictor = Literal["curvature", "measured", "restored", "pqi"]
Rotations = Literal["per-matrix", "folded"]
Nodes = Literal["gauss2", "gauss4", "midpoint", "simpson", "plain32"]
MOST = 1_000_000  # windows and training steps: more is a typing error


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The text that statistics are measured on, and the model they are measured in.

    `inputs`: the model whose activations are a matrix's inputs: the original, one with all earlier blocks quantized
    (`quantized`), or one with all earlier matrices quantized, where the weight is corrected to restore the original's
    outputs (`corrected`: `quantizers/correction.py`). Gradients are always the original's.
    """

    text: tuple[str, ...] = ()
    """Files, a `datasets` name, `demo` or `self`; empty: `demo` for the demo model, else the training part of WikiText-2."""
    field: str = "text"
    """The field of a .jsonl or .parquet file that holds the text."""
    num_samples: int = 128
    """Windows that statistics, scores and losses are measured on."""
    seq_len: int = 2048
    """Tokens of a window; the default is all the positions of a model that has fewer."""
    inputs: Literal["original", "quantized", "corrected"] = "original"
    """The model whose activations are a matrix's inputs: the original, or the one with all earlier blocks quantized
    (`quantized`) or all earlier matrices (`corrected`, which also restores the original's outputs)."""
    all_experts: bool = False
    """Whether statistics of inputs take every token to every expert of a mixture, not only those that are routed to it."""

    def __post_init__(self) -> None:
        _require(1 <= self.num_samples <= MOST, "calibration.num_samples", self.num_samples, f"1 to {MOST:,}")
        _require(self.seq_len >= 8, "calibration.seq_len", self.seq_len, "8 or more")


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Which score ranks weights, and the nodes of the path integral."""

    score: Score = "pqi"
    """What ranks the weights of the sparse part in mode `paper`."""
    nodes: Nodes = "gauss2"
    """Nodes of the path integral of PQI."""


@dataclass(frozen=True, kw_only=True)
class Detach:
    """The sparse part (paper: r_o, r_s and beta), as fractions of all quantized weights.

    `outlier_rule`: `adaptive` is Algorithm 1, `uniform` gives every matrix the same fraction, `iqr` is SqueezeLLM's
    (largest |w| over the matrix's interquartile range, over all matrices).
    """

    outlier_fraction: float = 0.0045
    """Fraction of all quantized weights that are detached as outliers before the codes (r_o)."""
    outlier_rule: Literal["adaptive", "uniform", "iqr"] = "adaptive"
    """How outliers are divided among the matrices: by Algorithm 1, evenly, or by the interquartile range."""
    temperatures: tuple[float, ...] = (0.5, 1.0)
    """Temperatures of Algorithm 1; each is tried, and the one with the smallest loss is kept (on bench-32m always 0.5)."""
    significant_fraction: float = 0.0005
    """Fraction of all quantized weights that are detached as significant after the codes (r_s)."""
    steps: int = 2
    """Number of equal parts in which significant weights are detached; all weights are scored again before each."""
    values: Literal["float16", "int8"] = "float16"
    """How a residual is stored; `int8` saves 8 of the 24 bits of an entry."""

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
    """Training everything except the codes to match the original's outputs (`requant/finetune/`)."""

    steps: int | None = 0
    """Training steps of a phase; mode `best` has a phase after each round, in the last of which all codes are fixed. 0: no
    training; none: by the model's size (`recipe/defaults.py`)."""
    train_windows: int = 2048
    """Windows of the calibration text that training may use, at most."""
    own_windows: int | None = 0
    """Windows that the original model writes, to train on in addition to those of the text
    (`requant/inference/own_text.py`); none: as many as keep training from seeing a window too often
    (`recipe/defaults.py`), where decoding can use CUDA graphs."""
    tokens_per_step: int = 16384
    """Tokens of a training step."""
    lr: float | None = None
    """Adam's learning rate at 2 bits, in units of each tensor's root mean square; halved with every further bit. None: by
    `steps`, 0.008 up to 200, 0.003 from 1000 on."""
    warmup_steps: int = 10
    """Steps of linear warm-up; a cosine to zero follows."""
    rounds: int = 6
    """Rounds of mode `best`, of `steps` training steps each: with 4, a round holds one or two kinds of matrices; with more,
    the largest rounds are halved by blocks. 0: all codes are made first, and training comes only at the end."""
    hidden_weight: float = 10.0
    """Weight, in the loss of mode `best`'s rounds, of the relative squared error of the last hidden states; 0: none."""
    val_windows: int = 8
    """Windows held out from training; they choose the best step of the final phase."""
    eval_every: int = 20
    """Steps between two evaluations on the validation windows."""
    blockwise: bool | None = None
    """Whether to train block by block, in half the memory; none: for models of 2.5e9 parameters or more, and wherever
    training would not fit the GPU otherwise (`finetune/blockwise.py`)."""

    def __post_init__(self) -> None:
        if self.steps is not None:
            _require(0 <= self.steps <= MOST, "finetune.steps", self.steps, f"0 to {MOST:,}")
        windows = self.train_windows
        _require(1 <= windows <= MOST, "finetune.train_windows", windows, f"1 to {MOST:,}")
        if self.own_windows is not None:
            _require(
                0 <= self.own_windows <= MOST, "finetune.own_windows", self.own_windows, f"0 to {MOST:,}"
            )
        if self.lr is not None:
            _require(0 < self.lr < math.inf, "finetune.lr", self.lr, "a positive number")
        _require(
            0 <= self.hidden_weight < math.inf, "finetune.hidden_weight", self.hidden_weight, "0 or more"
        )
        _require(self.rounds >= 0, "finetune.rounds", self.rounds, "0 or more")
        for name in ("tokens_per_step", "warmup_steps", "val_windows", "eval_every"):
            _require(getattr(self, name) >= 1, f"finetune.{name}", getattr(self, name), "1 or more")

    @property
    def num_steps(self) -> int:
        """`steps`, where the model's size has set what was none (`preparation/completion.py`); else a ValueError."""
        if self.steps is None:
            raise ValueError("finetune.steps is none until a model is prepared")
        return self.steps

    @property
    def trains(self) -> bool:
        return self.steps != 0

    def windows_of_step(self, count: int, length: int) -> int:
        """How many of `count` windows of so many tokens a step takes."""
        return min(count, max(1, self.tokens_per_step // length))


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Mode `sparse`: what `finetune.steps` of training after pruning learn, and how masks move (`finetune/recovery.py`)."""

    method: Literal["fixed", "ast", "s-ste"] = "fixed"
    """`fixed`: only values learn; `ast`: masks change too; `s-ste`: masks come from a continuous projection."""
    lr: float = 1e-2
    """Adam's learning rate, in units of each tensor's root mean square."""
    mask_every: int = 10
    """Steps between updates of the masks of `ast`; 0: never."""
    decay: float = 1.0
    """Decay of the weights that `ast` prunes, in units of gradient over weight (`finetune/masked_adam.py`)."""
    distillation: float = 1.0
    """Share of the KL divergence to the original in the loss; the rest is the cross-entropy of the text."""

    def __post_init__(self) -> None:
        _require(0 < self.lr < math.inf, "recovery.lr", self.lr, "a positive number")
        _require(self.mask_every >= 0, "recovery.mask_every", self.mask_every, "0 or more")
        _require(0 <= self.decay < math.inf, "recovery.decay", self.decay, "0 or more")
        _require(0 <= self.distillation <= 1, "recovery.distillation", self.distillation, "0 to 1")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A budget of stored bytes; without `bits` and `size` every code has `quantizer.bits`, and the rest comes on top.

    With one, the allocation chooses the bits of every code. Embedding, head and per-layer embeddings are quantized too: in
    trellis codes where the matrices are, else to grids.
    """

    bits: float | None = None
    """`--bits`: the most bits per weight that the quantized matrices may take, everything stored for them counted."""
    size: int | None = None
    """`--size`: the most bytes that the weight files may take, headers included."""
    predictor: Predictor = "curvature"
    """How the loss of a matrix at each number of bits is predicted (`requant/allocation/predictors.py`)."""
    quarters: bool = True
    """Whether methods that take quarters of a bit may use them (2.25, 2.5, 2.75)."""
    outliers: bool = True
    """Whether, in mode `best`, a codebook may store the weights that its levels represent worst as floats."""
    first_round_weight: float | None = None
    """Factor on the predicted losses of mode `best`'s first round, which training repairs most; none: 0.4 at 2 bits, 1 from
    3 on."""
    head_bits: float | None = None
    """Bits of the head: 3 to 8 (trellis codes: 2 to 8 in steps of a quarter) or 16. None: with `bits` the fewest that add at
    most 1 % to the loss, with `size` the best split, without a budget 16."""
    embedding_bits: float | None = None
    """Bits of the embedding and of per-layer embeddings, as of the head; a tied embedding is the same tensor as the head."""

    def __post_init__(self) -> None:
        for name in ("bits", "size", "head_bits", "embedding_bits", "first_round_weight"):
            value = getattr(self, name)
            known = value is None or (isinstance(value, Real) and not isinstance(value, bool))
            _require(known, f"budget.{name}", repr(value), "a number")
        _require(self.bits is None or 1 <= self.bits <= 8, "budget.bits", self.bits, "1 to 8")  # NaN is not
        known = self.size is None or 1 <= self.size < 1 << 63
        _require(known, "budget.size", self.size, "a number of bytes")
        _require(
            self.bits is None or self.size is None,
            "budget.size",
            self.size,
            "no value together with budget.bits",
        )
        for name, bits in (("head_bits", self.head_bits), ("embedding_bits", self.embedding_bits)):
            known = bits is None or bits == 16 or (2 <= bits <= 8 and 4 * bits % 1 == 0)
            _require(known, f"budget.{name}", bits, "16, or 2 to 8 in quarters")
        weight = self.first_round_weight
        # refuses NaN as well
        _require(weight is None or 0 < weight <= 1, "budget.first_round_weight", weight, "above 0, at most 1")
        # whole numbers are written as in a recipe that is read: one recipe has one hash
        for name in ("bits", "head_bits", "embedding_bits"):
            if isinstance(whole := getattr(self, name), int):
                object.__setattr__(self, name, float(whole))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The text that quality is measured on."""

    text: tuple[str, ...] = ()
    """Empty: `demo-eval` for the demo model, else the last tenth of a named calibration text, else WikiText-2's test."""
    field: str = "text"
    """The field of a .jsonl or .parquet file that holds the text."""
    context: int = 2048
    """Tokens of a window; the default is all the positions of a model that has fewer."""
    windows: int = 20
    """Windows that are scored, at most."""
    samples: int = 2
    """Samples of text in the report: beginnings of windows that both models continue; 0: none."""

    def __post_init__(self) -> None:
        _require(self.context >= 8, "evaluation.context", self.context, "8 or more")
        _require(1 <= self.windows <= MOST, "evaluation.windows", self.windows, f"1 to {MOST:,}")
        _require(self.samples >= 0, "evaluation.samples", self.samples, "0 or more")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run of `requant quantize`."""

    model: str = "demo"
    """A folder, a hub name, an alias, or `demo`."""
    mode: Mode = "paper"
    """`best`: rounds of quantizing and training; `paper`: ReQuant as published; `dense`: codes only; `sparse`: 2:4."""
    method: str = "kmeans"
    """The quantization method; `requant methods` lists them."""
    quantizer: Any = field(default_factory=METHODS["kmeans"].config)
    """The method's own options."""
    rotations: Rotations = "per-matrix"
    """Rotations of trellis codes: `per-matrix`, two around every matrix; `folded`, into the model where its architecture
    allows it, so that only the input of `down_proj` is rotated at run time."""
    calibration: Calibration = field(default_factory=Calibration)
    """The text that statistics are measured on."""
    sensitivity: Sensitivity = field(default_factory=Sensitivity)
    """The score of the weights."""
    detach: Detach = field(default_factory=Detach)
    """The sparse part of mode `paper`."""
    finetune: Finetune = field(default_factory=Finetune)
    """Training of everything except the codes."""
    recovery: Recovery = field(default_factory=Recovery)
    """Training after 2:4 pruning, of mode `sparse`."""
    budget: Budget = field(default_factory=Budget)
    """A budget of stored bytes."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """The text that quality is measured on."""
    skip: tuple[str, ...] = ()
    """Shell patterns of matrices that are not quantized, on their whole name or its last part. Names are those of the model
    or, where a pattern matches none of them, those in its weight files."""
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of `quantizer` for some matrices, by patterns like those of `skip`: `{"*.down_proj": {bits: 4}}`. The last
    pattern that matches wins. Bits set here are fixed; a budget distributes the rest."""
    seed: int = 0
    """Seed of the order in which training takes its windows; above 0 it also shifts the calibration windows."""
    deterministic: bool = False
    """Whether two runs on one GPU write the same bytes; gradients of attention take longer. On a CPU they always do."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        expected = find_method(self.method).config
        if type(self.quantizer) is not expected:
            raise RecipeError(
                f"method '{self.method}' takes a {expected.__name__}, not {type(self.quantizer).__name__}."
            )
        if (self.mode == "sparse") != (self.method in PRUNING_METHODS):
            raise RecipeError(
                f"method '{self.method}' and mode {self.mode} do not go together: mode sparse, which `requant sparsify` "
                f"runs, takes one of {', '.join(PRUNING_METHODS)}, and the other modes take one of {', '.join(METHODS)}."
            )
        if self.mode == "sparse" and (self.budget.bits is not None or self.budget.size is not None):
            raise RecipeError(
                "budget.bits and budget.size change nothing in mode sparse, where all bytes follow from quantizer.bits; "
                "leave them out."
            )
        if self.mode == "sparse" and self.finetune.blockwise:
            raise RecipeError(
                "finetune.blockwise changes nothing in mode sparse, which trains the model as a whole; leave it out."
            )
        if self.mode != "sparse" and self.recovery != Recovery():
            raise RecipeError(
                f"recovery changes nothing in mode {self.mode}, which prunes nothing; leave it out, or choose mode sparse, "
                "which `requant sparsify` runs."
            )
        if self.mode == "paper" and getattr(self.quantizer, "outlier_fraction", 0):
            raise RecipeError(
                "quantizer.outlier_fraction has no meaning in mode paper, whose sparse part follows detach; leave it out, "
                "or choose mode dense or best."
            )
        if self.rotations == "folded" and not hasattr(self.quantizer, "rotate_input"):
            raise RecipeError(
                f"rotations: folded has no meaning for method '{self.method}', which rotates nothing; leave it out, or "
                "choose method trellis."
            )
        for pattern, options in self.modules.items():
            self._check_module(pattern, options)
        if self.calibration.inputs == "original":
            return
        if "hessian" not in find_method(self.method).needs:
            readers = [
                name for name, method in (METHODS | PRUNING_METHODS).items() if "hessian" in method.needs
            ]
            raise RecipeError(
                f"calibration.inputs changes nothing for method '{self.method}', which reads no Hessian of its inputs; "
                f"leave it out, or choose one of: {', '.join(readers)}."
            )
        if self.trains_in_rounds:
            raise RecipeError(
                "calibration.inputs changes nothing for mode best with fine-tuning, which measures inputs in the model as "
                "training leaves it, round by round; leave it out, or choose mode dense."
            )

    @property
    def trains_in_rounds(self) -> bool:
        """Whether training also takes place between rounds of codes, and so repairs the errors of those already made."""
        return self.mode == "best" and self.finetune.trains and self.finetune.rounds > 0

    def _check_module(self, pattern: str, options: Mapping[str, Any]) -> None:
        """Raise RecipeError for settings of some matrices that the method does not take, or that the run decides."""
        where = f"modules: '{pattern}'"
        if self.mode == "sparse":
            raise RecipeError(
                f"{where}: mode sparse stores all matrices alike; leave it out, or give --skip."
            )
        known = [each.name for each in dataclasses.fields(self.quantizer)]
        for key in options:
            if key not in known:
                raise RecipeError(
                    f"{where}: method '{self.method}' has no option '{key}'{did_you_mean(str(key), known)}; "
                    f"it has: {', '.join(known)}."
                )
        if options.get("bits") == 16:
            raise RecipeError(f"{where}: to keep matrices at 16 bits, list their pattern under skip.")
        if self.mode == "paper" and "outlier_fraction" in options:
            raise RecipeError(
                f"{where}: outlier_fraction has no meaning in mode paper, whose sparse part follows detach; leave it out."
            )
        if self.rotations == "folded" and (own := {"rotate_input", "rotate_output", "seed"} & options.keys()):
            raise RecipeError(
                f"{where}: rotations that are folded into the model decide {min(own)}; leave it out, or choose "
                "rotations: per-matrix."
            )
        try:
            dataclasses.replace(self.quantizer, **options)
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from error


def _require(condition: bool, key: str, value: Any, takes: str) -> None:
    if not condition:
        raise RecipeError(f"{key} is {value}; it takes {takes}.")
