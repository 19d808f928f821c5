"""The trellis on the GPU: transforms of every shape, one token rotated by every CTA, graphs and streams at once, NaN."""

import pytest
import torch
from requant_kernels import TrellisLayout, linear, lookup, pack_trellis
from requant_kernels.dispatch import dispatch, shape_of
from requant_kernels.fallback import reference
from requant_kernels.ops import lookup_bands, multiply_bands
from requant_kernels.trellis import gemv
from requant_kernels.trellis.gemv import can_fuse
from requant_kernels.trellis.gemv_group import gemv_group
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig, trellis_group
from torch import Tensor

from .cases import random_csr, random_trellis, relative_error

pytestmark = pytest.mark.gpu


def packed(code: str, n: int, k: int, *, bits: float = 2, density: float = 0.0) -> TrellisLayout:
    sparse = random_csr(n, k, density, False, "cuda") if density else None
    return pack_trellis(*random_trellis(n, k, bits, "cuda"), bits=bits, code=code, sparse=sparse)


def want_of(x: Tensor, layout: TrellisLayout, bias: Tensor | None, rows: Tensor) -> Tensor:
    """In float64, of some rows alone."""
    want = (x.double() @ reference.weight(layout, torch.float32).double().T)[:, rows]
    return want if bias is None else want + bias.double()[rows]


TF32 = 8e-4  # of one token, which every CTA may rotate in tf32, beside the rounding to float16
SHAPES = [
    (8192, 512, 1), (8192, 4096, 5), (12288, 512, 2), (16384, 256, 1), (4608, 8192, 1), (768, 14336, 8), (256, 14336, 16),
    (1000, 4096, 1), (4097, 1024, 3), (8192, 768, 16), (256, 16384, 2), (2048, 2048, 1),
]  # fmt: skip


@pytest.mark.parametrize("code", ["mul1", "pair"])
@pytest.mark.parametrize(("n", "k", "m"), SHAPES)
def test_blocks_and_tiles(n: int, k: int, m: int, code: str) -> None:
    torch.manual_seed(0)
    layout = packed(code, n, k)
    x, bias = torch.randn(m, k, device="cuda").half(), torch.randn(n, device="cuda").half()
    y = linear(x, layout, bias)
    rows = torch.arange(0, n, max(1, n // 128), device="cuda")
    limit = 1.1e-2 if m > 4 and gemv.activation_form(layout, m).int8 else TF32 if m == 1 else 6e-4
    assert relative_error(y[:, rows], want_of(x, layout, bias, rows)) < limit
    for _ in range(20):
        assert torch.equal(y, linear(x, layout, bias))


@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize(
    "parts",
    [(("mul1", 1.75, 4096), ("mul1", 2, 1024), ("mul1", 2.75, 1024)), (("mul1", 3, 14336), ("mul1", 2.75, 14336)),
     (("pair", 2, 4096), ("mul1", 5, 1000))],
    ids=str,
)  # fmt: skip
def test_matrices_in_one_launch_give_what_each_gives(
    parts: tuple[tuple[str, float, int], ...], m: int
) -> None:
    torch.manual_seed(0)
    layouts = [packed(code, n, 4096, bits=bits) for code, bits, n in parts]
    inputs = [gemv.activation_form(layout, m).empty(m, torch.device("cuda")) for layout in layouts]
    assert any(own.scales is None for own in inputs) == (m > 4 and parts[-1][1] > 3.25)
    for own in inputs:
        if own.scales is None:
            own.values.normal_()
        else:
            own.values.random_(-128, 128)
            own.scales.normal_()
    configs = trellis_group([shape_of(layout, m) for layout in layouts], torch.device("cuda"))
    together = gemv_group(inputs, layouts, configs)
    for own, layout, config, got in zip(inputs, layouts, configs, together, strict=True):
        assert torch.equal(got, gemv.product(own, layout, config))


@pytest.mark.parametrize("m", [1, 8, 40, 600])
@pytest.mark.parametrize("parts", [(4096, 1024, 1024), (1408, 1408), (512, 16, 16), (14336, 14336)])
def test_joined_matrices_are_rotated_one_by_one(parts: tuple[int, ...], m: int) -> None:
    torch.manual_seed(0)
    n, k = sum(parts), 1024
    layout = pack_trellis(
        *random_trellis(n, k, 2, "cuda"), bits=2, code="mul1", parts=parts,
        sparse=random_csr(n, k, 0.01, False, "cuda") if n == 2816 else None,
    )  # fmt: skip
    x, bias = torch.randn(m, k, device="cuda").half(), torch.randn(n, device="cuda").half()
    rows = torch.arange(0, n, max(1, n // 300), device="cuda")
    int8 = dispatch(layout, m, x.device)[0].name == "trellis_gemm_int8"
    limit = 1.4e-2 if int8 or (4 < m <= 16 and gemv.activation_form(layout, m).int8) else 2e-3
    assert relative_error(linear(x, layout, bias)[:, rows], want_of(x, layout, bias, rows)) < limit


@pytest.mark.parametrize(
    ("code", "bits", "n", "k", "launch"),
    [
        ("pair", 2, 4096, 4096, (16, 2, 1)), ("mul1", 2, 2048, 2048, (16, 1, 2)), ("mul1", 4, 49 * 16, 1280, (16, 4, 1)),
        ("mul1", 2.25, 1000, 256, (16, 1, 1)), ("mul1", 2, 1429, 4096, (16, 7, 1)), ("pair", 2, 896, 3328, (16, 7, 1)),
    ],
)  # fmt: skip
def test_one_token_is_rotated_by_every_cta(
    code: str, bits: float, n: int, k: int, launch: tuple[int, int, int]
) -> None:
    config = TrellisGemvConfig(num_warps=launch[0], tiles_per_cta=launch[1], units_per_step=launch[2])
    layout = packed(code, n, k, bits=bits)
    rows = torch.arange(0, n, 31, device="cuda")
    for dtype, limit in ((torch.float16, TF32), (torch.bfloat16, 6e-3)):
        x = torch.randn(1, k, device="cuda", dtype=dtype)
        assert can_fuse(x, layout, config)
        y = gemv.gemv(x, layout, None, config)
        assert relative_error(y[:, rows], want_of(x, layout, None, rows)) < limit
        for _ in range(20):
            assert torch.equal(y, gemv.gemv(x, layout, None, config))
    x[:] = 0
    assert not gemv.gemv(x, layout, None, config).any()


@pytest.mark.parametrize(("code", "n", "k"), [("mul1", 1429, 8192), ("pair", 112, 4224)])
def test_seven_tiles_with_a_separate_rotation(code: str, n: int, k: int) -> None:
    layout, config = packed(code, n, k), TrellisGemvConfig(num_warps=16, tiles_per_cta=7, units_per_step=1)
    x, rows = torch.randn(1, k, device="cuda", dtype=torch.float16), torch.arange(0, n, 5, device="cuda")
    assert not can_fuse(x, layout, config)
    y = gemv.gemv(x, layout, None, config)
    assert relative_error(y[:, rows], want_of(x, layout, None, rows)) < 6e-4
    for _ in range(20):
        assert torch.equal(y, gemv.gemv(x, layout, None, config))


@pytest.mark.parametrize("m", [1, 3])
def test_residuals_are_added(m: int) -> None:
    layout = packed("mul1", 4096, 1024, density=0.01)
    x = torch.randn(m, 1024, device="cuda", dtype=torch.float16)
    rows = torch.arange(0, 4096, 7, device="cuda")
    limit = TF32 if m == 1 else 6e-4
    assert relative_error(linear(x, layout)[:, rows], want_of(x, layout, None, rows)) < limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 5, 700])
@pytest.mark.parametrize(
    ("code", "bits", "k", "rotates"),
    [
        ("mul1", 2, 512, True), ("pair", 2.25, 2048, True), ("3inst", 3, 4096, True), ("mul1", 2.5, 200, True),
        ("pair", 2, 5120, True), ("mul1", 3.75, 8192, True), ("mul1", 4, 2048, False), ("pair", 1.75, 208, False),
    ],
)  # fmt: skip
def test_rows_of_an_embedding(
    code: str, bits: float, k: int, rotates: bool, m: int, dtype: torch.dtype
) -> None:
    """By every transform; tokens that are none get row 0."""
    torch.manual_seed(0)
    codes, input_scales, output_scales = random_trellis(1000, k, bits, "cuda")
    layout = pack_trellis(
        codes, input_scales if rotates else None, output_scales, bits=bits, code=code, rotates_output=False
    )
    tokens = torch.randint(0, 1000, (m, 3), device="cuda")
    want, limit = reference.weight(layout, torch.float32).double(), 4e-4 if dtype == torch.float16 else 3e-3
    for own in (tokens[:, 0], tokens[:, 1].int().contiguous()):  # the first ones lie apart
        assert relative_error(lookup(own, layout, dtype), want[own]) < limit
    assert relative_error(lookup(tokens, layout, dtype), want[tokens]) < limit
    tokens[0, 0], tokens[0, 1] = 1000, -1
    assert torch.equal(lookup(tokens[0, :2], layout, dtype), lookup(tokens[0, :2] * 0, layout, dtype))


@pytest.mark.parametrize("m", [1, 8, 16, 40])
@pytest.mark.parametrize("k", [256, 512, 4096, 1536])
@pytest.mark.parametrize("bits", [(5, 4, 3.5, 3), (6.25, 5.25, 4.75, 4.25), (7.5, 6.5, 6, 5.5)], ids=str)
def test_bands_give_what_each_gives(bits: tuple[float, ...], k: int, m: int) -> None:
    """Rows and products; beyond one launch none."""
    torch.manual_seed(0)
    input_scales = random_trellis(16, k, 2, "cuda")[1]
    layouts = []
    for n, own in zip((512, 512, 1024, 2100), bits, strict=True):
        codes, _, output_scales = random_trellis(n, k, own, "cuda")
        layouts.append(
            pack_trellis(codes, input_scales, output_scales, bits=own, code="mul1", rotates_output=False)
        )
    tokens = torch.randint(0, 4148, (m, 2), device="cuda")
    rows = lookup_bands(tokens, layouts, torch.bfloat16)
    want = torch.cat([lookup(torch.arange(own.n, device="cuda"), own, torch.bfloat16) for own in layouts])
    assert torch.equal(rows, want[tokens])
    for dtype, limit in ((torch.float16, 6e-4), (torch.bfloat16, 6e-3)):
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        y = multiply_bands(x, layouts)
        assert (y is None) != gemv.supports(layouts[0], m, x.device)
        if y is not None:
            assert relative_error(y, torch.cat([linear(x, own) for own in layouts], 1)) < limit


@pytest.mark.parametrize("m", [1, 40])
def test_a_graph_looks_new_tokens_up(m: int) -> None:
    codes, input_scales, output_scales = random_trellis(512, 2048, 2, "cuda")
    layout = pack_trellis(codes, input_scales, output_scales, bits=2, code="mul1", rotates_output=False)
    tokens = torch.zeros(m, dtype=torch.int64, device="cuda")
    lookup(tokens, layout, torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = lookup(tokens, layout, torch.float16)
    tokens.random_(0, 512)
    graph.replay()
    assert torch.equal(rows, lookup(tokens, layout, torch.float16))


def chain(x: Tensor, layouts: list[TrellisLayout]) -> Tensor:
    for layout in layouts:
        x = linear(x, layout) * 1e-2
    return x


@pytest.mark.parametrize("m", [1, 8])
def test_a_graph_and_an_eager_stream_at_once(m: int) -> None:
    """A replayed graph, and eager calls of the same layers on another stream, at once."""
    layouts = [packed(code, 4096, 4096) for code in ("pair", "mul1", "pair")]
    x, other = (torch.randn(m, 4096, device="cuda", dtype=torch.float16) for _ in range(2))
    want, others = chain(x, layouts), chain(other, layouts)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        y = chain(x, layouts)
    torch.cuda.synchronize()
    found = []
    for _ in range(100):
        graph.replay()
        with torch.cuda.stream(stream):
            found.append(chain(other, layouts))
    torch.cuda.synchronize()
    assert torch.equal(y, want)
    assert all(torch.equal(one, others) for one in found)


def test_nan_and_inf_give_nan() -> None:
    layout = packed("pair", 4096, 4096)
    x = torch.randn(3, 4096, device="cuda", dtype=torch.float16)
    want = linear(x, layout)
    x[1, 5] = torch.nan
    x[2, 7] = torch.inf
    y = linear(x, layout)
    assert torch.equal(y[0], want[0])
    assert y[1:].isnan().all()
    assert linear(x[1:2], layout).isnan().all()
