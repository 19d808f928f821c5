"""Trellis layouts and decoders against the format's own definition."""

import numpy as np
import pytest
import torch
from requant_kernels import TrellisLayout, linear, lookup, pack_trellis, unpack_trellis
from requant_kernels.fallback import reference, torch_fallback
from requant_kernels.trellis.code_ptx import decode_ptx
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.gemv_ptx import fp16_mma_ptx, int8_mma_ptx
from requant_kernels.trellis.layout import k64_per_unit

from requant.formats.trellis import Trellis

from .cases import random_trellis, relative_error
from .ptx_model import floats, run_ptx

KINDS = [
    ("mul1", 1), ("mul1", 2), ("mul1", 2.25), ("mul1", 2.5), ("mul1", 2.75), ("mul1", 3), ("mul1", 3.5), ("mul1", 4),
    ("mul1", 5), ("mul1", 7.75), ("mul1", 8), ("3inst", 2), ("3inst", 3.25), ("3inst", 6), ("pair", 1), ("pair", 1.75),
    ("pair", 2), ("pair", 2.25), ("pair", 3), ("pair", 4), ("pair", 8),
]  # fmt: skip


@pytest.mark.parametrize(("code", "bits"), KINDS)
def test_round_trip_and_weight(code: str, bits: float) -> None:
    torch.manual_seed(0)
    codes, input_scales, output_scales = random_trellis(37, 200, bits, "cpu")
    layout = pack_trellis(codes, input_scales, output_scales, bits=bits, code=code)
    assert torch.equal(unpack_trellis(layout), codes)
    assert layout.packed_codes.numel() * 32 == 48 * 256 * bits  # nothing but the codes of whole k64_count
    held = Trellis(codes=codes, input_scales=input_scales, output_scales=output_scales, bits=bits, code=code)
    assert relative_error(held.dequantize(), reference.trellis_weight(layout)) < 1e-6
    x = torch.randn(2, 3, 200)
    assert relative_error(linear(x, layout), x.double() @ reference.trellis_weight(layout).T) < 1e-5


@pytest.mark.parametrize(("code", "bits"), KINDS)
@pytest.mark.parametrize(("k", "rotates"), [(200, True), (208, False), (768, True)])
def test_rows_are_those_of_the_matrix(
    code: str, bits: float, k: int, rotates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the tiles of the tokens alone, a few at a time."""
    codes, input_scales, output_scales = random_trellis(37, k, bits, "cpu")
    layout = pack_trellis(
        codes, input_scales if rotates else None, output_scales, bits=bits, code=code, rotates_output=False
    )
    tokens, want = torch.tensor([[36, 0, 17], [5, 5, 16]]), reference.weight(layout)
    decoded: list[int] = []
    values = reference.trellis_values

    def counted(layout: TrellisLayout, dtype: torch.dtype) -> torch.Tensor:
        found = values(layout, dtype)
        decoded.append(found.numel())
        return found

    monkeypatch.setattr(reference, "trellis_values", counted)
    whole = lookup(tokens, layout, torch.float32)
    assert whole.shape == (2, 3, k) and relative_error(whole, want[tokens]) < 1e-6
    assert relative_error(lookup(tokens, layout, torch.float16), want[tokens]) < 1e-3
    assert lookup(tokens[:0], layout, torch.float16).shape == (0, 3, k)
    monkeypatch.setattr(torch_fallback, "WEIGHTS_AT_ONCE", 4 * 16 * k)
    decoded.clear()
    assert torch.equal(lookup(tokens, layout, torch.float32), whole)
    assert decoded == [4 * 16 * codes.shape[1], 2 * 16 * codes.shape[1]]


LANE = np.arange(32)


def words_of(layout: TrellisLayout) -> np.ndarray:
    """The words of the first unit of every row of tiles, in the order of a lane's loads: [tiles, words, lane]."""
    return layout.packed_codes[:, 0].transpose(1, 2).flatten(2).transpose(1, 2).numpy().view(np.uint32)


@pytest.mark.parametrize(("code", "bits"), KINDS)
def test_weights_of_a_lane_are_exact(code: str, bits: float) -> None:
    """Every k64 of a unit: windows, also those across the ends of the stream, become the values of the format."""
    k64_count = k64_per_unit(round(4 * bits))
    codes, input_scales, output_scales = random_trellis(16, 64 * k64_count, bits, "cpu")
    layout = pack_trellis(codes, input_scales, output_scales, bits=bits, code=code)
    operands = {f"${16 + i}": word for i, word in enumerate(words_of(layout)[0])}
    operands[f"${16 + len(operands)}"] = (LANE + 28) % 32
    want = reference.trellis_values(layout).numpy().reshape(8, 2, k64_count, 4, 16).transpose(2, 0, 3, 1, 4)
    for k64 in range(k64_count):
        ptx = decode_ptx(code, layout.quad_bits, k64)
        assert len(ptx.constraints.split(",")) == 16 + len(operands)
        pairs = run_ptx(ptx.text, operands, (32,), outputs=16)
        got = np.concatenate([floats(pair, "fp16") for pair in pairs], -1)
        assert np.array_equal(got.reshape(8, 4, 2, 16), want[k64])


SUMS = [kind for kind in KINDS if CODES[kind[0]].byte_sums]


@pytest.mark.parametrize(("code", "bits"), SUMS)
def test_hashes_meet_their_activations_in_the_tensor_core(code: str, bits: float) -> None:
    """A warp's product of a unit of two rows of tiles and fixed-point activations, against the values of the format."""
    tiles, n8_tiles, k64_count = 2, 2, k64_per_unit(round(4 * bits))
    codes, input_scales, output_scales = random_trellis(16 * tiles, 64 * k64_count, bits, "cpu")
    layout = pack_trellis(codes, input_scales, output_scales, bits=bits, code=code)
    x = np.random.randint(-128, 128, (8 * n8_tiles, 64 * k64_count), np.int8)  # column of the operand, place
    sums = 4 * tiles * n8_tiles
    ptx = int8_mma_ptx(code, layout.quad_bits, tiles, n8_tiles)
    inputs = [np.full(32, i, np.uint32) for i in range(sums)] + [*words_of(layout).reshape(-1, 32)]
    for n8 in range(n8_tiles):
        own = x[8 * n8 + LANE // 4].reshape(32, k64_count, 4, 16)[LANE, :, LANE % 4].reshape(32, -1)
        inputs += [*own.copy().view(np.uint32).T]
    operands = {f"${sums + i}": value for i, value in enumerate([*inputs, (LANE + 28) % 32])}
    assert len(ptx.constraints.split(",")) == sums + len(operands)
    got = np.stack(run_ptx(ptx.text, operands, (32,), outputs=sums)).view(np.int32).astype(int)
    got = (got - np.arange(sums)[:, None]).reshape(tiles, n8_tiles, 2, 2, 8, 4)  # tile n8 row-half n-half g t
    got = got.transpose(0, 4, 2, 1, 5, 3).reshape(16 * tiles, -1)  # tile g row-half, n8 t n-half
    values = reference.trellis_values(layout).numpy() * 128
    left, right = x[:, ::2].astype(int), x[:, 1::2].astype(int)
    if code == "pair":  # x holds sums and differences of neighbours
        want = values[:, ::2] @ ((left + right) / 2).T + values[:, 1::2] @ ((left - right) / 2).T
    else:
        want = values @ x.T.astype(int)
    assert np.array_equal(got - CODES[code].byte_sum_mean * x.sum(1, dtype=int), want)


@pytest.mark.parametrize("bits", [2, 2.25])
def test_weights_that_are_no_byte_sums_meet_floats(bits: float) -> None:
    k64_count = k64_per_unit(round(4 * bits))
    codes, input_scales, output_scales = random_trellis(16, 64 * k64_count, bits, "cpu")
    layout = pack_trellis(codes, input_scales, output_scales, bits=bits, code="3inst")
    x = np.random.randn(8, 64 * k64_count).astype(np.float16)
    ptx = fp16_mma_ptx("3inst", layout.quad_bits, 1, 1)
    own = x[LANE // 4].reshape(32, k64_count, 4, 16)[LANE, :, LANE % 4].reshape(32, -1)
    inputs = [np.zeros(32, np.uint32)] * 4 + [
        *words_of(layout)[0],
        *own.copy().view(np.uint32).T,
        (LANE + 28) % 32,
    ]
    assert len(ptx.constraints.split(",")) == 4 + len(inputs)
    got = np.stack(
        run_ptx(ptx.text, {f"${4 + i}": value for i, value in enumerate(inputs)}, (32,), outputs=4)
    )
    got = (
        got.view(np.float32).reshape(2, 2, 8, 4).transpose(2, 0, 3, 1).reshape(16, 8)
    )  # g row-half, t n-half
    want = reference.trellis_values(layout).numpy() @ x.T.astype(float)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_refusals_name_the_remedy() -> None:
    codes, input_scales, output_scales = random_trellis(16, 16, 6, "cpu")
    for code, bits in (("mul1", 9), ("mul1", 2.1), ("pair", 2.125), ("hyb", 2)):
        with pytest.raises(
            ValueError, match=f"no trellis kernel decodes '{code}' at {bits} bits; there are mul1 to 8"
        ):
            pack_trellis(codes, input_scales, output_scales, bits=bits, code=code)
    with pytest.raises(ValueError, match="padded to multiples of 16"):
        pack_trellis(codes[:8], input_scales, output_scales, bits=2, code="mul1")


@pytest.mark.parametrize(
    ("rotates", "k", "launches"),
    [
        ((True, True), 8192, ["hadamard_tile_kernel", "trellis_gemv_kernel", "hadamard_butterfly_kernel"]),
        ((True, False), 8192, ["hadamard_tile_kernel", "trellis_gemv_kernel"]),
        ((False, False), 8192, ["hadamard_butterfly_kernel", "trellis_gemv_kernel"]),
    ],
)
def test_launches_of_a_token(
    rotates: tuple[bool, bool], k: int, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A side that is not rotated costs no transform: that of blocks of one value only quantizes x."""
    pytest.importorskip("triton")
    from requant_kernels.hadamard import butterfly, tile_kernel
    from requant_kernels.trellis import gemv

    found: list[str] = []
    for module in (butterfly, tile_kernel, gemv):
        monkeypatch.setattr(
            module, "launch", lambda kernel, *_args, **_options: found.append(kernel.__name__)
        )
    codes, input_scales, output_scales = random_trellis(48, k, 2, "cpu")
    layout = pack_trellis(
        codes,
        input_scales if rotates[0] else None,
        output_scales,
        bits=2,
        code="mul1",
        rotates_output=rotates[1],
    )
    config = TrellisGemvConfig(num_warps=8, tiles_per_cta=1, units_per_step=1)
    y = gemv.gemv(torch.zeros(1, k, dtype=torch.half), layout, None, config)
    assert y.shape == (1, 48) and found == launches
