"""The PTX of a section of a rotation, run by a model of its instructions, all 16 warps in step."""

import numpy as np
import pytest
from requant_kernels.fallback import reference
from requant_kernels.hadamard.turns import section_asm

from .ptx_model import pair_of
from .section_model import LANE, SHAPE, WARP, as_float, run


def signs(mask: int) -> np.ndarray:
    """A lane's pairs of signs over the bits of `mask`, as bfloat16; ones on the diagonal of the other bits."""
    entries = []
    for j in (LANE % 4 * 2, LANE % 4 * 2 + 1):
        odd = 0x6996 >> (LANE // 4 & j & mask).astype(int) & 1
        entries.append(np.where((LANE // 4 ^ j) & ~np.uint32(mask) & 7, 0.0, 1.0 - 2 * odd))
    return pair_of(np.stack(entries, -1), "bf16")


def section(values: np.ndarray, size: int, paired: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Operands of a section of blocks of `size`, and what it becomes."""
    own = values.reshape(16, 32, 8)
    operands = {f"${8 + i}": own[..., i].copy().view(np.uint32) for i in range(8)}
    for first, mask in ((16, 6 if paired else 7), (24, 7), (32, size - 1 >> 8)):
        operands |= {f"${first + i}": signs(mask) for i in range(8)}
    matrix = reference.hadamard(size).numpy() * size**0.5
    if paired:
        matrix = np.kron(reference.hadamard(size // 2).numpy() * (size // 2) ** 0.5, np.eye(2))
    return operands, (values.astype(float).reshape(-1, size) @ matrix).ravel()


PLACE = (LANE // 4 * 256 + WARP * 16 + LANE % 4 * 4)[..., None] + np.array(
    [0, 1, 2, 3, 2048, 2049, 2050, 2051]
)


@pytest.mark.parametrize("size", [256, 512, 2048, 4096])
def test_a_section_is_turned(size: int) -> None:
    operands, want = section(np.random.randn(4096).astype(np.float32), size, paired=False)
    text, names = section_asm(size == 4096, fixed=False)
    assert len(names.split(",")) == 8 + len(operands)
    registers, _ = run(text, operands)
    got = np.stack([as_float(registers[f"${i}"]) for i in range(8)], -1)
    assert np.abs(got - want[PLACE]).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("size", [1024, 4096])
@pytest.mark.parametrize("kind", ["many", "one", "none"])
def test_a_section_in_fixed_point(size: int, kind: str) -> None:
    """High and low bytes, one scale, and the sum of exactly the integers that were stored."""
    values = np.random.randn(4096).astype(np.float32) * (kind != "none")
    if kind == "one":
        values = np.eye(1, 4096, 77, dtype=np.float32)[0] * 1e-3
    operands, want = section(values, size, paired=kind == "many")
    high, low, scale = 1 << 20, 1 << 21, 1 << 22
    for first, base in ((40, high + PLACE[..., 0]), (48, low + PLACE[..., 0]), (56, np.full(SHAPE, scale))):
        operands |= {f"${first + i}": base for i in range(8)}
    text, names = section_asm(size == 4096, fixed=True)
    assert len(names.split(",")) == 8 + len(operands)
    _, stored = run(text, operands)
    found = np.array([stored.pop(base + 4 * i) for base in (high, low) for i in range(1024)], np.uint32)
    found = found.view(np.int8).reshape(2, 4096).astype(int)
    assert found[0].min() > -128
    factor, total = np.array([stored.pop(scale), stored.pop(scale + 4)], np.uint32).view(np.float32)
    assert not stored
    q = 256 * found[0] + found[1]
    assert total == np.float32(q.sum())
    assert np.abs(q * float(factor) - want).max() <= np.abs(want).max() * 1e-4
    assert kind == "none" or np.abs(q).max() == 32512
