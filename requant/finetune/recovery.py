"""Training after pruning: the kept weights learn the outputs of the dense original, by distillation (`loop.py`).

Every matrix has a float32 weight w [n, k], its pruned weights included: the pruned matrix where the mask keeps, the original
elsewhere. The model multiplies by a 2:4 function of it:

| recovery | the model's weight | gradient | mask |
| --- | --- | --- | --- |
| `fixed` | `mask . w` | of the kept weights | as pruned |
| `ast` | `mask . w` | straight through to all of w | the two largest of four, every `mask_every` steps |
| `s-ste` | `beta S(w)` (`sparsity/masks.py`) | straight through | where S(w) is not zero |

`ast` (Huang et al. 2024, arXiv 2407.20584) also decays pruned weights, by a strength that grows over the first quarter of
the steps (`masked_adam.py`): first they explore, then masks settle. With strength 0 and a mask that is never updated it is
`fixed`, bit for bit. `s-ste` (Hu et al. 2024, arXiv 2409.09099) computes beta once, before the first step. Both were made
for billions of tokens; at a few millions `fixed` is better (docs/sparsity.md). We deviate from AST in the loss, which is the
KL divergence alone, at temperature 1, unless `recovery.distillation` gives the cross-entropy of the text a share.

With fewer than 16 bits the model's weight is rounded in every step, and the steps of the levels learn too (LSQ; Esser et al.
2019, arXiv 1902.08153):

    w~ = s (floor(w / s) + 1/2)      dw~/dw = 1 inside the range, 0 outside
                                     dw~/ds = floor(w / s) + 1/2 - w / s inside the range, the outermost level outside
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from requant.finetune.final import original_model, save_finetuned_params, split_windows
from requant.finetune.loop import single_precision, train
from requant.finetune.masked_adam import MaskedDecay, MaskedDecayAdam
from requant.finetune.saved_training import SavedTraining
from requant.finetune.step import ReparametrizedWeight, TrainableTensor
from requant.finetune.teacher import Teacher
from requant.finetune.trainables import learning_rate, params_without_codes, trainable_tensors
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.semi_structured import SemiStructured
from requant.models.targets import QuantTarget
from requant.quantizers.semi_structured import SemiStructuredConfig, stored
from requant.recipe.schema import Finetune, Recovery
from requant.run.context import RunContext, Weights
from requant.sparsity.masks import keep2, least_squares_scale, soft_threshold
from requant.sparsity.straight_through import straight_through

Projection = Callable[["PrunedWeight"], Float[Tensor, "n k"]]


@dataclass(frozen=True, kw_only=True)
class PrunedWeight:
    """One matrix in training; `mask` is a buffer that is updated in place."""

    weight: Float[Tensor, "n k"]  # a leaf
    mask: Bool[Tensor, "n k"]
    steps: Float[Tensor, "n g"] | None  # a leaf: steps of the levels, None with 16 bits
    beta: Float[Tensor, ""]  # of S-STE
    config: SemiStructuredConfig

    @classmethod
    def start(cls, pruned: QuantizedWeight, original: Float[Tensor, "n k"]) -> "PrunedWeight":
        """The pruned matrix, with the original's weights where it has none."""
        dense = pruned.dense
        assert isinstance(dense, SemiStructured)
        weight = torch.where(dense.mask, dense.dequantize(), original)
        return cls(
            weight=weight,
            mask=dense.mask,
            steps=None if dense.scales is None else dense.scales.float(),
            beta=least_squares_scale(weight),
            config=SemiStructuredConfig(
                bits=dense.bits, group_size=dense.group_size, metadata=dense.metadata
            ),
        )

    def stored(self, project: Projection) -> QuantizedWeight:
        """The matrix as a checkpoint holds it."""
        with torch.no_grad():
            return stored(project(self), self.mask, self.steps, self.config)

    def rounded(self, values: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """The values on their levels where the mask keeps; as they are with 16 bits."""
        if self.steps is None:
            return values
        groups = torch.arange(values.shape[1], device=values.device) // self.config.group_size
        step, half = self.steps[:, groups], 1 << (self.config.bits - 1)
        position = (values / step).clamp(-half, half)
        level = (values / step).detach().floor().clamp(-half, half - 1) + 0.5
        return torch.where(self.mask, step * (position + (level - position).detach()), 0.0)


def fixed(matrix: PrunedWeight) -> Float[Tensor, "n k"]:
    """`mask . w`"""
    return torch.where(matrix.mask, matrix.weight, 0.0)


def adaptive(matrix: PrunedWeight) -> Float[Tensor, "n k"]:
    """`mask . w`, with the gradient of w"""
    return straight_through(matrix.weight, fixed(matrix))


def smooth(matrix: PrunedWeight) -> Float[Tensor, "n k"]:
    """`beta S(w)`, with the gradient of w"""
    return straight_through(matrix.weight, matrix.beta * soft_threshold(matrix.weight.detach()))


PROJECTIONS: dict[str, Projection] = {"fixed": fixed, "ast": adaptive, "s-ste": smooth}


@dataclass(kw_only=True)
class MaskUpdates:
    """Updates masks and the strength of their decay between steps; `flip_rates` has the share that each update moved."""

    matrices: Sequence[PrunedWeight]
    every: int  # 0: never
    strength: Tensor
    full_strength: float
    steps: int
    flip_rates: list[float] = field(default_factory=list)

    def __call__(self, step: int) -> dict[str, str]:
        """Update strength and masks after `step` (from 0), and return what the progress bar shows."""
        self.strength.fill_(self.full_strength * min(1.0, 4 * (step + 1) / self.steps))
        if self.every and ((step + 1) % self.every == 0 or step + 1 == self.steps):
            self._update()
        return {"flips": f"{self.flip_rates[-1]:.5f}"} if self.flip_rates else {}

    def _update(self) -> None:
        """Every mask becomes the two largest of four."""
        moved = torch.zeros((), dtype=torch.int64, device=self.strength.device)
        for matrix in self.matrices:
            mask = keep2(matrix.weight.detach().abs())
            moved += (mask ^ matrix.mask).sum()
            matrix.mask.copy_(mask)
        self.flip_rates.append(moved.item() / sum(matrix.mask.numel() for matrix in self.matrices))


def recover(
    run: RunContext, weights: Weights, settings: Finetune, recovery: Recovery
) -> tuple[Weights, list[float]]:
    """The recovered matrices and the flip rate of every update of the masks.

    Parameters without codes learn too and go into `run.finetuned_params`; the model is left at the originals. Raises
    RecipeError for fewer than two calibration windows.
    """
    train_windows, val_windows = split_windows(run, settings)
    teacher = Teacher(original_model(run), train_windows)
    matrices = {
        target.name: PrunedWeight.start(weights[target.name], target.weight()) for target in run.targets
    }
    run.apply_quantized_weights(weights)
    project = PROJECTIONS[recovery.method]
    other_params = params_without_codes(run)
    before = {name: run.original_param(name, p) for name, p in other_params.items()}
    strength = torch.zeros((), device=run.model.device)
    if recovery.method == "s-ste":
        for matrix in matrices.values():
            matrix.mask.copy_(keep2(matrix.weight.abs()))
    saved = SavedTraining.of(run, "recovered")
    updates = MaskUpdates(
        matrices=list(matrices.values()),
        every={"fixed": 0, "ast": recovery.mask_every, "s-ste": 1}[recovery.method],
        strength=strength,
        full_strength=recovery.decay if recovery.method == "ast" else 0.0,
        steps=settings.num_steps,
        flip_rates=saved.record,
    )
    with single_precision(run.model.parameters()):
        trainables = [TrainableTensor(tensor=m.weight, lr=recovery.lr) for m in matrices.values()]
        trainables += [
            TrainableTensor(tensor=m.steps, lr=learning_rate(run, settings))
            for m in matrices.values()
            if m.steps is not None
        ]
        trainables += trainable_tensors({}, (), list(other_params.values()), recovery.lr)
        decays = {m.weight: MaskedDecay(mask=m.mask, strength=strength) for m in matrices.values()}
        train(
            run,
            teacher,
            trainables,
            [_derived(target, matrices[target.name], project) for target in run.targets],
            settings,
            saved=saved,
            val_windows=val_windows,
            optimizer=lambda groups, captures: MaskedDecayAdam(
                groups, decays if updates.full_strength else {}
            ),
            between_steps=updates,
            buffers=[strength, *(matrix.mask for matrix in matrices.values())],
            distillation=recovery.distillation,
        )
    save_finetuned_params(run, before)
    run.apply_original_weights()
    found = {name: matrix.stored(project) for name, matrix in matrices.items()}
    return found, updates.flip_rates


def _derived(target: QuantTarget, matrix: PrunedWeight, project: Projection) -> ReparametrizedWeight:
    return ReparametrizedWeight(
        parameter=target.parameter, value=lambda: target.oriented(matrix.rounded(project(matrix)))
    )
