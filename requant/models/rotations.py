"""Rotations that are folded into a model, so that its matrices see rotated activations and need no rotation of their own.

RMSNorm without its weight commutes with an orthogonal matrix Q, so the residual stream of a pre-norm transformer can be
rotated whole and the model computes the same (SliceGPT, Ashkboos et al. 2024, arXiv 2401.15024; QuaRot, Ashkboos et al.
2024, arXiv 2404.00456). With g the weight of a norm, H Hadamard blocks (`formats/hadamard.py`) and s, t random signs,

    Q = H diag(s), of the stream            R = H diag(t), of every head of the values
    embedding       x = Q e                 at run time: one Hadamard per step, so the table stays as it is, and tied
    q, k, gate, up  W diag(g) Q'            the norm's weight becomes 1
    v               R W diag(g) Q'          by head
    o               Q W R'
    down            Q W
    head            y = E (g * Q' x)        at run time too; g, the final norm's weight, is stored as `head_scales`

All that is left for a quantizer that wants incoherent matrices is the input of down, because the activation function is
between it and gate, up. The weights of the norms start at 1 and are still trained: they scale the rotated stream.

We deviate from both papers in embedding and head. Folding Q into them would round them again and untie them, which costs
the bytes of a second table; two Hadamard transforms per step are a fraction of the fourteen per block that are saved.
`head_scales` belongs to the embedding's module, since the weights of a tied head are not in the file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from requant_kernels import rotate
from torch import Tensor, nn

from requant.formats.hadamard import hadamard, random_signs

HEAD_SCALES = "head_scales"


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The signs of a model's rotations follow from `seed`."""

    seed: int

    def stream(self, x: Float[Tensor, "*m d"]) -> Float[Tensor, "*m d"]:
        """Q x of every row, in its dtype."""
        return scaled_hadamard(x, before=self.signs(x))

    def stream_back(
        self, x: Float[Tensor, "*m d"], scales: Float[Tensor, " d"] | None = None
    ) -> Float[Tensor, "*m d"]:
        """Q' x of every row, times `scales`, in its dtype."""
        signs = self.signs(x)
        return scaled_hadamard(x, after=signs if scales is None else signs * scales)

    def heads(self, x: Float[Tensor, "*m w"], head_dim: int) -> Float[Tensor, "*m w"]:
        """R x of every head of every row."""
        signs = cached_signs(head_dim, 2 * self.seed + 1, x.device)
        return scaled_hadamard(x.unflatten(-1, (-1, head_dim)), before=signs).flatten(-2)

    def signs(self, x: Float[Tensor, "*m d"]) -> Float[Tensor, " d"]:
        """The signs by which the residual stream is rotated."""
        return cached_signs(x.shape[-1], 2 * self.seed, x.device)


@cache
def cached_signs(width: int, seed: int, device: torch.device) -> Float[Tensor, " w"]:
    """Random signs on a device; a captured graph reads them where they lie."""
    return random_signs(width, seed=seed).to(device)


def scaled_hadamard(
    x: Float[Tensor, "*m d"], *, before: Tensor | None = None, after: Tensor | None = None
) -> Float[Tensor, "*m d"]:
    """after * H (before * x) in x's dtype, computed in float32; on a GPU one kernel, where no gradient is wanted."""
    if x.is_cuda and not torch.is_grad_enabled():
        return rotate(x, input_scales=before, output_scales=after)
    y = hadamard(x.float() if before is None else x.float() * before)
    return (y if after is None else y * after).to(x.dtype)


class RotateEmbedding:
    """Forward hook of the embedding: its output enters the rotated stream."""

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation

    def __call__(
        self, _embedding: nn.Module, _inputs: Any, x: Float[Tensor, "*m d"]
    ) -> Float[Tensor, "*m d"]:
        return self.rotation.stream(x)


class RotateHead:
    """Forward pre-hook of the head: its input leaves the rotated stream, and is scaled as the final norm would."""

    def __init__(self, rotation: Rotation, embedding: nn.Module) -> None:
        self.rotation, self.embedding = rotation, embedding

    def __call__(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.rotation.stream_back(inputs[0], self.embedding.get_parameter(HEAD_SCALES)),)


def add_head_scales(model: Any, head_scales: Tensor) -> None:
    """Give the embedding's module its parameter `head_scales`."""
    parameter = nn.Parameter(head_scales, requires_grad=False)
    model.get_input_embeddings().register_parameter(HEAD_SCALES, parameter)


def rotate_stream(model: Any, rotation: Rotation) -> None:
    """Rotate what the embedding gives, and rotate back what the head gets; again where one of them was replaced."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for hooks, kind in ((embedding._forward_hooks, RotateEmbedding), (head._forward_pre_hooks, RotateHead)):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
            del hooks[key]
    embedding.register_forward_hook(RotateEmbedding(rotation))
    head.register_forward_pre_hook(RotateHead(rotation, embedding))


@contextmanager
def stream_kept(model: Any) -> Iterator[None]:
    """The body may replace the modules of the embedding and the head: the rotations of a folded model stay."""
    rotation = rotation_of(model)
    if rotation is None:
        yield
        return
    head_scales = model.get_input_embeddings().get_parameter(HEAD_SCALES).detach()
    try:
        yield
    finally:
        add_head_scales(model, head_scales)
        rotate_stream(model, rotation)


def rotation_of(model: Any) -> Rotation | None:
    """The rotation that is folded into a model."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    hooks = () if embedding is None else embedding._forward_hooks.values()
    return next((hook.rotation for hook in hooks if isinstance(hook, RotateEmbedding)), None)
