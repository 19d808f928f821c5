"""The trellis GEMV of one matrix, compiled for real GPUs without one: no spills, instructions a weight."""

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.launch_config import Shape, m_bucket  # noqa: E402
from requant_kernels.trellis import gemv_kernel, gemv_launch  # noqa: E402
from requant_kernels.trellis.gemv_kernel import gemv_constants  # noqa: E402
from requant_kernels.trellis.layout import k64_per_unit  # noqa: E402

from .compile_offline import counts_instructions  # noqa: E402
from .trellis_machines import TRELLIS_CEILING, trellis_machine  # noqa: E402


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits", "shared"),
    [
        pytest.param(*kind, shared, marks=() if shared or kind == ("mul1", 2) else pytest.mark.slow)
        for shared in (True, False)
        for kind in TRELLIS_CEILING
    ],
)
def test_trellis_instructions_a_weight(
    code: str, bits: float, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shared`: our sum over the warps in shared memory; else Triton's."""
    unroll = 2 if bits == 2 else 1
    gemv_constants.cache_clear()
    if not shared:
        monkeypatch.setattr(gemv_kernel, "MAX_SUM_BYTES", 0)
    machine = trellis_machine(code, bits, launch=(8, 2, unroll))
    gemv_constants.cache_clear()
    assert machine.stack == 0
    assert machine.registers <= 128
    k64_count = unroll * k64_per_unit(round(4 * bits))  # of a step; 64 weights a lane and k64
    assert machine.inner / (64 * k64_count) < TRELLIS_CEILING[code, bits]
    if code != "3inst":
        assert machine.opcodes["IMMA"] == (16 if code == "mul1" else 8) * k64_count
        integer_pipe, multiplier = (
            sum(machine.opcodes[name] for name in names)
            for names in (("SHF", "PRMT", "LOP3"), ("IMAD", "IDP"))
        )
        assert integer_pipe < 1.2 * multiplier  # half of the windows of 3 bits would be on the wrong one
    if shared:
        assert machine.opcodes["SHFL"] == 2 * k64_count  # the bits before a segment, of each row tile
        assert machine.opcodes["BAR"] <= 2


@counts_instructions
@pytest.mark.parametrize(("code", "bits"), [("mul1", 3), pytest.param("pair", 2, marks=pytest.mark.slow)])
def test_high_bytes_alone_take_the_mmas_of_one_token(code: str, bits: float) -> None:
    one, eight = (trellis_machine(code, bits, tokens=tokens) for tokens in (1, 8))
    assert eight.stack == 0
    assert eight.opcodes["IMMA"] == one.opcodes["IMMA"]
    assert eight.inner < 1.05 * one.inner


@counts_instructions
@pytest.mark.parametrize("tokens", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_float16_takes_few_mmas(tokens: int) -> None:
    """One for eight weights a lane and eight tokens, and one for the offset of all row tiles."""
    machine = trellis_machine("mul1", 4, launch=(4, 2, 2), tokens=tokens, k=4096, int8=False)
    assert machine.stack == 0 and "IMMA" not in machine.opcodes
    weights = 2 * 2 * 32  # a lane and step
    assert machine.opcodes["HMMA"] == (weights / 8 + weights / 16) * (tokens // 8)
    assert machine.inner / weights < (4.3 if tokens == 8 else 4.7)


@counts_instructions
@pytest.mark.parametrize(
    ("code", "tokens"),
    [
        ("mul1", 1),
        ("3inst", 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("pair", 1), ("mul1", 8))),
    ],
)
def test_an_output_that_is_not_rotated_is_finished_without_spills(code: str, tokens: int) -> None:
    plain = trellis_machine(code, 2, tokens=tokens)
    machine = trellis_machine(code, 2, tokens=tokens, finished=True)
    assert machine.stack == 0 and machine.barriers == plain.barriers
    assert machine.inner == plain.inner  # the loop over steps is the same
    assert machine.instructions <= plain.instructions + 120


@counts_instructions
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(
    ("code", "bits"),
    [("mul1", 2.75), ("mul1", 3.75), ("mul1", 8), ("pair", 4), ("pair", 2.25), ("3inst", 2.25)],
)
def test_no_trellis_launch_spills(code: str, bits: float, tokens: int) -> None:
    rule = gemv_launch.trellis_gemv(Shape(code, bits, 8192, 8192, tokens), torch.device("cpu"))
    machine = trellis_machine(
        code,
        bits,
        launch=(rule.num_warps, rule.tiles_per_cta, rule.units_per_step),
        tokens=tokens,
        capability=80,
    )
    assert machine.stack == 0


Odd = tuple[
    str, float, int, int, int, tuple[int, ...] | None
]  # code, bits, n, k, tokens, launch or the rule's


ODD: list[Odd] = [
    ("mul1", 2, 37, 200, 1, None),
    ("mul1", 2.25, 37, 200, 5, None),  # a single unit
    ("mul1", 8, 64, 1408, 16, None),
    ("pair", 2, 8192, 256, 5, None),
    ("pair", 2, 48, 11008, 9, None),
    ("pair", 2, 80, 5120, 5, (16, 2, 4)),
    ("3inst", 3.25, 37, 200, 1, None),
    ("mul1", 2, 8192, 11072, 1, None),
]


EVERY_ODD: list[Odd] = [
    (*kind, *shape, tokens, None)
    for kind in [
        *(("mul1", bits) for bits in (1, 2, 2.25, 2.5, 3.5, 4, 8)),
        *(("pair", bits) for bits in (1, 2, 2.25, 4, 8)),
        *(("3inst", bits) for bits in (1, 2, 2.25, 3.5, 4, 8)),
    ]
    for shape in ((37, 200), (8192, 11072))
    for tokens in (1, 5, 9, 16)
]


EVERY_ODD += [
    (code, bits, 8192, 11072, tokens, launch)
    for code, bits in (("mul1", 2), ("pair", 2), ("mul1", 4))
    for launch in gemv_launch.LAUNCHES
    for tokens in (1, 8, 16)
    if launch[1] * tokens <= 32
]


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits", "n", "k", "tokens", "launch"),
    [*ODD, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY_ODD if case not in ODD)],
)
def test_trellis_of_columns_that_are_no_whole_steps(
    code: str, bits: float, n: int, k: int, tokens: int, launch: tuple[int, int, int] | None
) -> None:
    rule = gemv_launch.trellis_gemv(Shape(code, bits, n, k, m_bucket(tokens)), torch.device("cpu"))
    chosen, k64_count = launch is None, k64_per_unit(round(4 * bits))
    launch = launch or (rule.num_warps, rule.tiles_per_cta, rule.units_per_step)
    assert -(-k // (64 * k64_count)) % (launch[0] * launch[2])  # some warps' units lie beyond the end
    machine = trellis_machine(code, bits, launch=launch, tokens=tokens, k=k)
    if chosen or tokens == 1:  # what the tuner tries for more tokens may spill; then it is not the fastest
        assert machine.stack <= 16
    assert machine.registers * launch[0] * 32 <= 65536
    assert machine.barriers == 0
    # a step of one unit has the loop's own instructions once for every unit: 5 to 12 % more
    if (code, bits) in TRELLIS_CEILING and tokens == 1 and launch[:2] == (8, 2) and launch[2] > 1:
        assert machine.inner / (64 * k64_count * launch[2]) < TRELLIS_CEILING[code, bits]


@pytest.mark.parametrize("launch", [(16, 1, 8), (8, 1, 3), (8, 7, 1)])
def test_trellis_launches_that_do_not_fit_are_refused(launch: tuple[int, int, int]) -> None:
    why = (
        "does not divide a Hadamard tile of 4096: use fewer warps or fewer units"
        if launch[1] == 1
        else "14 sums a lane"
    )
    with pytest.raises(ValueError, match=why):
        trellis_machine("mul1", 2, launch=launch)


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits", "k", "launch"),
    [("pair", 2, 4096, (16, 2, 1)), ("mul1", 4, 256, (16, 1, 2)), ("mul1", 2, 4096, (16, 7, 1)),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (("mul1", 2, 2048, (16, 4, 1)), ("pair", 2, 4096, (16, 7, 1))))],
)  # fmt: skip
def test_one_token_is_rotated_without_spills(
    code: str, bits: int, k: int, launch: tuple[int, int, int]
) -> None:
    plain = trellis_machine(code, bits, launch=launch, k=k)
    machine = trellis_machine(code, bits, launch=launch, k=k, fused=True)
    assert machine.stack == 0
    assert machine.registers <= 128
    assert machine.opcodes["HMMA"] == 12
    assert machine.opcodes["BAR"] == 4  # three of the rotation
    assert machine.inner <= plain.inner + 16
    assert machine.shared[1] <= (32768 if launch[1] <= 4 else 40960)
