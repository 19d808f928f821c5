"""A decoding step in few launches, for models whose blocks are made of Llama's modules.

    x = rows of the embedding         one, with RoPE's cosines and sines (`step_inputs.py`); then for every block
    x += delta;  y = norm(x)          one launch; delta is what the attention or the MLP before gave
    q, k, v = matrices of y           RoPE, and into the cache: one launch
    attention                         two, of many sequences one
    delta = o(attention)
    x += delta;  y = norm(x)          one
    delta = down(act(gate y) * up y)  the gate one
    logits = head(norm(x += delta))   the norm one, and two to keep the logits and choose the tokens

transformers writes this as some thirty small operations per block, each a launch of its own: fusing them saves two of the
8.5 ms of a step of an 8B model in bf16 on an H100. torch.compile saves as much, but has to compile first, model by model.
Here they are the kernels of `requant_kernels/step`; matrices, embedding and head are whatever modules the model holds
(`PlainBlock`). If all matrices of the blocks are trellis codes, the rotations around them are fused too
(`trellis_block.py`), and those of an embedding and a head in such codes (`trellis_ends.py`).

The experts of a mixture, with their router, are the model's own modules (`MixtureBlock`) unless they and the attention's
matrices are trellis codes.

Whether a model qualifies is decided first by the names of its modules, then by numbers: `Decoder` compares the logits of one
step with the model's own, and keeps the model's step if they differ (for instance because a block scales its residuals).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from requant_kernels.common.compile_ahead import compile_ahead
from requant_kernels.step.attention import attend
from requant_kernels.step.choose import choose_tokens
from requant_kernels.step.gated import ACTIVATIONS, gated
from requant_kernels.step.rms_norm import add_rms_norm
from requant_kernels.step.rope_cache import rope_cache
from requant_kernels.step.rotated_norm import rotated_norm
from requant_kernels.trellis.operands import Product
from torch import Tensor, nn
from torch.nn import functional

from requant.inference.kernel_layers import Sibling
from requant.inference.prompt_attention import attend_prompt
from requant.inference.step_inputs import AngleInputs, ModelInputs, RowInputs, step_inputs
from requant.inference.trellis_block import TrellisBlock, head_norms, trellis_block
from requant.inference.trellis_ends import TrellisHead, TrellisInputs, trellis_head, trellis_inputs
from requant.inference.trellis_mixture import called
from requant.models.experts import has_experts

BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"})
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
MIXTURE = "mixture"  # in place of an activation, where all blocks have experts
TOLERANCE = 5e-2  # of the logits, relative: above the rounding of bfloat16 through many blocks
logger = logging.getLogger(__name__)


class FusedStep:
    """One more token of every sequence, by the modules of a model that `fused_steps` found to qualify."""

    def __init__(
        self,
        model: Any,
        inputs: "RowInputs | AngleInputs | ModelInputs | TrellisInputs",
        blocks: "Blocks",
        head: TrellisHead | None = None,
    ) -> None:
        self.model, self.inputs, self.blocks, self.head = model, inputs, blocks, head
        self.fuses_rotations = isinstance(blocks[0], TrellisBlock)

    @torch.no_grad()
    def __call__(self, tokens: Int64[Tensor, "b 1"], cache: Any) -> Float[Tensor, "b v"]:
        """Logits; keys and values are written after the first `cache.length`, which the caller counts."""
        x, cos, sin, delta = self.inputs(tokens, cache.length)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            step: Any = block
            delta = step(x, delta, cos, sin, layer, cache.length)
        if self.head is not None and (delta is None or isinstance(delta, Product)):
            return self.head(x, delta, self.model.base_model.norm)
        return self.model.get_output_embeddings()(normalized(x, delta, self.model.base_model.norm))

    @torch.no_grad()
    def advance(self, tokens: Int64[Tensor, "b 1"], cache: Any, logits: Float[Tensor, "b v"]) -> None:
        """A step as a graph repeats it: `logits` become its own, `tokens` their argmax, and the cache counts it."""
        choose_tokens(self(tokens, cache), logits, tokens, cache.length)

    def agrees(self, tokens: Int64[Tensor, "b 1"], cache: Any, wanted: Float[Tensor, "b v"]) -> bool:
        """Whether a step gives the logits that are wanted; the log says where it does not."""

        def checked() -> Tensor:
            if tokens.is_cuda:  # matrices of many widths are many programs
                compile_ahead(lambda: self(tokens, cache))
            logits, kept, chosen = self(tokens, cache), torch.empty_like(wanted), torch.empty_like(tokens)
            choose_tokens(logits, kept, chosen)
            if not (torch.equal(kept, logits) and torch.equal(chosen, logits.argmax(-1, keepdim=True))):
                raise ValueError("it takes another token than the likeliest")
            return logits

        return agrees(self.model, self.blocks, "step", checked, wanted)


def agrees(
    model: Any,
    blocks: "Blocks",
    what: str,
    run: Callable[[], Tensor],
    wanted: Float[Tensor, "b v"],
    *,
    tolerance: float = TOLERANCE,
) -> bool:
    """Whether `run`, a step or whatever else goes through fused blocks, gives the logits that are wanted; the log says where
    it does not."""
    try:
        error = ((run().float() - wanted.float()).norm() / wanted.float().norm()).item()
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # it is a shortcut: whatever stops it, the model's own way is there
        reason = f"fails on this machine ({type(problem).__name__}: {problem})"
    else:
        if error <= tolerance:
            return True
        reason = f"gives other logits (relative error {error:.2g})"
    logger.warning(
        "the fused %s of %s %s, so %s, which is slower",
        what,
        type(model).__name__,
        reason,
        "its rotations are launches of their own"
        if isinstance(blocks[0], TrellisBlock)
        else "transformers' own is used",
    )
    return False


class PlainBlock:
    """A block whose matrices are modules that take and give ordinary activations."""

    def __init__(self, block: Any, activation: str) -> None:
        self.block, self.activation = block, activation

    def __call__(
        self,
        x: Float[Tensor, "b d"],
        delta: Float[Tensor, "b d"] | None,
        cos: Tensor,
        sin: Tensor,
        layer: Any,
        position: Tensor,
        past: int | None = None,
    ) -> Float[Tensor, "b d"]:
        """What the block adds to x last; x becomes what it has added before. `past`: x are the tokens of prompts, after so
        many others; None: x has one token of every sequence."""
        block = self.block
        y = normalized(x, delta, block.input_layernorm)
        delta = attention(block.self_attn, y, cos, sin, layer, position, past)
        return self.mlp(normalized(x, delta, block.post_attention_layernorm))

    def mlp(self, y: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        mlp = self.block.mlp
        gate, up = parts(mlp, ("gate_proj", "up_proj"), "gate_up_proj", y)
        return mlp.down_proj(gated(gate, up, self.activation))


class MixtureBlock(PlainBlock):
    """A block whose MLP is a mixture of experts, and is called as the model calls it."""

    def mlp(self, y: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        return called(self.block.mlp, y)


def normalized(
    x: Float[Tensor, "b d"], delta: Float[Tensor, "b d"] | Product | None, norm: Any
) -> Float[Tensor, "b d"]:
    """The norm of x + delta, which x becomes."""
    if isinstance(delta, Product):
        found = rotated_norm(x, delta, norm.weight, norm.variance_epsilon)
        assert isinstance(found, Tensor)
        return found
    return add_rms_norm(x, delta, norm.weight, norm.variance_epsilon)


def attention(
    module: Any,
    y: Float[Tensor, "b d"],
    cos: Tensor,
    sin: Tensor,
    layer: Any,
    position: Tensor,
    past: int | None,
) -> Float[Tensor, "b d"]:
    """Attention of one token per sequence, or of prompts, over a layer of the cache, which takes their keys and values."""
    head_dim, key_heads = layer.keys.shape[-1], layer.keys.shape[1]
    sizes = (module.o_proj.in_features, key_heads * head_dim, key_heads * head_dim)
    q, k, v = parts(module, ("q_proj", "k_proj", "v_proj"), "qkv_proj", y, sizes)
    q = rope_cache(q, k, v, cos, sin, position, layer.keys, layer.values, **head_norms(module))
    scale = getattr(module, "scaling", head_dim**-0.5)
    if past is not None:
        return module.o_proj(attend_prompt(q, layer.keys, layer.values, scale, past=past))
    output = attend(q[:, :, None], layer.keys, layer.values, None, scale, position=position)
    return module.o_proj(output.flatten(1))


def parts(
    module: Any, names: tuple[str, ...], fused: str, y: Float[Tensor, "b d"], sizes: tuple[int, ...] = ()
) -> tuple[Tensor, ...]:
    """What several matrices make of y, or the one that holds them all."""
    if not hasattr(module, fused):
        return tuple(getattr(module, name)(y) for name in names)
    whole = getattr(module, fused)(y)
    return whole.split(sizes, -1) if sizes else whole.chunk(len(names), -1)


Blocks = Sequence[PlainBlock] | Sequence[TrellisBlock]


def fused_steps(model: Any, sequences: int, length: int, *, rotations: bool = True) -> list[FusedStep]:
    """The fused steps of a model for so many sequences and a cache of `length` tokens, the fastest first; none where its
    modules are not those of a Llama. `rotations`: those of trellis codes are fused too."""
    found = fused_blocks(model, sequences, rotations=rotations)
    if not found:
        return []
    plain, steps = step_inputs(model, length), []
    for blocks in found:
        inputs, head = plain, None
        if isinstance(blocks[0], TrellisBlock):
            inputs, head = trellis_inputs(model, length) or plain, trellis_head(model, sequences)
        steps.append(FusedStep(model, inputs, blocks, head))
    return steps


def fused_blocks(model: Any, rows: int, *, rotations: bool = True) -> list[Blocks]:
    """A model's blocks, fused, in one way or two, the fastest first, for activations of so many rows: sequences of a step,
    or tokens of prompts."""
    base = model.base_model
    if not is_norm(getattr(base, "norm", None), model.dtype) or not hasattr(base, "rotary_emb"):
        return []
    blocks: list[Any] = list(getattr(base, "layers", ()))
    if not blocks or not all(qualifies(block, model.dtype) for block in blocks):
        return []
    activations = {activation_of(block) for block in blocks if not has_experts(block)} or {MIXTURE}
    activation = activations.pop() if len(activations) == 1 else None
    if activation is None or model.get_output_embeddings() is None:
        return []
    rotations = rotations and turns_whole_heads(base, blocks)
    trellises = [trellis_block(block, activation, rows) for block in blocks] if rotations else [None]
    found = [block for block in trellises if block is not None]
    plain = [(MixtureBlock if has_experts(block) else PlainBlock)(block, activation) for block in blocks]
    return [found, plain] if len(found) == len(blocks) else [plain]


def qualifies(block: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a block has the modules of Llama's, and none of those that a fused step passes over has hooks."""
    if children_of(block) != BLOCK:
        return False
    attention, mlp = block.get_submodule("self_attn"), block.get_submodule("mlp")
    if next(attention.parameters(recurse=False), None) is not None:  # gpt-oss has sinks
        return False
    norms = [block.get_submodule(name) for name in BLOCK if name.endswith("layernorm")]
    if children_of(attention) >= HEAD_NORMS:
        own = [attention.get_submodule(name) for name in HEAD_NORMS]
        if any(len(norm.get_parameter("weight")) != getattr(attention, "head_dim", 0) for norm in own):
            return False  # of all heads together, as OLMo's
        norms += own
    return (
        children_of(attention) - HEAD_NORMS in ATTENTION
        and children_of(attention) & HEAD_NORMS in (HEAD_NORMS, set())
        and (children_of(mlp) in MLP or has_experts(block))
        and all(is_norm(norm, dtype) for norm in norms)
        and not any(part._forward_hooks or part._forward_pre_hooks for part in (block, attention, mlp))
    )


def turns_whole_heads(base: Any, blocks: Sequence[Any]) -> bool:
    """Whether RoPE turns all values of a head, not the first of them alone."""
    frequencies = getattr(base.rotary_emb, "inv_freq", None)
    return frequencies is None or 2 * len(frequencies) == getattr(blocks[0].self_attn, "head_dim", 0)


def children_of(module: nn.Module) -> set[str]:
    """The names of the modules that hold tensors, or share another's: not of activations and dropout."""
    return {
        name
        for name, child in module.named_children()
        if isinstance(child, Sibling)
        or next(child.parameters(), None) is not None
        or next(child.buffers(), None) is not None
    }


def is_norm(norm: Any, dtype: torch.dtype) -> bool:
    """Whether a module has what `add_rms_norm` needs, and no hooks."""
    weight = getattr(norm, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.dtype == dtype
        and hasattr(norm, "variance_epsilon")
        and not norm._forward_hooks
        and not norm._forward_pre_hooks
    )


def activation_of(block: nn.Module) -> str | None:
    """Which of the activations the gate of an MLP has, by trying it."""
    mlp = block.get_submodule("mlp")
    act: Any = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    known: dict[str, Callable[[Tensor], Tensor]] = dict(
        zip(ACTIVATIONS, (functional.silu, lambda x: functional.gelu(x, approximate="tanh")), strict=True)
    )
    x = torch.linspace(-4, 4, 33)
    for name, function in known.items():
        if act is not None and torch.allclose(act(x), function(x), atol=1e-6):
            return name
    return None
