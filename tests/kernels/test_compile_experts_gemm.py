"""The launch of the experts of a prompt, compiled for sm_90, beside those of single matrices."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from requant_kernels.trellis.gemm_sm90 import takes_half_sums
from requant_kernels.trellis.gemm_sm90_launch import GROUP_TOKENS, group_cta, group_tokens

from .compile_offline import counts_instructions
from .trellis_gemm_machines import experts_gemm_machine, multiply_machine
from .trellis_kinds import KINDS

FEW, ALL = (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3), tuple(quarters / 4 for quarters in range(4, 17))


def test_tokens_of_a_cta_follow_those_of_an_expert() -> None:
    """Qwen3-30B-A3B, 8 of 128 experts."""
    assert [group_tokens(8 * m, 128) for m in (128, 512, 2048, 4096)] == [32, 64, 64, 256]


@counts_instructions
@pytest.mark.parametrize("tokens", GROUP_TOKENS)
@pytest.mark.parametrize(
    ("code", "widths"),
    [
        ("mul1", (2.25,)),
        *(pytest.param(code, (bits,), marks=pytest.mark.slow) for code, bits in KINDS),
        ("pair", FEW),
        *(pytest.param(code, ALL, marks=pytest.mark.slow) for code in ("mul1", "pair")),
    ],
)
def test_experts_of_prompts_are_one_launch_that_does_not_spill(
    code: str, widths: tuple[float, ...], tokens: int
) -> None:
    """Qwen3-30B-A3B: the loop of a width is that of a single matrix."""
    machine, cta = experts_gemm_machine(code, widths, tokens, k=2048), group_cta(tokens)
    launch = cta.tokens_per_cta, cta.num_warps, cta.tiles_per_warp, cta.prefetch_at
    sums = takes_half_sums(code, tokens)
    plain = [multiply_machine(code, bits, launch=launch, sums=sums) for bits in widths]
    assert machine.stack <= 16 and sum(machine.shared) <= 227 << 10
    assert machine.opcodes["HGMMA"] == sum(own.opcodes["HGMMA"] for own in plain)
    assert machine.inner <= max(own.inner for own in plain) + 8
    assert machine.instructions <= 1.3 * sum(own.instructions for own in plain) + 320
    if tokens <= 64 and max(widths) <= 4:
        assert machine.registers * 32 * cta.num_warps * 2 <= 65536  # two CTAs an SM
