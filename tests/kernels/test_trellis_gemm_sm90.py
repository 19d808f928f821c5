"""The trellis GEMM of Hopper without a GPU: the order of weights and activations, wgmma in the background, no spills."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from requant_kernels import pack_trellis

pytest.importorskip("triton.experimental.gluon")

from requant_kernels.common import wgmma
from requant_kernels.common.wgmma import x_layout
from requant_kernels.fallback import reference
from requant_kernels.launch_config import Shape
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis import gemm_int8_launch, gemm_sm90, gemm_sm90_launch
from requant_kernels.trellis.code_ptx import INTEGER_SUMS
from requant_kernels.trellis.gemm_sm90 import activation_stages, gemm_constants, max_registers
from requant_kernels.trellis.layout import k64_per_unit

from .cases import random_trellis
from .compile_offline import Machine, compile_kernel, counts_instructions
from .ptx_model import run_ptx

KINDS = [
    ("mul1", 1), ("mul1", 2), ("mul1", 2.25), ("mul1", 3), ("mul1", 3.5), ("mul1", 4), ("mul1", 8), ("pair", 1),
    ("pair", 2), ("pair", 2.25), ("pair", 4), ("3inst", 2), ("3inst", 3.25),
]  # fmt: skip


def plain(kernel: Any) -> Any:
    """What `gluon.jit` was put around."""
    return kernel.fn


class Array:
    """What `_decode` does to tensors, in numpy."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def to(self, dtype: Any, bitcast: bool = False) -> "Array":
        return Array(self.values.view(dtype) if bitcast else self.values.astype(dtype))

    def __rshift__(self, by: int) -> "Array":
        return Array(self.values >> by)


class Language:
    """The few functions of Gluon that `_decode` calls."""

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
INT8 = [("mul1", 1), ("mul1", 2), ("mul1", 2.25), ("mul1", 3), ("pair", 2), ("pair", 2.25)]
ROWS = np.arange(16) % 8 * 2 + np.arange(16) // 8  # of a tile, by row of wgmma


def decoded(
    decode: str, code: str, bits: float, monkeypatch: pytest.MonkeyPatch, **kind: bool
) -> tuple[Any, Any, float]:
    """What the kernel's own function makes of a matrix of 64 rows and 256 columns, and the weights themselves, both by tile,
    k64, row of wgmma, and column; and the factor of the former."""
    monkeypatch.setattr(gemm_sm90, "gl", Language)
    monkeypatch.setattr(wgmma, "gl", Language)
    for name in ("unpack_pair", "unpack_four"):
        monkeypatch.setattr(gemm_sm90, name, plain(getattr(wgmma, name)))
    tiles, warps, k64_count = 2, 2, k64_per_unit(round(4 * bits))
    layout = pack_trellis(*random_trellis(16 * tiles * warps, 256, bits, "cpu"), bits=bits, code=code)
    config = GemmSm90Config(tokens_per_cta=64, num_warps=warps, tiles_per_warp=tiles)
    given: dict[str, Any] = gemm_constants(
        code, layout.quad_bits, layout.packed_codes.shape[-1], config, whole=True, **kind
    )
    by_lane = layout.packed_codes.transpose(2, 3).flatten(3)  # row tile, unit, lane, word
    words = tuple(
        Array(by_lane[:, unit, :, word].reshape(tiles, warps, 32).numpy())
        for unit in range(4 // k64_count)
        for word in range(given["COUNT"])
    )
    previous_lane = Array(
        np.broadcast_to((np.arange(32, dtype=np.int32) + 28) % 32, (tiles, warps, 32)).copy()
    )
    found = [
        plain(getattr(gemm_sm90, decode))(
            words, previous_lane, given["DECODE"], q, given["COUNT"], k64_count, None, warps, tiles
        ).values.reshape(-1, 16, 64)
        for q in range(4)
    ]
    values = reference.trellis_values(layout).numpy().reshape(-1, 16, 4, 64)[:, ROWS]
    return np.stack(found, 1), values.transpose(0, 2, 1, 3), given["SCALE"]


def halved(weights: Any) -> Any:
    """Half sums and half differences of neighbours."""
    both = weights[..., ::2] + weights[..., 1::2], weights[..., ::2] - weights[..., 1::2]
    return np.stack(both, -1).reshape(weights.shape) / 2


@pytest.mark.parametrize(("code", "bits", "sums"), [*((*kind, False) for kind in KINDS), *HALF_SUMS])
def test_a_lane_has_the_operand_of_wgmma(
    code: str, bits: float, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, and columns as activations are arranged."""
    got, weights, scale = decoded("_decode", code, bits, monkeypatch, sums=sums)
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
    got, weights, scale = decoded("_decode_int8", code, bits, monkeypatch, sums=sums, int8=True)
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


def multiply_machine(
    code: str,
    bits: float,
    *,
    launch: tuple[int, ...] = (64, 8, 1, 0),
    whole: bool = True,
    sums: bool = False,
    int8: bool = False,
    out: str = "fp32",
    experts: int = 0,
) -> Machine:
    """`launch`: tokens, warps, tiles, ahead."""
    tokens, warps, tiles, ahead = launch
    four = round(4 * bits)
    config = GemmSm90Config(tokens_per_cta=tokens, num_warps=warps, tiles_per_warp=tiles, prefetch_at=ahead)
    given = gemm_constants(
        code, four, math.gcd(four * k64_per_unit(four) // 4, 4), config, whole=whole, sums=sums, int8=int8
    )
    box = f"[{tokens}, {activation_stages(tokens, int8=int8)[0]}]"
    pointers = {
        "x_desc": f"tensordesc<{'i8' if int8 else 'fp16'}{box},{x_layout(8 if int8 else 16)!r}>",
        "x_scales_ptr": "*fp32",
        "codes_ptr": "*i32",
        "out_ptr": f"*{out}",
    }
    pointers |= {
        "units": "i32",
        "rows": "i32",
        "k_tiles": "i32",
        "skipped": "i32",
        "groups_ptr": "*i32",
        "matrices_ptr": "*i32",
    }
    absent = (*(() if experts else ("groups_ptr", "matrices_ptr")), *(() if int8 else ("x_scales_ptr",)))
    return compile_kernel(
        gemm_sm90.trellis_gemm_sm90_kernel, {**given, "PDL": True, "EXPERTS": experts}, capability=90,
        pointers=pointers, warps=warps, aligned=("rows",), absent=absent, max_registers=max_registers(config, four),
    )  # fmt: skip


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
    for n, k in ((300, 1500), (4096, 4096), (28672, 8192)):
        for tokens in (128, 256, 4096):
            config = gemm_int8_launch.trellis_gemm_int8(Shape(code, bits, n, k, tokens), torch.device("cpu"))
            launches.add((config.tokens_per_cta, config.num_warps, config.tiles_per_warp, config.prefetch_at))
    assert launches == {launch for launch, _ in gemm_int8_launch.LAUNCHES}
    for launch in launches:
        for sums in {False, code == "pair" and launch[0] == 128}:
            machine = multiply_machine(code, bits, launch=launch, whole=whole, sums=sums, int8=True)
            assert machine.stack <= 16 and sum(machine.shared) <= 227 << 10
            assert machine.opcodes["STG"] == launch[2] * launch[0] // 4  # 8 bytes: two rows of a token


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
        for width in (32, 64, 128, 256, 512):
            config = gemm_sm90_launch.trellis_gemm_sm90(Shape(code, bits, n, k, width), device)
            launches.add((config.tokens_per_cta, config.num_warps, config.tiles_per_warp, config.prefetch_at))
            rows = -(-n // 16) * 16
            assert config.split_k * max(1, (rows & -rows) // 4096) <= 8  # parts that the rotation adds
    assert launches <= set(LAUNCHES) and len(launches) >= 4
    for launch in launches:
        tokens, warps, tiles, _ = launch
        machine = multiply_machine(code, bits, launch=launch, whole=whole)
        # six registers more of `pair` at 4 bits on rows that are no whole tiles, which no default asks for
        assert machine.stack <= (24 if (code, bits, whole) == ("pair", 4, False) else 16)
        if bits <= 4 and tokens <= 64:
            assert machine.registers * 32 * warps * 2 <= 65536  # two CTAs an SM
        assert machine.opcodes["STG"] == tiles * tokens // 4  # 8 bytes: two rows of a token
        assert sum(machine.shared) <= 227 << 10


@counts_instructions
@pytest.mark.parametrize(
    ("code", "sums"), [pytest.param("mul1", False, marks=pytest.mark.slow), ("pair", True)]
)
def test_a_product_in_float16_is_stored_by_pairs(code: str, sums: bool) -> None:
    machine = multiply_machine(code, 2, launch=(256, 8, 1, 2), sums=sums, out="fp16")
    assert machine.stack == 0
    assert machine.opcodes["STG"] == 64 and machine.opcodes["STS"] == 0  # 4 bytes: two rows of a token


GROUPED = [("mul1", 2), ("pair", 2), ("mul1", 2.25), ("mul1", 4), ("3inst", 2)]


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits"),
    [
        pytest.param(*kind, marks=() if kind == ("mul1", 2.25) else pytest.mark.slow)
        for kind in (*GROUPED, *(kind for kind in KINDS if kind not in GROUPED))
    ],
)
def test_groups_of_experts_change_nothing_in_the_loop(code: str, bits: float) -> None:
    """Qwen3-30B-A3B, prompts of 65 tokens to 4 k: the loop of a single matrix, and no spills."""
    launches = set()
    for slots in (8 * 65, 8 * 512, 8 * 2048, 8 * 8192):
        config = gemm_sm90_launch.trellis_groups(bits, slots, 128)
        launches.add((config.tokens_per_cta, config.num_warps, config.tiles_per_warp, config.prefetch_at))
    assert {launch[0] for launch in launches} == {32, 64, 128, 256} and launches <= set(LAUNCHES)
    for launch in launches:
        alone, grouped = (multiply_machine(code, bits, launch=launch, experts=e) for e in (0, 128))
        assert grouped.stack <= 16
        assert grouped.opcodes["HGMMA"] == alone.opcodes["HGMMA"] and grouped.inner <= alone.inner + 8
        assert grouped.instructions <= alone.instructions + 320


@pytest.mark.parametrize(
    ("rows", "tokens", "split_k", "dtype"),
    [(1024, 64, 1, "32"), (1024, 256, 1, "16"), (1024, 256, 2, "32"), (128, 256, 1, "32")],
)
def test_whole_products_of_tall_matrices_and_many_tokens_are_float16(
    rows: int, tokens: int, split_k: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = pack_trellis(*random_trellis(rows, 512, 2, "cpu"), bits=2, code="mul1")
    config = GemmSm90Config(tokens_per_cta=tokens, num_warps=8, split_k=split_k)
    launched: list[Any] = []
    monkeypatch.setattr(gemm_sm90, "launch", lambda *given: launched.append(given))
    x = gemm_sm90.activation_form(layout, tokens).empty(tokens, torch.device("cpu"))
    values = gemm_sm90.product(x, layout, config)
    assert values.shape == (split_k, tokens, rows) and str(values.dtype) == f"torch.float{dtype}"
    assert len(launched) == 1


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
    assert all(constants["CTA"][0] * grid[2] == tokens for _, grid, _, constants in launched)
