import pytest
import torch
from torch.nn import functional

from requant.calibration.collect import bytes_needed, collect
from requant.calibration.hessian import input_statistics
from requant.calibration.output_hessian import SEED, output_hessians
from requant.calibration.passes import sample
from requant.errors import NumericalError
from requant.models import mixed_precision
from requant.models.experts import unfuse_experts
from requant.models.targets import QuantTarget, find_linears


@pytest.mark.parametrize("recompute", [False, True])
def test_is_the_mean_outer_product_of_the_gradients(
    tiny_model, tiny_windows, recomputing, recompute: bool
) -> None:
    recomputing(recompute)
    model, windows = tiny_model("llama"), tiny_windows[:3, :12]
    target = find_linears(model)[5]
    seen: list[torch.Tensor] = []
    handle = target.module.register_forward_hook(lambda _m, _i, output: seen.append(output))
    expected = torch.zeros(target.shape[0], target.shape[0])
    generator = torch.Generator().manual_seed(SEED)
    every = model(input_ids=windows, use_cache=False).logits[:, :-1]
    seen.clear()
    for window, drawn in zip(windows, sample(every.flatten(0, 1), generator).view(3, -1), strict=True):
        embedded = model.get_input_embeddings()(window[None]).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0, :-1]
        loss = functional.cross_entropy(logits, drawn, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, [seen.pop()])
        expected += torch.einsum("btn,btm->nm", gradient, gradient)
    handle.remove()
    found = output_hessians(model, windows, [target])
    assert list(found) == [target.name]
    expected /= windows.numel()
    torch.testing.assert_close(found[target.name], expected, rtol=1e-4, atol=1e-6 * float(expected.max()))
    assert not any(module._forward_hooks for module in model.modules())


def test_tokens_are_drawn_by_their_probability() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0]).expand(40_000, 4)
    drawn = sample(logits, torch.Generator().manual_seed(1)).bincount(minlength=4) / 40_000
    torch.testing.assert_close(drawn, logits[0].softmax(0), rtol=0, atol=0.01)  # four standard deviations


def test_the_trace_is_that_of_the_curvature_of_the_divergence(tiny_model, tiny_windows) -> None:
    """At the head, the Fisher matrix of a row of logits is diag(p) - p p': its trace is 1 - |p|^2 in the mean."""
    model, windows = tiny_model("llama"), tiny_windows.repeat(8, 1)
    head = QuantTarget(name="lm_head", kind="lm_head", block=0, module=model.lm_head, transposed=False)
    found = output_hessians(model, windows, [head])["lm_head"].trace()
    p = model(input_ids=windows, use_cache=False).logits[:, :-1].softmax(-1)
    expected = (1 - p.square().sum(-1)).sum() / windows.numel()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3-moe"])
def test_their_pass_sees_the_inputs_too(
    tiny_model, tiny_windows, monkeypatch, name: str, recompute: bool
) -> None:
    """As a forward pass of their own does: the same numbers, siblings as one tensor, every token of an expert once."""
    model = tiny_model(name)
    unfuse_experts(model)
    targets = find_linears(model)
    monkeypatch.setattr("requant.calibration.batches.chunks", lambda windows, *_, **__: windows.split(3))
    monkeypatch.setattr("requant.calibration.batches.RECOMPUTE_ABOVE", 0 if recompute else 10**12)
    separate = input_statistics(model, tiny_windows, targets)
    alone = output_hessians(model, tiny_windows, targets)
    needs = frozenset({"hessian", "output_hessian"})
    together = collect(model, tiny_windows, targets, needs=needs)
    assert list(together) == [target.name for target in targets]
    for matrix, stats in together.items():
        assert stats.tokens == separate[matrix].tokens
        assert stats.hessian is not None and not stats.hessian.requires_grad
        torch.testing.assert_close(stats.hessian, separate[matrix].hessian, rtol=1e-5, atol=1e-6)
        assert stats.output_hessian is not None
        assert torch.equal(stats.output_hessian, alone[matrix])
    shared = [len({id(each[matrix].hessian) for matrix in each}) for each in (together, separate)]
    assert shared[0] == shared[1]
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_in_float32_are_multiplied_as_in_training(
    tiny_model, tiny_windows, monkeypatch, recompute: bool
) -> None:
    """In bfloat16 on a GPU, here told to a CPU: G is float32 and moves by its rounding alone."""
    model, dtypes = tiny_model("llama"), set()
    targets = find_linears(model)
    monkeypatch.setattr("requant.calibration.batches.RECOMPUTE_ABOVE", 0 if recompute else 10**12)
    exact = output_hessians(model, tiny_windows, targets)
    monkeypatch.setitem(mixed_precision.PRODUCTS, "cpu", torch.bfloat16)
    for target in targets:
        target.module.register_forward_hook(lambda _m, _i, y: dtypes.add(y.dtype))
    rounded = output_hessians(model, tiny_windows, targets)
    assert dtypes == {torch.bfloat16}
    for name, found in rounded.items():
        assert found.dtype == torch.float32 and not torch.equal(found, exact[name])
        assert (found - exact[name]).norm() < 0.05 * exact[name].norm()
    dtypes.clear()
    output_hessians(model.half(), tiny_windows, targets[-1:])
    assert dtypes == {torch.float16}


def test_collect_gathers_what_the_trellis_needs(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    target = find_linears(model)[0]
    needs = frozenset({"hessian", "output_hessian"})
    stats = collect(model, tiny_windows, [target], needs=needs)[target.name]
    n, k = target.shape
    assert stats.hessian is not None and stats.hessian.shape == (k, k)
    assert stats.output_hessian is not None and stats.output_hessian.shape == (n, n)
    assert stats.fisher is None and stats.input_mean_abs is None
    assert bytes_needed([target], needs) == {0: 4 * (n * n + k * k)}


def test_gradients_that_overflow_are_refused(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    target = find_linears(model)[0]
    target.parameter.data.fill_(float("nan"))
    with pytest.raises(NumericalError, match="its gradients overflow"):
        output_hessians(model, tiny_windows, [target])
