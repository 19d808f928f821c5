import pytest
import torch

from requant.calibration.hessian import input_statistics
from requant.calibration.hidden_states import HiddenStateCache
from requant.models.targets import find_linears


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "gpt2", "gpt-neox", "phi3"])
def test_going_on_is_starting_again(tiny_model, tiny_windows, name: str) -> None:
    """After changed weights, a block has the same statistics from its cache as from the first token embedding."""
    model = tiny_model(name)
    targets = find_linears(model)
    cache = HiddenStateCache(model, tiny_windows)
    for target in targets:
        if target.block == 0:
            target.set_weight(target.weight() * 1.1)
    late = [target for target in targets if target.block == 1]
    whole = input_statistics(model, tiny_windows, late)
    cache.advance_to(1)
    resumed = input_statistics(model, tiny_windows, late, cache=cache)
    for target in late:
        assert torch.equal(whole[target.name].hessian, resumed[target.name].hessian)


def test_no_block_runs_without_need(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    calls: list[int] = []
    for index, block in enumerate(model.model.layers):
        block.self_attn.register_forward_pre_hook(lambda _m, _i, index=index: calls.append(index))
    first, last = ([s for s in find_linears(model) if s.block == block] for block in (0, 1))
    cache = HiddenStateCache(model, tiny_windows)
    input_statistics(model, tiny_windows, first, cache=cache)
    assert set(calls) == {0}
    cache.advance_to(1)
    calls.clear()
    input_statistics(model, tiny_windows, last, cache=cache)
    assert set(calls) == {1}
    assert all("forward" not in block.__dict__ for block in model.model.layers)
