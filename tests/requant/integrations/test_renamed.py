"""Parameters that transformers renames while it loads."""

import torch
from torch import nn

from requant.integrations.transformers import cast_renamed


class Router(nn.Module):
    _keep_in_fp32_modules = None
    _keep_in_fp32_modules_strict = ("bias_of_choice",)

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2, bias=False)
        self.bias_of_choice = nn.Parameter(torch.zeros(2))
        self.later = nn.Parameter(torch.zeros(2))


def test_they_have_the_dtype_of_the_model() -> None:
    model = Router()
    cast_renamed(model, {"gate.weight": torch.bfloat16, "bias_of_choice": torch.bfloat16})
    assert model.gate.weight.dtype == torch.bfloat16
    assert model.bias_of_choice.dtype == model.later.dtype == torch.float32
