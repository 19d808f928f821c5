import pytest
import torch
from torch.nn import functional

from requant.calibration import passes
from requant.calibration.fisher import position_fisher
from requant.errors import NumericalError
from requant.models.targets import find_linears


def fisher_by_loops(model, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """sum_t (g_t x_t')^2 / T, one token at a time, from inputs and output gradients that autograd gives."""
    targets = find_linears(model)
    total = {target.name: torch.zeros(target.shape, dtype=torch.float64) for target in targets}
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def hook_of(name: str):
        def hook(_module, inputs, output):
            seen[name] = (inputs[0], output)

        return hook

    handles = [target.module.register_forward_hook(hook_of(target.name)) for target in targets]
    for window in windows:
        embedded = model.get_input_embeddings()(window[None]).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0, :-1]
        loss = functional.cross_entropy(logits, window[1:], reduction="sum")
        outputs = [seen[target.name][1] for target in targets]
        for target, gradient in zip(targets, torch.autograd.grad(loss, outputs), strict=True):
            for g, x in zip(
                gradient.flatten(0, -2), seen[target.name][0].detach().flatten(0, -2), strict=True
            ):
                total[target.name] += torch.outer(g.double(), x.double()).square()
    for handle in handles:
        handle.remove()
    return {name: values / windows.numel() for name, values in total.items()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "opt"])
@pytest.mark.parametrize("recompute", [False, True])
def test_fisher_is_a_loop_over_tokens(
    tiny_model, tiny_windows, monkeypatch, recomputing, name: str, recompute: bool
) -> None:
    recomputing(recompute)
    model, windows = tiny_model(name), tiny_windows[:3, :12]
    expected = fisher_by_loops(model, windows)
    monkeypatch.setattr(
        "requant.calibration.batches.chunks", lambda windows, model, windows_each, **_: windows.split(2)
    )
    found = position_fisher(model, windows, find_linears(model))
    assert found.keys() == expected.keys()
    for matrix, fisher in expected.items():
        assert found[matrix].dtype == torch.float32 and (found[matrix] >= 0).all()
        torch.testing.assert_close(found[matrix].double(), fisher, rtol=1e-4, atol=1e-6 * fisher.max().item())
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_only_the_sites_asked_for(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    targets = find_linears(model)[3:5]
    some, every = (position_fisher(model, tiny_windows, s) for s in (targets, find_linears(model)))
    assert list(some) == [target.name for target in targets]
    assert all(torch.equal(some[name], every[name]) for name in some)


def test_it_is_the_mean_of_squares_not_the_square_of_the_mean(tiny_model, tiny_windows) -> None:
    """The square of a sequence-mean gradient is smaller by about the number of tokens."""
    model = tiny_model("llama")
    targets = find_linears(model)
    fisher = position_fisher(model, tiny_windows, targets)
    squares = {target.name: torch.zeros(target.shape) for target in targets}
    passes.gradient_pass(
        model, tiny_windows, targets, lambda target, g: squares[target.name].add_(g.square())
    )
    ratio = sum(v.sum() for v in fisher.values()) / sum(v.sum() for v in squares.values())
    assert ratio > tiny_windows.numel() / 10


def test_an_overflow_names_the_matrix(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    model.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(
        NumericalError, match=r"^model\.layers\.0\.self_attn\.q_proj: its gradients overflow; use --dtype"
    ):
        position_fisher(model, tiny_windows, find_linears(model))
