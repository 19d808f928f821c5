"""A run warns of what its recipe says for nothing."""

import pytest

from requant.errors import RecipeError
from requant.recipe.options import recipe_from_options, sparsify_recipe
from requant.recipe.shipped import available_recipes

options = recipe_from_options


def test_recovery_without_training_is_refused(caplog) -> None:
    with pytest.raises(RecipeError, match="--recover ast changes nothing without training"):
        sparsify_recipe(recover="ast", finetune_steps=0)
    assert sparsify_recipe(recover="ast").finetune.trains and sparsify_recipe(recover="ast", finetune_steps=1)
    assert not sparsify_recipe(recover="fixed", finetune_steps=0).finetune.trains
    for steps in (1, 0):  # a recipe's own
        assert not caplog.text
        options({"mode": "sparse", "method": "wanda", "recovery": {"method": "ast"}}, finetune_steps=steps)
    assert "recovery changes nothing here" in caplog.text


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({"bits": 2, "finetune_steps": 3}, False),
        ({"size": "9MB", "finetune_steps": 3}, False),
        ({"code_bits": 2, "finetune_steps": 3}, True),
        ({"bits": 2, "finetune_steps": 0}, True),
        ({"bits": 2, "finetune_steps": 3, "mode": "dense"}, True),
    ],
)
def test_a_weight_of_rounds_without_a_use_is_said(given: dict, warned: bool, caplog) -> None:
    assert options({"method": "trellis", "mode": "best", "budget": {"first_round_weight": 0.5}}, **given)
    assert ("budget.first_round_weight changes nothing here" in caplog.text) == warned
    caplog.clear()
    options({"method": "trellis", "mode": "best"}, **given)
    assert not caplog.text


@pytest.mark.parametrize(
    ("mode", "section", "values", "unused"),
    [
        ("dense", "detach", {"outlier_fraction": 0.01}, "detach changes nothing here: it is the sparse part of mode paper"),
        ("dense", "detach", {"outlier_fraction": 0.0025, "significant_fraction": 0.0}, None),  # awq's, as a run writes it
        ("paper", "detach", {"outlier_fraction": 0.01}, None),
        ("dense", "sensitivity", {"score": "marginal"}, "sensitivity.score changes nothing here: it ranks the sparse part"),
        ("best", "sensitivity", {"score": "marginal"}, "sensitivity.score changes nothing here"),
        ("best", "sensitivity", {"nodes": "gauss4"}, None),
        ("paper", "sensitivity", {"score": "marginal"}, None),
        ("sparse", "finetune", {"rounds": 2}, "finetune.rounds changes nothing here: mode sparse trains after all codes"),
        ("dense", "finetune", {"hidden_weight": 0.0}, "finetune.hidden_weight changes nothing here"),
        ("best", "finetune", {"rounds": 2, "hidden_weight": 0.0}, None),
        ("dense", "budget", {"predictor": "measured"}, "budget.predictor changes nothing here: without --bits or --size"),
        ("dense", "budget", {"predictor": "measured", "bits": 3}, None),
    ],
)  # fmt: skip
def test_keys_that_the_mode_does_not_read_are_said(
    caplog, mode: str, section: str, values: dict, unused: str | None
) -> None:
    method = "wanda" if mode == "sparse" else "lut"
    options({"mode": mode, "method": method, section: values})
    assert unused in caplog.text if unused else not caplog.text


def test_a_mode_by_option_leaves_what_another_reads_unsaid(caplog) -> None:
    """A recipe of mode paper in mode dense: its sparse part is what the option leaves out."""
    paper = {"mode": "paper", "detach": {"outlier_fraction": 0.01}, "sensitivity": {"score": "marginal"}}
    options(paper, mode="dense")
    assert not caplog.text
    options(paper, mode="dense", sensitivity="hessian")
    assert "--sensitivity changes nothing here" in caplog.text


def test_a_score_that_ranks_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    options(bits="3", mode="best", sensitivity="hessian")
    assert "which mode best does not have" in caplog.text
    caplog.clear()
    options(bits="3", mode="dense", sensitivity="hessian")
    assert "which mode dense does not have" in caplog.text
    caplog.clear()
    options(bits="3", mode="paper", sensitivity="hessian")
    assert not caplog.text


@pytest.mark.parametrize("name", available_recipes())
def test_no_recipe_that_comes_with_requant_has_an_unused_key(caplog, name: str) -> None:
    options(name)
    assert not caplog.text
