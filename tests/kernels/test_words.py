"""The words of a block, and the PTX that reads them, run by `ptx_model`."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from requant_kernels.common.bit_layout import (
    HALF,
    MANTISSA,
    UNIT,
    bit_positions,
    codebook_asm,
    constraints,
    grid_asm,
    zero_bias,
)
from requant_kernels.common.packing import pack_codebook, pack_words, unpack_words

from .ptx_model import floats, pair_of, run_ptx

KINDS = [(kind, bits) for kind in ("grid", "codebook") for bits in range(2, 9)]


def random_words(bits: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes [16 rows, 256 columns] and their words [bits, g, t, kh, rh] as registers."""
    codes = torch.randint(0, 1 << bits, (16, 256), dtype=torch.uint8)
    words = pack_words(codes, kind=kind, bits=bits).view(bits, 8, 4, 2, 2)
    return codes.numpy(), words.numpy().view(np.uint32)


def planes_of(matrix: np.ndarray) -> np.ndarray:
    """[16, 256] -> [plane, g, t, kh, rh, e], by the formula in the docstring of `words.py`."""
    j, g, t, kh, rh, e = np.meshgrid(*map(np.arange, (16, 8, 4, 2, 2, 2)), indexing="ij")
    return matrix[8 * rh + g, 32 * (j // 2) + 8 * t + 4 * (j % 2) + 2 * kh + e]


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_every_bit_of_the_words_is_used_once(kind: str, bits: int) -> None:
    places = [place for half in bit_positions(kind, bits) for plane in half for place in plane]
    assert sorted(places) == [(word, bit) for word in range(bits) for bit in range(32)]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), kind_bits=st.sampled_from(KINDS), n=st.integers(1, 40), k=st.integers(1, 600))
def test_words_round_trip(data: st.DataObject, kind_bits: tuple[str, int], n: int, k: int) -> None:
    kind, bits = kind_bits
    seed = data.draw(st.integers(0, 2**31))
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=torch.manual_seed(seed))
    assert torch.equal(
        unpack_words(pack_words(codes, kind=kind, bits=bits), kind=kind, bits=bits, k=k)[:n], codes
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_grid_asm_is_exact(bits: int, dtype: str) -> None:
    codes, words = random_words(bits, "grid")
    for groups in (0, 1, 2, 8):
        zeros = (
            np.random.randint(0, 1 << bits, (max(groups, 1), 16))
            if groups
            else np.full((1, 16), 1 << bits - 1)
        )
        operands = {f"${HALF + w}": words[w] for w in range(bits)}
        rows = (
            np.arange(2)[None, None, None, :] * 8
            + np.arange(8)[:, None, None, None]
            + 0 * words[0].astype(int)
        )
        planes = []
        for half in range(2):
            own = [0] if groups == 1 else range(half * groups // 2, (half + 1) * groups // 2)
            for i, group in enumerate(own):
                z = -(zeros[group][rows] + zero_bias(bits, dtype)) * UNIT[dtype]
                operands[f"${HALF + bits + i}"] = pair_of(np.stack([z, z], -1), dtype)
            planes += run_ptx(grid_asm(bits, dtype, groups, half), operands, words[0].shape)
        got = np.stack([floats(plane, dtype) for plane in planes]) / UNIT[dtype]
        zero_of_column = zeros[np.arange(256) * max(groups, 1) // 256].T  # [16, 256]
        assert np.array_equal(got, planes_of(codes.astype(np.float64) - zero_of_column))
    assert MANTISSA[dtype] in (7, 10)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebook_asm_is_exact(bits: int, dtype: str) -> None:
    codes, words = random_words(bits, "codebook")
    levels = torch.randn(16, 1 << bits).half()
    layout = pack_codebook(torch.from_numpy(codes), levels, bits=bits)
    assert layout.tables is not None
    tables = layout.tables[int(dtype == "bf16"), 0].numpy().view(np.uint32)  # [word, g, rh]
    operands = {f"${HALF + w}": words[w] for w in range(bits)}
    for i, table in enumerate(tables):
        operands[f"${HALF + bits + i}"] = table[:, None, None, :] + 0 * words[0]
    planes = [
        plane for half in range(2) for plane in run_ptx(codebook_asm(bits, half), operands, words[0].shape)
    ]
    held = levels.float() if dtype == "fp16" else levels.bfloat16().float()
    want = planes_of(held.gather(1, torch.from_numpy(codes).long()).double().numpy())
    assert np.array_equal(np.stack([floats(plane, dtype) for plane in planes]), want)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_constraints_name_every_operand(bits: int) -> None:
    inputs = bits + (1 << (bits - 1))
    highest = max(int(i) for i in re.findall(r"\$(\d+)", codebook_asm(bits, 1)))
    assert highest + 1 == len(constraints(inputs).split(",")) == HALF + inputs
