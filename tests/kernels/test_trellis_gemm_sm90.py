"""The trellis GEMM of Hopper compiled without a GPU: wgmma in the background, no spills, and how it is launched."""

import dataclasses
from typing import Any

import pytest
import torch
from requant_kernels import pack_trellis

pytest.importorskip("triton.experimental.gluon")

from requant_kernels.fallback import reference
from requant_kernels.launch_config import Shape
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis import gemm_int8_launch, gemm_sm90, gemm_sm90_launch
from requant_kernels.trellis.operands import PARTIAL_SUM_SCALE, sums_scale

from .cases import random_trellis
from .compile_offline import counts_instructions
from .trellis_gemm_machines import multiply_machine
from .trellis_kinds import INT8, KINDS


def test_sums_and_differences_make_the_same_product() -> None:
    """What `activation_form` asks of the rotation, times what is decoded, is the product with the weights."""
    layout = pack_trellis(*random_trellis(16, 64, 2, "cpu"), bits=2, code="pair")
    assert gemm_sm90.activation_form(layout, 128).pair and not gemm_sm90.activation_form(layout, 129).pair
    other = pack_trellis(*random_trellis(16, 64, 2, "cpu"), bits=2, code="mul1")
    assert not gemm_sm90.activation_form(other, 64).pair
    weights, x = reference.trellis_values(layout).double(), torch.randn(64, dtype=torch.float64)
    even, odd = weights[:, ::2], weights[:, 1::2]
    half_sums = torch.stack([even + odd, even - odd], -1).flatten(1) / 2
    arranged = torch.stack([x[::2] + x[1::2], x[::2] - x[1::2]], -1).flatten()
    torch.testing.assert_close(half_sums @ arranged, weights @ x)


CEILING = {
    ("mul1", 2, False): 5.1, ("pair", 2, False): 4.1, ("pair", 2, True): 3.4, ("mul1", 4, False): 5.3,
    ("mul1", 2.25, False): 5.4, ("3inst", 2, False): 5.8,
}  # fmt: skip


FAST_LOOPS = (("mul1", 2, False), ("pair", 2, True), ("3inst", 2, False))  # one of each code


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits", "sums"),
    [pytest.param(*kind, marks=() if kind in FAST_LOOPS else pytest.mark.slow) for kind in CEILING],
)
def test_products_run_on_while_weights_are_decoded(code: str, bits: float, sums: bool) -> None:
    machine = multiply_machine(code, bits, launch=(64, 8, 2, 0), sums=sums)
    assert machine.stack <= 16
    assert machine.opcodes["HGMMA"] == 32  # two tiles, sixteen steps
    assert machine.opcodes["WARPGROUP"] <= 12  # one fence and one wait a k64: nothing was serialized
    assert machine.opcodes["STS"] == machine.opcodes["STSM"] == 0  # neither weights nor sums go through it
    assert machine.opcodes["SHFL"] == 8  # the bits before a segment
    assert machine.opcodes["UTMALDG"] > 0
    assert machine.inner / 256 < CEILING[code, bits, sums]


INT8_CEILING = {
    ("mul1", 3, False): 5.3,
    ("pair", 2, True): 3.8,
    ("pair", 2, False): 3.8,
    ("mul1", 2, False): 5.0,
}


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits", "sums"),
    [pytest.param(*kind, marks=() if kind[1] == 3 or kind[2] else pytest.mark.slow) for kind in INT8_CEILING],
)
def test_products_in_int8_take_half_of_the_wgmma(code: str, bits: float, sums: bool) -> None:
    machine = multiply_machine(code, bits, launch=(128, 4, 2, 0), sums=sums, int8=True)
    assert machine.stack == 0
    assert machine.opcodes["IGMMA"] == 16 and machine.opcodes["HGMMA"] == 0  # two tiles, eight steps
    assert machine.opcodes["WARPGROUP"] <= 12
    assert machine.opcodes["STS"] == machine.opcodes["STSM"] == 0
    assert machine.inner / 256 < INT8_CEILING[code, bits, sums]


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits"),
    [pytest.param(*kind, marks=() if kind == ("mul1", 2.25) else pytest.mark.slow) for kind in INT8],
)
@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["whole", "odd"])
def test_no_launch_of_the_rule_spills_in_int8(code: str, bits: float, whole: bool) -> None:
    launches = set()
    for n, k in ((300, 1500), (4096, 4096), (14336, 4096), (28672, 8192)):
        for tokens in (64, 128, 256, 4096):
            config = gemm_int8_launch.trellis_gemm_int8(Shape(code, bits, n, k, tokens), torch.device("cpu"))
            launches.add((config.tokens_per_cta, config.num_warps, config.tiles_per_warp, config.prefetch_at))
    assert launches == {launch for launch, _ in gemm_int8_launch.LAUNCHES} - {(64, 4, 2, 0)}  # of finer codes
    for launch in launches:
        for sums in {False, code == "pair" and launch[0] <= 128}:
            machine = multiply_machine(code, bits, launch=launch, whole=whole, sums=sums, int8=True)
            assert machine.stack <= 16 and sum(machine.shared) <= 227 << 10
            assert machine.opcodes["STG"] == launch[2] * launch[0] // 4  # 4 bytes: two rows of a token


LAUNCHES = sorted(launch for launch, _ in gemm_sm90_launch.LAUNCHES)


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits"),
    [pytest.param(*kind, marks=() if kind == ("mul1", 2.25) else pytest.mark.slow) for kind in KINDS],
)
@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["whole", "odd"])
def test_no_launch_of_the_rule_spills(code: str, bits: float, whole: bool) -> None:
    device, launches = torch.device("cpu"), set()
    for n, k in ((16, 16), (300, 1500), (4096, 4096), (28672, 8192), (128256, 4096)):
        for width in (16, 32, 64, 128, 256, 512):
            config = gemm_sm90_launch.trellis_gemm_sm90(Shape(code, bits, n, k, width), device)
            launches.add((config.tokens_per_cta, config.num_warps, config.tiles_per_warp, config.prefetch_at))
            rows = -(-n // 16) * 16
            assert config.split_k * max(1, (rows & -rows) // 4096) <= 8  # parts that the rotation adds
    assert launches <= set(LAUNCHES) and len(launches) >= 4
    for launch in launches:
        tokens, warps, tiles, _ = launch
        machine = multiply_machine(code, bits, launch=launch, whole=whole)
        # six registers more of `pair` at 4 bits on rows that are not whole tiles, which no default asks for
        assert machine.stack <= (24 if (code, bits, whole) == ("pair", 4, False) else 16)
        if bits <= 4 and tokens <= 64:
            assert machine.registers * 32 * warps * 2 <= 65536  # two CTAs an SM
        assert machine.opcodes["STG"] == tiles * tokens // 4  # 4 bytes: two rows of a token
        assert sum(machine.shared) <= 227 << 10


@pytest.mark.parametrize(
    ("bits", "n", "k", "cta"),
    [
        (4, 4096, 4096, (4, 2)), (4.25, 4096, 14336, (4, 2)), (4.5, 4096, 4096, (8, 1)), (3.25, 4096, 4096, (8, 1)),
        (4, 1024, 4096, (8, 1)), (4, 4096, 2048, (8, 1)), (4, 128256, 4096, (8, 1)),
    ],
)  # fmt: skip
def test_large_products_of_64_tokens_and_fine_codes_have_four_warps(
    bits: float, n: int, k: int, cta: tuple[int, int]
) -> None:
    """Where K is split; with more bits they would spill."""
    config = gemm_sm90_launch.trellis_gemm_sm90(Shape("mul1", bits, n, k, 64), torch.device("cpu"))
    assert (config.num_warps, config.tiles_per_warp) == cta
    assert (config.split_k > 1) == (n < 100_000)


@counts_instructions
@pytest.mark.parametrize(
    "bits", [gemm_sm90_launch.MOST_BITS_OF_TWO_TILES, *(pytest.param(b, marks=pytest.mark.slow) for b in (3.5, 3.75))]
)  # fmt: skip
@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["whole", "odd"])
def test_two_tiles_do_not_spill(bits: float, whole: bool) -> None:
    machine = multiply_machine("mul1", bits, launch=(64, 4, 2, 0), whole=whole)
    assert machine.stack == 0 and machine.registers * 32 * 4 * 2 <= 65536  # two CTAs an SM


@counts_instructions
def test_a_product_that_waits_last_is_the_same_program() -> None:
    """All positions let the next launch start and wait for the previous one, once each; only where is different."""
    machines = {
        position: multiply_machine("pair", 2, launch=(64, 4, 1, 0), position=position)
        for position in ("alone", "first", "later")
    }
    for position, machine in machines.items():
        assert machine.stack == 0 and machine.inner == machines["alone"].inner, position
        wait, trigger, load, last_store = (
            [i for i, line in enumerate(machine.listing[0]) if mnemonic in line]
            for mnemonic in ("ACQBULK", "PREEXIT", "UTMALDG", "STG")
        )
        assert len(wait) == len(trigger) == 1
        assert (wait[0] < trigger[0]) == (position == "first")
        assert (wait[0] > last_store[-1]) if position == "later" else (wait[0] < load[0])


@pytest.mark.parametrize(("rows", "tokens", "split_k"), [(1024, 64, 1), (1024, 256, 2), (128, 256, 1)])
def test_sums_are_of_16_bits_with_a_scale(
    rows: int, tokens: int, split_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = pack_trellis(*random_trellis(rows, 512, 2, "cpu"), bits=2, code="mul1")
    config = GemmSm90Config(tokens_per_cta=tokens, num_warps=8, split_k=split_k)
    launched: list[Any] = []
    monkeypatch.setattr(gemm_sm90, "launch", lambda *given: launched.append(given))
    x = gemm_sm90.activation_form(layout, tokens).empty(tokens, torch.device("cpu"))
    values = gemm_sm90.product(x, layout, config)
    assert values.shape == (split_k, tokens, rows) and sums_scale(values) == PARTIAL_SUM_SCALE
    ((_, _, _, constants),) = launched
    assert constants["CODES"].scale == 1 / PARTIAL_SUM_SCALE


@pytest.mark.parametrize(
    ("rows", "tokens", "grids"),
    [
        (28672, 512, [(198, 1, 2), (26, 1, 4)]),  # three rounds of 132 CTAs, and one of 104 smaller ones
        (28672, 256, [(224, 1, 1)]),  # 92 CTAs in the last round: not worth a launch
        (28672, 1024, [(224, 1, 4)]),
        (17408, 256, [(132, 1, 1), (4, 1, 2)]),
        (4096, 128, [(32, 1, 1)]),
    ],
)
def test_the_last_round_of_ctas_is_of_smaller_ones(
    rows: int, tokens: int, grids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 132 SMs; every row tile is in one launch."""
    layout = pack_trellis(*random_trellis(16, 256, 2, "cpu"), bits=2, code="mul1")
    codes = layout.packed_codes.expand(rows // 16, *layout.packed_codes.shape[1:])
    layout = dataclasses.replace(layout, packed_codes=codes, n=rows)
    launched: list[Any] = []
    monkeypatch.setattr(gemm_sm90, "launch", lambda *given: launched.append(given))
    config = GemmSm90Config(tokens_per_cta=min(tokens, 256), num_warps=8)
    gemm_sm90.product(
        gemm_sm90.activation_form(layout, tokens).empty(tokens, torch.device("cpu")), layout, config
    )
    assert [grid for _, grid, _, _ in launched] == grids
    skipped = [arguments[-1] for _, _, arguments, _ in launched]
    assert skipped == [0, 8 * grids[0][0]][: len(grids)]
    assert 8 * sum(grid[0] for grid in grids) == rows // 16
    assert all(constants["CTA"].tokens * grid[2] == tokens for _, grid, _, constants in launched)


@pytest.mark.parametrize(
    ("ctas_before", "last", "grids"),
    [
        (0, True, [(224, 1, 1)]),
        (0, False, [(224, 1, 1)]),
        (224, True, [(172, 1, 1), (52, 1, 2)]),  # 92 CTAs of the round are others': two rounds, and 52 CTAs
        (224, False, [(224, 1, 1)]),  # others follow, which fill the last round
    ],
)
def test_the_last_round_counts_the_products_before(
    ctas_before: int, last: bool, grids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GemmSm90Config(tokens_per_cta=256, num_warps=8)
    position = gemm_sm90_launch.PdlPosition(first=ctas_before == 0, last=last, ctas_before=ctas_before)
    found = gemm_sm90_launch.launches(config, 28672 // 16, 256, 132, position)
    assert sum(tiles for _, tiles in found) == 28672 // 16
    assert [(-(-tiles // 8), 1, 256 // own.tokens_per_cta) for own, tiles in found] == grids


def test_products_that_overlap_share_the_gpu() -> None:
    """q, k and v of an 8B model: with the splits of one matrix of all their rows, where they had eight each."""
    device = torch.device("cpu")
    shapes = tuple(Shape("mul1", bits, n, 4096, 64) for bits, n in ((2.75, 4096), (3, 1024), (3.25, 1024)))
    configs = tuple(gemm_sm90_launch.trellis_gemm_sm90(shape, device) for shape in shapes)
    assert {config.split_k for config in configs} == {8}
    assert {config.split_k for config in gemm_sm90_launch.overlapping_configs(shapes, configs, device)} == {6}
    longer = tuple(shape._replace(m_bucket=512) for shape in shapes)
    configs = tuple(gemm_sm90_launch.trellis_gemm_sm90(shape, device) for shape in longer)
    assert gemm_sm90_launch.overlapping_configs(longer, configs, device) == list(configs)


def test_the_position_of_a_launch_follows_from_that_of_its_product() -> None:
    of = gemm_sm90_launch.PdlPosition
    assert of().of_launch(first=True, last=True) == "alone"
    assert of().of_launch(first=True, last=False) == "first"  # the smaller CTAs of its last round follow
    assert of(last=False).of_launch(first=True, last=True) == "first"
    assert of().of_launch(first=False, last=True) == "later"
    assert of(first=False).of_launch(first=True, last=True) == "later"
