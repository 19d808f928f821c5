"""The public operations on the CPU: values, operator contract, tracing, messages, memory."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from requant_kernels import TrellisLayout, dequantize, linear, lookup, ops, pack_trellis
from requant_kernels.fallback import reference, torch_fallback
from requant_kernels.flat_layout import flatten, unflatten
from requant_kernels.ops import lookup_refusal
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis.gemm_sm90_launch import ALONE, PdlPosition
from requant_kernels.trellis.operands import RotatedActivations

from .cases import Case, random_csr, random_layout, random_trellis, relative_error

CASES = [
    Case(format="grid", bits=2, n=37, k=300, m=1, density=0.02, bias=True),
    Case(
        format="grid",
        bits=5,
        n=20,
        k=700,
        m=5,
        zero_points=True,
        column_scales=True,
        density=0.02,
        int8_residuals=True,
    ),
    Case(format="codebook", bits=3, n=33, k=515, m=3, density=0.05),
    Case(format="codebook", bits=8, n=16, k=256, m=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear_and_dequantize(case: Case) -> None:
    torch.manual_seed(0)
    layout = random_layout(case, "cpu")
    x, bias = torch.randn(2, case.m, case.k), torch.randn(case.n) if case.bias else None
    assert relative_error(linear(x, layout, bias), reference.linear(x, layout, bias)) < 1e-5
    assert relative_error(dequantize(layout, torch.float32), reference.weight(layout)) < 1e-6


def test_tiles_at_a_time_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = random_layout(CASES[0], "cpu")
    x = torch.randn(4, 300)
    whole = linear(x, layout)
    monkeypatch.setattr(torch_fallback, "WEIGHTS_AT_ONCE", 16 * 300)
    monkeypatch.setattr(torch_fallback, "RESIDUALS_AT_ONCE", 7)
    assert relative_error(linear(x, layout), whole.double()) < 1e-6


def test_activations_that_layers_share_are_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only for the layers whose kernel reads them so."""
    layouts = [
        pack_trellis(*random_trellis(16, 64, bits, "cpu"), bits=bits, code="mul1") for bits in (2, 4, 3)
    ]
    given = RotatedActivations(values=torch.zeros(80, 64), scales=None)
    made: list[RotatedActivations] = []
    seen: list[RotatedActivations] = []

    def quantize(x: RotatedActivations) -> RotatedActivations:
        made.append(RotatedActivations(values=x.values.to(torch.int8), scales=torch.ones(80)))
        return made[-1]

    def product(x: RotatedActivations, layout: TrellisLayout, config: None) -> torch.Tensor:
        seen.append(x)
        return torch.zeros(1, 80, layout.n)

    exact = SimpleNamespace(name="float16", overlaps=False, module=SimpleNamespace(product=product))
    int8 = SimpleNamespace(
        name="int8", overlaps=False, module=SimpleNamespace(product=product, quantize=quantize)
    )
    kernel_of = {layout.bits: exact if layout.bits == 4 else int8 for layout in layouts}
    monkeypatch.setattr(ops, "dispatch", lambda layout, tokens, device: (kernel_of[layout.bits], None))
    monkeypatch.setattr(ops, "dispatch_group", lambda *_: None)
    monkeypatch.setattr(ops, "module_of", lambda kernel: kernel.module)
    ops.products([given] * 3, layouts, [None] * 3)
    assert len(made) == 1 and seen[0] is made[0] and seen[1] is given and seen[2] is made[0]
    other = RotatedActivations(values=torch.ones(80, 64), scales=None)
    ops.products([given, other], [layouts[0], layouts[2]], [None] * 2)
    assert len(made) == 3 and bool(seen[-1].values.all())


def test_products_of_the_same_activations_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all kernels can; each knows how many CTAs are before it."""
    layouts = [pack_trellis(*random_trellis(n, 256, 2, "cpu"), bits=2, code="mul1") for n in (256, 128, 64)]
    given, config = RotatedActivations(values=torch.zeros(40, 256), scales=None), GemmSm90Config(num_warps=4)
    positions: list[PdlPosition] = []

    def product(
        x: RotatedActivations, layout: TrellisLayout, config: object, position: PdlPosition = ALONE
    ) -> torch.Tensor:
        positions.append(position)
        return torch.zeros(1, 40, layout.n)

    kernel = SimpleNamespace(name="float16", overlaps=True, module=SimpleNamespace(product=product))
    monkeypatch.setattr(ops, "dispatch", lambda *_: (kernel, config))
    monkeypatch.setattr(ops, "dispatch_group", lambda *_: None)
    monkeypatch.setattr(ops, "module_of", lambda kernel: kernel.module)
    ops.products([given] * 3, layouts, [None] * 3)
    assert positions == [
        PdlPosition(first=True, last=False, ctas_before=0),
        PdlPosition(first=False, last=False, ctas_before=4),
        PdlPosition(first=False, last=True, ctas_before=6),
    ]
    ops.products([given], layouts[:1], [None])
    assert positions[3:] == [ALONE]
    kernel.overlaps = False
    ops.products([given] * 2, layouts[:2], [None] * 2)
    assert positions[4:] == [ALONE] * 2


def test_operator_contract_and_tracing() -> None:
    layout = random_layout(CASES[0], "cpu")
    x = torch.randn(3, 300)
    torch.library.opcheck(torch.ops.requant.linear, (x, None, *flatten(layout)))
    torch.library.opcheck(torch.ops.requant.dequantize, (torch.float32, *flatten(layout)))
    sparse = random_csr(37, 300, 0.05, True, "cpu")
    trellis = pack_trellis(*random_trellis(37, 300, 2, "cpu"), bits=2, code="mul1", sparse=sparse)
    torch.library.opcheck(torch.ops.requant.trellis_linear, (x, None, *flatten(trellis)))
    assert relative_error(linear(x, trellis), reference.linear(x, trellis)) < 1e-5
    assert relative_error(dequantize(trellis, torch.float32), reference.weight(trellis)) < 1e-6
    assert flatten(unflatten(*flatten(trellis))) == flatten(trellis)
    plain = inspect.unwrap(linear)  # the type checks of the tests are not part of a server's graph
    traced = torch.compile(lambda t: plain(t, layout) + 1, fullgraph=True, backend="eager")
    assert torch.equal(traced(x), linear(x, layout) + 1)
    assert linear(x[:0], layout).shape == (0, 37)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("k", "group", "zeros", "scaled"), [(300, 64, True, False), (96, 96, False, True)])
def test_rows_are_those_of_the_matrix(bits: int, k: int, group: int, zeros: bool, scaled: bool) -> None:
    case = Case(
        format="grid", bits=bits, n=37, k=k, m=1, group_size=group, zero_points=zeros, column_scales=scaled
    )
    layout, tokens = random_layout(case, "cpu"), torch.tensor([[0, 36, 5], [8, 8, 17]])
    rows = lookup(tokens, layout, torch.float32)
    assert torch.equal(rows, dequantize(layout, torch.float32)[tokens])
    own = layout.packed_codes, layout.scales, layout.zero_points, layout.column_scales
    sizes = layout.n, layout.k, layout.bits, layout.group_size, layout.kernel_group
    torch.library.opcheck(torch.ops.requant.lookup, (tokens.flatten(), torch.float16, *own, *sizes))
    for outside in (-1, 37):  # a row of the last tile that pads
        with pytest.raises(IndexError, match="tokens are 0 to 36 here"):
            lookup(torch.tensor([outside]), layout, torch.float32)
    with pytest.raises(ValueError, match="a grid without residuals"):
        lookup(tokens, random_layout(CASES[0], "cpu"), torch.float32)


@pytest.mark.parametrize("rotates", [True, False])
def test_rows_of_a_trellis(rotates: bool) -> None:
    codes, input_scales, output_scales = random_trellis(37, 208, 2, "cpu")
    layout = pack_trellis(
        codes, input_scales if rotates else None, output_scales, bits=2, code="mul1", rotates_output=False
    )
    tokens = torch.tensor([0, 36, 5])
    own = (
        [layout.packed_codes],
        layout.input_scales,
        [layout.output_scales],
        layout.k,
        [layout.bits],
        layout.code,
    )
    torch.library.opcheck(torch.ops.requant.trellis_lookup, (tokens, torch.float16, *own))
    plain = inspect.unwrap(lookup)
    traced = torch.compile(lambda t: plain(t, layout, torch.float32) + 1, fullgraph=True, backend="eager")
    assert torch.equal(traced(tokens), lookup(tokens, layout, torch.float32) + 1)


def test_matrices_without_rows_say_why() -> None:
    codes, tokens = random_trellis(32, 64, 2, "cpu"), torch.tensor([0])
    sparse = random_csr(32, 64, 0.05, False, "cpu")
    for options, why in (
        ({"rotates_output": True}, "a trellis whose output is not rotated"),
        ({"rotates_output": False, "parts": (16, 16)}, "not joined of parts"),
        ({"rotates_output": False, "sparse": sparse}, "a trellis without residuals: pack it without"),
    ):
        layout = pack_trellis(*codes, bits=2, code="mul1", **options)
        with pytest.raises(ValueError, match=why):
            lookup(tokens, layout, torch.float32)
        assert why in str(lookup_refusal(layout))
    assert "not in a codebook" in str(lookup_refusal(random_layout(CASES[3], "cpu")))


def test_refusals_name_both_values() -> None:
    layout = random_layout(CASES[0], "cpu")
    with pytest.raises(ValueError, match="x has 12 features, but the packed matrix takes 300"):
        linear(torch.randn(1, 12), layout)


def test_import_needs_no_triton() -> None:
    """Importing the package must not import Triton, which is not there on every platform."""
    code = "import sys; sys.modules['triton'] = None; import requant_kernels"
    root = Path(__file__).parents[2] / "kernels"
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
