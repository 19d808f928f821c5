import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from requant.allocation import predictors
from requant.allocation.predictors import (
    curvature,
    integrated,
    measured,
    outlier_factors,
    predicted_losses,
    restored,
)
from requant.calibration.stats import LinearStats
from requant.evaluation.perplexity import perplexity_and_kl
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.block_ldlq import block_ldl, white_trace
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Recipe
from requant.recipe.yaml_files import from_dict
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import Workspace

from ..on_text import on_text

SLOW = {"trellis": pytest.mark.slow}


def statistics(n: int, k: int) -> tuple[torch.Tensor, LinearStats]:
    """A Gaussian matrix whose inputs and gradients are correlated and of unequal size."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=generator) * 0.1

    def covariance(size: int) -> torch.Tensor:
        mix = torch.randn(size, size, generator=generator) / size**0.5 + torch.eye(size)
        samples = torch.randn(8 * size, size, generator=generator) @ mix
        samples *= torch.linspace(0.5, 2, size)
        return samples.T @ samples / len(samples)

    hessian, output = covariance(k), covariance(n)
    fisher = output.diagonal()[:, None] * hessian.diagonal()
    return weight, LinearStats(hessian=hessian, output_hessian=output, fisher=fisher, tokens=1000)


@pytest.mark.parametrize(
    ("method", "options", "bits", "within"),
    [
        ("rtn", {"group_size": 64}, 4, 0.1),
        ("rtn", {"group_size": 64, "symmetric": True}, 5, 0.1),
        ("gptq", {"group_size": 64}, 4, 0.2),
        ("gptq", {"group_size": 64, "act_order": True}, 4, 0.2),
        ("kmeans", {}, 2, 0.2),
        ("kmeans", {}, 3, 0.2),
        ("lut", {}, 2, 0.3),
        ("lut", {}, 3, 0.3),
        pytest.param("trellis", {}, 2, 0.25, marks=SLOW["trellis"]),  # feedback widens what is coded
        pytest.param("trellis", {"two_sided": False}, 3, 0.15, marks=SLOW["trellis"]),
    ],
)
def test_the_closed_form_foretells_the_loss_of_the_method(
    method: str, options: dict, bits: int, within: float
) -> None:
    weight, stats = statistics(64, 256)
    config = METHODS[method].config(bits=bits, **options)
    error = METHODS[method].quantize(weight, stats, config).dequantize() - weight
    assert stats.hessian is not None and stats.output_hessian is not None and stats.fisher is not None
    if method in ("rtn", "kmeans"):
        found = (stats.fisher * error.square()).sum()
    else:
        found = ((stats.output_hessian @ error @ stats.hessian) * error).sum()
    foretold = METHODS[method].predicted_losses(weight, stats, config, [bits])[bits]
    assert foretold == pytest.approx(0.5 * found.item(), rel=within)


def test_white_trace_is_the_loss_of_white_errors_after_feedback() -> None:
    _, stats = statistics(16, 64)
    assert stats.hessian is not None
    factor = block_ldl(stats.hessian, damp=0.05)
    white = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(1))
    # E L = F, so a row of E is a row of F times the inverse of L
    inverse = torch.linalg.inv(factor + torch.eye(64))
    rows = white @ inverse
    mean = ((rows @ stats.hessian) * rows).sum(1).mean().item()
    trace, spread = white_trace(stats.hessian, damp=0.05)
    assert trace == pytest.approx(mean, rel=0.02)
    assert spread == pytest.approx(rows.square().mean().item(), rel=0.02)
    assert trace == pytest.approx(((inverse @ stats.hessian) * inverse).sum().item(), rel=1e-5)
    assert spread == pytest.approx(inverse.square().sum().item() / 64, rel=1e-5)


def test_a_hessian_of_zeros_loses_nothing() -> None:
    assert white_trace(torch.zeros(64, 64), damp=0.01) == (0.0, 1.0)


@pytest.fixture
def run(tiny_folder, tiny_text_file):
    recipe = Recipe(
        mode="dense",
        method="rtn",
        quantizer=METHODS["rtn"].config(bits=3),
        calibration=Calibration(num_samples=4, seq_len=32),
        evaluation=Evaluation(context=32, windows=2),
    )
    prepared = prepare(str(tiny_folder("llama")), on_text(recipe, tiny_text_file))
    return start(prepared, recipe, workspace=Workspace(None), quiet=True)


def test_measured_is_the_divergence_of_one_matrix_alone(run, tiny_text) -> None:
    weights = quantize_linears(run, None, label="")
    units = measured(run, weights)
    run.apply_original_weights()
    original = copy.deepcopy(run.model)
    target = run.targets[3]
    target.set_weight(weights[target.name].dequantize())
    quality = perplexity_and_kl(run.model, run.windows, text=tiny_text, reference=original)
    assert units[target.name] == pytest.approx(quality.mean_kl, rel=1e-3)
    assert units.keys() == {target.name for target in run.targets} and min(units.values()) > 0


def test_restored_is_what_one_original_saves_among_the_quantized(run, tiny_text) -> None:
    weights = quantize_linears(run, None, label="")
    units = restored(run, weights)
    run.apply_original_weights()
    original = copy.deepcopy(run.model)

    def kl() -> float:
        found = perplexity_and_kl(run.model, run.windows, text=tiny_text, reference=original).mean_kl
        assert found is not None
        return found

    run.apply_quantized_weights(weights)
    whole = kl()
    name, saved = max(units.items(), key=lambda item: item[1])
    target = next(target for target in run.targets if target.name == name)
    target.set_weight(run.original[name])
    assert saved == pytest.approx(whole - kl(), rel=1e-2)
    assert units.keys() == weights.keys() and min(units.values()) > 0


@pytest.mark.parametrize("predict", [measured, restored, integrated])
def test_measuring_leaves_the_model_as_it_was(run, predict) -> None:
    weights = quantize_linears(run, None, label="")
    run.apply_original_weights()
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    predict(run, weights)
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())


def test_pqi_has_a_floor(run) -> None:
    """The random model gains from some errors; no matrix may cost nothing, or it would get no bits at all."""
    units = integrated(run, quantize_linears(run, None, label=""))
    assert min(units.values()) > 0


def test_curvature_scales_with_what_an_error_costs(run) -> None:
    """Twice the weights of a matrix, with half the inputs of its readers, is four times the error."""
    widths = {target.name: [3] for target in run.targets}
    before = curvature(run, widths)
    name = run.targets[0].name
    doubled = dict(run.original) | {name: 2 * run.original[name]}
    after = curvature(dataclasses.replace(run, original=doubled), widths)
    assert after[name][3] == pytest.approx(4 * before[name][3], rel=1e-3)
    assert all(after[other] == before[other] for other in before if other != name)


@pytest.mark.parametrize("predictor", ["curvature", "measured", "restored", "pqi"])
def test_every_predictor_can_be_chosen(run, predictor: str) -> None:
    chosen = dataclasses.replace(
        run,
        recipe=dataclasses.replace(
            run.recipe, budget=from_dict({"budget": {"bits": 3.5, "predictor": predictor}}).budget
        ),
    )
    names = [target.name for target in run.targets]
    losses = predicted_losses(chosen, {name: [2, 3, 4] for name in names}, average=3.1)
    assert losses.keys() == {target.name for target in run.targets}
    assert all(found[2] > found[3] > found[4] > 0 for found in losses.values())
    if predictor == "measured":
        alone = measured(run, quantize_linears(run, None, label=""))
        assert {name: found[3] for name, found in losses.items()} == pytest.approx(alone)


def test_a_resumed_run_reads_what_was_predicted(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From JSON, whose keys are strings, come bits and fractions that equal those written, of the same types."""
    kept = dataclasses.replace(run, workspace=Workspace(tmp_path / "kept"))
    widths = {target.name: [2, 2.25] for target in run.targets}
    losses = {name: {2: 0.5, 2.25: 0.25} for name in widths}
    monkeypatch.setattr(predictors, "curvature", lambda *_: losses)
    monkeypatch.setattr(predictors, "remaining_loss", lambda *_: {0.0025: 0.75})
    monkeypatch.setitem(METHODS, "rtn", dataclasses.replace(METHODS["rtn"], outlier_cost=lambda *_: None))
    made = predicted_losses(kept, widths, average=2.0), outlier_factors(kept)
    monkeypatch.setattr(predictors, "curvature", None)
    monkeypatch.setattr(predictors, "remaining_loss", None)
    found = predicted_losses(kept, widths, average=2.0), outlier_factors(kept)
    assert found == made == (losses, {name: {0.0025: 0.75} for name in widths})
    assert all([type(bits) for bits in of] == [int, float] for of in found[0].values())
    with pytest.raises(TypeError):  # of other bits nothing is kept
        predicted_losses(kept, {name: [2, 3] for name in widths}, average=2.0)
