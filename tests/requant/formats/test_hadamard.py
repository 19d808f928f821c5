"""The rotation: an orthogonal matrix, the one of Sylvester, the same floats everywhere."""

import pytest
import scipy.linalg
import torch

from requant.formats.hadamard import (
    block_size,
    hadamard,
    incoherence_process,
    padded,
    random_signs,
    rotate_columns,
)


@pytest.mark.parametrize(("width", "block"), [(16, 16), (48, 16), (1408, 128), (2048, 2048), (176, 16)])
def test_blocks_are_the_largest_power_of_two(width: int, block: int) -> None:
    assert block_size(width) == block


def test_widths_are_padded_to_tiles() -> None:
    assert [padded(w) for w in (1, 16, 17, 172)] == [16, 16, 32, 176]


@pytest.mark.parametrize("width", [16, 48, 128])
def test_is_the_block_diagonal_of_sylvester_matrices(width: int) -> None:
    size = block_size(width)
    block = scipy.linalg.hadamard(size) / size**0.5
    expected = torch.tensor(scipy.linalg.block_diag(*[block] * (width // size)), dtype=torch.float32)
    torch.testing.assert_close(hadamard(torch.eye(width)), expected)


def test_is_its_own_inverse() -> None:
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(hadamard(x)), x)


def test_both_sides_leave_the_product_unchanged() -> None:
    generator = torch.Generator().manual_seed(1)
    n, k = 24, 40
    weight, x = torch.randn(n, k, generator=generator), torch.randn(7, k, generator=generator)
    rows, columns = random_signs(n, seed=2), random_signs(k, seed=3)
    rotated = incoherence_process(weight, rows=rows, columns=columns)
    assert rotated.shape == (32, 48)
    y = hadamard(rotate_columns(x, columns) @ rotated.mT)[:, :n] * rows
    torch.testing.assert_close(y, x @ weight.mT, rtol=1e-4, atol=1e-4)


def test_spreads_an_outlier_over_its_block() -> None:
    weight = torch.zeros(64, 64)
    weight[3, 5] = 64.0
    rotated = incoherence_process(weight, rows=random_signs(64, seed=0), columns=random_signs(64, seed=1))
    torch.testing.assert_close(rotated.abs(), torch.ones(64, 64))


def test_signs_follow_the_seed() -> None:
    a, b = random_signs(1000, seed=5), random_signs(1000, seed=6)
    assert torch.equal(a, random_signs(1000, seed=5))
    assert set(a.tolist()) == {-1.0, 1.0}
    assert 400 < int((a == b).sum()) < 600
