"""Layers on the kernels in a compiled model: vLLM and others compile one for every number of rows."""

from dataclasses import replace

import pytest
import torch
from requant_kernels import TrellisLayout
from requant_kernels.random_layouts import random_layout
from torch import Tensor, nn

from requant.inference.kernel_layers import BandedLinear, KernelLinear


def linear(kind: str, bits: float, density: float = 0.0) -> KernelLinear:
    return KernelLinear(random_layout(kind, bits, 64, 96, density, device="cpu"))


def bands() -> BandedLinear:
    layouts = [random_layout("mul1", bits, 64, 96, 0.0, device="cpu") for bits in (4, 5)]
    trellises = [
        replace(layout, rotates_output=False) for layout in layouts if isinstance(layout, TrellisLayout)
    ]
    return BandedLinear(
        [KernelLinear(replace(each, input_scales=trellises[0].input_scales)) for each in trellises]
    )


class Rows(nn.Module):
    def __init__(self, matrix: KernelLinear | BandedLinear) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, tokens: Tensor) -> Tensor:
        return self.matrix.rows(tokens, torch.bfloat16)


X, TOKENS = torch.randn(5, 96), torch.arange(5)


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (linear("grid", 4), X), (linear("grid", 4, 0.01), X), (linear("lut", 3), X), (linear("pair", 2), X),
        (bands(), X), (Rows(bands()), TOKENS), (Rows(linear("grid", 4)), TOKENS),
    ],
    ids=["grid", "residuals", "levels", "trellis", "bands", "rows of bands", "rows of a grid"],
)  # fmt: skip
def test_numbers_of_rows_stay_symbolic(layer: nn.Module, given: Tensor) -> None:
    """Export raises where one becomes a constant."""
    exported = torch.export.export(layer, (given,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    (result,) = exported.graph.output_node().args[0]
    assert isinstance(result.meta["val"].shape[0], torch.SymInt)
    assert any("requant" in str(node.target) for node in exported.graph.nodes), "by an operator of its own"
