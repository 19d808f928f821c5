from dataclasses import replace

import pytest
import torch

from requant.calibration.stats import LinearStats
from requant.errors import NumericalError
from requant.quantizers.correction import DAMP, corrected
from requant.quantizers.registry import METHODS, PRUNING_METHODS, find_method


def moments(x: torch.Tensor, z: torch.Tensor) -> LinearStats:
    return LinearStats(hessian=x.T @ x / len(x), cross_hessian=z.T @ x / len(x), tokens=len(x))


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer reads behind quantized layers, and what it read in the original."""
    z = torch.randn(600, 48) @ torch.randn(48, 48)
    return z + 0.3 * torch.randn(600, 48) * z.std(0) + 0.1 * z.roll(1, 1), z


def test_the_target_is_the_damped_least_squares_solution(inputs) -> None:
    x, z = inputs
    weight = torch.randn(5, 48)
    damp = (DAMP * (x * x).mean()).sqrt() * len(x) ** 0.5
    left = torch.cat([x, damp * torch.eye(48)]).double()
    right = torch.cat([z @ weight.T, damp * weight.T]).double()
    expected = torch.linalg.lstsq(left, right).solution.T.float()
    torch.testing.assert_close(corrected(weight, moments(x, z)), expected, rtol=1e-3, atol=1e-3)


def test_the_same_inputs_leave_the_weight(inputs) -> None:
    _, z = inputs
    weight = torch.randn(5, 48)
    torch.testing.assert_close(corrected(weight, moments(z, z)), weight)
    assert torch.equal(corrected(weight, LinearStats(hessian=z.T @ z)), weight)
    zeros = torch.zeros(48, 48)
    assert torch.equal(corrected(weight, LinearStats(hessian=zeros, cross_hessian=zeros)), weight)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param(name, most, marks=[pytest.mark.slow] if name == "trellis" else [])
        for methods, most in ((METHODS, 0.75), (PRUNING_METHODS, 1.0))
        for name, method in methods.items()
        if "hessian" in method.needs
    ],
)
def test_corrected_outputs_are_nearer_to_the_originals(inputs, name: str, most: float) -> None:
    """Of every method that reads Hessians of inputs, for a recipe may ask for corrected ones."""
    x, z = inputs
    weight = torch.randn(32, 48)
    method = find_method(name)
    stats = replace(moments(x, z), output_hessian=torch.eye(32), input_mean_abs=x.abs().mean(0))
    config = method.config(bits=4)

    def error(stats: LinearStats) -> float:
        found = method.quantize(weight, stats, config).dequantize()
        return float((x @ found.T - z @ weight.T).square().mean())

    assert error(stats) < most * error(replace(stats, cross_hessian=None))


def test_moments_that_overflow_are_refused(inputs) -> None:
    stats = moments(*inputs)
    assert stats.cross_hessian is not None
    stats.cross_hessian[1, 2] = float("inf")
    with pytest.raises(NumericalError, match="cross_hessian holds NaN or infinity: calibrate in float32"):
        METHODS["gptq"].quantize(torch.randn(3, 48), stats, METHODS["gptq"].config())
