"""Codes, the search for the cheapest ring, and what error feedback is worth."""

import itertools
import struct

import pytest
import torch

from requant.calibration.stats import LinearStats
from requant.errors import InputError, NumericalError, RecipeError
from requant.formats.quantized_weight import spec_of
from requant.formats.trellis import Trellis
from requant.formats.trellis_codes import (
    CODES,
    STATES,
    code_values,
    codes_of_states,
    from_tiles,
    states_of_codes,
    step_bits,
    to_tiles,
)
from requant.quantizers import viterbi
from requant.quantizers.block_ldlq import block_ldl
from requant.quantizers.trellis import TrellisConfig, packed_spec, predicted_losses, quantize


def covariance(width: int, seed: int) -> torch.Tensor:
    """A well-conditioned one with strong correlations."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) / width**0.5 + 0.2 * torch.eye(width)
    return mixing @ mixing.T


def cost(error: torch.Tensor, hessian: torch.Tensor, output_hessian: torch.Tensor) -> float:
    return float((output_hessian @ error @ hessian * error).sum())


# codes


@pytest.mark.parametrize(
    ("bits", "steps"), [(2, (2, 2, 2, 2)), (2.25, (2, 2, 2, 3)), (2.5, (2, 3, 2, 3)), (3.75, (3, 4, 4, 4))]
)
def test_steps_of_quarter_bits(bits: float, steps: tuple[int, ...]) -> None:
    assert step_bits(bits) == steps
    generator = torch.Generator().manual_seed(1)
    room = torch.tensor([1 << own for own in steps]).repeat(64)
    codes = (torch.rand(3, 256, generator=generator) * room).to(torch.uint8)
    states = states_of_codes(codes, bits=bits, weights_per_step=1)
    assert torch.equal(codes_of_states(states, bits=bits, weights_per_step=1), codes)
    stream = "".join(f"{int(code):0{own}b}" for code, own in zip(codes[1], steps * 64, strict=True))
    ends = torch.tensor(steps * 64).cumsum(0).tolist()
    rolled = stream[-16:] + stream  # the ring closes
    assert states[1].tolist() == [int(rolled[end : end + 16], 2) for end in ends]


def test_steps_refuse_what_they_cannot_be() -> None:
    for bits, vector in ((2.3, 1), (2.125, 2)):
        with pytest.raises(ValueError, match="bits per weight"):
            step_bits(bits, vector)
    with pytest.raises(RecipeError, match="in quarters"):
        TrellisConfig(bits=2.3)
    with pytest.raises(RecipeError, match="1 to 4 in quarters:"):
        TrellisConfig(bits=4.5, code="pair")


@pytest.mark.parametrize("name", ["mul1", "pair"])
def test_quarters_lie_on_the_curve_of_whole_bits(name: str) -> None:
    values = code_values(name) / code_values(name).std()
    vector = CODES[name].weights_per_step
    targets = torch.randn(8, 256 // vector, vector, generator=torch.Generator().manual_seed(3))
    error = {}
    for bits in (2, 2.25, 2.5, 3):
        states = viterbi.tail_biting_states(targets, values, bits=bits)
        error[bits] = float((values[states] - targets).square().mean())
    # far below the mixture of tiles of 2 and of 3 bits, and near the geometric mean that a rate would have
    assert error[2.5] < 0.85 * (error[2] + error[3]) / 2
    assert error[2.5] < 1.06 * (error[2] * error[3]) ** 0.5
    assert error[2.25] < 1.06 * (error[2] ** 3 * error[3]) ** 0.25


def test_values_of_a_state_by_hand() -> None:
    state = 54321
    h = state * 0x83DCD12D % 2**32
    assert code_values("mul1")[state].item() == (sum(h.to_bytes(4, "little")) - 510) / 128
    h = ((state * 89226354 + 64248484) % 2**32 & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = (
        torch.tensor(half, dtype=torch.float16) for half in struct.unpack("<ee", struct.pack("<I", h))
    )
    assert code_values("3inst")[state].item() == (low + high).item()
    b0, b1, b2, b3 = ((state * 0x4E6DA66B + 0x3C6EF35F) % 2**32).to_bytes(4, "little")
    expected = [(b0 + b1 + b2 + b3 - 510) / 128, (b0 - b1 - b2 + b3) / 128]
    assert code_values("pair")[state].tolist() == expected


@pytest.mark.parametrize("name", CODES)
def test_codes_look_like_independent_gaussians(name: str) -> None:
    values = code_values(name)
    assert values.shape == (STATES, CODES[name].weights_per_step)
    assert torch.equal(values.half().float(), values)
    assert 0.8 < values.std() < 1.3 and values.mean().abs() < 0.01
    kurtosis = (values / values.std()).pow(4).mean()
    assert 2.5 < kurtosis < 3.3  # 3 for a Gaussian
    states = torch.arange(STATES)
    for shift in (2, 3, 4, 6):  # a state and one that may follow it
        new = torch.randint(0, 1 << shift, (STATES,), generator=torch.Generator().manual_seed(shift))
        pairs = torch.cat([values[states], values[(states << shift | new) & STATES - 1]], dim=1)
        correlations = torch.corrcoef(pairs.T) - torch.eye(pairs.shape[1])
        assert correlations.abs().max() < 0.02


def test_tiles_are_blocks_in_row_order() -> None:
    matrix = torch.arange(32 * 48).view(32, 48)
    tiles = to_tiles(matrix)
    assert torch.equal(tiles[4].view(16, 16), matrix[16:, 16:32])
    assert torch.equal(from_tiles(tiles, (32, 48)), matrix)


@pytest.mark.parametrize(
    ("bits", "vector"), [(b, 1) for b in range(1, 9)] + [(b, 2) for b in (1, 1.75, 2, 2.25, 2.5, 3, 3.75, 4)]
)
def test_states_are_windows_of_the_ring(bits: float, vector: int) -> None:
    generator = torch.Generator().manual_seed(int(bits))
    own = step_bits(bits) * 64  # of every weight
    room = torch.tensor([1 << width for width in own])
    codes = (torch.rand(3, 256, generator=generator) * room).to(torch.uint8)
    states = states_of_codes(codes, bits=bits, weights_per_step=vector)
    stream = "".join(f"{code:0{width}b}" for code, width in zip(codes[1].tolist(), own, strict=True))
    for step in (0, 1, 2, 7):  # the first ones wrap around to the end of the ring
        end = sum(own[: vector * (step + 1)])
        assert states[1, step].item() == int((stream + stream)[len(stream) + end - 16 : len(stream) + end], 2)
    assert torch.equal(codes_of_states(states, bits=bits, weights_per_step=vector), codes)


# search


def cheapest_by_definition(targets: torch.Tensor, values: torch.Tensor, shift: int) -> float:
    """The cost of the best free walk, states in their own order, all predecessors compared."""
    states = torch.arange(STATES)
    total = torch.zeros(STATES, dtype=torch.float64)
    for target in targets:
        earlier = torch.stack([(states >> shift) | p << (16 - shift) for p in range(1 << shift)])
        total = total[earlier].amin(0) + (values - target).double().square().sum(1)
    return float(total.min())


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("mul1", 1),
        ("3inst", 2),
        ("mul1", 3),
        ("pair", 2),
        ("mul1", 5),
        pytest.param("pair", 3, marks=pytest.mark.slow),
        pytest.param("mul1", 8, marks=pytest.mark.slow),
    ],
)
def test_walk_is_the_cheapest(name: str, bits: int) -> None:
    values = code_values(name)
    vector = CODES[name].weights_per_step
    targets = torch.randn(2, 13, vector, generator=torch.Generator().manual_seed(bits))
    states = viterbi.plain_paths(targets, values=values, shifts=(bits * vector,), pinned=None)
    assert torch.equal(states[:, 1:] >> bits * vector, states[:, :-1] & (STATES >> bits * vector) - 1)
    for sequence, path in zip(targets, states, strict=True):
        found = (values[path] - sequence).double().square().sum()
        assert float(found) == pytest.approx(
            cheapest_by_definition(sequence, values, bits * vector), rel=1e-5
        )


@pytest.mark.parametrize(
    ("name", "bits"), [("mul1", 1), ("3inst", 2), ("pair", 2), ("pair", 2.25), ("mul1", 4), ("3inst", 8)]
)
def test_rings_close(name: str, bits: float) -> None:
    vector = CODES[name].weights_per_step
    targets = torch.randn(2, 256 // vector, vector, generator=torch.Generator().manual_seed(0))
    states = viterbi.tail_biting_states(targets, code_values(name), bits=bits)
    codes = codes_of_states(states, bits=bits, weights_per_step=vector)
    assert torch.equal(states_of_codes(codes, bits=bits, weights_per_step=vector), states)


def test_threads_change_nothing() -> None:
    targets = torch.randn(3, 256, 1, generator=torch.Generator().manual_seed(1))
    alone = viterbi.tail_biting_states(targets, code_values("mul1"), bits=3)
    torch.set_num_threads(2)
    try:
        assert torch.equal(viterbi.tail_biting_states(targets, code_values("mul1"), bits=3), alone)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("name", "bits", "limit"),
    [("mul1", 1, 1.16), ("mul1", 2, 1.16), ("3inst", 2, 1.16), ("mul1", 4, 1.2), ("pair", 2, 1.2)],
)
def test_error_on_gaussians_is_near_the_bound(name: str, bits: int, limit: float) -> None:
    code, values = CODES[name], code_values(name)
    unit = code.spreads[bits - 1] / values.std()
    gaussian = torch.randn(12, 256, generator=torch.Generator().manual_seed(2))
    targets = (gaussian / unit).view(12, -1, code.weights_per_step)
    states = viterbi.tail_biting_states(targets, values, bits=bits)
    error = (unit * values[states].flatten(1) - gaussian).square().mean()
    assert 1 < float(error / gaussian.square().mean()) * 4**bits < limit


# quantize


def test_feedback_factor_is_the_block_cholesky_factor() -> None:
    hessian = covariance(64, 0)
    unit = block_ldl(hessian, damp=1e-6) + torch.eye(64)
    middle = torch.linalg.solve(unit, torch.linalg.solve(unit, hessian).T)
    block = torch.arange(64) // 16
    off = middle[block[:, None] != block[None, :]]
    assert off.abs().max() < 1e-4 * middle.diagonal().max()


def test_feedback_pays_under_its_own_curvature() -> None:
    generator = torch.Generator().manual_seed(3)
    n, k = 48, 64
    weight = 0.02 * torch.randn(n, k, generator=generator)
    hessian, gradients = covariance(k, 4), covariance(n, 5)
    flat = LinearStats(hessian=torch.eye(k), output_hessian=torch.eye(n))
    curved = LinearStats(hessian=hessian, output_hessian=gradients)
    errors = {
        name: cost(quantize(weight, stats, config).dequantize() - weight, hessian, gradients)
        for name, stats, config in [
            ("none", flat, TrellisConfig(two_sided=False)),
            ("one side", curved, TrellisConfig(two_sided=False)),
            ("both", curved, TrellisConfig()),
        ]
    }
    assert errors["one side"] < 0.85 * errors["none"]
    assert errors["both"] < 0.85 * errors["one side"]


def test_two_sides_of_an_identity_are_one() -> None:
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(6))
    stats = LinearStats(hessian=covariance(48, 7), output_hessian=torch.eye(32))
    both, one = (quantize(weight, stats, TrellisConfig(bits=3, two_sided=two)) for two in (True, False))
    assert torch.equal(both.dense.codes, one.dense.codes)


@pytest.mark.parametrize("code", CODES)
def test_odd_shapes_and_determinism(code: str) -> None:
    weight = 0.1 * torch.randn(20, 36, generator=torch.Generator().manual_seed(8))
    stats = LinearStats(hessian=covariance(36, 9), output_hessian=covariance(20, 10))
    before = weight.clone()
    first, again = (quantize(weight, stats, TrellisConfig(bits=4, code=code)) for _ in range(2))
    assert isinstance(first.dense, Trellis) and first.sparse is None
    assert first.shape == (20, 36) and first.dense.codes.shape == (32, 48)
    assert torch.equal(first.dense.codes, again.dense.codes) and torch.equal(weight, before)
    assert first.dense.input_scales.abs().unique().tolist() == [1.0]
    assert first.dense.output_scales.abs().unique().numel() == 1
    other = quantize(weight, stats, TrellisConfig(bits=4, code=code, seed=1))
    assert not torch.equal(first.dense.input_scales, other.dense.input_scales)
    assert (first.dequantize() - weight).square().mean() < 0.05 * weight.square().mean()


def test_a_bit_is_a_quarter_of_the_error() -> None:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(11))
    stats = LinearStats(hessian=torch.eye(32))
    errors = [
        float(
            (quantize(weight, stats, TrellisConfig(bits=b, two_sided=False)).dequantize() - weight)
            .square()
            .mean()
        )
        for b in (1, 2, 3, 4, 5)
    ]
    for more, less in itertools.pairwise(errors):
        assert 3.3 < more / less < 4.4


def test_detached_places_are_exact_and_help_the_rest() -> None:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(12))
    weight[3, 5], weight[20, 7] = 40.0, -30.0
    stats = LinearStats(hessian=torch.eye(32))
    places = weight.abs() > 10
    kept = quantize(weight, stats, TrellisConfig(bits=3, two_sided=False), detached=places)
    whole = quantize(weight, stats, TrellisConfig(bits=3, two_sided=False))
    assert kept.sparse is not None and kept.sparse.values.numel() == 2
    torch.testing.assert_close(kept.dequantize()[places], weight[places], rtol=1e-3, atol=0)
    rest = ~places
    errors = [(q.dequantize() - weight)[rest].square().mean() for q in (kept, whole)]
    assert errors[0] < 0.5 * errors[1]


def test_a_matrix_of_zeros() -> None:
    stats = LinearStats(hessian=torch.zeros(16, 16), output_hessian=torch.zeros(16, 16))
    found = quantize(torch.zeros(16, 16), stats, TrellisConfig()).dequantize()
    assert found.isfinite().all()


@pytest.mark.parametrize("rotate_output", [True, False])
@pytest.mark.parametrize("bits", [2, 8])
def test_weights_too_small_for_a_scale_become_zeros(bits: int, rotate_output: bool) -> None:
    weight = 1e-9 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    stats = LinearStats(hessian=torch.eye(16), output_hessian=torch.eye(16))
    found = quantize(weight, stats, TrellisConfig(bits=bits, rotate_output=rotate_output)).dequantize()
    assert not found.any()


def test_a_row_too_small_for_a_scale_becomes_zeros() -> None:
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    weight[3] *= 1e-9
    stats = LinearStats(hessian=torch.eye(16), output_hessian=torch.eye(16))
    found = quantize(weight, stats, TrellisConfig(bits=8, rotate_output=False)).dequantize()
    assert not found[3].any() and found.norm() > 0.9 * weight.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"code": "hyb"}, "trellis codes are mul1, 3inst, pair"),
        ({"bits": 9}, "takes 1 to 8"),
        ({"bits": 5, "code": "pair"}, "takes 1 to 4"),
        ({"damp": 0.0}, "damp is 0.0"),
        ({"output_damp": 2.0}, "output_damp is 2.0"),
    ],
)
def test_recipes_that_cannot_work(options: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        TrellisConfig(**options)


def test_missing_and_broken_statistics() -> None:
    weight = torch.randn(16, 16)
    with pytest.raises(InputError, match=r"stats\.hessian is missing"):
        quantize(weight, LinearStats(), TrellisConfig())
    with pytest.raises(InputError, match=r"stats\.output_hessian is missing"):
        quantize(weight, LinearStats(hessian=torch.eye(16)), TrellisConfig())
    with pytest.raises(NumericalError, match="not positive definite even at damp 1"):
        quantize(
            weight,
            LinearStats(hessian=torch.diag(torch.tensor([-99.0] + [1.0] * 15))),
            TrellisConfig(two_sided=False),
        )


# sides that are not rotated


@pytest.mark.parametrize("sides", [(False, False), (True, False)])
def test_a_side_that_is_not_rotated(sides: tuple[bool, bool]) -> None:
    """Rows of very different norms are coded as well as equal ones, each at its own scale; bytes are those foretold."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.logspace(-1, 0.5, 32)[torch.randperm(32, generator=generator)]
    weight = torch.randn(32, 48, generator=generator) * norms[:, None]
    stats = LinearStats(hessian=torch.eye(48), output_hessian=torch.eye(32))
    config = TrellisConfig(bits=2, rotate_input=sides[0], rotate_output=sides[1])
    found = quantize(weight, stats, config)
    assert isinstance(found.dense, Trellis)
    assert (found.dense.input_scales is not None, found.dense.rotates_output) == sides
    assert spec_of(found) == packed_spec(config, (32, 48)) == packed_spec(config, (32, 48), finetuned=True)
    errors = (weight - found.dequantize()).square().mean(1) / norms.square()
    assert errors.mean() < 0.1 and errors.max() < 0.2  # a Gaussian at 2 bits leaves 0.07
    rotated = quantize(weight, stats, TrellisConfig(bits=2))
    spread = (weight - rotated.dequantize()).square().mean(1) / norms.square()
    assert spread.max() > 10 * errors.max()  # its error is the same in every row


def test_the_predicted_loss_of_rows_with_their_own_scales() -> None:
    """Rows that matter more where they are small lose less by it, and the prediction knows that."""
    generator = torch.Generator().manual_seed(1)
    norms = torch.logspace(-1, 1, 32)
    weight = torch.randn(32, 48, generator=generator) * norms[:, None]
    stats = LinearStats(hessian=torch.eye(48), output_hessian=norms.square().reciprocal().diag())
    losses = {}
    for rotate in (False, True):
        config = TrellisConfig(bits=3, rotate_input=False, rotate_output=rotate)
        error = weight - quantize(weight, stats, config).dequantize()
        measured = 0.5 * cost(error, stats.hessian, stats.output_hessian)
        losses[rotate] = measured
        assert predicted_losses(weight, stats, config, [3])[3] == pytest.approx(measured, rel=0.5)
    assert losses[False] < 0.5 * losses[True]
