"""The KL of validation: its mean, and the precision of products that it is computed in."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from requant.finetune import loss
from requant.finetune.divergence import kl
from requant.finetune.teacher import Teacher
from requant.models.targets import find_linears


def test_it_is_the_mean_over_all_positions(tiny_model) -> None:
    original = tiny_model("llama")
    model = copy.deepcopy(original)
    with torch.no_grad():
        for target in find_linears(model):
            target.parameter.mul_(1.05)
    windows = torch.randint(0, 200, (4, 16))
    with torch.no_grad():
        found, expected = (each(windows).logits for each in (model, original))
    mean = loss.mean_kl(model, Teacher(original, windows), windows)
    assert mean == pytest.approx(kl(found, expected).item() / windows.numel(), rel=1e-4)


@pytest.mark.parametrize(("device", "inside"), [("cuda", "high"), ("cpu", "highest")])
@pytest.mark.parametrize("fails", [False, True])
def test_products_are_in_tf32_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, inside: str, fails: bool
) -> None:
    """Only while it is computed, and also where that fails."""
    seen: list[str] = []

    def loss_sum(model: Any, teacher: Any, tokens: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        if fails:
            raise RuntimeError("memory")
        return torch.tensor(6.0)

    windows = torch.zeros(2, 3, dtype=torch.int64)
    monkeypatch.setattr(loss, "loss_sum", loss_sum)
    monkeypatch.setattr(loss, "rounds", lambda windows, *_, **__: enumerate(windows.split(1)))
    model, teacher = Mock(spec=PreTrainedModel, device=torch.device(device)), Mock(spec=Teacher)
    if fails:
        with pytest.raises(RuntimeError, match="memory"):
            loss.mean_kl(model, teacher, windows)
    else:
        assert loss.mean_kl(model, teacher, windows) == 2.0
    assert seen == [inside] * (1 if fails else 2)
    assert torch.get_float32_matmul_precision() == "highest"
