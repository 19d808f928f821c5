"""Weights of scaled rows, written and differentiated without autograd, are what autograd makes of them."""

from typing import Any

import pytest
import torch
from torch import nn

from requant.finetune import scaled_rows
from requant.finetune.reparametrized import reparametrized_weights
from requant.finetune.scaled_rows import ScaledRows
from requant.finetune.step import ReparametrizedWeight
from requant.formats.quantized_weight import trainable_params
from requant.models.targets import QuantTarget
from requant.run.context import RunContext


def derived(
    weight: Any, dtype: torch.dtype, *, transposed: bool, experts: str | None = None
) -> tuple[ReparametrizedWeight, Any]:
    """A parameter that holds nothing yet, and the trainable floats from which it follows."""
    n, k = weight.shape
    module = nn.Linear(*((n, k) if transposed else (k, n)), bias=False, dtype=dtype)
    target = QuantTarget(
        name="matrix", kind="matrix", block=0, module=module, transposed=transposed, experts=experts
    )
    run = RunContext.__new__(RunContext)  # of which nothing but its targets is read
    object.__setattr__(run, "targets", [target])
    params = {name: value.requires_grad_() for name, value in trainable_params(weight).items()}
    (found,) = reparametrized_weights(run, {"matrix": weight}, {"matrix": params})
    return found, params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, density, transposed, count", [
    ("trellis", 0.0, False, 1), ("bands", 0.0, False, 2), ("trellis", 0.0, True, 0), ("trellis", 0.05, False, 0),
    ("bands-grid", 0.0, False, 0), ("asymmetric", 0.0, False, 0),
])  # fmt: skip
def test_value_and_gradient_are_those_of_autograd(
    random_weight, kind: str, density: float, transposed: bool, count: int, dtype: torch.dtype
) -> None:
    weight, params = derived(random_weight(32, 64, kind=kind, density=density), dtype, transposed=transposed)
    assert len(weight.rows) == count
    for _ in range(2):  # gradients add up
        weight.apply()
        value = weight.value()
        assert torch.equal(weight.parameter.detach(), value.detach().to(dtype))
        gradient = torch.randn(value.shape).to(dtype)
        expected = torch.autograd.grad(value, list(params.values()), gradient.to(value.dtype))
        before = [0 if each.grad is None else each.grad.clone() for each in params.values()]
        weight.parameter.grad = gradient
        weight.backward()
        for each, old, own in zip(params.values(), before, expected, strict=True):
            torch.testing.assert_close(each.grad, old + own)


def test_matrices_of_one_kind_of_experts_may_be_computed_together(random_weight) -> None:
    weight = random_weight(32, 64, kind="trellis")
    plain, _ = derived(weight, torch.float32, transposed=False)
    gate, _ = derived(weight, torch.float32, transposed=False, experts="model.layers.0.mlp.experts")
    assert plain.stack is None
    assert gate.stack == ("model.layers.0.mlp.experts", "matrix")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_kernels_do_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((3, 70), (2048, 8192), (513, 2048)):
        unscaled, gradient = torch.randn(2, *shape, device="cuda").to(dtype)
        found = []
        for used in (True, False):
            rows = ScaledRows(scales=torch.linspace(-1, 1, shape[0], device="cuda"), unscaled=unscaled)
            written = torch.empty_like(unscaled)
            with monkeypatch.context() as patch:
                if not used:
                    patch.setattr(scaled_rows, "_kernels", lambda _: None)
                assert (rows._kernels(written) is not None) == used
                rows.write(written)
                rows.add_gradient(gradient)
            found.append((written, rows.scales.grad))
        (written, sums), (plain, plain_sums) = found
        assert torch.equal(written, plain)
        torch.testing.assert_close(sums, plain_sums, rtol=1e-4, atol=1e-4 * plain_sums.abs().max().item())
