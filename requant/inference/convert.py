"""Preparing a loaded model for serving: every quantized matrix is packed once into the layout of the kernels.

    q_proj, k_proj, v_proj  ->  one matrix [n_q + n_k + n_v, k], one launch; each layer returns its columns

Trellis codes of equal bits are joined too: one rotation of x, one product, and a rotation back for neighbours of equal size.
A mixture has thousands of matrices, so those of a layer's experts that are stored alike are unpacked and packed together.

`QuantLinear` holds what is on disk, which no kernel can read at speed, so `convert_to_kernels` replaces it and drops its
buffers: memory is then the packed size. 2:4 matrices of 16-bit values become `SemiStructuredLinear`. A matrix that no kernel
supports, or that one computes wrongly (`kernel_check.py`), stays a `QuantLinear`, and the log says so.
"""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from requant_kernels import Layout, TrellisLayout
from requant_kernels.dispatch import shape_of
from torch import Tensor, nn

from requant.formats.hadamard import TILE
from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, bands_of, join_key, join_rows
from requant.formats.trellis import Trellis, TrellisSpec, kernel_layouts
from requant.inference.kernel_check import TOKENS, KernelCheck, kind_of
from requant.inference.kernel_layers import (
    BandedLinear,
    FusedLinear,
    KernelEmbedding,
    KernelLinear,
    Sibling,
)
from requant.inference.quant_embedding import QuantEmbedding
from requant.inference.quant_linear import QuantLinear
from requant.inference.semi_structured_linear import has_sparse_products, semi_structured_linear
from requant.models.experts import Expert, Experts
from requant.models.rotations import stream_kept
from requant.models.targets import SIBLINGS

AUTOTUNE = "REQUANT_AUTOTUNE"  # 1: measure launch shapes that no table has, when a model is loaded
CODES_AT_ONCE = 1 << 25  # unpacked together: each takes some 20 bytes meanwhile
# tokens that bands are checked with: those whose products may be one launch
ONE_LAUNCH = tuple(tokens for tokens in TOKENS if tokens <= 16)
logger = logging.getLogger(__name__)


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
            for layer in [module for module in model.modules() if isinstance(module, Experts)]:
                _convert_experts(layer, device, check)
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
    for layer in model.modules():  # some models (Mamba) cast a layer's input to the dtype of its `weight`
        if isinstance(layer, KernelLinear | BandedLinear | Sibling):
            layer.register_buffer(GUARD_TENSOR, torch.empty(0, dtype=model.dtype), persistent=False)
    model = model.to(device)
    if device.type == "cuda" and os.environ.get(AUTOTUNE) == "1":
        logger.info("%d launch shapes measured", tune_kernels(model, tokens=(1, 8)))
    return model


def tune_kernels(model: Any, *, tokens: Sequence[int] = (1,)) -> int:
    """Measure launch shapes for the matrices of a served model on this GPU, and keep them; returns how many were new."""
    from requant_kernels.autotune import tune

    shapes: dict[Any, Any] = {}  # one layout for every key of the tables: those with residuals have their own
    for layer in model.modules():
        if isinstance(layer, KernelLinear) and layer.packed_codes.is_cuda:
            shapes.setdefault(shape_of(layer.layout, 1), layer.layout)
    return tune(list(shapes.values()), tokens)


def _convert_experts(experts: Experts, device: torch.device, check: KernelCheck) -> None:
    """Trellis matrices of a layer's experts, those of one spec together, as a layer may have hundreds. Those of which the
    first one is refused remain, as others do, for `_convert_children`."""
    alike: dict[PackedSpec, list[tuple[nn.Module, str, QuantLinear]]] = defaultdict(list)
    for parent in experts:
        for name, child in parent.named_children():
            if isinstance(child, QuantLinear) and isinstance(child.spec.dense, TrellisSpec):
                alike[child.spec].append((parent, name, child))
    for spec, members in alike.items():
        dense = spec.dense
        if spec.sparse is not None or spec.shape[0] % TILE or not isinstance(dense, TrellisSpec):
            continue
        try:
            kernel_linear(members[0][2].quantized(device), check)
        except ValueError:
            continue
        most = max(1, CODES_AT_ONCE // dense.num_codes)
        for start in range(0, len(members), most):
            own = members[start : start + most]
            layouts = kernel_layouts(dense, [child.tensors for _, _, child in own], device)
            for (parent, name, child), layout in zip(own, layouts, strict=True):
                setattr(parent, name, KernelLinear(layout, _joined_bias([child], device)))


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
        weights = {name: layers[name].quantized(device) for name in names if name in layers}
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
            matrix = kernel_linear(embedding.quantized(device), None)
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
