"""`QuantEmbedding`: an embedding whose rows are dequantized when they are asked for, and a head that shares its codes.

    y_t = row(x_t) * scale

The buffers are those of the file, as in `QuantLinear`. The whole table never exists as floats: a batch of m tokens costs m
rows of a grid, and at most 16 m of a trellis, where the codes of 16 rows belong together. If head and embedding are tied,
both modules hold the same dictionary of buffers: moving either moves both, and only the embedding's are saved.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, dequantize_rows, unpack
from requant.inference.quant_linear import QuantLinear, apply_without_casts, store_guard
from requant.models.row_scale import restore_buffer, row_scale

DTYPE = "of_dtype"  # see `keep_dtype`


class QuantEmbedding(nn.Module):
    """Replaces an `nn.Embedding`, or one that multiplies its rows by a factor (`models/row_scale.py`)."""

    def __init__(self, spec: PackedSpec, plain: nn.Embedding) -> None:
        """Empty buffers for `spec`, on the device of `plain`, whose dtype is that of the output."""
        super().__init__()
        self.spec = spec
        self.num_embeddings, self.embedding_dim = spec.shape
        self.padding_idx = plain.padding_idx
        self.dtype = plain.weight.dtype
        for suffix, tensor in spec.tensors().items():
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=plain.weight.device)
            self.register_buffer(suffix, buffer)
        self.register_buffer(GUARD_TENSOR, torch.empty(0, dtype=torch.half, device=plain.weight.device))
        # What this stands for; hidden, because a submodule would be saved. It holds Gemma's buffer.
        self.__dict__["plain"] = plain
        self.scale = row_scale(plain)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by suffix."""
        return {suffix: self.get_buffer(suffix) for suffix in self.spec.tensors()}

    def quantized(self, device: torch.device | None = None) -> QuantizedWeight:
        """The container behind the buffers, on a device or theirs."""
        return unpack(self.spec, self.tensors, device=device)

    def forward(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m d"]:
        rows = self.rows(tokens)
        return rows if self.scale is None else self.scale(rows)

    def rows(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m d"]:
        """Rows of the table, without the scale."""
        floats = dequantize_rows(self.spec, self.tensors, tokens.flatten()).to(self.dtype)
        return floats.view(*tokens.shape, self.embedding_dim)

    def dequantized(self, dtype: torch.dtype) -> nn.Module:
        """The plain module with the same floats."""
        plain: Any = self.plain
        plain.weight = nn.Parameter(self.quantized().dequantize().to(dtype), requires_grad=False)
        restore_buffer(plain, plain.weight.device)
        return plain

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantEmbedding":
        self.dtype = fn(
            torch.empty(0, dtype=self.dtype)
        ).dtype  # a cast of the model changes the output's dtype
        return apply_without_casts(self, lambda: super(QuantEmbedding, self)._apply(fn, recurse))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}{DTYPE}", None)
        store_guard(destination, prefix)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.spec.bits}"


class Rows:
    """`weight` of an embedding in codes, for a model that reads rows by itself, as Gemma 4 beside its encoders does."""

    def __init__(self, embedding: nn.Module) -> None:
        self.embedding: Any = embedding

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return next(self.embedding.buffers()).device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.embedding.num_embeddings, self.embedding.embedding_dim))

    def __getitem__(self, index: Any) -> Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, int):
            tokens = torch.full((), first % self.shape[0], device=self.device)
        else:
            tokens = torch.arange(self.shape[0], device=self.device)[first]
        return self.embedding.rows(tokens)[(slice(None),) * tokens.dim() + tuple(rest)]


def show_rows(embedding: nn.Module) -> None:
    """`embedding.weight[tokens]` are rows from now on; its buffer of that name, which holds nothing, stays what is saved."""
    embedding.__dict__[GUARD_TENSOR] = Rows(embedding)


def keep_dtype(model: Any) -> None:
    """Give a model without any float parameter one that is empty: transformers asks the first for `model.dtype`.

    Such are models whose norms have no weights (OLMo, nanochat) when embedding and head are codes as well.
    """
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        embedding = model.get_input_embeddings()
        empty = torch.empty(0, dtype=embedding.dtype, device=next(embedding.buffers()).device)
        embedding.register_parameter(DTYPE, nn.Parameter(empty, requires_grad=False))
        embedding.register_load_state_dict_post_hook(_is_not_missing)


def _is_not_missing(_embedding: nn.Module, keys: Any) -> None:
    """No state dict has DTYPE."""
    keys.missing_keys[:] = [name for name in keys.missing_keys if name.rpartition(".")[2] != DTYPE]


def tied_head(embedding: QuantEmbedding, plain: nn.Linear) -> QuantLinear:
    """A head that computes with the codes of `embedding`."""
    head = QuantLinear(embedding.spec, bias=False, dtype=plain.weight.dtype, device="meta")
    head.bias = plain.bias
    head._buffers = embedding._buffers
    head._non_persistent_buffers_set = set(embedding._buffers)  # saved once, by the embedding
    return head
