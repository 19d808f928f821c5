"""A seeded layer with correlated inputs, as a quantizer meets it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.formats.quantized_weight import QuantizedWeight


@dataclass(frozen=True, kw_only=True)
class Layer:
    weight: Tensor
    stats: LinearStats
    detached: Tensor

    def output_error(self, quantized: QuantizedWeight) -> float:
        """tr(D H D') over tr(W H W')."""
        error = quantized.dequantize() - self.weight
        hessian = self.stats.hessian
        assert hessian is not None
        return float((error @ hessian * error).sum() / (self.weight @ hessian * self.weight).sum())

    def fisher_error(self, quantized: QuantizedWeight) -> float:
        assert self.stats.fisher is not None
        return float((self.stats.fisher * (quantized.dequantize() - self.weight).square()).sum())


@pytest.fixture
def layer() -> Callable[[int, int], Layer]:
    def make(n: int, k: int) -> Layer:
        generator = torch.Generator().manual_seed(100 * n + k)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        # Correlated inputs of unequal size
        inputs = normal(512, k) @ (torch.eye(k) + normal(k, k) / k**0.5) * normal(k).exp()
        weight, fisher = 0.05 * normal(n, k), (2 * normal(n, k)).exp()
        detached = torch.rand(n, k, generator=generator) < 0.02
        gradients = normal(512, n) @ (torch.eye(n) + normal(n, n) / n**0.5)
        return Layer(
            weight=weight,
            stats=LinearStats(
                hessian=inputs.T @ inputs / 512,
                output_hessian=gradients.T @ gradients / 512,
                input_mean_abs=inputs.abs().mean(0),
                fisher=fisher,
                tokens=512,
            ),
            detached=detached,
        )

    return make
