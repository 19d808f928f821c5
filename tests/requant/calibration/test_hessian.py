import pytest
import torch

from requant.calibration.collect import bytes_needed, collect
from requant.calibration.hessian import input_statistics
from requant.calibration.hidden_states import HiddenStateCache
from requant.errors import NumericalError
from requant.models.targets import find_linears

SIBLINGS = {
    "llama": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "gemma3": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "phi3": [{"qkv_proj"}, {"o_proj"}, {"gate_up_proj"}, {"down_proj"}],
    "opt": [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}],
    "gpt-neox": [{"query_key_value"}, {"dense"}, {"dense_h_to_4h"}, {"dense_4h_to_h"}],
}


@torch.no_grad()
def inputs_of(model, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}

    def hook_of(name: str):
        return lambda _module, inputs: found.setdefault(name, []).append(inputs[0].flatten(0, -2).double())

    handles = [
        target.module.register_forward_pre_hook(hook_of(target.name)) for target in find_linears(model)
    ]
    for window in windows:
        model(input_ids=window[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("name", [*SIBLINGS, "gpt2"])
def test_hessian_is_the_second_moment(tiny_model, tiny_windows, monkeypatch, name: str) -> None:
    model = tiny_model(name)
    monkeypatch.setattr(
        "requant.calibration.batches.chunks",
        lambda windows, model, windows_each, **_: windows.split(3),
    )
    found = input_statistics(model, tiny_windows, find_linears(model))
    for matrix, x in inputs_of(model, tiny_windows).items():
        hessian = x.T @ x / len(x)
        scale = hessian.abs().max().item()
        torch.testing.assert_close(found[matrix].hessian.double(), hessian, rtol=1e-4, atol=1e-5 * scale)
        torch.testing.assert_close(found[matrix].mean_abs.double(), x.abs().mean(0), rtol=1e-4, atol=1e-6)
        assert len(x) == tiny_windows.numel()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_share_one_hessian(tiny_model, tiny_windows, name: str) -> None:
    model = tiny_model(name)
    found = input_statistics(model, tiny_windows, find_linears(model))
    for block in range(model.config.num_hidden_layers):
        targets = [target for target in find_linears(model) if target.block == block]
        groups: dict[int, set[str]] = {}
        for target in targets:
            groups.setdefault(id(found[target.name]), set()).add(target.kind)
        assert sorted(map(sorted, groups.values())) == sorted(map(sorted, SIBLINGS[name]))


def test_collect_gives_what_is_needed_and_no_more(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    targets = find_linears(model)
    fields = {"hessian", "input_mean_abs", "fisher"}
    for needs in ({"fisher"}, {"hessian"}, {"input_mean_abs"}, {"hessian", "fisher"}, fields):
        found = collect(model, tiny_windows, targets, needs=frozenset(needs))
        for target in targets:
            stats = found[target.name]
            assert stats.tokens == tiny_windows.numel()
            for name in fields:
                assert (getattr(stats, name) is not None) == (name in needs)
            size = sum(4 * getattr(stats, name).numel() for name in needs)
            assert bytes_needed([target], frozenset(needs)) == {0: size}


def test_a_matrix_that_never_runs_is_named(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(
        NumericalError, match=r"model\.layers\.1\.mlp\.gate_proj was never called .* --skip model"
    ):
        input_statistics(model, tiny_windows, find_linears(model))
    model.model.layers[0].mlp.forward = lambda x: x
    with pytest.raises(
        NumericalError, match=r"nor were 5 others; .* text does not reach: --skip '\*\.mlp\.\*'\.$"
    ):
        input_statistics(model, tiny_windows, find_linears(model))


def test_an_overflow_is_an_error(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj.weight.mul_(1e38)
    with pytest.raises(NumericalError, match="inputs overflow; use --dtype"):
        input_statistics(model, tiny_windows, find_linears(model))


def test_cross_moments_with_a_reference(tiny_model, tiny_windows, monkeypatch) -> None:
    monkeypatch.setattr(
        "requant.calibration.batches.chunks",
        lambda windows, model, windows_each, **_: windows.split(3),
    )
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    found = input_statistics(
        model, tiny_windows, find_linears(model), reference=HiddenStateCache(other, tiny_windows)
    )
    x, z = inputs_of(model, tiny_windows), inputs_of(other, tiny_windows)
    for name, statistics in found.items():
        cross = z[name].T @ x[name] / len(x[name])
        scale = 1e-5 * cross.abs().max().item()
        torch.testing.assert_close(statistics.cross.double(), cross, rtol=1e-4, atol=scale)
    assert not any(module._forward_pre_hooks for one in (model, other) for module in one.modules())
    stats = collect(model, tiny_windows, find_linears(model)[:1], needs=frozenset({"hessian"}))
    assert all(one.cross_hessian is None for one in stats.values())
