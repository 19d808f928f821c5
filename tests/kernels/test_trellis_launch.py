"""Rules for the launches of trellis products of up to 16 tokens."""

import itertools
from typing import Any

import pytest
import torch
from requant_kernels.common.device import H200_SMS
from requant_kernels.hadamard import transform
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.launch_config import Shape
from requant_kernels.trellis import gemv_launch
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.gemv_kernel import gemv_constants
from requant_kernels.trellis.layout import k64_per_unit


@pytest.mark.parametrize(
    ("n", "k", "bits", "launch"),
    [
        (4096, 4096, 2.25, (16, 2, 1)), (4096, 4096, 2, (16, 2, 4)), (14336, 4096, 2.5, (16, 7, 1)),
        (2048, 2048, 2, (16, 1, 2)), (8192, 8192, 2.25, (8, 2, 2)), (28672, 8192, 1.75, (4, 2, 2)),
        (28672, 8192, 2, (8, 2, 2)), (4096, 14336, 2, (8, 1, 4)), (128256, 4096, 3.75, (4, 2, 2)),
        (8192, 2048, 2.25, (8, 2, 1)), (8192, 2048, 2, (16, 4, 1)), (3072, 2048, 2, (16, 2, 2)),
    ],
)  # fmt: skip
def test_the_rule_of_one_token_of_a_trellis(n: int, k: int, bits: float, launch: tuple[int, ...]) -> None:
    """Of `mul1`, what was measured on an H200, or within 6 % of it."""
    found = gemv_launch.trellis_one_token(Shape("mul1", bits, n, k, 1), torch.device("cpu"))
    assert (found.num_warps, found.tiles_per_cta, found.units_per_step) == launch


@pytest.mark.parametrize(
    ("n", "k", "bits", "tokens", "cap"),
    [
        (4096, 4096, 3, 1, 1), (4096, 14336, 3.25, 1, 2), (2048, 8192, 2.25, 1, 1), (4096, 4096, 2, 8, 1),
        (4096, 14336, 4.25, 8, 1), (2048, 2048, 4, 8, 1), (2048, 8192, 4.25, 8, 1), (16384, 2048, 3, 8, 4),
        (14336, 4096, 3, 1, None), (2048, 2048, 3, 8, None), (28672, 4096, 3, 8, None),
    ],
)  # fmt: skip
def test_ctas_of_few_rows_are_spread_over_the_sms(
    n: int, k: int, bits: float, tokens: int, cap: int | None
) -> None:
    """In a step they start while others still run: without a cap they share the SMs that are free first."""
    shape = Shape("mul1", bits, n, k, tokens)
    found: Any = gemv_launch.trellis_gemv(shape, torch.device("cpu"))
    assert found.max_ctas_per_sm == cap
    assert cap is None or -(-n // (16 * found.tiles_per_cta)) <= cap * H200_SMS


def test_the_rule_of_several_matrices_fits_all_of_them() -> None:
    """Equal warps, and steps that are parts of a section; one token's CTAs of 16 warps run at once."""
    for fours in itertools.product((4, 7, 8, 10, 17), (5, 8, 14, 24)):
        for sizes in ((4096, 1024), (14336, 14336), (512, 64), (28672, 8192)):
            for k, m in itertools.product((256, 2048, 4096, 8192), (1, 8, 16)):
                shapes = [Shape("mul1", four / 4, n, k, m) for four, n in zip(fours, sizes, strict=True)]
                configs = gemv_launch.trellis_group(shapes, torch.device("cpu"))
                assert len({config.num_warps for config in configs}) == 1
                for four, config in zip(fours, configs, strict=True):
                    assert (
                        HADAMARD_TILE % (64 * k64_per_unit(four) * config.num_warps * config.units_per_step)
                        == 0
                    )


@pytest.mark.parametrize("code", CODES)
def test_the_kernel_takes_what_the_rule_of_several_matrices_gives(code: str) -> None:
    for sizes, m in itertools.product(((4096, 1024), (14336, 14336), (512, 64)), (1, 8, 16)):
        shapes = [Shape(code, bits, n, 4096, m) for bits, n in zip((2, 3), sizes, strict=True)]
        for shape, config in zip(shapes, gemv_launch.trellis_group(shapes, torch.device("cpu")), strict=True):
            gemv_constants(code, round(4 * shape.bits), 1, config, m, 64)


def test_steps_of_the_rule_are_parts_of_a_section() -> None:
    for four in range(4, 17):
        for n in (512, 2048, 4096, 8192, 14336, 28672, 128256):
            for k in (512, 2048, 4096, 8192, 14336):
                found = gemv_launch.trellis_one_token(Shape("mul1", four / 4, n, k, 1), torch.device("cpu"))
                assert HADAMARD_TILE % (64 * k64_per_unit(four) * found.num_warps * found.units_per_step) == 0


@pytest.mark.parametrize(("tokens", "splits"), [(9, 4), (16, 1), (40, 2)])
def test_split_sums_of_few_tokens_are_added(
    tokens: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel that adds splits: another takes the first dimension for the tokens."""
    given: list[Any] = []
    monkeypatch.setattr(transform, "transform_batched", lambda *args, **_: given.append(args))
    sums, y = torch.zeros(splits, tokens, 256).half(), torch.zeros(tokens, 256).half()
    scales = torch.ones(256).half()
    transform.hadamard_transform(
        sums, y, in_width=256, columns=256, out_width=256, output_scales=scales, asm=True, pdl=False
    )
    assert len(given) == 1 and given[0][0] is sums
