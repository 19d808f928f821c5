"""A recipe with every stage once, and the logits by which models are compared."""

import torch

from requant.recipe.schema import Calibration, Detach, Evaluation, Recipe

from ..brief_settings import brief_settings

IDS = torch.arange(40)[None] * 7 % 256


def tiny_recipe(method: str = "kmeans", **changes) -> Recipe:
    """Two windows of 32 tokens, every stage once."""
    settings = {
        "mode": "paper",
        "method": method,
        "quantizer": brief_settings(method, bits=3),
        "calibration": Calibration(num_samples=2, seq_len=32),
        "evaluation": Evaluation(context=32, windows=2, samples=0),
        "detach": Detach(outlier_fraction=0.01, outlier_rule="uniform", significant_fraction=0.01, steps=1),
    }
    return Recipe(**(settings | changes))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits
