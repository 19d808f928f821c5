"""A block of a fused step whose matrices are trellis codes with rotations: products, and a few launches between them.

    y = rotated norm(x += finished product of the block before)                  1 launch  (`step/rotated_norm.py`)
    q, k, v = products of y                                                      1         (`trellis/gemv_group.py`)
    queries, cache = rotated rope(q, k, v)                                       1         (`step/rotated_rope.py`)
    attention                                                                    1, or 2 of a few sequences
    o = product of the attention                                                 1, or 2 where its input is rotated apart
    y = rotated norm(x += finished o)                                            1
    gate, up = products of y                                                     1
    h = rotated gate(gate, up)                                                   1         (`step/rotated_gate.py`)
    down = product of h, which the next block finishes                           1

That is 9 launches for one sequence, 10 or 11 for more; if each matrix rotates for itself, it takes 21 for one token and 27
for more. Matrices that read the same activations need the same input scales, which is the case for those that `requant
quantize` made: their signs follow from the recipe's seed. Matrices of equal bits are one matrix for the kernels
(`convert.py`); those of different widths, as a budget may give them, take one launch up to eight sequences (16 on GPUs
before Hopper), and one per width beyond, which overlap.

What follows the attention is `TrellisMLP`, or for a mixture of experts `trellis_mixture.py`.
"""

from collections.abc import Sequence
from typing import Any, cast

from jaxtyping import Float
from requant_kernels.ops import activation_form, combines_parts, product, products
from requant_kernels.step import rotated_gate, rotated_norm, rotated_rope
from requant_kernels.step.attention import attend, attend_split
from requant_kernels.trellis.layout import TILE, TrellisLayout
from requant_kernels.trellis.operands import (
    ActivationForm,
    Product,
    RotatedActivations,
    SplitAttention,
    common_form,
    shares_form,
)
from torch import Tensor, nn

from requant.inference.kernel_layers import KernelLinear, Sibling
from requant.inference.prompt_attention import attend_prompt
from requant.inference.trellis_mixture import TrellisMixture, trellis_mixture
from requant.models.experts import has_experts


class TrellisBlock:
    """A block for steps of a number of sequences, by `trellis_block`."""

    def __init__(
        self, block: Any, qkv: "Readers", mlp: "TrellisMLP | TrellisMixture", *, splits: bool = False
    ) -> None:
        """`splits`: o combines the parts of the attention of one sequence."""
        self.block, self.qkv, self.mlp, self.splits = block, qkv, mlp, splits

    def __call__(
        self,
        x: Float[Tensor, "b d"],
        delta: Product | None,
        cos: Tensor,
        sin: Tensor,
        layer: Any,
        position: Tensor,
        past: int | None = None,
    ) -> Product | None:
        """What the block adds to x last, still to be finished, or None where it has been added; x becomes what it has added
        before. `past`: as in `PlainBlock`."""
        module = self.block.self_attn
        q, k, v = self.before_attention(x, delta)
        scale = getattr(module, "scaling", layer.keys.shape[-1] ** -0.5)
        queries = rotated_rope.rotated_rope(
            q, k, v, cos, sin, position, layer.keys, layer.values, **head_norms(module)
        )
        if past is not None:
            output = attend_prompt(queries, layer.keys, layer.values, scale, past=past)
            return self.after_attention(x, output)
        one_query = queries[:, :, None], layer.keys, layer.values
        if self.splits:
            attended = attend_split(*one_query, scale, position=position)
        else:
            attended = attend(*one_query, None, scale, position=position).flatten(1)
        return self.after_attention(x, attended)

    def before_attention(self, x: Float[Tensor, "b d"], delta: Product | None) -> list[Product]:
        """The products of q, k and v with the norm of x + delta; x becomes that sum."""
        return self.qkv.products(self.qkv.normalized(x, delta, self.block.input_layernorm))

    def after_attention(
        self, x: Float[Tensor, "b d"], output: Float[Tensor, "b q"] | SplitAttention
    ) -> Product | None:
        """What the MLP adds to x, which becomes what it is after the attention, or with None has it added."""
        o = self.block.self_attn.o_proj
        return self.mlp(x, product(output, layout_of(o), o.bias))


class TrellisMLP:
    """The second half of a block, after o."""

    def __init__(self, norm: Any, activation: str, gate_up: "Readers", down: "Readers") -> None:
        self.norm, self.activation, self.gate_up, self.down = norm, activation, gate_up, down

    def __call__(self, x: Float[Tensor, "b d"], delta: Product) -> Product:
        """What it adds to x, which becomes x + delta."""
        gate, up = self.gate_up.products(self.gate_up.normalized(x, delta, self.norm))
        h = rotated_gate.rotated_gate(
            gate, up, self.activation, x.dtype, input_scales=self.down.input_scales, form=self.down.form
        )
        (delta,) = self.down.products(h)
        return delta


class Readers:
    """Matrices that read the same rotated activations, of so many sequences."""

    def __init__(self, layers: "Sequence[KernelLinear | Sibling]", sequences: int) -> None:
        self.parts = [part_of(layer) for layer in layers]
        self.matrices = list(dict.fromkeys(matrix for matrix, _ in self.parts))
        layouts = [layout_of(matrix) for matrix in self.matrices]
        forms = [activation_form(layout, sequences) for layout in layouts]
        self.form = common_form(cast("list[ActivationForm]", forms))
        self.input_scales = cast(Tensor, layouts[0].input_scales)
        self.share_form = shares_form(layouts)

    def normalized(self, x: Float[Tensor, "b d"], delta: Product | None, norm: Any) -> RotatedActivations:
        """The norm of x + delta, which x becomes, rotated."""
        found = rotated_norm.rotated_norm(
            x, delta, norm.weight, norm.variance_epsilon, input_scales=self.input_scales, form=self.form
        )
        return cast(RotatedActivations, found)

    def products(self, x: RotatedActivations) -> list[Product]:
        """One a layer; several may be parts of one tensor."""
        layouts = [layout_of(matrix) for matrix in self.matrices]
        found = products([x] * len(layouts), layouts, [matrix.bias for matrix in self.matrices])
        whole = dict(zip(self.matrices, found, strict=True))
        return [whole[matrix].part(rows) for matrix, rows in self.parts]


def trellis_block(block: nn.Module, activation: str, sequences: int) -> TrellisBlock | None:
    """A qualified block (`fused_step.qualifies`) for steps of so many sequences; None where a matrix is not a trellis
    that is rotated on both sides, or of a size that the kernels do not take."""
    attention = block.get_submodule("self_attn")
    qkv, o = _trellises(attention, QKV, sequences), _trellises(attention, ("o_proj",), sequences)
    head_dim = getattr(attention, "head_dim", 0)
    if not (
        qkv
        and o
        and isinstance(o[0], KernelLinear)
        and rotated_norm.supports(o[0].out_features)
        and rotated_rope.supports(head_dim, tuple(layer.out_features for layer in qkv))
    ):
        return None
    readers = Readers(qkv, sequences)
    mixture = has_experts(block)
    mlp = trellis_mixture(block, sequences) if mixture else _trellis_mlp(block, activation, sequences)
    if mlp is None or not readers.share_form:
        return None
    splits = sequences == 1 and combines_parts(layout_of(o[0]))
    return TrellisBlock(block, readers, mlp, splits=splits)


def _trellis_mlp(block: nn.Module, activation: str, sequences: int) -> TrellisMLP | None:
    mlp = block.get_submodule("mlp")
    gate_up = _trellises(mlp, ("gate_proj", "up_proj"), sequences)
    down = _trellises(mlp, ("down_proj",), sequences)
    if not (gate_up and down and rotated_gate.supports(down[0].in_features)):
        return None
    readers = Readers(gate_up, sequences), Readers(down, sequences)
    if not all(own.share_form for own in readers):
        return None
    return TrellisMLP(block.get_submodule("post_attention_layernorm"), activation, *readers)


QKV = ("q_proj", "k_proj", "v_proj")


def _trellises(
    parent: nn.Module, names: Sequence[str], sequences: int
) -> "list[KernelLinear | Sibling] | None":
    """The layers with these names; None where one is not a trellis for the kernels of so many sequences."""
    layers = [getattr(parent, name, None) for name in names]
    if not all(is_rotated_trellis(layer, sequences) for layer in layers):
        return None
    return cast("list[KernelLinear | Sibling]", layers)


def head_norms(attention: Any) -> dict[str, Any]:
    """The norms of q and k as the kernels of RoPE take them; empty for a model without."""
    if not hasattr(attention, "q_norm"):
        return {}
    return {
        "q_norm": attention.q_norm.weight,
        "k_norm": attention.k_norm.weight,
        "eps": attention.q_norm.variance_epsilon,
    }


def is_rotated_trellis(layer: Any, sequences: int) -> bool:
    """Whether a layer is on the kernels, its codes a trellis with both rotations, without residuals and hooks, and whether
    the kernel of so many sequences takes rotated activations."""
    if not isinstance(layer, KernelLinear | Sibling) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    matrix: Any = layer.siblings.matrix if isinstance(layer, Sibling) else layer
    if not isinstance(matrix, KernelLinear) or not matrix.trellis:
        return False
    layout, sizes = layout_of(matrix), layer.siblings.sizes if isinstance(layer, Sibling) else ()
    return (
        layout.input_scales is not None
        and layout.rotates_output
        and layout.parts == tuple(sizes)
        and layout.sparse is None
        and layout.n % TILE == 0
        and activation_form(layout, sequences) is not None
    )


def part_of(layer: KernelLinear | Sibling) -> tuple[KernelLinear, slice]:
    """The matrix that holds a layer's codes, and the layer's rows of it."""
    if isinstance(layer, KernelLinear):
        return layer, slice(0, layer.out_features)
    start = sum(layer.siblings.sizes[: layer.index])
    return cast(KernelLinear, layer.siblings.matrix), slice(start, start + layer.out_features)


def layout_of(layer: KernelLinear) -> TrellisLayout:
    """What the kernels hold of a trellis."""
    return cast(TrellisLayout, layer.layout)
