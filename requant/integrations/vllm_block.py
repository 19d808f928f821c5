"""vLLM's decoder layers of trellis codes in few launches: the pieces of `inference/trellis_block.py` around its attention.

    enter     q, k, v = rotated rope(products of the rotated norm of x)           the first layer
    vLLM's attention of q, k, v, which it also writes into its pages
    between   delta = MLP and o_proj's part of a layer; q, k, v = those of the next, of x += delta
    leave     y = delta, finished                                                 after the last attention

vLLM has norms, RoPE and gates between the matrices, so a rotation at either end of a matrix is a launch of its own: 21 per
block of the 8B shape with one sequence. Here everything between two attentions is one custom operator of 8 or 9 launches,
whatever the number of rows; the next layer's norm finishes its last product. Operators find layers by name, as vLLM's
attention does.

`fuse` is called once a model is loaded, unless REQUANT_VLLM_FUSE is 0. It changes only the class of the decoder layers:
what a layer passes to the next is (q, k, v) instead of hidden states, which vLLM's models do not look at. Whether the
modules are Llama's is decided first by their names, then by numbers: a layer of each kind is compared with vLLM's own
forward. A model that is divided among GPUs, has adapters or is the target of speculative decoding (a draft model may look
at hidden states between layers) is left as it is, and the log says so once.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from requant_kernels.common.device import supports_ptx
from requant_kernels.dispatch import TRELLIS_BOUNDS
from torch import Tensor, nn

from requant.inference import kernel_check
from requant.inference.fused_prefill import kind_of as kind_of_rows
from requant.inference.kernel_check import kind_of
from requant.inference.kernel_layers import FusedLinear, KernelLinear, Sibling

FUSE = "REQUANT_VLLM_FUSE"  # 0: layers stay as vLLM runs them
MODELS = {
    "LlamaModel",
    "MistralModel",
    "Qwen2Model",
    "Qwen3Model",
}  # that hand x and what is added from layer to layer
MAX_ROWS = 1 << 15  # launches have a row each along a dimension that ends at 65535
# relative, of a whole layer in bfloat16, whose prompts may round activations to int8; a wrong index is of the order of 1
LIMIT = 6e-2
OWN_TENSORS = {"attn", "rotary_emb"}  # modules of an attention that hold tensors, besides matrices and norms
MATRICES = (  # of vLLM, and what each is made of
    ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", "o_proj", ("o_proj",)),
    ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
    ("mlp", "down_proj", ("down_proj",)),
)
logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said below its own name


class Place(NamedTuple):
    """What a fused layer's forward knows, which vLLM's compiler reads."""

    name: str
    following: str  # the next layer's; "" of the last
    queries: int
    keys: int


class FusedLayer:
    """A base put in front of a decoder layer's class, whose `forward` it replaces by our operators."""

    self_attn: Any
    place: Place

    def forward(
        self,
        positions: Int[Tensor, " m"],
        hidden_states: Any,
        residual: Float[Tensor, "m d"] | None,
        **_: Any,
    ) -> tuple[Any, Tensor]:
        """`hidden_states`: (q, k, v) of all layers but the first."""
        place, operators = self.place, torch.ops.requant
        if residual is None:
            residual = cast(Tensor, hidden_states)
            q, k, v = operators.vllm_enter(residual, positions, place.name, place.queries, place.keys)
        else:
            q, k, v = hidden_states
        attended = self.self_attn.attn(q, k, v)
        if not place.following:
            return operators.vllm_leave(attended, residual, place.name), residual
        sizes = place.queries, place.keys
        return operators.vllm_between(
            attended, residual, positions, place.name, place.following, *sizes
        ), residual


class LayerPieces:
    """What the operators run for one decoder layer, by numbers of rows that the same kernels multiply."""

    def __init__(self, layer: Any, block: Any, most_rows: int) -> None:
        """`block`: `block_of(layer)`. Raises ValueError where one of its matrices does not qualify."""
        from requant.inference.trellis_block import head_norms, trellis_block  # needs Triton

        self.block, self.angles = block, layer.self_attn.rotary_emb.cos_sin_cache
        self.norms = head_norms(block.self_attn)
        self.blocks: dict[int, Any] = {}
        for rows in {min(rows, most_rows) for rows in (*TRELLIS_BOUNDS, MAX_ROWS)}:
            self.blocks[kind_of_rows(rows)] = trellis_block(block, "silu", rows)
        if None in self.blocks.values():
            raise ValueError(
                "not all their matrices are trellis codes, rotated on both sides and without residuals, that the kernels "
                "of this device take"
            )

    def enter(
        self, x: Float[Tensor, "m d"], delta: Any, positions: Int[Tensor, " m"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v for the attention, of x + delta, which x becomes."""
        from requant_kernels.step.rotated_rope import rotated_rope_apart

        q, k, v = self.blocks[kind_of_rows(len(x))].before_attention(x, delta)
        return rotated_rope_apart(q, k, v, self.angles, positions, x.dtype, **self.norms)

    def after(self, attended: Float[Tensor, "m q"], x: Float[Tensor, "m d"]) -> Any:
        """What the layer adds to x last, still to be finished; x becomes what it is after the attention."""
        return self.blocks[kind_of_rows(len(x))].after_attention(x, attended)

    def leave(self, attended: Float[Tensor, "m q"], x: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        """The same, finished."""
        from requant_kernels.trellis.rotate import rotate_output

        delta, down = self.after(attended, x), self.block.mlp.down_proj
        return rotate_output(delta.values, x, down.layout, down.bias, asm=supports_ptx(x.device))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides which programs run."""
        matrices = [module for module in self.block.modules() if isinstance(module, KernelLinear)]
        return (
            *(kind_of(matrix.layout) for matrix in matrices),
            *(matrix.bias is None for matrix in matrices),
            self.angles.shape, len(self.norms),
        )  # fmt: skip


def _pieces(name: str) -> LayerPieces:
    from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]

    return get_forward_context().no_compile_layers[name]


@torch.library.custom_op("requant::vllm_enter", mutates_args=())
def _enter(x: Tensor, positions: Tensor, name: str, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return _pieces(name).enter(x, None, positions)


@_enter.register_fake
def _(x: Tensor, positions: Tensor, name: str, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x, queries, keys)


@torch.library.custom_op("requant::vllm_between", mutates_args=("x",))
def _between(
    attended: Tensor, x: Tensor, positions: Tensor, name: str, following: str, queries: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _pieces(following).enter(x, _pieces(name).after(attended, x), positions)


@_between.register_fake
def _(
    attended: Tensor, x: Tensor, positions: Tensor, name: str, following: str, queries: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x, queries, keys)


@torch.library.custom_op("requant::vllm_leave", mutates_args=("x",))
def _leave(attended: Tensor, x: Tensor, name: str) -> Tensor:
    return _pieces(name).leave(attended, x)


@_leave.register_fake
def _(attended: Tensor, x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _empty(x: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    m = x.shape[0]  # symbolic where vLLM compiles; len(x) would make it a constant
    return x.new_empty(m, queries), x.new_empty(m, keys), x.new_empty(m, keys)


@torch.no_grad()
def fuse(model: nn.Module, vllm_config: Any) -> bool:
    """Fuse the decoder layers of a model that vLLM has loaded; whether it did. The log says why not, once a model."""
    layers: list[Any] = []
    try:
        layers = decoder_layers(model, vllm_config)
        pieces = [
            LayerPieces(layer, block_of(layer), vllm_config.scheduler_config.max_num_batched_tokens)
            for layer in layers
        ]
    except (ValueError, ImportError, AttributeError) as reason:  # the last: a vLLM with other names
        logger.info("the layers of %s are not fused: %s", type(model).__name__, reason)
        return False
    try:
        check(layers, pieces)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # it is a shortcut: whatever stops it, vLLM's own way is there
        logger.warning(
            "the fused layers of %s %s, so their rotations are launches of their own, which is slower",
            type(model).__name__,
            problem if isinstance(problem, Differs) else f"fail on this machine ({type(problem).__name__}: {problem})",
        )  # fmt: skip
        return False
    names = [f"{layer.self_attn.attn.layer_name}.requant" for layer in layers]
    vllm_config.compilation_config.static_forward_context.update(zip(names, pieces, strict=True))
    for layer, name, following in zip(layers, names, [*names[1:], ""], strict=True):
        queries, keys, _ = layer.self_attn.qkv_proj.output_partition_sizes
        layer.place = Place(name=name, following=following, queries=queries, keys=keys)
        layer.__class__ = fused_class(type(layer))
    if isinstance(vllm_config.additional_config, dict):  # compiled models that vLLM keeps are others
        vllm_config.additional_config["requant_fused_layers"] = len(layers)
    logger.info("the %d layers of %s are fused", len(layers), type(model).__name__)
    return True


def is_fused(model: nn.Module) -> bool:
    """Whether the decoder layers of a model are fused."""
    return any(isinstance(module, FusedLayer) for module in model.modules())


@cache
def fused_class(own: type[nn.Module]) -> type[nn.Module]:
    """A decoder layer's class with another forward."""
    return type(f"Fused{own.__name__}", (FusedLayer, own), {})


def decoder_layers(model: nn.Module, vllm_config: Any) -> list[nn.Module]:
    """The layers of a model that may be fused. Raises ValueError, with the reason, for one that may not."""
    if os.environ.get(FUSE) == "0":
        raise ValueError(f"{FUSE} is 0")
    parallel = vllm_config.parallel_config
    reasons = {
        "they are divided among GPUs": parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1,
        "adapters change their matrices": vllm_config.lora_config is not None,
        "speculative decoding may look at what is between them": vllm_config.speculative_config is not None,
        f"steps have more than {MAX_ROWS} tokens": vllm_config.scheduler_config.max_num_batched_tokens > MAX_ROWS,
        "their rotations are folded": vllm_config.quant_config.rotation is not None,
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)
    found = [module for module in model.modules() if type(module).__name__ in MODELS]
    if len(found) != 1:
        raise ValueError(f"they are not those of {', '.join(sorted(MODELS))}")
    return list(cast(Iterable[nn.Module], found[0].layers))


def block_of(layer: Any) -> nn.Module:
    """A decoder layer as `inference/trellis_block.py` knows blocks: its matrices have the names of the checkpoint. Raises
    ValueError where its modules are not Llama's."""
    from requant.inference.fused_step import BLOCK, HEAD_NORMS, children_of, qualifies

    block: Any = nn.Module()
    block.self_attn, block.mlp = nn.Module(), nn.Module()
    unlike = ValueError("their modules are not Llama's")
    if children_of(layer) != BLOCK or "forward" in vars(layer):
        raise unlike
    for parent, joined, names in MATRICES:
        own = layer.get_submodule(parent)
        if children_of(own) - HEAD_NORMS - OWN_TENSORS != {name for p, name, _ in MATRICES if p == parent}:
            raise unlike
        linear = own.get_submodule(joined)
        for name, matrix in zip(names, matrices_of(linear, linear.output_partition_sizes), strict=True):
            setattr(block.get_submodule(parent), name, matrix)
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(block, name, getattr(layer, name))
    for name in HEAD_NORMS & children_of(layer.self_attn):
        setattr(block.self_attn, name, getattr(layer.self_attn, name))
    head_dim, rope = layer.self_attn.head_dim, layer.self_attn.rotary_emb
    block.self_attn.head_dim = head_dim
    angles = getattr(rope, "cos_sin_cache", None)
    if not (
        isinstance(angles, Tensor)
        and angles.dim() == 2
        and angles.shape[1] == head_dim
        and angles.is_contiguous()
        and rope.is_neox_style
        and not hasattr(rope, "mrope_section")
    ):
        raise ValueError("their RoPE is not that of a whole head")
    dtype = layer.input_layernorm.weight.dtype
    if not qualifies(block, dtype):
        raise unlike
    return block


def matrices_of(linear: Any, sizes: Sequence[int]) -> list[KernelLinear | Sibling]:
    """The matrices of one of vLLM's layers, with its bias. Raises ValueError where one is not on the kernels, or joined with
    others under one rotation."""
    bias, start, found = getattr(linear, "bias", None), 0, []
    for kernel in getattr(linear, "kernels", ()):
        own = sizes[len(found) : len(found) + max(1, len(getattr(kernel, "parts", ())))]
        if not isinstance(kernel, KernelLinear) or sum(own) != kernel.out_features:
            break
        matrix = KernelLinear(kernel.layout, None if bias is None else bias[start : start + sum(own)])
        start += sum(own)
        siblings = FusedLinear(matrix, own)
        found += [matrix] if len(own) == 1 else [Sibling(siblings, index) for index in range(len(own))]
    if len(found) != len(sizes):
        raise ValueError("not all their matrices are on the kernels, each by itself")
    return found


class Differs(Exception):
    """Fused layers give other values than vLLM's."""


def check(layers: Sequence[Any], pieces: Sequence[LayerPieces]) -> None:
    """Compare layers of every kind with vLLM's own forward, for every number of rows that has programs of its own."""
    passed: set[tuple[Any, ...]] = set()
    for layer, own in zip(layers, pieces, strict=True):
        if own.kind in passed:
            continue
        numbers = [rows for rows in kernel_check.TOKENS if kind_of_rows(rows) in own.blocks]
        samples = [_sample(layer, own, rows) for rows in numbers]
        if samples[0][0].is_cuda:
            from requant_kernels.common.compile_ahead import compile_ahead

            compile_ahead(lambda own=own, samples=samples: [_fused(own, *sample) for sample in samples])
        for rows, sample in zip(numbers, samples, strict=True):
            pairs = zip(_fused(own, *sample), _plain(layer, *sample), strict=True)
            for what, (got, wanted) in zip("qkvqkvxy", pairs, strict=True):
                error = (
                    (got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-30)
                ).item()
                if not error <= LIMIT:  # NaN is not
                    raise Differs(f"give another {what} (relative error {error:.2g} at {rows} tokens)")
        passed.add(own.kind)


def _sample(layer: Any, own: LayerPieces, rows: int) -> tuple[Tensor, ...]:
    """What a layer is given: x, what is added to it, what attention gives, positions."""
    weight, generator = layer.input_layernorm.weight, torch.Generator().manual_seed(rows)
    x, delta, attended = (
        torch.randn(rows, width, generator=generator).to(weight.device, weight.dtype)
        for width in (len(weight), len(weight), layer.self_attn.o_proj.input_size)
    )
    positions = torch.randint(len(own.angles), (rows,), generator=generator).to(weight.device)
    return x, delta, attended, positions


def _fused(own: LayerPieces, x: Tensor, delta: Tensor, attended: Tensor, positions: Tensor) -> list[Tensor]:
    """q, k and v of a layer that is the first, those of one that comes after it and has its matrices, x there; what the
    last layer adds."""
    last, x = x + delta, x + delta
    first = own.enter(x, None, positions)
    second = own.enter(x, own.after(attended, x), positions)
    return [*first, *second, x, own.leave(attended, last)]


def _plain(layer: Any, x: Tensor, delta: Tensor, attended: Tensor, positions: Tensor) -> list[Tensor]:
    """The same by the layer's own forward."""
    with _attention_gives(layer.self_attn, attended) as seen:
        delta, x = layer(positions, delta.clone(), x.clone())
        delta, x = delta.clone(), x.clone()
        layer(positions, delta.clone(), x.clone())
    return [*seen, x + delta, delta]


@contextmanager
def _attention_gives(module: Any, attended: Tensor) -> Iterator[list[Tensor]]:
    """Replace a module's attention by one that always returns `attended`; yields the q, k and v that it is called with."""
    seen: list[Tensor] = []

    class Attention(nn.Module):
        def forward(self, *asked: Tensor) -> Tensor:
            seen.extend(tensor.clone() for tensor in asked)
            return attended.clone()

    own, module.attn = module.attn, Attention()
    try:
        yield seen
    finally:
        module.attn = own
