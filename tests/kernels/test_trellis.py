"""Trellis layouts and decoders against the format's own definition."""

import numpy as np
import pytest
import torch
from requant_kernels import linear, naive, pack_trellis, unpack_trellis
from requant_kernels.words import BYTE_SUM_OFFSET, trellis_asm

from requant.formats import Trellis

from .cases import random_trellis, relative_error
from .ptx_model import floats, run_ptx

KINDS = [
    ("mul1", 1),
    ("mul1", 2),
    ("mul1", 3),
    ("mul1", 5),
    ("3inst", 2),
    ("3inst", 4),
    ("pair", 1),
    ("pair", 2),
    ("pair", 4),
]


@pytest.mark.parametrize(("code", "bits"), KINDS)
def test_round_trip_and_weight(code: str, bits: int) -> None:
    torch.manual_seed(0)
    codes, input_scales, output_scales = random_trellis(37, 200, bits, "cpu")
    layout = pack_trellis(codes, input_scales, output_scales, bits=bits, code=code)
    assert torch.equal(unpack_trellis(layout), codes)
    assert layout.words.numel() * 32 == 48 * 256 * bits  # nothing but the codes of whole groups
    held = Trellis(codes=codes, input_scales=input_scales, output_scales=output_scales, bits=bits, code=code)
    assert relative_error(held.dequantize(), naive.trellis_weight(layout)) < 1e-6
    x = torch.randn(2, 3, 200)
    assert relative_error(linear(x, layout), x.double() @ naive.trellis_weight(layout).T) < 1e-5


@pytest.mark.parametrize(("code", "bits"), KINDS)
def test_asm_is_exact(code: str, bits: int) -> None:
    """Every lane of one tile: the funnel shift finds its window, the windows become the values of the format."""
    codes, input_scales, output_scales = random_trellis(16, 16, bits, "cpu")
    layout = pack_trellis(codes, input_scales, output_scales, bits=bits, code=code)
    ring = layout.words[0, 0, :, 0].numpy().view(np.uint32)
    row, t = np.meshgrid(np.arange(16), np.arange(4), indexing="ij")
    end = (16 * row + 4 * t + 4) * bits
    last = (end - 1) // 32
    operands = {"$2": ring[last], "$3": ring[last - 1], "$4": ((last + 1) * 32 - end).astype(np.uint32)}
    text, _ = trellis_asm(code, bits)
    pairs = run_ptx(text, operands, row.shape, outputs=2)
    got = np.concatenate([floats(pair, "fp16") for pair in pairs], -1).reshape(16, 16)
    scale, offset = (1, 0) if code == "3inst" else (128, BYTE_SUM_OFFSET)
    assert np.array_equal(got, naive.trellis_values(layout).numpy() * scale + offset)


def test_refusals_name_the_remedy() -> None:
    codes, input_scales, output_scales = random_trellis(16, 16, 6, "cpu")
    with pytest.raises(
        ValueError, match="no trellis kernel decodes 'mul1' at 6 bits; there are mul1 to 5 bits"
    ):
        pack_trellis(codes, input_scales, output_scales, bits=6, code="mul1")
    with pytest.raises(ValueError, match="padded to multiples of 16"):
        pack_trellis(codes[:8], input_scales, output_scales, bits=2, code="mul1")
