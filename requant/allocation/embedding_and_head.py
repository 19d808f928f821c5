"""Embedding and head on grids of 3 to 8 bits: their tensors, the loss that an error in them causes, their codes.

The rows of `W [V, d]`, one per token, are divided into groups of GROUP columns, each rounded to an asymmetric grid
(`quantizers/rtn.py`) whose range is shrunk by the factor of the least weighted error. The weights are the diagonal of the
curvature, a product of a row and a column factor, with t over the tokens of the calibration text:

    loss(E)  ~  1/2 sum_ij r_i c_j E_ij^2
    head       r_i = mean_t g_ti^2, g the loss's gradient at the logits      c_j = mean_t x_tj^2, x the head's input
    embedding  r_i = frequency of token i                                       c_j = mean_t g_tj^2, g at its output

Tied, the two are one tensor, one set of codes, and the sum of both losses. The error at b bits is taken as
`1 / (2^b - 1)^2` times that of one measured width.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant.calibration.passes import batches, recomputed_blocks, summed_loss
from requant.calibration.stats import Curvature
from requant.checkpoint.save import disk_dtype
from requant.errors import ModelError, RecipeError
from requant.formats.grid import Grid, GridSpec
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight
from requant.models.targets import embedding_and_head_modules
from requant.quantizers.kmeans import row_chunks
from requant.quantizers.rtn import encode, fit_grid
from requant.recipe.schema import Budget
from requant.run.context import RunContext
from requant.run.stage_cache import load_weight, save_weight
from requant.run.workspace import digest

GROUP = 64  # columns that share a scale
WIDTHS = (3, 4, 5, 6, 7, 8, 16)  # 16: not quantized
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
MEASURED_BITS = 4  # at which the error is measured; those at other bits follow
ELEMENTS = 1 << 24  # weights rounded at once, to bound memory
TOKENS = 65536  # of the calibration text, for the curvature


@dataclass(frozen=True, kw_only=True)
class Part:
    """The embedding, or an untied head."""

    name: str  # dotted path of the module
    module: nn.Module

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter("weight")

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True, kw_only=True)
class EmbeddingAndHead:
    """`parts` by role, `embedding` before `head`; tied, there is only `embedding`."""

    parts: Mapping[str, Part]
    tied: bool
    head: nn.Module | None


@dataclass(frozen=True, kw_only=True)
class QuantizedEmbeddingAndHead:
    """Codes by module name, and the original weights, to restore them."""

    embedding_and_head: EmbeddingAndHead
    weights: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    originals: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters that have codes, by module name."""
        parts = self.embedding_and_head.parts.values()
        return {part.name: part.weight for part in parts if part.name in self.weights}

    @torch.no_grad()
    def apply_weights(self, *, quantized: bool) -> None:
        """Write the quantized floats, or the originals, into the model."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.weights[name].dequantize() if quantized else self.originals[name])


def embedding_and_head_of(model: PreTrainedModel) -> EmbeddingAndHead:
    """The parts of a model."""
    found = embedding_and_head_modules(model)
    (embedding_name, embedding), (head_name, head) = found
    parts = {"embedding": Part(name=embedding_name, module=embedding)}
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    if head is not None and not tied:
        parts["head"] = Part(name=head_name, module=head)
    return EmbeddingAndHead(parts=parts, tied=tied, head=head)


def embedding_and_head_bits(budget: Budget, embedding_and_head: EmbeddingAndHead) -> dict[str, Sequence[int]]:
    """Role -> the bits among which the budget may choose.

    Raises RecipeError if tied ones are given different bits, ModelError if one that is given bits cannot be quantized.
    """
    given: dict[str, int | None] = {"embedding": budget.embedding_bits, "head": budget.head_bits}
    if embedding_and_head.tied:
        said = {bits for bits in given.values() if bits is not None}
        if len(said) > 1:
            raise RecipeError(
                f"budget.embedding_bits is {budget.embedding_bits} and budget.head_bits {budget.head_bits}, but this "
                "model ties them to one tensor; give the same."
            )
        given = {"embedding": next(iter(said), None)}
    free: Sequence[int] = (16,) if budget.size is None and budget.bits is None else WIDTHS
    widths: dict[str, Sequence[int]] = {}
    for role, part in embedding_and_head.parts.items():
        bits, why = given[role], _obstacle(part)
        if why and bits not in (None, 16):
            raise ModelError(f"{part.name} {why}, so it cannot be quantized; give --head-bits 16.")
        widths[role] = (16,) if why else free if bits is None else (bits,)
    return widths


def _obstacle(part: Part) -> str | None:
    """Why a module cannot be quantized; None if it can."""
    module: Any = part.module
    if isinstance(module, nn.Linear):
        return None
    if not isinstance(module, nn.Embedding):
        return f"is a {type(module).__name__}"
    if module.max_norm is not None:
        return "renormalizes its rows"
    if type(module) is not nn.Embedding and not hasattr(module, "scalar_embed_scale"):
        return f"is a {type(module).__name__}"
    return None


def embedding_and_head_spec(shape: tuple[int, int], bits: int) -> PackedSpec:
    """What is stored for an embedding or head of this shape."""
    return PackedSpec(dense=GridSpec(bits=bits, shape=shape, group_size=GROUP, zero_points=True))


def part_sizes(
    model: PreTrainedModel, source: Path | None, part: Part, widths: Sequence[int]
) -> dict[int, int]:
    """Bits -> bytes of a part."""
    plain = part.weight.numel() * disk_dtype(model, source, part.weight).itemsize
    return {bits: plain if bits == 16 else embedding_and_head_spec(part.shape, bits).bytes for bits in widths}


def embedding_and_head_curvature(
    run: RunContext, embedding_and_head: EmbeddingAndHead
) -> dict[str, list[Curvature]]:
    """The curvature of each part on the calibration text; of tied ones both uses. One backward pass in a run."""
    if run.curvature:
        return run.curvature
    windows = run.windows[: max(1, TOKENS // run.windows.shape[1])]
    run.apply_original_weights()
    embedding = embedding_and_head.parts["embedding"].module
    uses: dict[str, Curvature] = {}

    def hook_of(use: str, module: nn.Module) -> Callable[..., None]:
        weight = module.get_parameter("weight")
        rows, columns = (torch.zeros(size, device=weight.device) for size in weight.shape)
        uses[use] = Curvature(rows=rows, columns=columns)

        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:  # the embedding's own hook makes it so, after the others
                output.requires_grad_()
            x = inputs[0].detach()

            def accumulate(gradient: Tensor) -> None:
                squares = gradient.flatten(0, -2).float().square()
                if use == "head":
                    rows.add_(squares.sum(0))
                    columns.add_(x.flatten(0, -2).float().square().sum(0))
                else:
                    rows.add_(torch.bincount(x.flatten(), minlength=len(rows)))
                    columns.add_(squares.sum(0) * getattr(module, "scalar_embed_scale", 1.0) ** 2)

            output.register_hook(accumulate)

        return hook

    with ExitStack() as stack, run.stage("allocation"):
        stack.enter_context(recomputed_blocks(run.model, None))
        # before the hook that rotates the rows of a folded model
        handle = embedding.register_forward_hook(hook_of("embedding", embedding), prepend=True)
        stack.callback(handle.remove)
        head = embedding_and_head.head
        if head is not None:
            stack.callback(head.register_forward_hook(hook_of("head", head)).remove)
        for tokens in batches(windows, run.model, label=run.label("embedding and head")):
            summed_loss(run.model, tokens).backward()
    means = {
        use: Curvature(rows=found.rows / windows.numel(), columns=found.columns / windows.numel())
        for use, found in uses.items()
    }
    tied = embedding_and_head.tied
    run.curvature.update(
        {"embedding": list(means.values())}
        if tied
        else {role: [means[role]] for role in embedding_and_head.parts}
    )
    return run.curvature


def embedding_and_head_losses(
    run: RunContext, embedding_and_head: EmbeddingAndHead, widths: Mapping[str, Sequence[int | float]]
) -> dict[str, dict[int | float, float]]:
    """Role -> bits -> predicted loss, nats a token; zero at 16 bits.

    On bench-32m and demo-4m the measured KL is 0.8 times the predicted one, at all bits from 3 to 8.
    """
    found: dict[str, dict[int | float, float]] = {}
    for role, choices in widths.items():
        weight = embedding_and_head.parts[role].weight.detach()
        unit = 0.0
        if set(choices) != {16}:
            curvature = embedding_and_head_curvature(run, embedding_and_head)[role]
            codes = quantize_table(weight, curvature, bits=MEASURED_BITS)
            unit = table_loss(weight, codes, curvature) * (2**MEASURED_BITS - 1) ** 2
        found[role] = {bits: 0.0 if bits == 16 else unit / (2**bits - 1) ** 2 for bits in choices}
    return found


def table_loss(weight: Tensor, quantized: QuantizedWeight, curvature: Sequence[Curvature]) -> float:
    """`1/2 sum_ij r_i c_j E_ij^2` over all uses, nats a token."""
    total = 0.0
    for rows in row_chunks(weight, elements=ELEMENTS):
        error = (_rows(quantized.dense, rows).dequantize() - weight[rows].float()).square()
        total += sum(0.5 * (use.rows[rows] @ (error @ use.columns)).double().item() for use in curvature)
    return total


def quantize_table(
    weight: Float[Tensor, "v d"], curvature: Sequence[Curvature], *, bits: int
) -> QuantizedWeight:
    """Codes of an embedding or head under its curvature."""
    parts = []
    for rows in row_chunks(weight, elements=ELEMENTS):
        values = weight[rows].float()
        importance = torch.stack([use.rows[rows, None] * use.columns for use in curvature]).sum(0)
        importance += importance.mean() * 1e-3 + 1e-30  # a token that the text lacks counts a little
        parts.append(_best_shrunk(values, importance, bits=bits))
    return QuantizedWeight(
        dense=Grid(
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zero_points=torch.cat([part.zero_points for part in parts if part.zero_points is not None]),
            column_scales=None,
            bits=bits,
            group_size=GROUP,
        ),
        sparse=None,
    )


def _best_shrunk(values: Tensor, importance: Tensor, *, bits: int) -> Grid:
    """The grid whose shrink is best for every group."""
    n, k = values.shape
    groups = -(-k // GROUP)
    best = torch.full((n, groups), float("inf"), device=values.device)
    shrink = torch.ones_like(best)
    for factor in SHRINKS:
        fit = fit_grid(values, bits=bits, group_size=GROUP, symmetric=False, shrink=factor)
        error = (encode(values, fit, bits=bits, group_size=GROUP).dequantize() - values).square() * importance
        padded = torch.nn.functional.pad(error, (0, groups * GROUP - k))
        cost = padded.view(n, groups, GROUP).sum(2)
        shrink = torch.where(cost < best, factor, shrink)
        best = torch.minimum(cost, best)
    fit = fit_grid(values, bits=bits, group_size=GROUP, symmetric=False, shrink=shrink)
    return encode(values, fit, bits=bits, group_size=GROUP)


def _rows(dense: Any, rows: slice) -> Grid:
    return dataclasses.replace(
        dense, codes=dense.codes[rows], scales=dense.scales[rows], zero_points=dense.zero_points[rows]
    )


def quantize_embedding_and_head(run: RunContext) -> QuantizedEmbeddingAndHead:
    """Codes of embedding and head at the bits of the run's allocation, cached in the workspace; the model is unchanged.

    Where earlier rounds have trained them, the codes are of the trained floats, and replace them in the run.
    """
    embedding_and_head, allocation = embedding_and_head_of(run.model), run.allocation
    assert allocation is not None
    bits = {"embedding": allocation.embedding_bits, "head": allocation.head_bits}
    weights: dict[str, QuantizedWeight] = {}
    originals: dict[str, Tensor] = {}
    for role, part in embedding_and_head.parts.items():
        if bits[role] == 16:
            continue
        original = originals[part.name] = part.weight.detach().to("cpu", copy=True)
        _, trained = run.finetuned_params.pop(f"{part.name}.weight", (original, original))
        key = digest(run.fingerprint, part.name, bits[role], trained)
        device = part.weight.device
        found = load_weight(run, "embedding-and-head", key, part.name, device)
        if found is None:
            curvature = embedding_and_head_curvature(run, embedding_and_head)[role]
            with run.stage("quantize"):
                found = quantize_table(trained.to(device), curvature, bits=bits[role])
            save_weight(run, "embedding-and-head", key, found)
        weights[part.name] = found
    return QuantizedEmbeddingAndHead(
        embedding_and_head=embedding_and_head, weights=weights, originals=originals
    )
