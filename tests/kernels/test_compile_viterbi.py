"""The search for trellis codes, compiled for sm_90 without a GPU: its instructions a state, and what it spills."""

import pytest

pytest.importorskip("triton")

from requant_kernels.viterbi import gpu

from requant.formats.trellis_codes import CODES, step_bits
from requant.quantizers.trellis import METHOD

from .compile_offline import Machine, compile_kernel, counts_instructions

L1_BYTES = 240 << 10  # of an H100, beside 16 KB of shared memory
# code, bits: machine instructions a state and step
CEILINGS = {
    ("mul1", 2): 5.2, ("mul1", 2.25): 5.1, ("mul1", 3): 4.8, ("mul1", 3.75): 4.8, ("mul1", 4): 4.3, ("mul1", 4.5): 4.5,
    ("mul1", 5): 4.4, ("mul1", 5.5): 5.5, ("mul1", 6): 4.2, ("mul1", 6.5): 4.7, ("mul1", 8): 4.7,
    ("pair", 1.5): 9.0, ("pair", 1.75): 8.1, ("pair", 2): 8.2, ("pair", 2.5): 9.0,
}  # fmt: skip


def forward(code: str, bits: float, *, pinned: bool) -> tuple[Machine, int, int]:
    """The forward pass, steps in its loop, and its threads."""
    vector = CODES[code].weights_per_step
    shifts = step_bits(bits, vector)
    shifts = shifts[:1] if len(set(shifts)) == 1 else shifts
    constants, _ = gpu._constants(256 // vector, vector, shifts, pinned, True)
    compiled = compile_kernel(
        gpu._forward,
        {name: value for name, value in constants.items() if name != "num_warps"},
        capability=90,
        pointers={
            "targets": "*fp32",
            "values": "*fp16" if vector == 1 else "*i32",
            "pinned": "*i32" if pinned else "*fp32",
            "back_pointers": "*i32",
            "final": "*fp32",
            "mask": "i32",
        },
        warps=constants["num_warps"],
    )
    return compiled, len(shifts), constants["THREADS"]


FAST = (
    ("mul1", 2),
    ("mul1", 2.25),
    ("mul1", 4),
    ("mul1", 5),
    ("mul1", 5.5),
    ("pair", 1.75),
    ("pair", 2),
)  # even and uneven steps


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits"),
    [pytest.param(*kind, marks=() if kind in FAST else pytest.mark.slow) for kind in CEILINGS],
)
def test_few_instructions_a_state(code: str, bits: float) -> None:
    compiled, steps, threads = forward(code, bits, pinned=True)
    assert compiled.loop / (steps * (65536 // threads)) <= CEILINGS[code, bits]
    assert compiled.barriers <= 4 * steps
    assert compiled.registers == min(255, 65536 // threads)  # as many as there are


@pytest.mark.parametrize("code", ["mul1", "pair"])
def test_back_pointers_of_a_thread_fit_a_word(code: str) -> None:
    """At all widths, whatever the number of warps: else some would be lost, and paths with them."""
    vector = CODES[code].weights_per_step
    for bits in METHOD.bits:
        shifts = step_bits(bits, vector)
        if max(shifts) > 8:
            continue
        constants, _ = gpu._constants(256 // vector, vector, shifts, False, True)
        for new_bits in set(shifts):
            fields = (1 << (16 - new_bits)) // constants["WORDS"]
            assert fields >= 1 << constants["LOW"] and fields * new_bits <= 32, bits


@counts_instructions
@pytest.mark.parametrize(("code", "bits"), [("mul1", 2), ("pair", 2), ("pair", 1.5), ("pair", 2.5)])
def test_what_is_spilled_stays_in_l1(code: str, bits: float) -> None:
    compiled, _, threads = forward(code, bits, pinned=False)
    assert compiled.stack * threads < L1_BYTES
