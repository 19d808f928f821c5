"""Linear layers that train with 2:4 weights; the weights themselves stay dense and take every gradient.

    Z = X P(W)'      dX = dZ P(W)      dW = prune(dZ') X

| method | P(W) | masks |
| --- | --- | --- |
| `s-ste` | `beta S(W)`, the soft threshold; beta by least squares at the start, and never again | continuous |
| `transposable` | `mask . W`, 2:4 along rows and columns, so that dX can be sparse too | every 40 steps, with decay |
| `sr-ste` | `mask . W`, the two largest of four | every step, with decay |

S-STE: Hu et al. 2024, arXiv 2409.09099; it needs no decay and no dense end. `transposable`: "Accelerating Transformer
Pre-training with 2:4 Sparsity" (Hu et al. 2024, arXiv 2404.01847), which adds `decay (1 - mask) . W` to the gradient before
the optimizer, trains the last sixth of the steps densely, and takes `decay` such that the flip rate is 0.6 to 0.95 of that
of a dense run. `sr-ste` (Zhou et al. 2021, arXiv 2102.04010) is what both improve on. The gradient of P is that of the
identity. `mvue` prunes dZ' at random without bias (`sparsity/mvue.py`), so that the third product can be sparse too; `fp8`
rounds the operands of all products to 8 bits (`sparsity/fp8.py`).

The products here are dense products of sparse matrices: they show the quality of a recipe, and take longer than dense
training.
"""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from requant.errors import InputError, RecipeError, did_you_mean
from requant.sparsity.fp8 import BACKWARD, FORWARD, simulate
from requant.sparsity.masks import keep2, keep2_transposable, least_squares_scale, soft_threshold
from requant.sparsity.mvue import prune_unbiased

FEED_FORWARD = ("*mlp*", "*ffn*", "*feed_forward*")  # attention stays dense in both papers


@dataclass(frozen=True, kw_only=True)
class TrainingMethod:
    """The mask of a weight, for flips and decay; whether the weight is projected smoothly; defaults of the options."""

    mask: Callable[[Tensor], Tensor]
    smooth: bool
    decay: float
    mask_every: int


METHODS = {
    "s-ste": TrainingMethod(mask=keep2, smooth=True, decay=0.0, mask_every=1),
    "transposable": TrainingMethod(mask=keep2_transposable, smooth=False, decay=6e-5, mask_every=40),
    "sr-ste": TrainingMethod(mask=keep2, smooth=False, decay=6e-5, mask_every=1),
}


class SparseLinear(nn.Module):
    """Stands in for an `nn.Linear` and holds its very parameters."""

    mask: Tensor
    beta: Tensor

    def __init__(
        self, linear: nn.Linear, method: TrainingMethod, *, mvue: bool, fp8: bool, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.method, self.mvue, self.fp8, self.generator = method, mvue, fp8, generator
        weight = linear.weight.detach()
        self.register_buffer("mask", method.mask(weight.abs()))
        self.register_buffer("beta", least_squares_scale(weight))

    @torch.no_grad()
    def projected(self) -> Float[Tensor, "n k"]:
        """P(W), 2:4."""
        if self.method.smooth:
            return self.beta * soft_threshold(self.weight)
        return torch.where(self.mask, self.weight, 0.0)

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        flat = _Product.apply(x.reshape(-1, self.in_features), self.weight, self)
        y = flat.view(*x.shape[:-1], self.out_features)  # type: ignore[union-attr]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dense(self) -> nn.Linear:
        """A plain layer with the same parameters."""
        plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        plain.weight, plain.bias = self.weight, self.bias
        return plain

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, mvue={self.mvue}, fp8={self.fp8}"


class _Product(torch.autograd.Function):
    """`X P(W)'` with the gradients of the module's docstring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SparseLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        x = x.to(product_dtype(x))  # saved so: autocast is over when gradients are computed
        sparse = layer.projected().to(x.dtype)
        ctx.save_for_backward(x, sparse)
        if layer.fp8:
            return F.linear(simulate(x, FORWARD), simulate(sparse, FORWARD))
        return F.linear(x, sparse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dz,) = gradients
        x, sparse = ctx.saved_tensors
        layer: SparseLinear = ctx.layer
        left = pruned_by_token(dz, layer.generator) if layer.mvue else dz
        if layer.fp8:
            dz, left, x, sparse = (simulate(operand, BACKWARD) for operand in (dz, left, x, sparse))
        return (dz @ sparse).to(ctx.dtype), (left.T @ x).to(layer.weight.dtype), None


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product with x: that of autocast where it is enabled, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def pruned_by_token(dz: Float[Tensor, "m n"], generator: torch.Generator) -> Float[Tensor, "m n"]:
    """`prune(dZ')'`: of every four tokens two keep a gradient at each output."""
    missing = -len(dz) % 4
    padded = F.pad(dz, (0, 0, 0, missing))
    return prune_unbiased(padded.T.contiguous(), generator).T[: len(dz)]


@dataclass(kw_only=True)
class SparseTraining:
    """The sparse layers of a model, by all their names; `flip_rates` has the share of the masks that every update moved."""

    model: nn.Module
    layers: dict[str, SparseLinear]
    decay: float
    mask_every: int
    steps: int = 0
    flip_rates: list[float] = field(default_factory=list)

    @torch.no_grad()
    def step(self) -> None:
        """Call it between `loss.backward()` (and clipping) and `optimizer.step()`: adds the decay, updates masks."""
        if self.steps % self.mask_every == 0:
            self._update_masks()
        for layer in self._by_weight():
            if self.decay and layer.weight.grad is not None:
                layer.weight.grad += self.decay * torch.where(layer.mask, 0.0, layer.weight)
        self.steps += 1

    @torch.no_grad()
    def densify_(self, *, keep_sparse: bool = False) -> nn.Module:
        """Put plain linear layers back, with the same parameters; with `keep_sparse` their values are the 2:4 ones.

        Training goes on densely with the optimizer as it is.
        """
        for layer in self._by_weight() if keep_sparse else ():
            layer.weight.copy_(layer.projected())
        plain = {layer: layer.dense() for layer in self.layers.values()}
        for name, layer in self.layers.items():
            self.model.set_submodule(name, plain[layer])
        self.layers = {}
        return self.model

    def _by_weight(self) -> Iterable[SparseLinear]:
        """A layer for every weight, which several layers, or names of one, may share."""
        return {id(layer.weight): layer for layer in self.layers.values()}.values()

    def _update_masks(self) -> None:
        moved: list[Tensor] = []  # counted on the device: the rate is read once, not layer by layer
        layers = dict.fromkeys(self.layers.values())
        for layer in layers:
            mask = layer.method.mask(layer.weight.abs())
            moved.append((mask ^ layer.mask).sum())
            layer.mask.copy_(mask)
        if self.steps and moved:
            total = sum(layer.mask.numel() for layer in layers)
            self.flip_rates.append(int(torch.stack(moved).sum()) / total)


def sparsify_(
    model: nn.Module,
    method: str = "s-ste",
    *,
    layers: str | Sequence[str] = FEED_FORWARD,
    decay: float | None = None,
    mask_every: int | None = None,
    mvue: bool = False,
    fp8: bool = False,
    seed: int = 0,
) -> SparseTraining:
    """Make linear layers of `model` train with 2:4 weights, in place; their parameters stay the same objects.

    The model must be on the device where it will be trained; under autocast products have autocast's dtype.

        from requant.sparse_training import sparsify_

        training = sparsify_(model, "transposable")
        for step, batch in enumerate(batches):
            loss_of(model, batch).backward()
            training.step()
            optimizer.step(), optimizer.zero_grad()
            if step == 5 * steps // 6:
                training.densify_()

    Args:
        method: `s-ste`, `transposable` or `sr-ste`.
        layers: shell patterns, or one, of the names of the `nn.Linear` modules; by default those of feed-forward networks.
        decay: of pruned weights, added to the gradient; None: 6e-5 (GPT-2's), for `s-ste` 0.
        mask_every: steps between two updates of the masks; None: 40 for `transposable`, else 1.
        mvue: prune the gradient of the outputs, without bias, in the product that gives the weight's gradient.
        fp8: round the operands of all products to 8 bits.
        seed: of the draws of `mvue`.

    Raises RecipeError for an unknown method, InputError where no layer matches or one is not a multiple of four.
    """
    if method not in METHODS:
        raise RecipeError(
            f"method '{method}' is unknown{did_you_mean(method, METHODS)}; there are: {', '.join(METHODS)}."
        )
    chosen = METHODS[method]
    layers = (layers,) if isinstance(layers, str) else layers
    linears = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name
        and isinstance(module, nn.Linear)
        and any(fnmatch.fnmatch(name, pattern) for pattern in layers)
    }
    if not linears:
        raise InputError(f"no linear layer is named like {', '.join(layers)}; give layers=.")
    device = next(iter(linears.values())).weight.device
    generator = torch.Generator(device).manual_seed(seed)
    made = {
        linear: SparseLinear(linear, chosen, mvue=mvue, fp8=fp8, generator=generator)
        for linear in dict.fromkeys(linears.values())
    }
    sparse = {name: made[linear] for name, linear in linears.items()}
    for name, layer in sparse.items():
        model.set_submodule(name, layer)
    return SparseTraining(
        model=model,
        layers=sparse,
        decay=chosen.decay if decay is None else decay,
        mask_every=chosen.mask_every if mask_every is None else mask_every,
    )
