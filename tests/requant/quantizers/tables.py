"""A table of rows by token as an embedding has them, with its curvature, and the loss of its codes."""

import dataclasses

import torch

from requant.calibration.stats import Curvature
from requant.formats.quantized_weight import QuantizedWeight


def table(v: int = 160, d: int = 96) -> tuple[torch.Tensor, Curvature]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(v, d, generator=generator) * 0.02
    weight[:, 3] *= 20  # an outlier column, as embeddings have
    x = torch.randn(4 * d, d, generator=generator) * torch.rand(d, generator=generator).sqrt()
    x += 0.5 * x.roll(1, dims=1)  # columns that go together
    return weight, Curvature(rows=torch.rand(v, generator=generator), covariance=x.T @ x / len(x))


def loss_of(weight: torch.Tensor, quantized: QuantizedWeight, uses: list[Curvature]) -> float:
    """The quadratic form, written out."""
    error = quantized.dequantize() - weight
    return 0.5 * sum((use.rows * ((error @ use.covariance) * error).sum(1)).sum().item() for use in uses)


def by_frequency(v: int, d: int = 16) -> tuple[torch.Tensor, Curvature]:
    """A table whose tokens are numbered by their frequency, as Zipf has it."""
    weight, use = table(v, d)
    rows = 1 / (torch.arange(v) + 3.0)
    return weight, dataclasses.replace(use, rows=rows / rows.sum())
