"""Embedding, head and further tables of rows by token: their tensors, the bits that a budget may choose for them, and the
curvature under which they are coded.

The rows of `W [V, d]`, one per token, are coded by a `TableMethod`: in trellis codes (`quantizers/table_trellis.py`) if the
matrices of the blocks are, otherwise on grids (`quantizers/table_grid.py`). Both see the loss that an error causes through
one number per row and one covariance for all rows, where t runs over the tokens of the calibration text:

    loss(E)  ~  1/2 sum_i r_i E_i C E_i'
    head       r_i = mean_t g_ti^2, g the loss's gradient at the logits      C = mean_t x_t x_t', x the head's input
    embedding  r_i = frequency of token i                                       C = mean_t g_t g_t', g at its output

If embedding and head are tied, they are one tensor with one set of codes, and their losses add up.

A token table (`models/token_tables.py`: per-layer embeddings) is treated as another embedding, with its own rows, gradients
and bits. It is not trained: it may have as many weights as all matrices together, and would take as much memory.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from requant.calibration.passes import backward_pass, rows_at_once, summed_loss
from requant.calibration.stats import Curvature
from requant.checkpoint.save import disk_dtype
from requant.errors import ModelError, RecipeError
from requant.formats.hadamard import TILE
from requant.formats.quantized_weight import QuantizedWeight, slice_rows
from requant.models.deterministic import deterministic
from requant.models.row_scale import row_scale
from requant.models.targets import embedding_and_head_modules
from requant.models.token_tables import lookup_obstacle, token_tables
from requant.quantizers.method import Bits, Losses
from requant.quantizers.table_grid import GRID
from requant.quantizers.table_trellis import TRELLIS
from requant.quantizers.tables import TableMethod
from requant.recipe.schema import Recipe
from requant.run.context import RunContext
from requant.run.quantize_linears import codes_of_rank
from requant.run.stage_cache import load_weight, save_weight
from requant.run.workspace import digest

FLOATS = 16  # bits: not quantized
TOKENS = 65536  # of the calibration text, for the curvature
WEIGHTS_AT_ONCE = 1 << 28  # of a table, dequantized


@dataclass(frozen=True, kw_only=True)
class Part:
    """The embedding, an untied head, or a token table."""

    name: str  # dotted path of the module
    module: nn.Module
    learns: bool = True  # with the norms before it has codes, and its scales with those of the matrices after

    @property
    def weight(self) -> nn.Parameter:
        return self.module.get_parameter("weight")

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True, kw_only=True)
class EmbeddingAndHead:
    """`parts` by role: `embedding`, `head` unless they are tied, and token tables, whose names are their roles."""

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

    @property
    def learning(self) -> dict[str, QuantizedWeight]:
        """The codes whose floats are trained, by module name."""
        parts = self.embedding_and_head.parts.values()
        return {
            part.name: self.weights[part.name] for part in parts if part.learns and part.name in self.weights
        }

    @torch.no_grad()
    def apply_weights(self, *, quantized: bool, learning: bool = True) -> None:
        """Write the quantized floats, or the originals, into the model; of all, or of those that do not learn."""
        left = set() if learning else set(self.learning)
        for name, parameter in self.parameters.items():
            if name not in left:
                if quantized:
                    _write_floats(self.weights[name], parameter)
                else:
                    parameter.copy_(self.originals[name])


def _write_floats(weight: QuantizedWeight, parameter: Tensor) -> None:
    """Write the dequantized table, a large one in parts: its float32 values may take twice the memory of the model."""
    rows, width = weight.shape
    step = max(1, WEIGHTS_AT_ONCE // (TILE * width)) * TILE
    for start in range(0, rows, step):
        part = slice_rows(weight, start, min(start + step, rows))
        parameter[start : start + step].copy_(part.dequantize())


def embedding_and_head_of(model: PreTrainedModel) -> EmbeddingAndHead:
    """The parts of a model."""
    found = embedding_and_head_modules(model)
    (embedding_name, embedding), (head_name, head) = found
    parts = {"embedding": Part(name=embedding_name, module=embedding)}
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    if head is not None and not tied:
        parts["head"] = Part(name=head_name, module=head)
    parts |= {
        name: Part(name=name, module=table, learns=False) for name, table in token_tables(model).items()
    }
    return EmbeddingAndHead(parts=parts, tied=tied, head=head)


def table_method(recipe: Recipe) -> TableMethod:
    """What codes embedding and head: trellis codes where the blocks have them, else grids."""
    return TRELLIS if recipe.method == "trellis" else GRID


def embedding_and_head_bits(
    recipe: Recipe, embedding_and_head: EmbeddingAndHead
) -> dict[str, Sequence[Bits]]:
    """Role -> the bits among which the budget may choose.

    Raises RecipeError if tied ones are given different bits, or bits that their codes cannot have, ModelError if one that is
    given bits cannot be quantized.
    """
    budget, method = recipe.budget, table_method(recipe)
    given: dict[str, float | None] = {"embedding": budget.embedding_bits, "head": budget.head_bits}
    if embedding_and_head.tied:
        said = {bits for bits in given.values() if bits is not None}
        if len(said) > 1:
            raise RecipeError(
                f"budget.embedding_bits is {budget.embedding_bits:g} and budget.head_bits {budget.head_bits:g}, but this "
                "model ties them to one tensor; give the same."
            )
        given = {"embedding": next(iter(said), None)}
    for bits in given.values():
        if bits not in (None, FLOATS, *method.bits):
            role = "head" if bits == budget.head_bits else "embedding"
            raise RecipeError(
                f"budget.{role}_bits is {bits:g}, but an embedding or head on a grid takes {method.bits[0]} to "
                f"{method.bits[-1]} whole bits; give those, or method trellis."
            )
    chosen = [bits for bits in method.bits if budget.quarters or not bits % 1]
    free: Sequence[Bits] = (FLOATS,) if budget.size is None and budget.bits is None else (*chosen, FLOATS)
    widths: dict[str, Sequence[Bits]] = {}
    for role, part in embedding_and_head.parts.items():
        bits, why = given.get(role, given["embedding"]), _obstacle(part)
        if why and bits not in (None, FLOATS):
            raise ModelError(f"{part.name} {why}, so it cannot be quantized; give --head-bits 16.")
        exact = tuple(own for own in (*method.bits, FLOATS) if own == bits)  # 3 where a recipe has 3.0
        widths[role] = (FLOATS,) if why else exact or free
    return widths


def _obstacle(part: Part) -> str | None:
    """Why a module cannot be quantized; None if it can."""
    module: Any = part.module
    if isinstance(module, nn.Linear):  # a subclass may compute more than the product
        own = type(module).forward is not nn.Linear.forward
        return f"is a {type(module).__name__}" if own else None
    return lookup_obstacle(module)


def part_sizes(
    model: PreTrainedModel, source: Path | None, part: Part, widths: Sequence[Bits], method: TableMethod
) -> dict[Bits, int]:
    """Bits -> bytes of a part."""
    plain = part.weight.numel() * disk_dtype(model, source, part.weight).itemsize
    return {bits: plain if bits == FLOATS else method.packed_spec(part.shape, bits).bytes for bits in widths}


def embedding_and_head_curvature(
    run: RunContext, embedding_and_head: EmbeddingAndHead
) -> dict[str, list[Curvature]]:
    """The curvature of each part on the calibration text; of tied ones both uses. One backward pass in a run."""
    if run.curvature:
        return run.curvature
    windows = run.windows[: max(1, TOKENS // run.windows.shape[1])]
    run.apply_original_weights()
    sums = {
        role: _CurvatureSums(part.module, lookup=True)
        for role, part in embedding_and_head.parts.items()
        if role != "head"
    }
    if (head := embedding_and_head.head) is not None:  # tied or not
        sums["head"] = _CurvatureSums(head, lookup=False)
    with deterministic(run.model), ExitStack() as stack, run.stage("allocation"):
        for each in sums.values():
            stack.callback(each.add_hook().remove)
        backward_pass(
            run.model,
            windows,
            lambda tokens, _number: summed_loss(run.model, tokens),
            label=run.label("embedding and head"),
            split=False,
        )
    means = {use: found.mean(windows.numel()) for use, found in sums.items()}
    run.curvature.update({role: [means[role]] for role in embedding_and_head.parts})
    if embedding_and_head.tied:
        run.curvature["embedding"].append(means["head"])
    return run.curvature


class _CurvatureSums:
    """The sums of one `Curvature` over the tokens of a backward pass: of a module that looks rows up, or of the head."""

    def __init__(self, module: nn.Module, *, lookup: bool) -> None:
        weight = module.get_parameter("weight")
        vocabulary, width = weight.shape
        self.module, self.lookup = module, lookup
        self.scale = row_scale(module)
        self.rows = torch.zeros(vocabulary, device=weight.device)
        self.covariance = torch.zeros(width, width, device=weight.device)

    def add_hook(self) -> RemovableHandle:
        # of a lookup before the hook that rotates the rows of a folded model
        return self.module.register_forward_hook(self._on_output, prepend=self.lookup)

    def _on_output(self, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:  # the embedding's own hook makes it so, after the others
            output.requires_grad_()
        x = inputs[0].detach()
        output.register_hook(lambda gradient: self._accumulate(x, gradient))

    def _accumulate(self, x: Tensor, gradient: Tensor) -> None:
        gradients = gradient.flatten(0, -2)
        if self.lookup:
            self.rows.add_(torch.bincount(x.flatten(), minlength=len(self.rows)))
            inputs = gradients.float() if self.scale is None else self.scale(gradients.float())
        else:
            for some in gradients.split(rows_at_once(gradients)):
                self.rows.add_(some.float().square().sum(0))
            inputs = x.flatten(0, -2).float()
        self.covariance.addmm_(inputs.mT, inputs)

    def mean(self, tokens: int) -> Curvature:
        return Curvature(rows=self.rows / tokens, covariance=self.covariance / tokens)


def embedding_and_head_losses(
    run: RunContext, embedding_and_head: EmbeddingAndHead, widths: Mapping[str, Sequence[Bits]]
) -> dict[str, Losses]:
    """Role -> bits -> predicted loss, nats per token; zero where they stay floats."""
    method, found = table_method(run.recipe), dict[str, Losses]()
    for role, choices in widths.items():
        coded = [bits for bits in choices if bits != FLOATS]
        losses: Losses = {}
        if coded:
            weight = embedding_and_head.parts[role].weight.detach()
            uses = embedding_and_head_curvature(run, embedding_and_head)[role]
            losses = method.predicted_losses(weight, uses, coded)
        found[role] = losses | {bits: 0.0 for bits in choices if bits == FLOATS}
    return found


def quantize_embedding_and_head(run: RunContext) -> QuantizedEmbeddingAndHead:
    """Codes of embedding, head and token tables at the bits of the run's allocation, cached in the workspace; the model is
    unchanged.

    Where earlier rounds have trained them, the codes are of the trained floats, and replace them in the run.
    """
    embedding_and_head, allocation = embedding_and_head_of(run.model), run.allocation
    method = table_method(run.recipe)
    assert allocation is not None
    bits = allocation.bits_of_tables
    weights: dict[str, QuantizedWeight] = {}
    originals: dict[str, Tensor] = {}
    for role, part in embedding_and_head.parts.items():
        if bits[role] == FLOATS:
            continue
        original = originals[part.name] = part.weight.detach().to("cpu", copy=True)
        _, trained = run.finetuned_params.pop(f"{part.name}.weight", (original, original))
        key = digest(run.fingerprint, part.name, method.name, bits[role], trained)
        device = part.weight.device
        found = load_weight(run, "embedding-and-head", key, part.name, device)
        if found is None:
            curvature = embedding_and_head_curvature(run, embedding_and_head)[role]
            with run.stage("quantize"):
                own = method.quantize(trained.to(device), curvature, bits[role])
                # those of each rank may differ where two choices are nearly equal
                found = codes_of_rank(0, own, name=part.name, device=device)
            save_weight(run, "embedding-and-head", key, found)
        weights[part.name] = found
    return QuantizedEmbeddingAndHead(
        embedding_and_head=embedding_and_head, weights=weights, originals=originals
    )
