"""A loaded model made ready to serve: every quantized matrix in the layout of the kernels, packed once.

    q_proj, k_proj, v_proj  ->  one matrix [n_q + n_k + n_v, k], one launch; each layer returns its columns

Trellis codes of one width join too: one rotation of x, one product, and a rotation back for neighbours of equal size.

`QuantLinear` holds what is on disk, which no kernel can read at speed, so `convert_to_kernels` replaces it and drops its
buffers: memory is then the packed size. 2:4 matrices of 16-bit values become `SemiStructuredLinear`. A matrix that no kernel
supports, or that one computes wrongly (`kernel_check.py`), stays a `QuantLinear`, and the log says so.
"""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from requant_kernels import Layout, TrellisLayout
from requant_kernels.ops import (
    OPERANDS,
    TRELLIS_OPERANDS,
    flatten,
    lookup_refusal,
    multiply,
    multiply_bands,
    unflatten,
)
from requant_kernels.trellis.operands import shares_form
from torch import Tensor, nn

from requant.formats.quantized_weight import QuantizedWeight, bands_of, join_key, join_rows
from requant.formats.trellis import Trellis
from requant.inference.kernel_check import KernelCheck, kind_of
from requant.inference.quant_embedding import QuantEmbedding
from requant.inference.quant_linear import QuantLinear, apply_without_casts, refuse_to_save
from requant.inference.semi_structured_linear import (
    SemiStructuredLinear,
    has_sparse_products,
    semi_structured_linear,
)
from requant.models.experts import Expert
from requant.models.rotations import stream_kept
from requant.models.targets import SIBLINGS

AUTOTUNE = "REQUANT_AUTOTUNE"  # 1: measure launch shapes that no table has, when a model is loaded
ONE_LAUNCH = (1, 8, 16)  # tokens that bands are checked with: those whose products are one launch
logger = logging.getLogger(__name__)


class KernelLinear(nn.Module):
    """`x w~' + bias` by the kernels; its buffers are the operands of the custom operator and are never saved."""

    def __init__(self, layout: Layout | TrellisLayout, bias: Tensor | None = None) -> None:
        super().__init__()
        self.trellis = isinstance(layout, TrellisLayout)
        self.lookup_refusal = lookup_refusal(layout)
        self.in_features, self.out_features = layout.k, layout.n
        for name, operand in zip(self.names, flatten(layout), strict=True):
            if isinstance(operand, Tensor):
                self.register_buffer(name, operand, persistent=False)
            else:
                setattr(self, name, operand)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.held: Layout | TrellisLayout | None = None  # `layout`, put together once

    @property
    def names(self) -> tuple[str, ...]:
        """Of the operands."""
        return TRELLIS_OPERANDS if self.trellis else OPERANDS

    @property
    def layout(self) -> Layout | TrellisLayout:
        """The matrix as the kernels take it."""
        if self.held is None:
            self.held = unflatten(*(getattr(self, name) for name in self.names))
        return self.held

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        flat = x.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():  # sees the operator and buffers
            operator = torch.ops.requant.trellis_linear if self.trellis else torch.ops.requant.linear
            y = operator(flat, self.bias, *(getattr(self, name) for name in self.names))
        else:
            y = multiply(flat, self.layout, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def rows(self, tokens: Int[Tensor, "*m"], dtype: torch.dtype) -> Float[Tensor, "*m k"]:
        """Rows of a grid or trellis without residuals, whose output is not rotated, as an embedding looks them up.

        Raises ValueError for any other matrix (`lookup_refusal`).
        """
        if self.lookup_refusal is not None:
            raise ValueError(self.lookup_refusal)
        flat = tokens.reshape(-1)
        if self.trellis:
            found = _trellis_rows([self], flat, dtype)
        else:
            found = torch.ops.requant.lookup(
                flat, dtype, self.packed_codes, self.scales, self.zero_points, self.column_scales, self.n, self.k,
                self.bits, self.group_size, self.kernel_group,
            )  # fmt: skip
        return found.view(*tokens.shape, self.in_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KernelLinear":
        self.held = None
        return apply_without_casts(self, lambda: super(KernelLinear, self)._apply(fn, recurse))

    _save_to_state_dict = refuse_to_save

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


class BandedLinear(nn.Module):
    """Bands of rows, their outputs side by side (`formats/bands.py`).

    Bands of trellis codes that share the rotation of x, as those of `requant quantize` do, are multiplied in two launches
    and looked up in two; any others one by one.
    """

    def __init__(self, bands: Sequence[KernelLinear], bias: Tensor | None = None) -> None:
        super().__init__()
        self.bands = nn.ModuleList(bands)
        self.in_features, self.out_features = bands[0].in_features, sum(band.out_features for band in bands)
        self.lookup_refusal = next((band.lookup_refusal for band in bands if band.lookup_refusal), None)
        self.rotates_once = self.lookup_refusal is None and _share_rotation([band.layout for band in bands])
        self.set_bias(bias)

    def set_bias(self, bias: Tensor | None) -> None:
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        y = None
        if self.rotates_once and not torch.compiler.is_compiling():
            y = multiply_bands(x.reshape(-1, self.in_features), self._layouts())
        if y is None:
            y = torch.cat([band(x) for band in self.bands], dim=-1)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def rows(self, tokens: Int[Tensor, "*m"], dtype: torch.dtype) -> Float[Tensor, "*m k"]:
        """Of the band that each token belongs to: all bands are asked, since a graph that is captured cannot choose."""
        bands = self._bands()
        if self.rotates_once:
            return _trellis_rows(bands, tokens.reshape(-1), dtype).view(*tokens.shape, self.in_features)
        found, first_row = None, 0
        for band in bands:
            own = band.rows((tokens - first_row).clamp(0, band.out_features - 1), dtype)
            found = own if found is None else torch.where((tokens >= first_row)[..., None], own, found)
            first_row += band.out_features
        assert found is not None
        return found

    def _bands(self) -> "Sequence[KernelLinear]":
        return cast("Sequence[KernelLinear]", self.bands)

    def _layouts(self) -> list[TrellisLayout]:
        return [cast(TrellisLayout, band.layout) for band in self._bands()]

    _save_to_state_dict = refuse_to_save


def _trellis_rows(
    bands: Sequence[KernelLinear], tokens: Int[Tensor, " m"], dtype: torch.dtype
) -> Float[Tensor, "m k"]:
    """Of trellises one below the other, by one operator, so that the compiler sees their buffers."""
    first = bands[0]
    return torch.ops.requant.trellis_lookup(
        tokens, dtype, [band.packed_codes for band in bands], first.input_scales,
        [band.output_scales for band in bands], first.k, [band.bits for band in bands], first.code,
    )  # fmt: skip


def _share_rotation(layouts: Sequence[Layout | TrellisLayout]) -> bool:
    """Whether all are trellises that read the very same rotated activations."""
    trellises = [layout for layout in layouts if isinstance(layout, TrellisLayout)]
    return len(trellises) == len(layouts) and shares_form(trellises)


class FusedLinear(nn.Module):
    """Matrices that take the same x, in one launch: the first layer that is asked computes for all.

    Outputs are kept until each of their layers has been called with the very same tensor, then dropped. A layer that is
    called with another x starts a launch of its own.
    """

    def __init__(self, matrix: KernelLinear | SemiStructuredLinear, sizes: Sequence[int]) -> None:
        super().__init__()
        self.matrix = matrix
        self.sizes = list(sizes)
        self.x: Tensor | None = None
        self.pending: list[Tensor | None] = []

    def part(self, index: int, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        """The columns of layer `index`: a view."""
        if self.x is not x or self.pending[index] is None:
            self.x, self.pending = x, list(self.matrix(x).split(self.sizes, dim=-1))
        y = self.pending[index]
        assert y is not None
        self.pending[index] = None
        if all(part is None for part in self.pending):
            self.x = None
        return y


class Sibling(nn.Module):
    """One layer of `FusedLinear`; the first of them owns the matrix."""

    def __init__(self, siblings: FusedLinear, index: int) -> None:
        super().__init__()
        if index == 0:
            self.siblings = siblings
        else:
            self.__dict__["siblings"] = siblings  # not registered twice
        self.index = index
        self.in_features, self.out_features = siblings.matrix.in_features, siblings.sizes[index]

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        return self.siblings.part(self.index, x)


class KernelEmbedding(nn.Module):
    """Rows of a packed grid or trellis as they are asked for; a tied head's matrix is its own, so codes are held once."""

    def __init__(self, matrix: KernelLinear | BandedLinear, plain: QuantEmbedding, *, tied: bool) -> None:
        super().__init__()
        if tied:
            self.__dict__["matrix"] = matrix  # the head's
        else:
            self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.out_features, matrix.in_features
        self.padding_idx, self.dtype, self.scale = plain.padding_idx, plain.dtype, plain.scale

    def forward(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m d"]:
        rows = self.matrix.rows(tokens, self.dtype)
        return rows if self.scale is None else rows * float(torch.tensor(self.scale, dtype=self.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KernelEmbedding":
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        return self


def convert_to_kernels(model: Any, *, device: torch.device | str) -> Any:
    """Replace every `QuantLinear` of `model` by the kernels' layout on `device`, in place, and move the rest there."""
    device = torch.device(device)
    refused: Counter[str] = Counter()
    unjoined: Counter[str] = Counter()
    if device.type != "cpu" and model.dtype not in (torch.float16, torch.bfloat16):
        matrices = sum(isinstance(layer, QuantLinear) for layer in model.modules())
        refused[
            f"the kernels take float16 or bfloat16 activations, not {model.dtype}: load with dtype='bfloat16'"
        ] = matrices
    else:
        embeddings = {name: m for name, m in model.named_modules() if isinstance(m, QuantEmbedding)}
        linears = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
        check = KernelCheck(model.dtype)
        with stream_kept(model):
            for parent in list(model.modules()):
                _convert_children(parent, device, refused, unjoined, check)
            for name, embedding in embeddings.items():
                tied = [head for head, m in linears.items() if m._buffers is embedding._buffers]
                _convert_embedding(model, name, embedding, tied, device)
    for reason, count in unjoined.items():
        logger.warning(
            "%d of the quantized matrices are multiplied one by one, not joined: %s", count, reason
        )
    for reason, count in refused.items():
        logger.warning(
            "%d of the quantized matrices are dequantized at every call, which is slow: %s", count, reason
        )
    model = model.to(device)
    if device.type == "cuda" and os.environ.get(AUTOTUNE) == "1":
        logger.info("%d launch shapes measured", tune_kernels(model, tokens=(1, 8)))
    return model


def tune_kernels(model: Any, *, tokens: Sequence[int] = (1,)) -> int:
    """Measure launch shapes for the matrices of a served model on this GPU, and keep them; returns how many were new."""
    from requant_kernels.autotune import tune

    shapes: dict[Any, Any] = {}
    for layer in model.modules():
        if isinstance(layer, KernelLinear) and layer.packed_codes.is_cuda:
            layout = layer.layout
            shapes.setdefault((type(layout), layout.bits, layout.n, layout.k), layout)
    return tune(list(shapes.values()), tokens)


def _convert_children(
    parent: nn.Module,
    device: torch.device,
    refused: Counter[str],
    unjoined: Counter[str],
    check: KernelCheck,
) -> None:
    """The quantized layers directly below `parent`, siblings together. Reasons are counted where that cannot be."""
    layers = {name: child for name, child in parent.named_children() if isinstance(child, QuantLinear)}
    for names in (*SIBLINGS, *((name,) for name in layers)):
        weights = {name: layers[name].quantized().to(device) for name in names if name in layers}
        apart = isinstance(parent, Expert) and any(isinstance(w.dense, Trellis) for w in weights.values())
        groups = [[name] for name in weights] if apart else joinable(weights)  # `experts.py` stacks them
        reasons: dict[str, str] = {}  # why a matrix is not joined, though it could be
        while groups:
            group = groups.pop(0)
            chosen = [layers[name] for name in group]
            try:
                weight = join_rows([weights[name] for name in group])
                assert weight is not None  # their keys say so
                bias = _joined_bias(chosen, device)
                if has_sparse_products(weight):
                    matrix = semi_structured_linear(weight, check, bias)
                else:
                    matrix = kernel_linear(weight, check, bias=bias)
            except ValueError as error:  # what no kernel takes, with the remedy, or what one gets wrong
                if len(group) > 1:  # perhaps only the joined one
                    groups += [[name] for name in group]
                    reasons |= dict.fromkeys(group, str(error))
                else:
                    refused[str(error)] += 1
                    del layers[group[0]]
                continue
            for name in group:
                del layers[name], weights[name]
            if len(group) == 1:
                setattr(parent, group[0], matrix)
                if group[0] in reasons:
                    unjoined[reasons[group[0]]] += 1
                continue
            assert not isinstance(matrix, BandedLinear)  # bands are joined to nothing
            siblings = FusedLinear(matrix, [layer.out_features for layer in chosen])
            for index, name in enumerate(group):
                setattr(parent, name, Sibling(siblings, index))


def _convert_embedding(
    model: nn.Module, name: str, embedding: QuantEmbedding, heads: list[str], device: torch.device
) -> None:
    """`heads`: names of the layers that share its codes."""
    if heads:
        matrix = model.get_submodule(heads[0])
        if not isinstance(matrix, KernelLinear | BandedLinear):  # refused, and said so
            return
    else:
        try:
            matrix = kernel_linear(embedding.quantized().to(device), None)
        except ValueError:  # its rows are dequantized one by one anyway
            return
    if matrix.lookup_refusal is None:
        model.set_submodule(name, KernelEmbedding(matrix, embedding, tied=bool(heads)))


def joinable(weights: Mapping[str, QuantizedWeight]) -> list[list[str]]:
    """The names of matrices that can be one matrix, group by group."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, weight in weights.items():
        key = join_key(weight)
        values = torch.half if weight.sparse is None else weight.sparse.values.dtype
        groups[name if key is None else (key, values)].append(name)
    return list(groups.values())


def kernel_linear(
    weight: QuantizedWeight, check: KernelCheck | None, *, bias: Float[Tensor, " n"] | None = None
) -> KernelLinear | BandedLinear:
    """The layer that multiplies with a matrix, on its device, its kernels checked there, unless it only looks rows up.

    Raises ValueError for a matrix that no kernel takes, or that one computes wrongly on this machine.
    """
    layers: list[KernelLinear] = []
    bands = bands_of(weight)
    for band in bands:
        layout = kernel_layout(band)
        if check is not None:
            check(KernelLinear(layout), layout, band)
        layers.append(KernelLinear(layout, bias if len(bands) == 1 else None))
    if len(layers) == 1:
        return layers[0]
    banded = BandedLinear(layers)
    if check is not None and banded.rotates_once:
        kind = "bands", *(kind_of(layer.layout) for layer in layers)
        try:
            check.once(kind, banded, weight, ONE_LAUNCH)
        except ValueError as error:
            logger.warning("an embedding or head in bands is multiplied band by band: %s", error)
            banded.rotates_once = False
    banded.set_bias(bias)
    return banded


def kernel_layout(weight: QuantizedWeight) -> Layout | TrellisLayout:
    """The kernels' layout of a matrix, on its device. Raises ValueError for one that no kernel takes."""
    return weight.dense.kernel_layout(None if weight.sparse is None else weight.sparse.csr())


def _joined_bias(layers: Sequence[QuantLinear], device: torch.device) -> Tensor | None:
    given = [layer.bias for layer in layers if layer.bias is not None]
    if not given:
        return None
    return torch.cat([
        torch.zeros(layer.out_features, dtype=given[0].dtype, device=device)
        if layer.bias is None else layer.bias.detach().to(device)
        for layer in layers
    ])  # fmt: skip
