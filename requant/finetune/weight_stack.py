"""The matrices of one kind of a layer of experts in training block by block, computed together.

    W_e = s_e[:, None] * U_e        dL/ds_e = (dL/dW_e * U_e) summed over columns         for all experts e

are, one matrix below the other, the rows of one large matrix (`scaled_rows.py`): two launches, where a model like
Qwen3-30B-A3B has 18,432 matrices, whose kernels take less time than Python needs to launch them. The matrices lie one behind
the other in memory, so `grouped_mm` reads them where they are (`models/stacked.py`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from requant.finetune.scaled_rows import ScaledRows
from requant.finetune.step import ReparametrizedWeight
from requant.models.stacked import stacked


@dataclass(frozen=True, kw_only=True)
class WeightStack:
    """Matrices of one shape. What they are before their scales is `unscaled`, of which each member holds a part."""

    members: Sequence[ReparametrizedWeight]
    unscaled: Float[Tensor, "e n k"]

    @classmethod
    def of(cls, members: Sequence[ReparametrizedWeight]) -> "WeightStack":
        """Members with one `ScaledRows` each, whose `unscaled` become parts of one tensor."""
        parts = [member.rows[0].unscaled for member in members]
        unscaled = torch.stack(parts)
        for part, own in zip(parts, unscaled, strict=True):
            part.data = own  # the memory of the part goes
        return cls(members=members, unscaled=unscaled)

    @property
    def parameters(self) -> list[Tensor]:
        return [member.parameter for member in self.members]

    @torch.no_grad()
    def values(self) -> Sequence[Float[Tensor, "n k"]]:
        """The matrices, in float32, one behind the other."""
        found = torch.empty_like(self.unscaled, dtype=torch.float32)
        self._rows().write(found.flatten(0, 1))
        return found.unbind()

    @torch.no_grad()
    def backward(self) -> None:
        """The chain rule, as `ReparametrizedWeight.backward`."""
        gradients = [parameter.grad for parameter in self.parameters]
        there = [gradient for gradient in gradients if gradient is not None]
        if len(there) < len(gradients):  # called one by one, experts without tokens have none
            for member in self.members:
                member.backward()
            return
        rows = self._rows()
        rows.add_gradient(stacked(there).flatten(0, 1))
        assert rows.scales.grad is not None
        of_each = rows.scales.grad.view(len(self.members), -1)
        for scales, own in zip(self._scales, of_each, strict=True):
            scales.grad = own if scales.grad is None else scales.grad + own

    @property
    def _scales(self) -> list[Tensor]:
        return [member.rows[0].scales for member in self.members]

    def _rows(self) -> ScaledRows:
        """All rows, with copies of the scales."""
        return ScaledRows(scales=torch.cat(self._scales), unscaled=self.unscaled.flatten(0, 1))


def in_stacks(weights: Sequence[ReparametrizedWeight]) -> list[WeightStack | ReparametrizedWeight]:
    """Those that are computed together as stacks, and the others as they are."""
    together: dict[Hashable, list[ReparametrizedWeight]] = {}
    for weight in weights:
        alone = weight.stack is None or len(weight.rows) != 1
        key = id(weight) if alone else (weight.stack, weight.parameter.shape, weight.rows[0].unscaled.dtype)
        together.setdefault(key, []).append(weight)
    return [WeightStack.of(found) if len(found) > 1 else found[0] for found in together.values()]
