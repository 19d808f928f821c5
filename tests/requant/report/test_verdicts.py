"""What a run's numbers say is wrong with it, and the option that mends it."""

import dataclasses

import pytest

from requant.report.report import BudgetSummary, CalibrationText
from requant.report.verdicts import verdicts

from .summaries import quality, summary


def test_verdicts_say_what_is_wrong_and_what_to_do() -> None:
    assert verdicts(summary()) == []
    damaged = verdicts(summary(after=dataclasses.replace(quality(400.0, 1.98), top1_agreement=0.32)))
    assert (
        len(damaged) == 1 and "The model is damaged: KL is 1.98" in damaged[0] and "times 7.2" in damaged[0]
    )
    assert (
        "32% of the most likely" in damaged[0]
        and "more --code-bits or --mode best --method trellis or --finetune-steps" in damaged[0]
    )
    few = verdicts(summary(after=dataclasses.replace(quality(26.0, 0.2), top1_agreement=0.5)))
    flat = quality(26.0, 0.004)  # of an untrained model, whose tokens are equally likely
    assert verdicts(summary(after=dataclasses.replace(flat, top1_agreement=0.47))) == []
    assert len(few) == 1 and "damaged" in few[0]
    grown = verdicts(summary(bytes_after=8_397_312))
    assert len(grown) == 1 and "did not shrink: 8.0 MiB before, 8.0 MiB now" in grown[0]


@pytest.mark.parametrize(
    ("written", "mode", "said"),
    [
        (None, "dense", "give more --code-bits or"),
        (None, "sparse", "give more --bits or"),
        (1_000_000, "dense", "give more --bits or"),
        (summary().bytes_after, "dense", "give a larger --size or"),
    ],
)
def test_the_remedy_names_the_option_of_the_run(written, mode, said) -> None:
    """--bits, --code-bits and --size exclude one another."""
    budget = written and BudgetSummary(
        target="", bytes=written, written=written, predictor="curvature", predicted=None, loss_curve={},
        embedding_bits=16, head_bits=16,
    )  # fmt: skip
    damaged = dataclasses.replace(quality(400.0, 1.98), top1_agreement=0.32)
    assert said in verdicts(summary(after=damaged, budget=budget, mode=mode))[0]


@pytest.mark.parametrize(
    ("predicted", "measured", "changes", "said"),
    [
        (0.02, 0.18, {}, True),
        (0.02, 0.18, {"embedding_and_head_delta": -0.15}, False),  # what was predicted for both
        (0.02, 0.03, {}, False),
        (0.001, 0.009, {}, False),  # noise
        (0.30, 0.10, {"mode": "dense"}, True),
        (0.30, 0.10, {"mode": "paper"}, False),  # the sparse part gained it
        (0.30, 0.10, {"mode": "dense", "seconds": {"finetuning": 5.0}}, False),  # training gained it
    ],
)
def test_a_prediction_that_was_wrong_is_said(predicted, measured, changes, said) -> None:
    budget = BudgetSummary(
        target="3bit", bytes=3, written=3, predictor="curvature", predicted=predicted, loss_curve={},
        embedding_bits=16, head_bits=16,
    )  # fmt: skip
    found = verdicts(summary(budget=budget, delta_loss=measured, **changes))
    assert [f"a loss of {predicted:.3f} nats" in sentence for sentence in found] == [True] * said


@pytest.mark.parametrize(
    ("predictor", "said"),
    [
        ("pqi", "; set budget.predictor: measured in the recipe, or"),
        ("measured", "; give more calibration text, or"),
    ],
)
def test_the_predictor_of_the_run_is_not_its_remedy(predictor, said) -> None:
    budget = BudgetSummary(
        target="3bit", bytes=3, written=3, predictor=predictor, predicted=0.02, loss_curve={},
        embedding_bits=16, head_bits=16,
    )  # fmt: skip
    (found,) = verdicts(summary(budget=budget, delta_loss=0.18))
    assert said in found


@pytest.mark.parametrize(
    ("method", "windows", "said"), [("gptq", 2, True), ("gptq", 16, False), ("rtn", 2, False)]
)
def test_too_little_text_is_a_cause_of_damage(method, windows, said) -> None:
    text = CalibrationText(
        name="demo", sha256="53" * 32, num_samples=windows, seq_len=64
    )  # matrices have 768 columns
    damaged = dataclasses.replace(quality(400.0, 1.98), top1_agreement=0.32)
    (found,) = verdicts(summary(after=damaged, method=method, calibration=text))
    assert ("give more calibration text (--num-samples) or more --code-bits" in found) is said
