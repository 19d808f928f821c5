"""The PTX of the Hadamard transforms, run by models of its instructions: a warp, and all 16 warps of a tile in step."""

import numpy as np
import pytest
from requant_kernels.fallback import reference
from requant_kernels.hadamard.tile_builder import TF32_FACTOR
from requant_kernels.hadamard.tile_ptx import (
    exchange_ptx,
    register_transform_ptx,
    tile_transform_ptx,
    warp_transform_ptx,
)

from .hadamard_ptx_model import LANE, SHAPE, WARP, as_float, run
from .ptx_model import pair_of, run_ptx


def signs(mask: int) -> np.ndarray:
    """A lane's pairs of signs over the bits of `mask`, as bfloat16; ones on the diagonal of the other bits."""
    entries = []
    for j in (LANE % 4 * 2, LANE % 4 * 2 + 1):
        odd = 0x6996 >> (LANE // 4 & j & mask).astype(int) & 1
        entries.append(np.where((LANE // 4 ^ j) & ~np.uint32(mask) & 7, 0.0, 1.0 - 2 * odd))
    return pair_of(np.stack(entries, -1), "bf16")


def sums_and_differences(size: int) -> np.ndarray:
    """The transform without its first stage, doubled: what the code `pair` takes."""
    return np.kron(reference.hadamard(size // 2).numpy() * (size // 2) ** 0.5, np.eye(2))


@pytest.mark.parametrize("pair", [False, True])
def test_a_warp_transforms_256_values(pair: bool) -> None:
    values = np.random.randn(32, 8).astype(np.float32)
    operands = {f"${8 + i}": values[:, i].copy().view(np.uint32) for i in range(8)}
    operands |= {f"${16 + i}": signs(6 if pair else 7)[0] for i in range(8)}
    operands |= {f"${24 + i}": signs(7)[0] for i in range(8)}
    ptx = warp_transform_ptx()
    assert len(ptx.constraints.split(",")) == 8 + len(operands)
    got = np.stack(run_ptx(ptx.text, operands, (32,)), -1).view(np.float32)
    matrix = sums_and_differences(256) if pair else reference.hadamard(256).numpy() * 16
    want = (matrix @ values.reshape(256)).reshape(32, 8)
    assert np.abs(got - want).max() < 2e-4 * np.abs(want).max()


def tile_operands(values: np.ndarray, size: int, pair: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Operands of a tile of blocks of `size`, and its transform."""
    own = values.reshape(16, 32, 8)
    operands = {f"${8 + i}": own[..., i].copy().view(np.uint32) for i in range(8)}
    for first, mask in ((16, 6 if pair else 7), (24, 7), (32, size - 1 >> 8)):
        operands |= {f"${first + i}": signs(mask) for i in range(8)}
    matrix = sums_and_differences(size) if pair else reference.hadamard(size).numpy() * size**0.5
    return operands, (values.astype(float).reshape(-1, size) @ matrix).ravel()


# of a lane's eight outputs: four neighbours of row g, and of row g + 8
POSITIONS = (LANE // 4 * 256 + WARP * 16 + LANE % 4 * 4)[..., None] + np.array(
    [0, 1, 2, 3, 2048, 2049, 2050, 2051]
)


@pytest.mark.parametrize("size", [256, 512, 2048, 4096])
def test_a_tile_is_transformed(size: int) -> None:
    operands, want = tile_operands(np.random.randn(4096).astype(np.float32), size, pair=False)
    ptx = tile_transform_ptx(size == 4096, int8=False)
    assert len(ptx.constraints.split(",")) == 8 + len(operands)
    registers, _ = run(ptx.text, operands)
    got = np.stack([as_float(registers[f"${i}"]) for i in range(8)], -1)
    assert np.abs(got - want[POSITIONS]).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("size", [1024, 4096])
@pytest.mark.parametrize("nonzero", ["many", "one", "none"])
def test_a_tile_in_int8(size: int, nonzero: str) -> None:
    """High and low bytes, one scale, and the sum of exactly the integers that were stored; and the same of the high bytes,
    which are those integers over 256, rounded."""
    values = np.random.randn(4096).astype(np.float32) * (nonzero != "none")
    if nonzero == "one":
        values = np.eye(1, 4096, 77, dtype=np.float32)[0] * 1e-3
    operands, want = tile_operands(values, size, pair=nonzero == "many")
    high, low, scale = 1 << 20, 1 << 21, 1 << 22
    for first, address in (
        (40, high + POSITIONS[..., 0]), (48, low + POSITIONS[..., 0]), (56, np.full(SHAPE, scale))
    ):  # fmt: skip
        operands |= {f"${first + i}": address for i in range(8)}
    ptx = tile_transform_ptx(size == 4096, int8=True)
    assert len(ptx.constraints.split(",")) == 8 + len(operands)
    _, stored = run(ptx.text, operands)
    found = np.array([stored.pop(base + 4 * i) for base in (high, low) for i in range(1024)], np.uint32)
    found = found.view(np.int8).reshape(2, 4096).astype(int)
    assert found[0].min() > -128
    words = np.array([stored.pop(scale + 4 * i) for i in range(4)], np.uint32)
    factor, total, high_factor, high_total = words.view(np.float32)
    assert not stored
    assert high_total == np.float32(found[0].sum()) and high_factor == 256 * factor
    q = 256 * found[0] + found[1]
    assert total == np.float32(q.sum())
    assert np.abs(q * float(factor) - want).max() <= np.abs(want).max() * 1e-4
    assert nonzero == "none" or np.abs(q).max() == 32512


def transformed_in_tf32(values: np.ndarray) -> np.ndarray:
    """A tile of one block in registers, [16, 32, 8] at POSITIONS."""
    numbers = {"$4": np.zeros(SHAPE, np.uint32), "$5": LANE, "$6": WARP}
    exchange, _ = run(exchange_ptx().text, numbers)
    operands = {f"${8 + i}": values.reshape(16, 32, 8)[..., i].copy().view(np.uint32) for i in range(8)}
    operands |= {f"${16 + i}": signs(7) for i in range(3)}
    operands |= {f"${19 + i}": exchange[f"${i}"] for i in range(4)}
    ptx = register_transform_ptx(True, True)
    assert len(ptx.constraints.split(",")) == 8 + len(operands)
    registers, _ = run(ptx.text, operands)
    return np.stack([as_float(registers[f"${i}"]) for i in range(8)], -1)


def test_tf32_cuts_off_bits_and_the_factor_makes_good_for_them() -> None:
    """What is left is the error of rounding, without a bias."""
    values = np.random.default_rng(0).standard_normal((4, 4096)).astype(np.float32)
    want = np.stack([tile_operands(own, 4096, pair=False)[1][POSITIONS] for own in values])
    got = np.stack([transformed_in_tf32(own) for own in values]).astype(float) * TF32_FACTOR
    assert np.linalg.norm(got - want) < 2**-11 * np.linalg.norm(want)
    assert abs((got * want).sum() / (want * want).sum() - 1) < 3e-5
    assert abs((got / TF32_FACTOR * want).sum() / (want * want).sum() - 1) > 9e-4


@pytest.mark.parametrize(
    "bits", [0x7FFFFFFF, 0xFFC00000, 0x7F800000]
)  # two NaN, of which GPUs make the first; infinity
def test_tf32_keeps_what_is_no_number(bits: int) -> None:
    values = np.ones(4096, np.float32)
    values.view(np.uint32)[1234] = bits
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(transformed_in_tf32(values)).any()
