"""Windows to train on, and the number format that a GPU multiplies in."""

import pytest
import torch

from requant.models import mixed_precision


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(0, 200, (6, 16))


@pytest.fixture
def products_of_a_gpu(monkeypatch) -> None:
    """Training on the CPU multiplies in bfloat16, as it does on a GPU."""
    monkeypatch.setitem(mixed_precision.PRODUCTS, "cpu", torch.bfloat16)
