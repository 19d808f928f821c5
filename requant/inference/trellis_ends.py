"""The ends of a fused step whose embedding and head are bands of trellis codes (`formats/bands.py`).

    x = rows of the embedding, with RoPE's cosines and sines      1 launch, whose rows the first norm rotates back
    y = rotated norm(x += finished product of the last block)     1
    logits = bands of the head, of y                              1

By the modules themselves it takes three launches more: to rotate rows back, to read the angles, and to rotate y.
"""

from typing import Any, cast

from jaxtyping import Float, Int64
from requant_kernels.dispatch import dispatch_group
from requant_kernels.step.rotated_norm import rotated_norm
from requant_kernels.step.rotated_norm import supports as norm_supports
from requant_kernels.trellis.gemv import activation_form
from requant_kernels.trellis.gemv_group import multiply_bands
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.layout import TILE, TrellisLayout
from requant_kernels.trellis.lookup import start_of_step
from requant_kernels.trellis.operands import Product, RotatedActivations, common_form
from torch import Tensor

from requant.inference.kernel_layers import BandedLinear, KernelEmbedding
from requant.inference.step_inputs import StepInputs, angles_of, has_fixed_angles, has_hooks


class TrellisInputs:
    """Inputs of a step from an embedding in codes and fixed angles. x is not written: the product is all of it."""

    def __init__(self, model: Any, bands: list[TrellisLayout], length: int) -> None:
        self.bands, self.width, self.dtype = bands, bands[0].k, model.dtype
        self.cos, self.sin = angles_of(model, length)

    def __call__(self, tokens: Int64[Tensor, "b 1"], position: Int64[Tensor, ""]) -> StepInputs:
        """x, to become the product, cosines, sines, and the product."""
        row, cos, sin = start_of_step(tokens, self.bands, self.cos, self.sin, position)
        x = row.values.new_empty(len(tokens), self.width, dtype=self.dtype)
        return x, cos.expand(len(x), -1), sin.expand(len(x), -1), row


class TrellisHead:
    """The logits of the norm of x + delta, for so many sequences."""

    def __init__(
        self,
        head: BandedLinear,
        bands: list[TrellisLayout],
        launches: list[TrellisGemvConfig],
        sequences: int,
    ) -> None:
        self.head, self.bands, self.launches = head, bands, launches
        self.form = common_form([activation_form(layout, sequences) for layout in bands])
        self.input_scales = bands[0].input_scales

    def __call__(self, x: Float[Tensor, "b d"], delta: Product | None, norm: Any) -> Float[Tensor, "b v"]:
        y = rotated_norm(
            x, delta, norm.weight, norm.variance_epsilon, input_scales=self.input_scales, form=self.form
        )
        logits = multiply_bands(cast(RotatedActivations, y), self.bands, self.launches, x.dtype)
        return logits if self.head.bias is None else logits + self.head.bias


def trellis_inputs(model: Any, length: int) -> TrellisInputs | None:
    """The inputs of a model's steps with a cache of `length` tokens; None where the embedding is of another kind."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, KernelEmbedding) or embedding.scale is not None or has_hooks(embedding):
        return None
    if not has_fixed_angles(model) or has_hooks(model.base_model.rotary_emb):
        return None
    bands = bands_of(embedding.matrix)
    return None if bands is None else TrellisInputs(model, bands, length)


def trellis_head(model: Any, sequences: int) -> TrellisHead | None:
    """The head of a model's steps of so many sequences; None where it is of another kind."""
    head = model.get_output_embeddings()
    bands = None if has_hooks(head) else bands_of(head)
    if bands is None:
        return None
    launches = dispatch_group(bands, sequences, bands[0].packed_codes.device)
    return None if launches is None else TrellisHead(head, bands, launches, sequences)


def bands_of(matrix: Any) -> list[TrellisLayout] | None:
    """The layouts of bands whose rotation of x is shared, and is one that a norm can do."""
    if not isinstance(matrix, BandedLinear) or not matrix.rotates_once:
        return None
    layouts = matrix.layouts()
    width = layouts[0].k
    fits = layouts[0].input_scales is not None and width % TILE == 0 and norm_supports(width)
    return layouts if fits else None
