"""What the tests of embeddings and heads in codes share."""

import torch

from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Calibration, Evaluation, Recipe

IDS = torch.arange(3 * 20).view(3, 20) % 250


def recipe_of(method: str = "rtn", **budget) -> Recipe:
    return Recipe(
        mode="dense",
        method=method,
        quantizer=METHODS[method].config(bits=4),
        calibration=Calibration(num_samples=2, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        budget=Budget(**budget),
        skip=("*.self_attn.*", "*.gate_proj", "*.up_proj") if method == "trellis" else (),  # for time
    )


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits
