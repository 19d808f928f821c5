"""The definition of a quantization method: its `Method` is what the rest of requant knows about it.

    quantize(weight [n, k], stats, config, *, detached=None) -> QuantizedWeight

is pure: the same arguments give the same result; it edits none of them, moves nothing between devices and prints
nothing. `weight` is float32. `detached` marks weights that go to the sparse part: the method leaves them out of its fit
(they cost nothing, whatever code they get) and returns their residuals in `sparse`. `config` is the method's own frozen
dataclass, with `bits` and the defaults of all its options. A method that reads `stats.hessian` quantizes `corrected(weight,
stats)` (`correction.py`) in place of the weight: with `calibration.inputs: corrected` inputs are those behind matrices that
are quantized already, and outputs should be the original's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight

Bits = int | float  # of a code: whole numbers, and quarters where a method takes them
Losses = dict[Bits, float]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One quantization method.

    summary: one line of help.
    config: the class of its options.
    needs: the fields of `LinearStats` that `quantize` reads.
    bits: the bits per weight that codes may take, ascending; `config` refuses those that other options exclude.
    packed_spec: `(config, shape, *, finetuned)` -> what a checkpoint stores for a matrix [n, k] of that shape; `finetuned`
        says whether scales and levels will be trained.
    predicted_losses: `(weight [n, k], stats, config, bits)` -> for each of these bits the expected increase of the loss,
        `1/2 tr(G E H E')` in nats per token, in closed form, without quantizing.
    predictor_needs: the fields of `LinearStats` that `predicted_losses` reads.
    outlier_cost: `(stats, config)` -> [n, k], the cost of a squared error of each weight; only of methods that can store
        outliers as floats (`config.outlier_fraction`, `outliers.py`).
    side_by_side: whether threads may call `quantize` at the same time, on streams of one GPU, and gain by it.
    quantize_batch: `(weights, stats, config, *, detached)`, sequences for several matrices of one shape -> the results of
        `quantize`, bit for bit; of methods that leave most of a GPU idle with a single small matrix.
    compile_ahead: `(configs, device, *, wait)` compiles the kernels that matrices of these settings need side by side, which
        `quantize` would do one after the other; without `wait` in the background.
    plain_grid: whether codes are a uniform grid without column scales, which other programs read (`recipe/readers.py`).
    seconds_per_weight: time of `quantize` on one CPU core and on one H200, by device type.
    detach: published sparse part of ReQuant with this method (Table 10), as fields of the recipe's section `detach`;
        what is not given has the defaults of the scalar quantizer.
    """

    summary: str
    config: type[Any]
    quantize: Callable[..., QuantizedWeight]
    packed_spec: Callable[..., PackedSpec]
    predicted_losses: Callable[[Tensor, LinearStats, Any, Sequence[Bits]], Losses]
    seconds_per_weight: Mapping[str, float]
    needs: frozenset[str] = frozenset()
    predictor_needs: frozenset[str] = frozenset({"fisher"})
    bits: tuple[Bits, ...] = (2, 3, 4, 5, 6, 7, 8)
    outlier_cost: Callable[[LinearStats, Any], Float[Tensor, "n k"]] | None = None
    side_by_side: bool = False
    quantize_batch: Callable[..., list[QuantizedWeight]] | None = None
    compile_ahead: Callable[..., None] | None = None
    plain_grid: bool = False
    detach: Mapping[str, Any] = field(default_factory=dict)

    @property
    def allocation_needs(self) -> frozenset[str]:
        """The statistics that an allocation collects: its own, and those of the codes that are made next."""
        return self.predictor_needs | self.needs


@dataclass(frozen=True, kw_only=True)
class PruningMethod:
    """One method of 2:4 sparsity (`requant sparsify`): fields as in `Method`.

    `quantize(weight [n, k], stats, config) -> QuantizedWeight` is as pure, and prunes and rounds in one pass. All bytes
    follow from the bits of a kept weight, so there is no budget to predict losses for, and no sparse part.
    """

    summary: str
    config: type[Any]
    quantize: Callable[..., QuantizedWeight]
    packed_spec: Callable[..., PackedSpec]
    seconds_per_weight: Mapping[str, float]
    needs: frozenset[str] = frozenset()
    predictor_needs: frozenset[str] = frozenset()
    side_by_side: bool = False
    quantize_batch: Callable[..., list[QuantizedWeight]] | None = None
    compile_ahead: Callable[..., None] | None = None
