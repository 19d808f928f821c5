"""Peers that train by block: their grids, where a block begins and ends, and what training does to its output."""

import dataclasses

import pytest
import torch

from eval import block_training
from eval.block_training import TrainedGrid
from eval.common import Study
from requant.calibration.stats import LinearStats
from requant.finetune import compile_blocks
from requant.formats.quantized_weight import QuantizedWeight
from requant.models.targets import find_blocks
from requant.quantizers.rtn import RtnConfig, quantize
from requant.recipe.schema import Finetune
from requant.run.context import RunContext
from requant.run.quantize_linears import quantize_linears

TUNING = Finetune(steps=12, tokens_per_step=128, val_windows=1, lr=1e-2)


@pytest.fixture
def study(tiny_study) -> Study:
    return tiny_study(TUNING)


def run_of(study: Study, method: str, steps: int, **options) -> RunContext:
    return study.run(method, options=options, mode="dense", finetune=dataclasses.replace(TUNING, steps=steps))


def test_gradients_pass_through_rounding_and_stop_where_codes_are_clamped() -> None:
    weight = torch.tensor([[0.1, 0.32, -0.2, 5.0]])
    grid = TrainedGrid(
        latent=weight.requires_grad_(),
        scales=torch.tensor([[0.1]]).requires_grad_(),
        zero_points=torch.tensor([[2.2]]).requires_grad_(),
        bits=3,
        group_size=4,
    )
    value = grid.weight()
    torch.testing.assert_close(
        value, torch.tensor([[0.1, 0.3, -0.2, 0.5]])
    )  # code 7 of 0 to 7 is the largest
    value.sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[1.0, 1.0, 1.0, 0.0]]))
    # a clamped weight is (7 - z) s; of the others the zero point cancels, and round(w / s) - w / s is left of the scale
    torch.testing.assert_close(grid.zero_points.grad, torch.tensor([[-0.1]]))
    torch.testing.assert_close(grid.scales.grad, torch.tensor([[(3 - 3.2) + 5.0]]))


def test_gradients_of_a_group_are_sums_over_its_columns() -> None:
    """Also where the last group is smaller."""
    weight, arriving = torch.randn(6, 40), torch.randn(6, 40)
    grid = TrainedGrid.fitted(weight, RtnConfig(bits=3, group_size=16))
    found = grid.of_columns(grid.scales.requires_grad_())
    found.backward(arriving)
    for group, columns in enumerate((slice(0, 16), slice(16, 32), slice(32, 40))):
        assert (found[:, columns] == grid.scales[:, [group]]).all()
        torch.testing.assert_close(grid.scales.grad[:, group], arriving[:, columns].sum(1))


def test_a_grid_starts_as_rtn_and_is_stored_as_it_was_trained() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    config = RtnConfig(bits=3, group_size=16)
    grid = TrainedGrid.fitted(weight, config)
    stored = QuantizedWeight(dense=grid.rounded(), sparse=None)
    rounded = quantize(weight, LinearStats(), config)
    assert (stored.dense.codes == rounded.dense.codes).all()
    torch.testing.assert_close(grid.weight(), stored.dequantize())


def test_blocks_are_between_the_original_states(study: Study) -> None:
    run = run_of(study, "rtn", 1, bits=3, group_size=16)
    windows = run.train_windows
    kept = windows[: (len(windows) - 1) // 4 * 4]
    expected = study.reference(kept, output_hidden_states=True).hidden_states
    for index, block in enumerate(block_training.blocks(run)):
        torch.testing.assert_close(block.inputs, expected[index], atol=1e-4, rtol=1e-4)
        for target in block.targets:  # whatever is done to a block, the next one has the original's states
            target.set_weight(torch.zeros(target.shape))
        last = index + 1 == len(expected) - 1  # transformers gives the last states behind the final norm
        if not last:
            torch.testing.assert_close(block.outputs, expected[index + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler looks where torch warns
def test_blocks_are_compiled_once_for_all(study: Study, counting_compiler, monkeypatch) -> None:
    """Without a graph and with one, not once a block."""
    monkeypatch.setattr(compile_blocks, "MIN_STEPS_TO_COMPILE", 1)
    run = run_of(study, "rtn", 2, bits=2, group_size=16)
    block_training.efficient_qat(run)
    blocks = find_blocks(run.model)[1]
    assert len(blocks) > 1 and 0 < counting_compiler.frame_count <= 3
    assert not any("forward" in block.__dict__ for block in blocks)


@pytest.mark.parametrize(
    ("make", "method", "options"),
    [
        pytest.param(
            block_training.efficient_qat, "rtn", {"bits": 2, "group_size": 16}, marks=pytest.mark.slow
        ),
        # any method: these codes are quick
        pytest.param(block_training.qtip, "gptq", {"bits": 2, "group_size": 16}, marks=pytest.mark.slow),
        pytest.param(
            block_training.qtip,
            "trellis",
            {"bits": 2, "code": "3inst", "two_sided": False},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_starts_at_the_codes_alone_and_lowers_the_error_of_outputs(
    study: Study, make, method: str, options
) -> None:
    def error(weights) -> float:
        """Of the last hidden states, on windows that train."""
        run.apply_quantized_weights(weights)
        tokens = run.train_windows[:8]
        with torch.no_grad():
            last, wanted = (
                m(tokens, output_hidden_states=True).hidden_states[-1]
                for m in (study.prepared.model, study.reference)
            )
        run.apply_original_weights()
        return float((last - wanted).square().mean())

    run = run_of(study, method, 0, **options)
    alone = quantize_linears(run, None, label="quantize")
    untrained = make(run)
    assert all((untrained[name].dequantize() == alone[name].dequantize()).all() for name in alone)
    run = run_of(study, method, TUNING.steps, **options)
    trained = make(run)
    assert error(trained) < 0.95 * error(alone)
    for target in run.targets:
        assert (target.weight() == run.original[target.name]).all() and target.parameter.grad is None
        assert trained[target.name].dense.spec().bits == 2
