"""Which routers the kernels take over: those that choose as theirs do, by numbers."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from requant.inference import router
from requant.models.experts import Experts, unfuse_experts


def chosen_by_torch(
    y: torch.Tensor, weight: torch.Tensor, chosen: int, *, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels compute, which do not run on a CPU."""
    weights, experts = torch.nn.functional.linear(y, weight).float().softmax(-1).topk(chosen)
    return experts.int(), (weights / weights.sum(-1, keepdim=True) if normalized else weights).to(y)


@pytest.fixture
def first_mixture(tiny_model, monkeypatch: pytest.MonkeyPatch):
    """`first_mixture("olmoe")`: the first module of that tiny model which has experts, unfused."""

    def first(name: str, **changes: Any) -> Any:
        monkeypatch.setattr(router, "choose_experts", chosen_by_torch)
        model = tiny_model(name, **changes)
        unfuse_experts(model)
        return next(own for own in model.modules() if isinstance(getattr(own, "experts", None), Experts))

    return first


@pytest.mark.parametrize(("name", "normalized"), [("qwen3-moe", None), ("mixtral", True), ("olmoe", False)])
def test_a_router_is_found_with_its_weights(first_mixture, name: str, normalized: bool | None) -> None:
    own = first_mixture(name)
    own.gate.weight.data.normal_()
    found = router.router_of(own)
    assert found is not None and own.experts.step is None
    assert found.normalized == (own.gate.norm_topk_prob if normalized is None else normalized)
    own.gate.weight = torch.nn.Parameter(torch.randn_like(own.gate.weight))  # it is read where it is
    y = torch.randn(7, found.weight.shape[1])
    experts, weights = found(y)
    calls = router._noted(own, own.experts, y)
    assert calls is not None and torch.equal(experts.long(), calls[0])
    torch.testing.assert_close(weights, calls[1])


@pytest.mark.parametrize("name", ["qwen2-moe", "deepseek-v3", "gpt-oss"])
def test_others_keep_their_own(first_mixture, name: str) -> None:
    """Shared experts; groups and sigmoids; a bias."""
    own = first_mixture(name)
    assert router.router_of(own) is None


def test_a_router_that_chooses_otherwise_keeps_its_own(first_mixture, monkeypatch, caplog) -> None:
    own = first_mixture("qwen3-moe")
    own.gate.weight.data.normal_()
    handle = own.gate.register_forward_hook(lambda *_: None)
    assert router.router_of(own) is None
    handle.remove()
    assert router.router_of(own) is not None
    given = own.gate.forward
    own.gate.forward = lambda x: given(-x)
    assert router.router_of(own) is None
    own.gate.forward = given

    def broken(*_given: Any, **_options: Any) -> Any:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(router, "choose_experts", broken)
    router._warn_once.cache_clear()
    assert router.router_of(own) is None and router.router_of(own) is None
    assert caplog.text.count("their kernels do not compile or start on this machine (RuntimeError)") == 1
