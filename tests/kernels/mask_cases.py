"""Values on which mask kernels and the formulas in torch must agree bit for bit: ties, zeros of both signs, odd sizes."""

from collections.abc import Iterator

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((4, 4), (12, 520), (8, 2064))  # beside and beyond the tile of a CTA


def with_ties(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A third multiples of a half, a third zeros, a third continuous, in groups that mix them."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator)
    kind = torch.randint(3, shape, generator=generator)
    zeros = torch.where(values > 0, 0.0, -0.0)
    return torch.where(kind == 0, (2 * values).round() / 2, torch.where(kind == 1, zeros, values)).to(dtype)


def strange(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Infinities, NaN and the largest numbers among others."""
    values = with_ties(shape, dtype)
    at = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(1))[: values.numel() // 2]
    largest = torch.finfo(dtype).max
    few = torch.tensor([torch.inf, -torch.inf, torch.nan, largest, -largest], dtype=dtype)
    values.view(-1)[at] = few[torch.arange(len(at)) % len(few)]
    return values


def _cases() -> Iterator[tuple[str, Tensor]]:
    for shape in SHAPES:
        for dtype in DTYPES:
            for name in ("keep2", "keep2_transposable"):
                yield name, with_ties(shape, dtype).abs()
                yield name, strange(shape, dtype)
            for name in ("soft_threshold", "least_squares_scale"):
                yield name, with_ties(shape, dtype)
    yield "soft_threshold", torch.zeros(4, 4)
    yield "least_squares_scale", torch.zeros(4, 4)
    yield "keep2", with_ties((6, 8), torch.float32).T.contiguous()[:, :4].T  # not contiguous


CASES = tuple(_cases())


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, the sign of zero included; a scale to the rounding of sums."""
    if found.dim() == 0:
        return torch.allclose(found, expected, rtol=1e-6, atol=0)
    signs = found.dtype == torch.bool or torch.equal(found.signbit(), expected.signbit())
    return signs and torch.equal(found, expected)
