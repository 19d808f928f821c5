"""Every kernel on the GPU against float64 of the dequantized weights, and what a server needs of it."""

import inspect
import math

import pytest
import torch
from requant_kernels import dequantize, linear, lookup, pack_trellis
from requant_kernels.fallback import reference
from requant_kernels.flat_layout import flatten
from requant_kernels.scalar.gemm import gemm
from requant_kernels.scalar.gemm_launch import GemmConfig
from requant_kernels.scalar.gemv import gemv
from requant_kernels.scalar.gemv_launch import GemvConfig
from requant_kernels.step.attention import attend, attend_split
from requant_kernels.step.choose import choose_tokens
from requant_kernels.step.embed import embed
from requant_kernels.trellis.dequantize import dequantize as dequantize_trellis
from requant_kernels.trellis.dequantize import matmul as trellis_dense
from requant_kernels.trellis.gemv import activation_form
from requant_kernels.trellis.gemv import gemv as trellis_gemv
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig

from .cases import Case, poisoned_empty, random_csr, random_layout, random_trellis, relative_error

pytestmark = pytest.mark.gpu
LIMIT = {torch.float16: 3e-3, torch.bfloat16: 1.2e-2}
HIGH_BYTES = 1.1e-2  # of products that leave out the low bytes of activations

CASES = [
    Case(format=kind, bits=bits, n=37, k=600, m=1, density=0.02, bias=True, dtype=dtype)
    for kind in ("grid", "codebook")
    for bits in range(2, 9)
    for dtype in LIMIT
]
CASES += [
    Case(format=kind, bits=bits, n=100, k=1500, m=m, zero_points=True, density=density, int8_residuals=True)
    for kind, bits in (("grid", 3), ("codebook", 3))
    for m, density in (
        (3, 0.01),
        (7, 0.0),
        (8, 0.01),
        (9, 0.01),
        (16, 0.01),
        (17, 0.01),
        (33, 0.0),
        (64, 0.01),
        (100, 0.0),
        (300, 0.01),
    )
]
CASES += [
    Case(
        format="grid",
        bits=4,
        n=64,
        k=k,
        m=m,
        group_size=group,
        zero_points=zeros,
        dtype=dtype,
        column_scales=True,
    )
    for k, group in ((1024, 32), (1024, 64), (1024, 256), (2048, 512), (777, 777), (5000, 96))
    for m, zeros, dtype in ((1, True, torch.float16), (5, False, torch.bfloat16))
]
CASES += [
    Case(format=kind, bits=bits, n=n, k=k, m=1, density=0.01)
    for kind, bits in (("grid", 2), ("codebook", 3), ("codebook", 4))
    for n, k in ((4096, 4096), (80, 8192), (48, 14336), (1, 256), (16, 1))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layout = random_layout(case, "cuda")
    x = torch.randn(case.m, case.k, device="cuda", dtype=case.dtype)
    bias = torch.randn(case.n, device="cuda", dtype=case.dtype) if case.bias else None
    monkeypatch.setattr(torch, "empty", poisoned_empty)
    y = linear(x, layout, bias)
    assert relative_error(y, reference.linear(x, layout, bias)) < LIMIT[case.dtype]
    assert torch.equal(y, linear(x, layout, bias))
    weight = dequantize(layout, case.dtype)
    assert relative_error(weight, reference.weight(layout)) < LIMIT[case.dtype]


@pytest.mark.parametrize("kind", ["grid", "codebook"])
@pytest.mark.parametrize("m", [1, 9, 40])
def test_without_assembly(kind: str, m: int) -> None:
    layout = random_layout(Case(format=kind, bits=3, n=32, k=600, m=m, density=0.02), "cuda")
    x = torch.randn(m, 600, device="cuda", dtype=torch.float16)
    if m <= 16:
        y = gemv(x, layout, None, GemvConfig(num_warps=4), asm=False)
    else:
        y = gemm(x, layout, None, GemmConfig(), asm=False)
    assert relative_error(y, reference.linear(x, layout)) < LIMIT[torch.float16]


@pytest.mark.parametrize("warps,tiles,unroll", [(2, 1, 1), (4, 2, 1), (8, 1, 2), (4, 4, 1), (16, 1, 1)])
def test_every_launch_shape_agrees(warps: int, tiles: int, unroll: int) -> None:
    layout = random_layout(Case(format="codebook", bits=3, n=100, k=5000, m=1, density=0.01), "cuda")
    x = torch.randn(1, 5000, device="cuda", dtype=torch.float16)
    config = GemvConfig(num_warps=warps, tiles_per_cta=tiles, num_stages=unroll)
    assert relative_error(gemv(x, layout, None, config), reference.linear(x, layout)) < 3e-3


@pytest.mark.parametrize("m", [1, 8, 40, 200])
def test_graph_capture_replays_on_new_activations(m: int) -> None:
    layout = random_layout(Case(format="grid", bits=2, n=256, k=1024, m=m, density=0.01), "cuda")
    x = torch.randn(m, 1024, device="cuda", dtype=torch.float16)
    linear(x, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(linear(x, layout).repeat(1, 4) * 1e-2, layout)
    x.normal_()
    graph.replay()
    assert torch.equal(y, linear(linear(x, layout).repeat(1, 4) * 1e-2, layout))


def test_operator_contract_and_compile() -> None:
    layout = random_layout(Case(format="grid", bits=3, n=64, k=512, m=2, density=0.02), "cuda")
    x = torch.randn(2, 512, device="cuda", dtype=torch.float16)
    torch.library.opcheck(torch.ops.requant.linear, (x, None, *flatten(layout)))
    plain = inspect.unwrap(linear)
    compiled = torch.compile(lambda t: plain(t, layout) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x, layout) * 2)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(
    ("b", "h", "heads", "length", "width"), [(1, 32, 8, 640, 128), (3, 4, 4, 100, 64), (2, 6, 2, 65, 80)]
)
def test_attention_of_one_token(
    b: int, h: int, heads: int, length: int, width: int, dtype: torch.dtype
) -> None:
    q = torch.randn(b, 1, h, width, device="cuda", dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(b, heads, length, width, device="cuda", dtype=dtype) for _ in range(2))
    filled = torch.arange(length, device="cuda").expand(b, -1) < torch.randint(
        1, length, (b, 1), device="cuda"
    )
    for mask in (None, filled):
        want = torch.ops.requant.attend(q.cpu(), k.cpu(), v.cpu(), None if mask is None else mask.cpu(), 0.1)
        got = torch.ops.requant.attend(q, k, v, mask, 0.1)
        assert relative_error(got.cpu(), want.double()) < 2 * LIMIT[dtype]
    torch.library.opcheck(torch.ops.requant.attend, (q, k, v, filled, 0.1))


@pytest.mark.parametrize(("d", "length"), [(128, 40), (128, 640), (64, 640), (256, 700), (128, 9000)])
def test_split_attention(d: int, length: int) -> None:
    """Its parts, combined, are the attention; those without positions weigh nothing."""
    q = torch.randn(1, 32, 1, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, length, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for last in (0, 37, length // 2, length - 1):
        position = torch.tensor(min(last, length - 1), device="cuda")
        found = attend_split(q, k, v, 0.1, position=position)
        weights = torch.softmax(found.logarithms.double() * math.log(2), 1)
        y = (found.values.double() * weights[:, :, None]).sum(1)[None, None]
        assert (
            relative_error(y, attend(q, k, v, None, 0.1, position=position).double()) < LIMIT[torch.bfloat16]
        )


@pytest.mark.parametrize(("b", "length"), [(1, 700), (8, 700), (1, 20000), (40, 3000)])
def test_attention_up_to_a_position(b: int, length: int) -> None:
    """What lies behind the position is not read, and a graph gives the same bits in every run."""
    q = torch.randn(b, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, 8, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    position = torch.tensor(0, device="cuda")
    attend(q, k, v, None, 0.1, position=position)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attend(q, k, v, None, 0.1, position=position)
    for last in (0, 63, 64, length // 2, length - 1):
        keys, values = k[:, :, : last + 1].clone(), v[:, :, : last + 1].clone()
        k[:, :, last + 1 :], v[:, :, last + 1 :] = torch.nan, torch.nan
        position.fill_(last)
        graph.replay()
        want = torch.ops.requant.attend(q.cpu(), keys.cpu(), values.cpu(), None, 0.1)
        assert relative_error(y.cpu(), want.double()) < 2 * LIMIT[torch.bfloat16]
        first = y.clone()
        graph.replay()
        assert torch.equal(y, first)
        k.normal_()
        v.normal_()


@pytest.mark.parametrize("dtype", [*LIMIT, torch.float32])
@pytest.mark.parametrize(("b", "v"), [(1, 128256), (5, 50257), (64, 3)])
def test_the_ends_of_a_step(b: int, v: int, dtype: torch.dtype) -> None:
    logits = torch.randn(b, v, device="cuda").mul(10).round().to(dtype)  # many are equal
    kept, tokens = torch.empty_like(logits), torch.empty(b, 1, dtype=torch.int64, device="cuda")
    length = torch.tensor(4, device="cuda")
    choose_tokens(logits, kept, tokens, length)
    assert torch.equal(tokens, logits.argmax(-1, keepdim=True)) and torch.equal(kept, logits)
    assert int(length) == 5
    table, cos, sin = (torch.randn(n, k, device="cuda").to(dtype) for n, k in ((v, 1500), (9, 80), (9, 80)))
    x, *angles = embed(tokens, table, cos, sin, length)
    assert torch.equal(x, table[tokens[:, 0]])
    assert torch.equal(angles[0][0], cos[5]) and torch.equal(angles[1][0], sin[5])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", LIMIT)
def test_rows_of_an_embedding(bits: int, dtype: torch.dtype) -> None:
    case = Case(format="grid", bits=bits, n=1000, k=640, m=1, group_size=64, zero_points=True)
    layout, tokens = random_layout(case, "cuda"), torch.randint(0, 1000, (3, 7), device="cuda")
    want = reference.weight(layout)[tokens]
    assert relative_error(lookup(tokens, layout, dtype), want) < LIMIT[dtype]
    assert relative_error(lookup(tokens[:, -1:], layout, dtype), want[:, -1:]) < LIMIT[dtype]  # lie apart


MAIN = [("mul1", 2), ("mul1", 2.25), ("pair", 2)]
OTHERS = [
    ("mul1", 1),
    ("mul1", 2.5),
    ("mul1", 3.5),
    ("mul1", 4),
    ("mul1", 8),
    ("pair", 4),
    ("3inst", 2),
    ("3inst", 3.25),
]
TRELLIS = [(*kind, 37, 200, 1) for kind in MAIN + OTHERS]
TRELLIS += [(*kind, *shape) for kind in MAIN for shape in ((512, 4096, 8), (64, 1408, 16), (48, 2048, 40))]


@pytest.mark.parametrize(("code", "bits", "n", "k", "m"), TRELLIS)
def test_trellis(code: str, bits: float, n: int, k: int, m: int) -> None:
    torch.manual_seed(0)
    sparse = random_csr(n, k, 0.01, m > 8, "cuda") if n > 40 else None
    layout = pack_trellis(*random_trellis(n, k, bits, "cuda"), bits=bits, code=code, sparse=sparse)
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    want = reference.linear(x, layout)
    y = linear(x, layout)
    # of the last, half is the rounding of float16; one token may be rotated in tf32
    exact = 8e-4 if m == 1 else 6e-4
    high_bytes = 4 < m <= 16 and activation_form(layout, m).int8
    assert relative_error(y, want) < (HIGH_BYTES if high_bytes else exact)
    assert torch.equal(y, linear(x, layout))
    assert torch.equal(dequantize_trellis(layout, asm=True).double(), reference.trellis_values(layout))


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(
    ("n", "k", "m"), [(4096, 14336, 2), (100, 8190, 3), (17, 16384, 1), (8192, 256, 5), (48, 11008, 9)]
)
def test_trellis_of_odd_shapes(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    layout = pack_trellis(*random_trellis(n, k, 2, "cuda"), bits=2, code="pair")
    x = torch.randn(m, k + 3, device="cuda", dtype=dtype)[:, :k]  # rows that lie apart, some unaligned
    bias = torch.randn(n, device="cuda", dtype=dtype)
    rows = torch.arange(0, n, max(1, n // 64), device="cuda")
    want = (x.double() @ reference.weight(layout, torch.float32).double().T + bias.double())[:, rows]
    limit = HIGH_BYTES if m > 4 and activation_form(layout, m).int8 else LIMIT[dtype] / 2
    assert relative_error(linear(x, layout, bias)[:, rows], want) < limit


@pytest.mark.parametrize("code", ["mul1", "pair"])
def test_trellis_of_activations_that_are_hard_to_round(code: str) -> None:
    """One huge value, all equal, one rotated value alone, nothing at all, and a token of each kind beside others."""
    layout = pack_trellis(*random_trellis(256, 8192, 2, "cuda"), bits=2, code=code)
    x = torch.randn(6, 8192, device="cuda", dtype=torch.float16)
    x[0] *= 1e-3
    x[0, 4711] = 3e3
    x[1] = 1
    x[2] = layout.input_scales  # after the scales' squares not flat, and far from Gaussian
    x[3] = 0
    x[4] *= 6e-5
    want = reference.linear(x, layout)
    y = torch.cat([linear(few, layout) for few in x.split(3)])  # more tokens are in 8 bits
    for got, exact in zip(y, want, strict=True):
        assert relative_error(got, exact) < 1e-3 if exact.any() else not got.any()


@pytest.mark.parametrize("launch", [(2, 1, 1), (16, 4, 1), (16, 2, 4)])
def test_every_trellis_launch_agrees(launch: tuple[int, ...]) -> None:
    warps, tiles, unroll = launch
    config = TrellisGemvConfig(num_warps=warps, tiles_per_cta=tiles, units_per_step=unroll)
    for code, bits, m in (("mul1", 2, 1), ("pair", 2, 4)):
        layout = pack_trellis(*random_trellis(80, 5120, bits, "cuda"), bits=bits, code=code)
        x = torch.randn(m, 5120, device="cuda", dtype=torch.float16)
        y = trellis_gemv(x, layout, None, config)
        assert relative_error(y, reference.linear(x, layout)) < 6e-4


def test_trellis_without_assembly() -> None:
    layout = pack_trellis(*random_trellis(64, 2048, 2.5, "cuda"), bits=2.5, code="mul1")
    for m in (3, 20):
        x = torch.randn(m, 2048, device="cuda", dtype=torch.float16)
        assert relative_error(trellis_dense(x, layout, None, asm=False), reference.linear(x, layout)) < 2e-3


@pytest.mark.parametrize("m", [1, 12])
def test_trellis_in_a_graph_replays_on_new_activations(m: int) -> None:
    layout = pack_trellis(*random_trellis(4096, 4096, 2, "cuda"), bits=2, code="pair")
    x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)
    linear(x, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(6):  # each waits for the one before it
            y = linear(y, layout) * 1e-2
    x.normal_()
    graph.replay()
    want = x
    for _ in range(6):
        want = linear(want, layout) * 1e-2
    assert torch.equal(y, want)
