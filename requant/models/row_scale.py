"""The factor by which an embedding multiplies the rows that it looks up.

    y_t = scale * E[token_t]

Gemma's classes round the factor to the dtype of the rows first; those of XGLM and BioGPT do not. A head that shares the
table multiplies with the unscaled rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROUNDED = "scalar_embed_scale"  # Gemma's number, beside a buffer
SCALE = "embed_scale"  # Gemma's buffer; of the others the number


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScale:
    """What an embedding multiplies its rows by, and whether it rounds that to their dtype."""

    factor: float
    rounded: bool

    def __call__(self, rows: Tensor) -> Tensor:
        return rows * (float(torch.tensor(self.factor, dtype=rows.dtype)) if self.rounded else self.factor)


def row_scale(embedding: nn.Module) -> RowScale | None:
    """The factor of an embedding of transformers; None: its class has none, or keeps it elsewhere."""
    for name, rounded in ((ROUNDED, True), (SCALE, False)):
        factor: Any = getattr(embedding, name, None)
        if isinstance(factor, float | int):
            return RowScale(factor=float(factor), rounded=rounded)
    return None


def restore_buffer(embedding: nn.Module, device: torch.device) -> None:
    """Fill Gemma's buffer with its number, which it has lost in a model that was built without memory."""
    scale = row_scale(embedding)
    if scale is not None and scale.rounded:
        embedding.register_buffer(SCALE, torch.tensor(scale.factor, device=device), persistent=False)
