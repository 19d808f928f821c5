"""What is compiled before the weights are read is what the checks of a loading model launch."""

import pytest
import torch

from requant.checkpoint.validate import read_header
from requant.inference import compile_while_loading as ahead
from requant.inference.convert import convert_to_kernels
from requant.inference.kernel_check import TOKENS, KernelCheck, kind_of
from requant.inference.load import load


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> set:
    """The kinds of matrices that are checked from now on."""
    found = set()
    once = KernelCheck.once
    monkeypatch.setattr(
        KernelCheck, "once", lambda self, kind, *rest: (found.add(kind), once(self, kind, *rest))
    )
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("gpt-neox", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["codebook", "trellis", "trellis-int8"])
def test_every_kind_that_is_checked_was_expected(make_checkpoint, checked: set, name: str, kind: str) -> None:
    folder, _ = make_checkpoint(name, kind=kind, density=0.0)
    specs = read_header(folder).modules
    expected = {kind_of(layout) for layout in ahead.expected_layouts(specs, torch.device("cpu"))}
    convert_to_kernels(load(folder), device="cpu")
    assert expected == checked and 0 < len(checked) < len(specs)


@pytest.mark.parametrize(("kind", "density"), [("codebook", 0.05), ("symmetric", 0.0)])
def test_residuals_and_what_no_kernel_takes_are_left_to_the_checks(
    make_checkpoint, kind: str, density: float
) -> None:
    specs = read_header(make_checkpoint("llama", kind=kind, density=density)[0]).modules
    assert not list(ahead.expected_layouts(specs, torch.device("cpu")))


def test_memory_that_is_too_short_does_not_end_the_loading(monkeypatch) -> None:
    def short(*_: object) -> None:
        asked.append(True)
        raise torch.OutOfMemoryError("CUDA out of memory")

    asked: list[bool] = []
    monkeypatch.setattr(ahead, "expected_layouts", short)
    ahead.compile_while_loading({}, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert asked


def test_experts_stay_apart() -> None:
    names = [
        "lm_head",
        "h.mlp.up_proj",
        "h.mlp.gate_proj",
        "h.mlp.experts.3.gate_proj",
        "h.mlp.experts.3.up_proj",
    ]
    assert sorted(ahead.siblings(names)) == [
        ["h.mlp.experts.3.gate_proj"], ["h.mlp.experts.3.up_proj"], ["h.mlp.gate_proj", "h.mlp.up_proj"], ["lm_head"],
    ]  # fmt: skip


def test_the_products_of_the_checks_are_compiled_and_nobody_waits(make_checkpoint, monkeypatch) -> None:
    products, waits = [], []

    def compile_ahead(calls, *, wait: bool = True) -> None:
        waits.append(wait)
        calls()

    monkeypatch.setattr("requant_kernels.common.compile_ahead.compile_ahead", compile_ahead)
    monkeypatch.setattr(
        ahead, "multiply", lambda x, layout, bias: products.append((len(x), x.shape[1] == layout.k))
    )
    specs = read_header(make_checkpoint("llama", kind="trellis", density=0.0)[0]).modules
    ahead.compile_while_loading(specs, device=torch.device("cpu"), dtype=torch.bfloat16)
    kinds = len({kind_of(layout) for layout in ahead.expected_layouts(specs, torch.device("cpu"))})
    assert waits == [False] and products == kinds * [(tokens, True) for tokens in TOKENS]
