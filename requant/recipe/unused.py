"""Keys of a recipe that nothing in its run reads: a run warns of them. What would mislead is refused (`schema.py`)."""

import logging
from collections.abc import Collection

from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Detach, Finetune, Recipe, Recovery, Sensitivity

logger = logging.getLogger(__name__)


def warn_of_unused(recipe: Recipe, given: Collection[str]) -> None:
    """A warning for every key that is not at its default and changes nothing; `given` are the options beside the recipe.

    What only another mode reads is not warned of where an option chose the mode: it is the recipe's, for its own mode.
    """
    mode, budget, finetune = recipe.mode, recipe.budget, recipe.finetune
    has_budget = budget.bits is not None or budget.size is not None
    own_mode = "mode" not in given
    ranked = "sensitivity" in given or (own_mode and recipe.sensitivity.score != Sensitivity.score)
    published = [Detach(), *(Detach(**method.detach) for method in METHODS.values())]
    for key, unused, why in (
        (
            "--sensitivity" if "sensitivity" in given else "sensitivity.score",
            ranked and mode != "paper",
            f"it ranks the sparse part, which mode {mode} does not have; give --mode paper",
        ),
        (
            "detach",
            own_mode and mode != "paper" and recipe.detach not in published,
            f"it is the sparse part of mode paper, and this is mode {mode}; leave it out, or give --mode paper",
        ),
        *(
            (
                f"finetune.{name}",
                own_mode and mode != "best" and getattr(finetune, name) != getattr(Finetune, name),
                f"mode {mode} trains after all codes are made, without rounds; leave it out, or give --mode best",
            )
            for name in ("rounds", "hidden_weight")
        ),
        (
            "budget.predictor",
            not has_budget and budget.predictor != Budget.predictor,
            "without --bits or --size all codes have the same bits; leave it out, or give one of them",
        ),
        (
            "budget.first_round_weight",
            budget.first_round_weight is not None and not (recipe.trains_in_rounds and has_budget),
            "it weights predicted losses where mode best trains in rounds, under --bits or --size",
        ),
        (
            "recovery",
            recipe.recovery != Recovery() and not finetune.trains,
            "it says how the pruned model is trained, and finetune.steps is 0; give --finetune-steps 1 or more",
        ),
    ):
        if unused:
            logger.warning("%s changes nothing here: %s.", key, why)
