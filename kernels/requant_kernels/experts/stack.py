"""Trellis matrices of all experts of a layer, of one shape, stacked so that launches can index them by expert.

Experts may have codes of different bit widths; each width is one stack. A launch has the code for every one of
`widths`, of which a layer may lack some: layers with the same `widths` share one program. Input scales are signs that depend
only on the seed and the number of columns, so one rotation of x serves all experts; every matrix has its own output scales.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from requant_kernels.trellis.layout import TrellisLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStack:
    """Matrix `part * experts + e` is part `part` (gate and up: 2; down: 1) of expert e."""

    by_bits: Mapping[float, TrellisLayout]  # stacked codes
    index_of: Sequence[tuple[float, int]]  # per matrix: its bits, and its index in their stack
    locations: Tensor  # the same on the device, int32 [matrices, 2]: the number of the width in `widths`, and the index
    widths: tuple[float, ...]
    output_scales: Tensor  # float16 [matrices, n]
    biases: Tensor | None  # [matrices, n]
    parts: int
    n: int
    k: int

    @property
    def experts(self) -> int:
        return len(self.index_of) // self.parts

    @property
    def layout(self) -> TrellisLayout:
        """One of the stacks: for what all have in common."""
        return next(iter(self.by_bits.values()))

    def codes(self, matrix: int) -> Tensor:
        """The packed codes of a matrix: a view of its stack."""
        bits, index = self.index_of[matrix]
        return self.by_bits[bits].packed_codes[index]

    def codes_of_widths(self) -> tuple[Tensor, ...]:
        """The stack of every one of `widths`; any where only other layers have a width: no matrix is there."""
        return tuple(self.by_bits.get(bits, self.layout).packed_codes for bits in self.widths)


def stack_experts(
    matrices: Sequence[TrellisLayout], *, parts: int, biases: Sequence[Tensor] | None = None,
    widths: Iterable[float] | None = None,
) -> ExpertStack:  # fmt: skip
    """Stack the matrices of all experts, part after part. Raises ValueError for matrices that no launch can share.

    `widths`: those of all layers whose stacks may share a program; None: the matrices' own.
    """
    first = matrices[0]
    for matrix in matrices:
        if matrix.input_scales is None or first.input_scales is None or not matrix.rotates_output:
            raise ValueError("experts whose rotations are folded into the model are not stacked")
        if matrix.sparse is not None:
            raise ValueError("experts with residuals are not stacked")
        if (matrix.n, matrix.k, matrix.code) != (first.n, first.k, first.code):
            raise ValueError("experts of different shapes or codes are not stacked")
        if not torch.equal(matrix.input_scales, first.input_scales):
            raise ValueError("experts whose inputs are rotated by different signs are not stacked")
    members: dict[float, list[int]] = {}
    for index, matrix in enumerate(matrices):
        members.setdefault(matrix.bits, []).append(index)
    by_bits = {
        bits: replace(matrices[own[0]], packed_codes=torch.stack([matrices[i].packed_codes for i in own]))
        for bits, own in members.items()
    }
    index_of = [(m.bits, members[m.bits].index(i)) for i, m in enumerate(matrices)]
    known = tuple(sorted({*members, *(widths or ())}))
    locations = torch.tensor([(known.index(bits), index) for bits, index in index_of], dtype=torch.int32)
    return ExpertStack(
        by_bits=by_bits, index_of=index_of, locations=locations.to(first.packed_codes.device), widths=known,
        output_scales=torch.stack([matrix.output_scales for matrix in matrices]),
        biases=None if biases is None else torch.stack(list(biases)),
        parts=parts, n=first.n, k=first.k,
    )  # fmt: skip
