"""The bit layout of a k_tile, and the PTX that dequantizes it, run by `ptx_model`."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from requant_kernels.common.bit_layout import bit_positions
from requant_kernels.common.dequant_ptx import (
    GRID_STEP,
    STEPS_PER_ASM,
    codebook_dequant_ptx,
    dequant_constraints,
    grid_dequant_ptx,
    zero_bias,
)
from requant_kernels.common.packing import pack_codebook, pack_codes, unpack_codes

from .ptx_model import floats, pair_of, run_ptx

FORMATS = [(format, bits) for format in ("grid", "codebook") for bits in range(2, 9)]


def random_k_tile(bits: int, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes [16 rows, 256 columns] and their packed words [bits, g, t, kh, rh] as registers."""
    codes = torch.randint(0, 1 << bits, (16, 256), dtype=torch.uint8)
    words = pack_codes(codes, format=format, bits=bits).view(bits, 8, 4, 2, 2)
    return codes.numpy(), words.numpy().view(np.uint32)


def fragments_of(matrix: np.ndarray) -> np.ndarray:
    """[16, 256] -> [step, g, t, kh, rh, e], by the formula in the docstring of `bit_layout.py`."""
    j, g, t, kh, rh, e = np.meshgrid(*map(np.arange, (16, 8, 4, 2, 2, 2)), indexing="ij")
    return matrix[8 * rh + g, 32 * (j // 2) + 8 * t + 4 * (j % 2) + 2 * kh + e]


@pytest.mark.parametrize(("format", "bits"), FORMATS)
def test_every_bit_is_used_once(format: str, bits: int) -> None:
    positions = [p for e in bit_positions(format, bits) for step in e for p in step]
    assert sorted(positions) == [(word, bit) for word in range(bits) for bit in range(32)]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), format_bits=st.sampled_from(FORMATS), n=st.integers(1, 40), k=st.integers(1, 600))
def test_packed_codes_round_trip(data: st.DataObject, format_bits: tuple[str, int], n: int, k: int) -> None:
    format, bits = format_bits
    seed = data.draw(st.integers(0, 2**31))
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=torch.manual_seed(seed))
    assert torch.equal(
        unpack_codes(pack_codes(codes, format=format, bits=bits), format=format, bits=bits, k=k)[:n], codes
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_grid_dequant_ptx_is_exact(bits: int, dtype: str) -> None:
    codes, words = random_k_tile(bits, "grid")
    for groups in (0, 1, 2, 8):
        zeros = (
            np.random.randint(0, 1 << bits, (max(groups, 1), 16))
            if groups
            else np.full((1, 16), 1 << bits - 1)
        )
        operands = {f"${STEPS_PER_ASM + w}": words[w] for w in range(bits)}
        rows = (
            np.arange(2)[None, None, None, :] * 8
            + np.arange(8)[:, None, None, None]
            + 0 * words[0].astype(int)
        )
        steps = []
        for half in range(2):
            own = [0] if groups == 1 else range(half * groups // 2, (half + 1) * groups // 2)
            for i, group in enumerate(own):
                z = -(zeros[group][rows] + zero_bias(bits, dtype)) * GRID_STEP[dtype]
                operands[f"${STEPS_PER_ASM + bits + i}"] = pair_of(np.stack([z, z], -1), dtype)
            text = grid_dequant_ptx(bits, dtype, groups, half).build([]).text
            steps += run_ptx(text, operands, words[0].shape)
        got = np.stack([floats(step, dtype) for step in steps]) / GRID_STEP[dtype]
        zero_of_column = zeros[np.arange(256) * max(groups, 1) // 256].T  # [16, 256]
        assert np.array_equal(got, fragments_of(codes.astype(np.float64) - zero_of_column))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebook_dequant_ptx_is_exact(bits: int, dtype: str) -> None:
    codes, words = random_k_tile(bits, "codebook")
    levels = torch.randn(16, 1 << bits).half()
    layout = pack_codebook(torch.from_numpy(codes), levels, bits=bits)
    assert layout.tables is not None
    tables = layout.tables[int(dtype == "bf16"), 0].numpy().view(np.uint32)  # [word, g, rh]
    operands = {f"${STEPS_PER_ASM + w}": words[w] for w in range(bits)}
    for i, table in enumerate(tables):
        operands[f"${STEPS_PER_ASM + bits + i}"] = table[:, None, None, :] + 0 * words[0]
    steps = [
        step
        for half in range(2)
        for step in run_ptx(codebook_dequant_ptx(bits, half).build([]).text, operands, words[0].shape)
    ]
    held = levels.float() if dtype == "fp16" else levels.bfloat16().float()
    want = fragments_of(held.gather(1, torch.from_numpy(codes).long()).double().numpy())
    assert np.array_equal(np.stack([floats(step, dtype) for step in steps]), want)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_constraints_name_every_operand(bits: int) -> None:
    inputs = bits + (1 << (bits - 1))
    built = codebook_dequant_ptx(bits, 1).build(dequant_constraints(inputs))
    highest = max(int(i) for i in re.findall(r"\$(\d+)", built.text))
    assert highest + 1 == len(built.constraints.split(",")) == STEPS_PER_ASM + inputs
