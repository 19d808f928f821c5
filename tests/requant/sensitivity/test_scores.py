import math

import pytest
import torch

from requant.calibration.fisher import position_fisher
from requant.calibration.passes import gradient_pass, mean_loss
from requant.calibration.stats import LinearStats
from requant.errors import NumericalError, RecipeError
from requant.formats.quantized_weight import QuantizedWeight
from requant.models.loading import load_model, load_tokenizer, resolve_source
from requant.models.targets import find_linears
from requant.quantizers.rtn import RtnConfig
from requant.quantizers.rtn import quantize as round_to_nearest
from requant.sensitivity.path import QuantizedPath, originals, signed_sum
from requant.sensitivity.pqi import NODES
from requant.sensitivity.scores import score_weights
from requant.sensitivity.sums import score_sums
from requant.text.sources import read_text
from requant.text.windows import token_windows


def path_of(model, bits: int = 4) -> QuantizedPath:
    targets = find_linears(model)
    quantized: dict[str, QuantizedWeight] = {
        target.name: round_to_nearest(target.weight(), LinearStats(), RtnConfig(bits=bits))
        for target in targets
    }
    return QuantizedPath(model=model, targets=targets, original=originals(targets), quantized=quantized)


def gradients(path: QuantizedPath, windows: torch.Tensor, t: float) -> dict[str, torch.Tensor]:
    total = {target.name: torch.zeros(target.shape) for target in path.targets}
    with path.at(t):
        gradient_pass(path.model, windows, path.targets, lambda target, g: total[target.name].add_(g))
    return total


def measured(path: QuantizedPath, windows: torch.Tensor) -> float:
    path.apply_weights(0.0)
    before = mean_loss(path.model, windows)
    path.apply_weights(1.0)
    return mean_loss(path.model, windows) - before


@pytest.mark.parametrize("nodes", NODES)
def test_node_weights_sum_to_one(nodes: str) -> None:
    assert math.fsum(weight for _, weight in NODES[nodes]) == pytest.approx(1, abs=1e-15)
    assert all(0 <= t <= 1 for t, _ in NODES[nodes])
    assert [t for t, _ in NODES[nodes]] == pytest.approx(
        [1 - t for t, _ in reversed(NODES[nodes])], abs=1e-15
    )


@pytest.mark.parametrize(
    ("nodes", "degree", "passes"),
    [("midpoint", 1, 1), ("gauss2", 3, 2), ("gauss4", 7, 4), ("simpson", 3, 5), ("plain32", 1, 32)],
)
def test_nodes_integrate_polynomials_exactly_to_their_degree(nodes: str, degree: int, passes: int) -> None:
    def integral(power: int) -> float:
        return math.fsum(weight * t**power for t, weight in NODES[nodes])

    for power in range(degree + 1):
        assert integral(power) == pytest.approx(1 / (power + 1), abs=1e-14)
    assert abs(integral(degree + 1) - 1 / (degree + 2)) > 1e-6
    assert len(NODES[nodes]) == passes


def test_the_path(trained_model) -> None:
    path = path_of(trained_model)
    for target in path.targets:
        w, quantized = path.original[target.name], path.quantized[target.name].dequantize()
        assert torch.equal(path.start(target), w) and torch.equal(path.step(target), quantized - w)
    for t in (0.0, 0.3, 1.0):
        path.apply_weights(t)
        for target in path.targets:
            torch.testing.assert_close(target.weight(), path.start(target) + t * path.step(target))
    path.apply_weights(0.0)
    assert all(torch.equal(target.weight(), path.original[target.name]) for target in path.targets)
    path.apply_weights(1.0)  # w + (w~ - w) would be w~ only nearly, and the checkpoint holds w~
    assert all(
        torch.equal(target.weight(), path.quantized[target.name].dequantize()) for target in path.targets
    )
    with path.at(0.5):
        assert not torch.equal(path.targets[0].weight(), path.quantized[path.targets[0].name].dequantize())
    assert torch.equal(path.targets[0].weight(), path.quantized[path.targets[0].name].dequantize())


def test_a_bfloat16_path_starts_and_ends_exactly(trained_model) -> None:
    path = path_of(trained_model.to(torch.bfloat16))
    assert all(w.dtype == torch.bfloat16 for w in path.original.values())
    path.apply_weights(0.37)
    path.apply_weights(0.0)
    assert all(torch.equal(target.parameter, path.original[target.name]) for target in path.targets)


def test_gradient_marginal_and_hessian_against_their_formulas(trained_model, tiny_windows) -> None:
    path = path_of(trained_model)
    found = {name: score_weights(name, path, tiny_windows) for name in ("gradient", "marginal", "hessian")}
    for t, name in ((0.0, "gradient"), (1.0, "marginal")):
        for matrix, g in gradients(path, tiny_windows, t).items():
            d = path.quantized[matrix].dequantize() - path.original[matrix]
            torch.testing.assert_close(found[name][matrix], g * d)
    with path.at(0.0):
        fisher = position_fisher(trained_model, tiny_windows, path.targets)
    for matrix, f in fisher.items():
        d = path.quantized[matrix].dequantize() - path.original[matrix]
        torch.testing.assert_close(found["hessian"][matrix], f * d**2 / 2)


@pytest.mark.parametrize("nodes", ["gauss2", "simpson"])
def test_pqi_is_the_weighted_mean_of_gradients_times_the_step(
    trained_model, tiny_windows, nodes: str
) -> None:
    path = path_of(trained_model)
    found = score_weights("pqi", path, tiny_windows, nodes=nodes)
    mean = {target.name: torch.zeros(target.shape) for target in path.targets}
    for t, weight in NODES[nodes]:
        for matrix, g in gradients(path, tiny_windows, t).items():
            mean[matrix] += weight * g
    for target in path.targets:
        torch.testing.assert_close(found[target.name], mean[target.name] * path.step(target))


@pytest.mark.parametrize("name", ["pqi", "hessian", "gradient", "marginal"])
def test_sums_need_no_scores(trained_model, tiny_text, tokenizer, monkeypatch, name: str) -> None:
    windows = token_windows(tiny_text, tokenizer, num_samples=96, seq_len=64)  # three batches
    path = path_of(trained_model)
    scores = score_weights(name, path, windows)
    expected = {matrix: signed_sum(values) for matrix, values in scores.items()}
    sizes = {matrix: values.abs().sum().item() for matrix, values in scores.items()}
    batches: list[str] = []
    step = QuantizedPath.step
    monkeypatch.setattr(QuantizedPath, "step", lambda own, t: batches.append(t.name) or step(own, t))
    found = score_sums(name, path, windows)
    assert len(batches) >= 3 * len(path.targets)  # every batch is multiplied with the step at once
    assert found.keys() == expected.keys()
    for matrix, total in found.items():
        assert total == pytest.approx(expected[matrix], rel=1e-5, abs=1e-6 * sizes[matrix])


@pytest.mark.parametrize("name", ["pqi", "hessian", "gradient", "marginal"])
def test_the_model_is_left_at_the_quantized_weights(trained_model, tiny_windows, name: str) -> None:
    path = path_of(trained_model)
    score_weights(name, path, tiny_windows)
    assert all(
        torch.equal(target.weight(), path.quantized[target.name].dequantize()) for target in path.targets
    )


@pytest.mark.parametrize(
    ("bits", "nodes", "error"), [(3, "gauss4", 2e-3), (2, "gauss4", 5e-3), (3, "gauss2", 2e-2)]
)
def test_the_sum_of_pqi_is_the_measured_loss(
    trained_model, tiny_text, tokenizer, bits: int, nodes: str, error: float
) -> None:
    windows = token_windows(tiny_text, tokenizer, num_samples=128, seq_len=32)
    path = path_of(trained_model, bits)
    predicted = sum(
        signed_sum(values) for values in score_weights("pqi", path, windows, nodes=nodes).values()
    )
    actual = measured(path, windows)
    assert actual > 0.002
    assert predicted == pytest.approx(actual, rel=error)


def test_the_sum_over_any_set_of_matrices_is_its_own_path(trained_model, tiny_windows) -> None:
    """With one matrix moved, PQI of that matrix is the loss of that matrix."""
    path = path_of(trained_model, 2)
    target = path.targets[6]
    alone = QuantizedPath(
        model=trained_model,
        targets=[target],
        original=path.original,
        quantized={target.name: path.quantized[target.name]},
    )
    path.apply_weights(0.0)
    found = score_weights("pqi", alone, tiny_windows, nodes="gauss4")
    assert signed_sum(found[target.name]) == pytest.approx(measured(alone, tiny_windows), rel=5e-3)


def test_nothing_moved_costs_nothing(trained_model, tiny_windows) -> None:
    path = path_of(trained_model)
    path.apply_weights(1.0)
    still = QuantizedPath(
        model=trained_model, targets=path.targets, original=originals(path.targets), quantized=path.quantized
    )
    for name in ("pqi", "hessian", "gradient", "marginal"):
        assert all((values == 0).all() for values in score_weights(name, still, tiny_windows).values())


def test_signed_sums_do_not_lose_small_terms() -> None:
    values = torch.tensor([[1e8, 1.0], [-1e8, 1.0]])
    assert signed_sum(values) == 2.0


def test_an_unknown_score_and_an_overflow(trained_model, tiny_windows) -> None:
    path = path_of(trained_model)
    with pytest.raises(
        RecipeError, match="score 'fisher' is unknown; there are: pqi, hessian, gradient, marginal"
    ):
        score_weights("fisher", path, tiny_windows)
    with pytest.raises(RecipeError, match="score 'fisher' is unknown"):
        score_sums("fisher", path, tiny_windows)
    path.quantized[path.targets[2].name].dense.scales[0, 0] = float("inf")
    for scored in (score_weights, score_sums):
        with pytest.raises(NumericalError):
            scored("gradient", path, tiny_windows)


def test_gauss2_on_the_demo_model() -> None:
    """Two windows of real text, 4 bits: dF within 2 %."""
    model = load_model("demo", device="cpu", dtype="auto")
    tokenizer = load_tokenizer(resolve_source("demo"))
    windows = token_windows(read_text("demo"), tokenizer, num_samples=2, seq_len=256)
    path = path_of(model)
    predicted = sum(signed_sum(values) for values in score_weights("pqi", path, windows).values())
    assert predicted == pytest.approx(measured(path, windows), rel=0.02)
