"""Tensor parallelism for trellis codes, whose rotations run over all ranks; knows nothing of vLLM.

    y = S H V H s x        S, s: output and input scales; H: Hadamard blocks of the whole width, which no rank may cut

V is divided, the rotations are not. Every rank holds the same number of rows (columns) of V, in tiles of 16:

    column-parallel     z_r = V_r H s x,  z = all-gather of z_r,  y = S H z, of which the rank takes its outputs
    row-parallel        x = all-gather of x_r,  y_r = S H V_r (H s x)_r;  the layer adds the y_r, as for any matrix

Both equal the whole product except for the rounding of what is gathered (z instead of y, in the dtype of activations). They
cost one all-gather per layer more than matrices that can be cut, and a rotation of the whole width on every rank, which is
cheap compared to the product. z is scaled by a power of two that makes it as large as y, so that float16 can hold it.

An H that splits as H_P x H_(n / P) would save nothing: every rank's outputs are sums over the z of all ranks. Hadamard
blocks that end at a rank's boundary would, but they have to be chosen when a matrix is quantized; matrices with such
blocks are cut.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from requant_kernels import rotate
from torch import Tensor, nn

from requant.errors import ModelError
from requant.formats.hadamard import TILE
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.trellis import Trellis

Gather = Callable[[Tensor], Tensor]  # the parts of all ranks, [m, c] each, side by side: [m, ranks c]


@dataclass(frozen=True, kw_only=True)
class OutputRotation:
    """What a column-parallel rank does once all z are there: rotate, scale, take the rows `runs`."""

    scales: Float[Tensor, " n"]
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class InputRotation:
    """What a row-parallel rank does before it multiplies: scale and rotate all x, take columns `start` to `stop`."""

    scales: Float[Tensor, " k"]
    start: int
    stop: int


def divide_rows(
    weight: QuantizedWeight, runs: Sequence[tuple[int, int]], *, rank: int, ranks: int, where: str
) -> tuple[QuantizedWeight, OutputRotation]:
    """The rank's rows of V, and what makes of all z the outputs `runs`. Raises ModelError where V does not divide."""
    trellis = _plain(weight, where)
    start, stop = _tiles(len(trellis.output_scales), rank, ranks, "rows", where)
    exponent = round(math.log2(max(trellis.output_scales.float().abs().mean().item(), 2**-14)))
    part = replace(
        trellis,
        codes=trellis.codes[start:stop],
        output_scales=torch.full((stop - start,), 2.0**exponent).half().to(trellis.codes.device),
        rotates_output=False,
    )
    scales = trellis.output_scales.float() * 2.0**-exponent
    return QuantizedWeight(dense=part, sparse=None), OutputRotation(scales=scales, runs=tuple(runs))


def divide_columns(
    weight: QuantizedWeight, *, rank: int, ranks: int, where: str
) -> tuple[QuantizedWeight, InputRotation]:
    """The rank's columns of V, and what makes its input of all x. Raises ModelError where V does not divide."""
    trellis = _plain(weight, where)
    assert trellis.input_scales is not None  # else it could have been cut
    start, stop = _tiles(len(trellis.input_scales), rank, ranks, "columns", where)
    part = replace(trellis, codes=trellis.codes[:, start:stop], input_scales=None)
    return QuantizedWeight(dense=part, sparse=None), InputRotation(
        scales=trellis.input_scales.float(), start=start, stop=stop
    )


class GatheredOutput(nn.Module):
    """Column-parallel: the outputs of a rank of one or more matrices that share x; `products` give their z_r."""

    def __init__(
        self, products: Sequence[nn.Module], rotations: Sequence[OutputRotation], ranks: int, gather: Gather
    ) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)
        self.ranks, self.gather = ranks, gather
        self.runs = [rotation.runs for rotation in rotations]
        self.sizes = [len(rotation.scales) // ranks for rotation in rotations]
        for index, rotation in enumerate(rotations):
            self.register_buffer(f"scales_{index}", rotation.scales, persistent=False)

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        parts = [product(x) for product in self.products]
        z = self.gather(parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        outputs = []
        for index, own in enumerate(z.unflatten(-1, (self.ranks, -1)).split(self.sizes, -1)):
            y = rotate(own.flatten(-2), output_scales=self.get_buffer(f"scales_{index}"))
            outputs += [y[..., start:stop] for start, stop in self.runs[index]]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


class GatheredInput(nn.Module):
    """Row-parallel: a rank's part of the sum; `product` takes its columns of the rotated input."""

    def __init__(self, product: nn.Module, rotation: InputRotation, gather: Gather) -> None:
        super().__init__()
        self.product, self.gather = product, gather
        self.start, self.stop = rotation.start, rotation.stop
        self.register_buffer("scales", rotation.scales, persistent=False)

    def forward(self, x: Float[Tensor, "*m c"]) -> Float[Tensor, "*m n"]:
        rotated = rotate(self.gather(x), input_scales=self.get_buffer("scales"))
        return self.product(rotated[..., self.start : self.stop])


def _plain(weight: QuantizedWeight, where: str) -> Trellis:
    assert isinstance(weight.dense, Trellis)
    if weight.sparse is not None and weight.sparse.values.numel():
        raise ModelError(
            f"{where}: trellis codes with residuals are not divided among GPUs; serve this model on one GPU or with "
            "--pipeline-parallel-size, or quantize it without outliers."
        )
    return weight.dense


def _tiles(size: int, rank: int, ranks: int, side: str, where: str) -> tuple[int, int]:
    if size % (TILE * ranks):
        raise ModelError(
            f"{where}: {size} {side} of trellis codes, in tiles of {TILE}, do not divide among {ranks} GPUs; use a "
            "tensor-parallel size that divides them, or --pipeline-parallel-size."
        )
    own = size // ranks
    return rank * own, (rank + 1) * own
