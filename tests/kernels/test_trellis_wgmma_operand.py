"""What a lane decodes is the left operand of wgmma: rows, columns, float16 exactly, int8 rounded."""

from typing import Any

import numpy as np
import pytest
from requant_kernels import pack_trellis

pytest.importorskip("triton.experimental.gluon")

from requant_kernels.common import wgmma
from requant_kernels.fallback import reference
from requant_kernels.trellis import wgmma_operand
from requant_kernels.trellis.code_ptx import INTEGER_SUMS
from requant_kernels.trellis.gemm_sm90 import gemm_codes
from requant_kernels.trellis.layout import k64_per_unit

from .cases import random_trellis
from .ptx_model import run_ptx
from .trellis_kinds import INT8, KINDS


def plain(kernel: Any) -> Any:
    """What `gluon.jit` was put around."""
    return kernel.fn


class Array:
    """What the kernel's functions do to tensors, in numpy."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def to(self, dtype: Any, bitcast: bool = False) -> "Array":
        return Array(self.values.view(dtype) if bitcast else self.values.astype(dtype))

    def __rshift__(self, by: int) -> "Array":
        return Array(self.values >> by)


class Language:
    """The few functions of Gluon that they call."""

    int8, int16, float16, static_range = np.int8, np.int16, np.float16, range

    @staticmethod
    def join(a: Array, b: Array) -> Array:
        return Array(np.stack([a.values, b.values], -1))

    @staticmethod
    def reshape(a: Array, shape: list[int]) -> Array:
        return Array(a.values.reshape(shape))

    @staticmethod
    def permute(a: Array, order: tuple[int, ...]) -> Array:
        return Array(a.values.transpose(order))

    @staticmethod
    def convert_layout(a: Array, layout: Any, assert_trivial: bool) -> Array:
        assert assert_trivial  # nothing is moved
        return a

    @staticmethod
    def inline_asm_elementwise(
        text: str, constraints: str, args: tuple[Array, ...], **_: Any
    ) -> tuple[Array, ...]:
        shape, made, outputs = args[0].values.shape, [], constraints.count("=r")
        for r, w in np.ndindex(*shape[:2]):
            operands = {f"${outputs + i}": arg.values[r, w].view(np.uint32) for i, arg in enumerate(args)}
            made.append(np.stack(run_ptx(text, operands, (32,), outputs=outputs)))
        found = np.stack(made, 1).reshape(outputs, *shape)
        return tuple(Array(register.view(np.int32)) for register in found)


HALF_SUMS = [("pair", bits, True) for bits in (1, 2, 2.25, 4)]
ROWS = np.arange(16) % 8 * 2 + np.arange(16) // 8  # of a tile, by row of wgmma


def decoded(
    decode: str, code: str, bits: float, monkeypatch: pytest.MonkeyPatch, **kind: bool
) -> tuple[Any, Any, float]:
    """What the kernel's own function makes of a matrix of 64 rows and 256 columns, and the weights themselves, both by tile,
    k64, row of wgmma, and column; and the factor of the former."""
    monkeypatch.setattr(wgmma_operand, "gl", Language)
    monkeypatch.setattr(wgmma, "gl", Language)
    for name in ("unpack_pair", "unpack_four"):
        monkeypatch.setattr(wgmma_operand, name, plain(getattr(wgmma, name)))
    tiles, warps, k64_count = 2, 2, k64_per_unit(round(4 * bits))
    layout = pack_trellis(*random_trellis(16 * tiles * warps, 256, bits, "cpu"), bits=bits, code=code)
    given = gemm_codes(code, layout.quad_bits, layout.packed_codes.shape[-1], whole=True, **kind)
    by_lane = layout.packed_codes.transpose(2, 3).flatten(3)  # row tile, unit, lane, word
    words = tuple(
        Array(by_lane[:, unit, :, word].reshape(tiles, warps, 32).numpy())
        for unit in range(4 // k64_count)
        for word in range(given.words)
    )
    previous_lane = Array(
        np.broadcast_to((np.arange(32, dtype=np.int32) + 28) % 32, (tiles, warps, 32)).copy()
    )
    found = [
        plain(getattr(wgmma_operand, decode))(
            words, previous_lane, given.decode, q, given.words, k64_count, None, warps, tiles
        ).values.reshape(-1, 16, 64)
        for q in range(4)
    ]
    values = reference.trellis_values(layout).numpy().reshape(-1, 16, 4, 64)[:, ROWS]
    return np.stack(found, 1), values.transpose(0, 2, 1, 3), given.scale


def halved(weights: Any) -> Any:
    """Half sums and half differences of neighbours."""
    both = weights[..., ::2] + weights[..., 1::2], weights[..., ::2] - weights[..., 1::2]
    return np.stack(both, -1).reshape(weights.shape) / 2


@pytest.mark.parametrize(("code", "bits", "sums"), [*((*kind, False) for kind in KINDS), *HALF_SUMS])
def test_a_lane_has_the_operand_of_wgmma(
    code: str, bits: float, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, and columns as activations are arranged."""
    got, weights, scale = decoded("decode", code, bits, monkeypatch, sums=sums)
    column = np.arange(64)
    of_column = column // 2 % 4 * 16 + column // 16 * 4 + column // 8 % 2 * 2 + column % 2
    want = halved(weights) if sums else weights
    assert np.array_equal(got.astype(np.float32) * scale, want[..., of_column])


@pytest.mark.parametrize(
    ("code", "bits", "sums"), [*((*kind, False) for kind in INT8), ("pair", 2, True), ("pair", 2.25, True)]
)
def test_a_lane_has_the_operand_of_wgmma_in_int8(
    code: str, bits: float, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest integer, and columns as `gemm_int8.quantized` arranges activations."""
    got, weights, scale = decoded("decode_int8", code, bits, monkeypatch, sums=sums, int8=True)
    assert got.dtype == np.int8
    want = (halved(weights) if sums else weights)[..., arranged(np.arange(64))]
    error = got * scale - want
    assert np.abs(error).max() <= scale * 0.50001 and np.abs(got).max() > 90
    assert np.square(error).mean() < (4e-5 if sums else 7e-5) * np.square(want).mean()


def arranged(columns: Any) -> Any:
    """64 columns in the order of the int8 product."""
    return columns.reshape(4, 4, 4).swapaxes(0, 1).reshape(64)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_every_sum_is_rounded_to_a_byte_without_a_bias(sums: bool, second: bool) -> None:
    """What `dp4a` makes of any bytes has its integer in the second byte; over random bytes errors have no mean. A bias of
    0.01 of a unit, the same in all rows, would be 1.7 % of one output of a block of 4096."""
    signed, factors, mean = INTEGER_SUMS[sums, second]
    each = np.array([factors >> shift & 0xFF for shift in (0, 8, 16, 24)], dtype=np.uint8)
    each = each.view(np.int8 if signed == "s32" else np.uint8).astype(int)
    for extreme in (each[each > 0].sum() * 255, each[each < 0].sum() * 255):
        assert -128 <= (extreme - mean + 128) >> 8 <= 127
    drawn = np.random.default_rng(0).integers(0, 256, (1 << 20, 4))
    scaled = drawn @ each - mean
    error = (scaled + 128 >> 8) - scaled / 256
    assert abs(error.mean()) < 0.003 and 0.08 < np.square(error).mean() < 0.09
