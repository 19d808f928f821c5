"""Input statistics of linears, the layer Hessian `H = mean_t x_t x_t'` and `mean_t |x_t|`, from one forward pass, or
collected along with gradients in a backward pass.

H is the exact Hessian of the layer's squared output error `1/2 mean_t |(w~ - w) x_t|^2` in each row of w (Frantar et al.
2022, arXiv 2210.17323, without their factor 2). With a reference model, whose linear reads z_t at the same token, `C =
mean_t z_t x_t'` is accumulated too: H and C give the weight that a matrix should approximate if it follows quantized ones
(`quantizers/correction.py`). Linears that read the same tensor (q, k and v; gate and up) share one object, to which only
the first of them adds. Means of an expert are over the tokens that reach it, and shrunk (`experts.py`).
"""

import fnmatch
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.exchange import Exchange
from requant.calibration.experts import peers, same_routes, shrunk
from requant.calibration.gram import add_gram, fill_lower_half
from requant.calibration.hidden_states import HiddenStateCache, StopForward
from requant.calibration.passes import add_product, tensor_cores
from requant.errors import NumericalError
from requant.models.experts import all_tokens_to_every_expert
from requant.models.hosted import hosted_blocks
from requant.models.targets import QuantTarget
from requant.progress import tracked


@dataclass(kw_only=True, slots=True)
class InputStatistics:
    """Means over tokens, float32, on the model's device, and how many tokens the linear saw."""

    hessian: Float[Tensor, "k k"]
    cross: Float[Tensor, "k k"] | None
    mean_abs: Float[Tensor, " k"] | None
    tokens: int = 0

    @property
    def means(self) -> dict[str, Tensor]:
        """All that is a mean, to change in place."""
        found = {"hessian": self.hessian, "cross": self.cross, "mean_abs": self.mean_abs}
        return {name: mean for name, mean in found.items() if mean is not None}


@torch.no_grad()
def input_statistics(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    targets: Sequence[QuantTarget],
    *,
    cache: HiddenStateCache | None = None,
    reference: HiddenStateCache | None = None,
    all_tokens: bool = False,
    label: str | None = None,
) -> dict[str, InputStatistics]:
    """Statistics of the inputs of every target that this rank owns, over all tokens of `windows`; targets with one input
    share one object.

    Those of experts are over the tokens that are routed to them, or with `all_tokens` over all, whatever the routing.

    The pass resumes from `cache` (None: from the first block), which goes on with the blocks of the targets where the model
    is hosted. `reference` is the cache of another model, the unquantized copy, which runs first on each batch to give the
    inputs z, and whose routing of tokens to experts is then followed; the targets lie in one block then. Raises
    NumericalError for a target that is never called or whose inputs overflow.
    """
    blocks = {target.block for target in targets}
    if hosted_blocks(model) is not None and (cache is None or len(blocks) > 1):
        cache, found = cache or HiddenStateCache(model, windows), dict[str, InputStatistics]()
        for block in tracked(sorted(blocks), label=label, unit="blocks"):
            cache.advance_to(block)
            members = [target for target in targets if target.block == block]
            found |= input_statistics(model, windows, members, cache=cache, all_tokens=all_tokens)
        return found
    sums = _Accumulator(tokens=windows.numel(), with_cross=reference is not None, with_mean_abs=True)
    own = HiddenStateCache(model, windows) if cache is None else cache
    caches = (own,) if reference is None else (reference, own)
    experts, owners = _experts_and_owners(model, targets)
    exchange = Exchange(owners, sums.accumulate)
    with ExitStack() as stack:
        stack.enter_context(tensor_cores(next(model.parameters()).device))
        if reference is not None:
            stack.enter_context(same_routes(reference.model, model))
        for each in caches:
            if all_tokens:
                stack.enter_context(all_tokens_to_every_expert(each.model))
            use = partial(sums.give, exchange) if each is own else sums.save_reference
            for name in owners:
                handle = each.module(name).register_forward_pre_hook(sums.hook_of(name, use))
                stack.callback(handle.remove)
            # reached where an expert is not
            last = each.blocks[max(target.block for target in targets)]
            stack.callback(last.register_forward_hook(_stop).remove)
        for index, tokens in enumerate(own.batches(label)):
            if tokens is not None:
                for each in caches:
                    sums.begin(set(owners))
                    each.run(index, tokens)
            exchange.deliver()
    sums.finish(experts)
    _check(targets, sums.found)
    return sums.found


@contextmanager
def observed_inputs(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    targets: Sequence[QuantTarget],
    *,
    mean_abs: bool = True,
) -> Iterator[tuple[dict[str, InputStatistics], Callable[[], None]]]:
    """The statistics of `input_statistics` in a pass with gradients that the caller makes over all `windows` while the
    context lasts; they are whole when it ends. Without `mean_abs` those are left out.

    The second is to be called after every batch, by every rank. A block that is recomputed counts once, in its graph.
    """
    sums = _Accumulator(tokens=windows.numel(), with_cross=False, with_mean_abs=mean_abs)
    experts, owners = _experts_and_owners(model, targets)
    exchange = Exchange(owners, torch.no_grad()(sums.accumulate))
    multiplied = _AsMultiplied()

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                exchange.give(name, multiplied(inputs[0]))

        return hook

    with ExitStack() as stack:
        for name in owners:
            handle = model.get_submodule(name).register_forward_pre_hook(hook_of(name))
            stack.callback(handle.remove)

        def after_each() -> None:
            exchange.deliver()
            sums.begin(set())  # keep no tensor of the batch's graph
            multiplied.last = None

        yield sums.found, after_each
    sums.finish(experts)
    _check(targets, sums.found)


def _experts_and_owners(
    model: PreTrainedModel, targets: Sequence[QuantTarget]
) -> tuple[list[list[str]], dict[str, int]]:
    """The experts' matrices by layer and kind, and the rank that owns each matrix whose inputs count: the targets', and
    those of all experts of a layer, also where some are quantized already, for they share their average."""
    experts = peers(model, targets)
    owners = {target.name: target.rank for target in targets}
    for group in experts:  # all of a layer's are owned together
        owners |= dict.fromkeys(group, next(owners[name] for name in group if name in owners))
    return experts, owners


def _check(targets: Sequence[QuantTarget], found: Mapping[str, InputStatistics]) -> None:
    """Raise NumericalError for a target that was never called or whose inputs overflow."""
    owned = ranks.owned(targets)
    missing = [target.name for target in owned if target.name not in found]
    if missing:
        skipped = " ".join(f"--skip {shlex.quote(pattern)}" for pattern in _patterns(missing, found))
        others = f", nor were {len(missing) - 1} others" if len(missing) > 1 else ""
        raise NumericalError(
            f"{missing[0]} was never called on the calibration text{others}; leave matrices as they are that "
            f"text does not reach: {skipped}."
        )
    for target in owned:
        if not torch.isfinite(found[target.name].hessian).all():
            raise NumericalError(f"{target.name}: its inputs overflow; use --dtype float32 or bfloat16.")


def _patterns(missing: Sequence[str], called: Collection[str]) -> list[str]:
    """Shell patterns that match these matrices and none that was called, the widest of each."""

    def of(name: str) -> str:
        parts = name.split(".")
        inside = parts[max((i for i, part in enumerate(parts) if part.isdigit()), default=-1) + 1 :]
        wider = [*(f"*.{part}.*" for part in inside[:-1]), f"*.{inside[-1]}"]
        return next((p for p in wider if not any(fnmatch.fnmatch(each, p) for each in called)), name)

    return list(dict.fromkeys(map(of, missing)))


def _stop(*_: Any) -> None:
    raise StopForward


class _AsMultiplied:
    """A linear's input in the dtype in which autocast multiplies it; of siblings, which run in a row, one object."""

    def __init__(self) -> None:
        self.last: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return x
        if self.last is None or self.last[0] is not x:
            self.last = x, x.to(torch.get_autocast_dtype(x.device.type))
        return self.last[1]


@dataclass(kw_only=True, slots=True)
class _Accumulator:
    """The sums over all batches so far, and the reference's inputs z of the current batch."""

    tokens: int
    with_cross: bool
    with_mean_abs: bool
    found: dict[str, InputStatistics] = field(default_factory=dict)
    reference_inputs: dict[str, Tensor] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)  # targets that the current pass has not reached
    last: tuple[Tensor, str] | None = None  # the tensor read last, and by which target: siblings run in a row

    def begin(self, names: set[str]) -> None:
        self.waiting, self.last = set(names), None

    def hook_of(self, name: str, use: Callable[[str, Tensor], None]) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            use(name, inputs[0])
            self.waiting.discard(name)
            if not self.waiting:
                raise StopForward

        return hook

    def save_reference(self, name: str, z: Tensor) -> None:
        self.reference_inputs[name] = z

    def give(self, exchange: Exchange, name: str, x: Tensor) -> None:
        exchange.give(name, x, *([self.reference_inputs.pop(name)] if self.with_cross else ()))

    def accumulate(self, name: str, x: Tensor, z: Tensor | None = None) -> None:
        if self.last is not None and x is self.last[0]:
            self.found[name] = self.found[self.last[1]]
            return
        self.last = (x, name)
        x = x.flatten(0, -2)
        if name not in self.found:
            k = x.shape[1]
            hessian = torch.zeros(k, k, device=x.device)
            self.found[name] = InputStatistics(
                hessian=hessian,
                cross=torch.zeros_like(hessian) if self.with_cross else None,
                mean_abs=torch.zeros(k, device=x.device) if self.with_mean_abs else None,
            )
        sums = self.found[name]
        sums.tokens += len(x)
        add_gram(sums.hessian, x, 1 / self.tokens)
        if sums.cross is not None and z is not None:
            add_product(sums.cross, z.flatten(0, -2), x, 1 / self.tokens)
        if sums.mean_abs is not None:
            sums.mean_abs += x.abs().sum(0, dtype=torch.float32) / self.tokens

    def finish(self, experts: Sequence[Sequence[str]]) -> None:
        """Complete the Hessians, and turn what was divided by all tokens into means over an expert's own, shrunk towards
        those of its layer."""
        for statistics in {id(each): each for each in self.found.values()}.values():
            fill_lower_half(statistics.hessian)
        # one of gate and up, which share their objects; none where all experts saw tokens: it takes as much as one of theirs
        averages: dict[tuple[int, ...], InputStatistics | None] = {}
        for names in experts:
            seen = [self.found[name] for name in names if name in self.found]
            unseen = [name for name in names if name not in self.found]
            key = tuple(map(id, seen))
            if seen and key not in averages:
                average = self._shrunk(seen)
                averages[key] = average if unseen else None
            if (common := averages.get(key)) is not None:
                self.found |= dict.fromkeys(unseen, common)

    def _shrunk(self, seen: Sequence[InputStatistics]) -> InputStatistics:
        """Shrink the statistics of a layer's experts in place; returns their average, for those that saw no token."""
        scale = self.tokens / sum(each.tokens for each in seen)
        common = {
            name: reduce(torch.add, (each.means[name] for each in seen)) * scale for name in seen[0].means
        }
        average = InputStatistics(**{"cross": None, "mean_abs": None, **common})
        for each in seen:
            for name, own in each.means.items():
                own.copy_(shrunk(own * (self.tokens / each.tokens), common[name], each.tokens))
        return average
