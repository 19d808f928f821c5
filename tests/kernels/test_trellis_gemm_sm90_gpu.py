"""The trellis GEMM of Hopper on the GPU: every code, odd shapes, every launch config, graphs."""

import dataclasses

import pytest
import torch
from requant_kernels import linear, ops, pack_trellis
from requant_kernels.common.device import supports_sm90
from requant_kernels.dispatch import dispatch
from requant_kernels.fallback import reference
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.launch_config import Shape
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis import gemm_int8, gemm_int8_launch, gemm_sm90, gemm_sm90_launch
from requant_kernels.trellis.code_ptx import INTEGER_SCALES
from requant_kernels.trellis.layout import TrellisLayout
from requant_kernels.trellis.operands import sums_scale
from requant_kernels.trellis.rotate import rotate_input

from .cases import random_csr, random_trellis, relative_error

pytestmark = pytest.mark.gpu
LIMIT = {torch.float16: 6e-4, torch.bfloat16: 4e-3}
INT8_LIMIT = 1.4e-2  # weights and activations rounded, by 6e-5 to 8e-5 of their variance each
KINDS = [
    ("mul1", 1), ("mul1", 2), ("mul1", 2.25), ("mul1", 2.5), ("mul1", 3), ("mul1", 3.5), ("mul1", 4), ("mul1", 7.75),
    ("mul1", 8), ("pair", 1), ("pair", 2), ("pair", 2.25), ("pair", 4), ("pair", 8), ("3inst", 2), ("3inst", 3.25),
    ("3inst", 6),
]  # fmt: skip
MAIN = [("mul1", 2), ("mul1", 2.25), ("pair", 2)]
SHAPES = [
    (37, 200, 9),
    (4096, 4096, 16),
    (37, 200, 17),
    (512, 4096, 64),
    (64, 1408, 100),
    (300, 3000, 300),
    (1024, 16, 33),
]
SHAPES += [(8192, 8192, 48), (100, 8190, 129), (48, 11008, 40), (28672, 1024, 512)]
CASES = [(*kind, *shape) for kind in KINDS for shape in ((300, 1000, 40), (48, 2048, 90))]
CASES += [(*kind, *shape) for kind in MAIN for shape in SHAPES]
# CTAs of the transform that compute several tiles
CASES += [("mul1", 2, 8192, 8192, 300), ("pair", 2, 16384, 512, 200), ("mul1", 2.25, 64, 16384, 201)]


def layout_of(code: str, bits: float, n: int, k: int, *, density: float = 0.0) -> TrellisLayout:
    sparse = random_csr(n, k, density, False, "cuda") if density else None
    return pack_trellis(*random_trellis(n, k, bits, "cuda"), bits=bits, code=code, sparse=sparse)


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if not supports_sm90(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this GPU has no wgmma")


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("code", "bits", "n", "k", "m"), CASES)
def test_trellis(code: str, bits: float, n: int, k: int, m: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layout = layout_of(code, bits, n, k, density=0.01 if m == 90 else 0.0)
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype) if m % 2 else None
    poison = torch.full((8, m, n), torch.nan, device="cuda")
    del poison  # what was there before is what the output and the partial products get
    y = linear(x, layout, bias)
    rows = torch.arange(0, n, max(1, n // 64), device="cuda")
    want = x.double() @ reference.weight(layout, torch.float32).double().T
    want = want if bias is None else want + bias
    int8 = gemm_int8.supports(layout, m, x.device)
    assert relative_error(y[:, rows], want[:, rows]) < (INT8_LIMIT if int8 else LIMIT[dtype])
    assert torch.equal(y, linear(x, layout, bias))


@pytest.mark.parametrize(
    ("code", "bits", "n", "k", "m"),
    [
        ("mul1", 2, 300, 960, 90), ("mul1", 3, 28672, 1024, 512), ("pair", 2, 512, 4096, 128),
        ("pair", 2, 512, 4096, 300), ("mul1", 2.25, 64, 1408, 2100), ("pair", 2.25, 720, 2048, 4096),
    ],
)  # fmt: skip
def test_int8_products_are_those_of_the_integers(code: str, bits: float, n: int, k: int, m: int) -> None:
    """Up to the type that products are stored in, and activations that float32 rounds to the other neighbour."""
    torch.manual_seed(0)
    layout = layout_of(code, bits, n, k)
    assert gemm_int8.supports(layout, m, layout.packed_codes.device)
    kernel, config = dispatch(layout, m, layout.packed_codes.device)
    assert kernel.name == "trellis_gemm_int8" and isinstance(config, GemmSm90Config)
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    x[3] = 0
    got = gemm_int8.product(x, layout, config)
    got = got.float().sum(0) * sums_scale(got)
    weights, form = reference.trellis_values(layout).double(), gemm_int8.activation_form(layout, m)
    assert form is not None
    if form.permute:
        rotated = gemm_sm90.rotated_activations(x, layout).values
        rotated = rotated.view(m, -1, 8, 4, 2).transpose(2, 3).flatten(1)
    else:
        rotated = rotate_input(x, layout, form.columns, asm=True)
    if form.pair:
        even, odd = weights[:, ::2], weights[:, 1::2]
        weights = torch.stack([even + odd, even - odd], -1).flatten(1) / 2
    unit = INTEGER_SCALES[form.pair]
    width = weights.shape[1]
    scales = rotated.double().abs().amax(1, keepdim=True) / 127
    q = (rotated.double()[:, :width] / scales.clamp(min=1e-30) + 0.5).floor()
    v = (weights / unit + 0.5).floor()
    want = (q @ v.T) * scales * unit
    assert relative_error(got[:, :n], want[:, :n]) < 2e-3 and not got[3].any()


SIBLINGS = [
    [("mul1", 2.75, 4096), ("mul1", 3, 1024), ("mul1", 3.5, 1024)],
    [("pair", 2, 14336), ("pair", 1.75, 14336)],
    [("mul1", 3, 512), ("mul1", 3.25, 28672)],
]


@pytest.mark.parametrize("m", [9, 17, 64, 100, 512, 2048])
@pytest.mark.parametrize("parts", SIBLINGS, ids=str)
def test_products_that_overlap(parts: list[tuple[str, float, int]], m: int) -> None:
    """They read what the launch before the first has written, and are complete when the launch after the last reads them."""
    torch.manual_seed(0)
    layouts = [layout_of(code, bits, n, 4096) for code, bits, n in parts]
    layouts = [dataclasses.replace(layout, input_scales=layouts[0].input_scales) for layout in layouts]
    form = ops.activation_form(layouts[0], m)
    assert form is not None and layouts[0].input_scales is not None
    given, worst = form.empty(m, layouts[0].packed_codes.device), 0.0
    for scale in range(1, 21):
        x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16) * scale
        hadamard_transform(
            x, given.values, in_width=4096, columns=4096, out_width=4096, input_scales=layouts[0].input_scales,
            pair=form.pair, permute=form.permute, asm=True, pdl=True,
        )  # fmt: skip
        found = ops.products([given] * len(layouts), layouts, [None] * len(layouts))
        sums = [own.values.float().sum(0) * sums_scale(own.values) for own in found if own.values.dim() == 3]
        alone = [ops.product(given, layout).values for layout in layouts]
        alone = [own.float().sum(0) * sums_scale(own) for own in alone if own.dim() == 3]
        worst = max(worst, *(relative_error(got, want) for got, want in zip(sums, alone, strict=True)))
    assert worst < 5e-4  # of other splits of K


@pytest.mark.parametrize("config", gemm_int8_launch.candidates(Shape("mul1", 2, 720, 2048, 128)), ids=str)
def test_every_launch_config_in_int8(config: GemmSm90Config) -> None:
    torch.manual_seed(0)
    for code, bits in (("mul1", 2.5), ("pair", 2)):
        layout = layout_of(code, bits, 720, 2048)
        x = torch.randn(100, 2048, device="cuda", dtype=torch.float16)
        y = gemm_int8.gemm_int8(x, layout, None, config)
        assert relative_error(y, reference.linear(x, layout)) < INT8_LIMIT


LAUNCHES = gemm_sm90_launch.candidates(Shape("mul1", 2, 720, 2100, 128))


@pytest.mark.parametrize("config", [c for c in LAUNCHES if getattr(c, "split_k", 0) in (1, 4)], ids=str)
def test_every_launch_config(config: GemmSm90Config) -> None:
    torch.manual_seed(0)
    for code, bits in (("mul1", 2.5), ("pair", 2)):
        layout = layout_of(code, bits, 720, 2100)
        x = torch.randn(90, 2100, device="cuda", dtype=torch.float16)
        y = gemm_sm90.gemm_sm90(x, layout, None, config)
        assert relative_error(y, reference.linear(x, layout)) < LIMIT[torch.float16]


@pytest.mark.parametrize(
    ("k", "dtype"), [(8192, torch.float16), (11008, torch.bfloat16), (200, torch.float16)]
)
def test_the_transform_permutes(k: int, dtype: torch.dtype) -> None:
    x, input_scales = (
        torch.randn(20, k, device="cuda", dtype=dtype),
        torch.rand(k, device="cuda").half() + 0.5,
    )
    width = -(-k // 64) * 64
    given = {"in_width": k, "columns": -(-k // 16) * 16, "out_width": width, "input_scales": input_scales}
    plain, permuted = (torch.empty(20, width, dtype=torch.float16, device="cuda") for _ in range(2))
    hadamard_transform(x, plain, asm=True, pdl=True, **given)
    hadamard_transform(x, permuted, asm=True, pdl=True, permute=True, **given)
    assert torch.equal(permuted, plain.view(20, -1, 4, 8, 2).transpose(2, 3).reshape(20, width))


@pytest.mark.parametrize("code", ["mul1", "pair", "3inst"])
def test_activations_of_one_sign(code: str) -> None:
    """Rotated activations whose sum is large, in whole k_tiles or in halves of them, and small ones."""
    layout = layout_of(code, 2, 256, 8192)
    x = torch.randn(40, 8192, device="cuda", dtype=torch.float16) * 0.1
    for token, column in enumerate((0, 1, 5, 64, 192, 256, 4096, 4711, 8191)):
        x[token, column] = 1e3
    x[9] = layout.input_scales
    x[10] = 0
    x[11] *= 1e-3
    y = linear(x, layout)
    for got, exact in zip(y, reference.linear(x, layout), strict=True):
        assert relative_error(got, exact) < 1e-3 if exact.any() else not got.any()


def test_activations_that_are_no_whole_rows() -> None:
    layout = layout_of("pair", 2, 64, 1024)
    wide = torch.randn(48, 1031, device="cuda", dtype=torch.float16)
    for x in (wide[:, 3:1027], wide[:, 4:1028], wide.T.contiguous().T[:, :1024]):
        assert relative_error(linear(x, layout), reference.linear(x, layout)) < LIMIT[torch.float16]


@pytest.mark.parametrize("m", [17, 64, 200])
def test_a_graph_replays_on_new_activations(m: int) -> None:
    layout = layout_of("mul1", 2, 4096, 4096)
    x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)
    linear(x, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(6):  # each waits for the one before it
            y = linear(y, layout) * 1e-2
    for _ in range(3):
        x.normal_()
        graph.replay()
        want = x
        for _ in range(6):
            want = linear(want, layout) * 1e-2
        assert torch.equal(y, want)


@pytest.mark.parametrize(
    ("n", "k", "m"), [(300, 1000, 12), (300, 1000, 40), (512, 4096, 64), (64, 11008, 100), (1024, 2048, 300)]
)
def test_half_sums(n: int, k: int, m: int) -> None:
    torch.manual_seed(0)
    layout = layout_of("pair", 3.5, n, k)
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    assert gemm_sm90.activation_form(layout, m).pair == (m <= 128)
    assert relative_error(linear(x, layout), reference.linear(x, layout)) < LIMIT[torch.float16]
