"""Which matrices of a model are quantized, in which order and under which names.

A causal LM of transformers has one list of equal transformer blocks, and every `nn.Linear` (GPT-2: `Conv1D`, whose weight
is transposed) inside a block is quantized. So no architecture is named here, and fused projections (Phi-3's `qkv_proj`,
`gate_up_proj`; GPT-NeoX's `query_key_value`) need no special case. Embedding and head are handled separately
(`allocation/embedding_and_head.py`); norms stay as they are. Experts are linears too once `experts.py` has taken them out
of their fused tensors; experts in an unknown layout are refused, because they would silently stay unquantized. Modules
that only choose stay as they are: routers, and the indexers of sparse attention, which have no gradients. A subclass of a
linear layer that computes something else from its weight (DeepSeek-V4's grouped projection) does not count as one.
Exporters and integrations know more about some architectures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant import ranks
from requant.errors import ModelError
from requant.models.experts import Experts, routers
from requant.models.hosted import HostedBlocks, HostedMatrix
from requant.models.patterns import matched, why_unmatched

MAX_UNSEEN = 0.1  # of a block's weights, in matrices that are not linear layers: a model with more is refused
MANY = 0.25  # as many linears as another list has, at least, for a list of blocks
# Linears of one module that read the same input, so that one kernel launch can compute them together.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def siblings(kind: str) -> tuple[str, ...]:
    """The kinds of a module's linears that read what one of this kind reads; of most itself alone."""
    return next((kinds for kinds in SIBLINGS if kind in kinds), (kind,))


@dataclass(frozen=True, kw_only=True)
class QuantTarget:
    """One matrix to quantize, seen as `[n, k]` whatever the module stores."""

    name: str  # dotted path in the model: "model.layers.0.self_attn.q_proj"
    kind: str  # its last component: "q_proj"
    block: int
    module: nn.Module
    transposed: bool  # GPT-2's Conv1D holds [k, n]
    # of the quantizer, for this matrix alone: those of the recipe's `modules`, and which sides a model's own rotation
    # leaves to it (`rotations.py`)
    options: Mapping[str, Any] = field(default_factory=dict)
    experts: str | None = None  # path of the layer's experts, for a matrix of one of them
    rank: int = 0  # of several processes, the one that collects its statistics and makes its codes
    # where the matrix is on the host, and on the GPU while its block is computed
    hosted: HostedMatrix | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.parameter.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def size(self) -> int:
        return self.parameter.numel()

    @property
    def parameter(self) -> nn.Parameter:
        return self.module.get_parameter("weight")

    @property
    def device(self) -> torch.device:
        """The device that computes its block."""
        return self.parameter.device

    @property
    def codes_device(self) -> torch.device:
        """The device that keeps its codes: the host for a hosted matrix."""
        return self.device if self.hosted is None else torch.device("cpu")

    def weight(self) -> Float[Tensor, "n k"]:
        """A float32 copy, on the model's device."""
        value = self.parameter.detach() if self.hosted is None else self.hosted.value()
        return self.oriented(value).to(torch.float32, copy=True).contiguous()

    def oriented(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape (the weight, its gradient) seen as [n, k]."""
        return tensor.T if self.transposed else tensor

    @torch.no_grad()
    def set_weight(self, weight: Float[Tensor, "n k"] | Callable[[], Tensor]) -> None:
        """Overwrite the parameter in place, rounding to its dtype, with a tensor or what a function returns.

        A hosted matrix keeps what is given as its source: a function is called whenever the block comes to the GPU.
        """
        if self.hosted is not None:
            self.hosted.set_source(weight)
        else:
            self.parameter.copy_(self.oriented(weight() if callable(weight) else weight))


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of transformer blocks and its dotted path.

    It is the outermost `nn.ModuleList` with many linears, of those the one with most. Encoders of images or sounds, which
    may have more, lie beside the decoder, or deeper in it.
    """
    candidates = _lists(model)
    most = max((count for count, _, _ in candidates), default=0)
    if most == 0:
        raise ModelError(
            f"{type(model).__name__} has no list of transformer blocks with linear layers; "
            "requant quantizes decoder-only causal LMs."
        )
    many = [each for each in candidates if each[0] >= MANY * most]
    _, path, blocks = min(many, key=lambda each: (each[1].count("."), -each[0]))
    return path, blocks


def _lists(model: nn.Module) -> list[tuple[int, str, nn.ModuleList]]:
    """Every list of modules: how many linears it holds, its dotted path; of a model with a decoder those inside."""
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    path = next((path for path, module in model.named_modules() if module is decoder), None)
    return (_lists_in(decoder, path) if path is not None else []) or _lists_in(model, "")


def _lists_in(root: nn.Module, path: str) -> list[tuple[int, str, nn.ModuleList]]:
    """The lists in a module at `path`, inner ones first. Each module is met once: mixtures have tens of thousands."""
    found: list[tuple[int, str, nn.ModuleList]] = []
    linear = _linear_types()

    def count(module: nn.Module, path: str) -> int:
        inside = [count(child, f"{path}.{name}".lstrip(".")) for name, child in module.named_children()]
        linears = isinstance(module, linear) + sum(inside)
        if isinstance(module, nn.ModuleList) and len(module):
            found.append((linears, path, module))
        return linears

    count(root, path)
    return found


def find_linears(
    model: nn.Module, *, skip: Sequence[str] = (), options: Mapping[str, Mapping[str, Any]] | None = None
) -> list[QuantTarget]:
    """Every matrix to quantize, in the model's order.

    `skip` holds shell patterns (`patterns.py`); `options` has for such patterns what the quantizer does differently there (a
    recipe's `modules`), where a later pattern has precedence.
    """
    path, blocks = find_blocks(model)
    _refuse_unseen(path, blocks)
    _refuse_other_lists(model, path, blocks)
    _refuse_shared(path, blocks)
    layers = [name for name, module in model.named_modules() if isinstance(module, Experts)]
    choosing = {id(parameter) for parameter in (*routers(model).values(), *_of_indexers(model))}
    targets = [
        QuantTarget(
            name=f"{path}.{index}.{name}",
            kind=name.rsplit(".", 1)[-1],
            block=index,
            module=module,
            transposed=not isinstance(module, nn.Linear),
            experts=next(
                (layer for layer in layers if f"{path}.{index}.{name}".startswith(f"{layer}.")), None
            ),
        )
        for index, block in enumerate(blocks)
        for name, module in block.named_modules()
        if _is_linear(module) and id(module.get_parameter("weight")) not in choosing
    ]
    names = [target.name for target in targets]
    found = matched(model, names, (*skip, *(options or {})))
    for pattern in skip:
        if not found[pattern]:
            raise ModelError(f"--skip {pattern} matches no matrix; {why_unmatched(model, names, pattern)}")
    skipped = {name for pattern in skip for name in found[pattern]}
    kept = [target for target in targets if target.name not in skipped]
    if not kept:
        raise ModelError("every matrix is skipped; nothing is left to quantize.")
    for pattern in options or {}:
        if not found[pattern]:
            raise ModelError(
                f"modules: '{pattern}' matches no matrix; {why_unmatched(model, names, pattern)}"
            )
        if found[pattern] <= skipped:
            raise ModelError(f"modules: '{pattern}' matches only matrices that are skipped; leave it out.")
    for pattern, given in (options or {}).items():
        kept = [
            replace(target, options={**target.options, **given}) if target.name in found[pattern] else target
            for target in kept
        ]
    return kept


def keep_on_host(
    model: PreTrainedModel, targets: Sequence[QuantTarget], device: str | torch.device
) -> list[QuantTarget]:
    """The targets of a model on the host, hosted from now on (`hosted.py`); all else of the model is moved to `device`."""
    matrices = [
        HostedMatrix(target.name, target.parameter, transposed=target.transposed, device=torch.device(device))
        for target in targets
    ]
    nn.Module.to(model, device)  # placeholders are there already
    HostedBlocks(
        model,
        list(find_blocks(model)[1]),
        [(target.block, matrix) for target, matrix in zip(targets, matrices, strict=True)],
    )
    return [replace(target, hosted=matrix) for target, matrix in zip(targets, matrices, strict=True)]


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the module's `forward` while the context lasts."""
    before = module.__dict__.get("forward")  # accelerate puts its own before the class's
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # uncovers the class's own method
        if before is not None:
            module.forward = before


def embedding_and_head_modules(model: PreTrainedModel) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Embedding and head with their dotted paths; the head is None for a model without one."""
    paths = {module: path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return (paths[embedding], embedding), ("" if head is None else paths[head], head)


def divided(targets: Sequence[QuantTarget], count: int) -> list[QuantTarget]:
    """The targets, each owned by one of `count` ranks; experts of a layer, which share their statistics, by the same."""
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for target in targets:
        unit = target.experts or target.name
        sizes[unit] = sizes.get(unit, 0) + target.size
        kinds[unit] = "experts" if target.experts else target.kind
    found = ranks.owners([(kinds[unit], size) for unit, size in sizes.items()], count)
    owner_of = dict(zip(sizes, found, strict=True))
    return [replace(target, rank=owner_of[target.experts or target.name]) for target in targets]


def by_block(targets: Sequence[QuantTarget]) -> list[list[QuantTarget]]:
    """The targets, one list a transformer block."""
    blocks = dict.fromkeys(target.block for target in targets)
    return [[target for target in targets if target.block == block] for block in blocks]


def by_kind_in_block(targets: Sequence[QuantTarget]) -> dict[tuple[int, str], list[QuantTarget]]:
    """The targets by block and kind: one each but in mixtures of experts."""
    groups: dict[tuple[int, str], list[QuantTarget]] = {}
    for target in targets:
        groups.setdefault((target.block, target.kind), []).append(target)
    return groups


def by_input(targets: Sequence[QuantTarget]) -> list[list[QuantTarget]]:
    """The targets in the model's order; those that read the same tensor (`SIBLINGS`) form one list.

    Experts of a layer run side by side, so all of their gates and ups form one list, and then all of their downs.
    """
    groups: dict[tuple[str, ...], list[QuantTarget]] = {}
    last: tuple[QuantTarget, tuple[str, ...]] | None = None
    for target in targets:
        if target.experts is not None:
            key = (target.experts, *siblings(target.kind))
        elif last is not None and _read_one_input(last[0], target):
            key = last[1]
        else:
            key = (target.name,)
        groups.setdefault(key, []).append(target)
        last = target, key
    return list(groups.values())


def _read_one_input(first: QuantTarget, second: QuantTarget) -> bool:
    """Whether two linears in a row read the same tensor; two of one kind belong to different modules."""
    alike = first.block == second.block and first.kind != second.kind
    return alike and second.kind in siblings(first.kind)


def _linear_types() -> tuple[type, ...]:
    from transformers.pytorch_utils import Conv1D

    return nn.Linear, Conv1D


def _is_linear(module: Any) -> bool:
    """Whether a module multiplies its input with its weight, and returns nothing else."""
    if not isinstance(module, _linear_types()):
        return False
    if any(type(module).forward is kind.forward for kind in _linear_types()):
        return True
    # a subclass with a forward of its own: routers, grouped projections, Falcon's
    rows, columns = module.weight.shape
    try:
        y = module.forward(torch.empty(1, 1, columns, dtype=module.weight.dtype, device=module.weight.device))
    except (RuntimeError, ValueError, IndexError):
        return False
    return isinstance(y, Tensor) and y.shape == (1, 1, rows)


def _of_indexers(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of what chooses the tokens that sparse attention reads.

    A model computes the choice without gradients, so nothing predicts what an error in it costs; they are a thousandth of
    the weights.
    """
    indexers = [module for module in model.modules() if "Indexer" in type(module).__name__]
    return [parameter for module in indexers for parameter in module.parameters()]


def _refuse_unseen(path: str, blocks: nn.ModuleList) -> None:
    """Raise ModelError for blocks with too many weights in no linear layer to leave them alone."""
    for index, block in enumerate(blocks):
        total = sum(parameter.numel() for parameter in block.parameters())
        unseen = {
            ".".join(filter(None, (path, str(index), module_name, name))): parameter
            for module_name, module in block.named_modules()
            if not _is_linear(module) and not isinstance(module, nn.Embedding)
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() > 1
        }
        count = sum(parameter.numel() for parameter in unseen.values())
        if count > MAX_UNSEEN * total:
            where, largest = max(unseen.items(), key=lambda each: each[1].numel())
            experts = "expert" in where.lower() or (largest.dim() == 3 and "conv" not in where.lower())
            raise ModelError(
                f"{where} {list(largest.shape)} holds {'experts' if experts else 'weights'} in a layout that requant does "
                f"not know, so {count / total:.0%} of the block's weights would stay as they are; this model is not "
                "supported."
            )


def _refuse_other_lists(model: nn.Module, path: str, blocks: nn.ModuleList) -> None:
    """Raise ModelError for a model with two lists of blocks, one of which would stay as it is."""
    inside = {id(module) for module in blocks.modules()}
    for _, other, modules in _lists(model):
        beside = id(modules) not in inside and not path.startswith(f"{other}.")
        if beside and _linear_weights(modules) > MANY * _linear_weights(blocks):
            raise ModelError(
                f"{type(model).__name__} has transformer blocks in {path} and in {other}; only models with a single list of "
                "blocks are supported."
            )


def _refuse_shared(path: str, blocks: nn.ModuleList) -> None:
    """Raise ModelError where two blocks have a matrix in common, which would be quantized twice."""
    owners: dict[int, str] = {}
    for index, block in enumerate(blocks):
        for name, module in block.named_modules():
            if _is_linear(module):
                where = f"{path}.{index}.{name}"
                first = owners.setdefault(id(module.weight), where)
                if first != where:
                    raise ModelError(
                        f"{first} and {where} are one matrix; models whose blocks share matrices are not supported."
                    )


def _linear_weights(module: nn.Module) -> int:
    return sum(m.get_parameter("weight").numel() for m in module.modules() if isinstance(m, _linear_types()))
