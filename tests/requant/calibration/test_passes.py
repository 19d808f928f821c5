from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from eval.tiny_configs import tiny_config
from requant.calibration import passes
from requant.calibration.batches import batches
from requant.calibration.hidden_states import in_graph_from, why_not_block_by_block
from requant.calibration.passes import SampledLoss, gradient_pass, mean_loss, scored_tokens, summed_loss
from requant.errors import NumericalError
from requant.models.experts import unfuse_experts
from requant.models.targets import find_blocks, find_linears

ARCHITECTURES = ("llama", "llama-bias", "gemma3", "phi3", "opt", "gpt2", "gpt-neox", "ctrl")


def plain_loss(model, windows: torch.Tensor) -> torch.Tensor:
    """F by its definition: every window alone, every next token."""
    losses = [
        functional.cross_entropy(model(input_ids=window[None]).logits[0, :-1], window[1:], reduction="none")
        for window in windows
    ]
    return torch.cat(losses).mean()


def plain_gradients(model, windows: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    targets = find_linears(model)
    for target in targets:
        target.parameter.requires_grad_(True)
    loss = plain_loss(model, windows)
    gradients = torch.autograd.grad(loss, [target.parameter for target in targets])
    model.requires_grad_(False)
    return loss.item(), {s.name: s.oriented(g) for s, g in zip(targets, gradients, strict=True)}


def gathered(model, windows: torch.Tensor) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    targets = find_linears(model)
    total = {target.name: torch.zeros(target.shape) for target in targets}
    calls: list[str] = []

    def accumulate(target, gradient: torch.Tensor) -> None:
        calls.append(target.name)
        total[target.name] += gradient

    return gradient_pass(model, windows, targets, accumulate), total, calls


@pytest.fixture
def small_batches(monkeypatch) -> None:
    """One window a batch."""
    monkeypatch.setattr(
        "requant.calibration.batches.chunks", lambda windows, model, windows_each, **_: windows.split(1)
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_autograd(
    tiny_model, tiny_windows, small_batches, recomputing, name: str, recompute: bool
) -> None:
    recomputing(recompute)
    model = tiny_model(name)
    loss, expected = plain_gradients(model, tiny_windows)
    found, gradients, calls = gathered(model, tiny_windows)
    assert found == pytest.approx(loss, rel=1e-6)
    assert len(calls) == len(tiny_windows) * len(expected)  # once a batch
    for matrix, gradient in expected.items():
        torch.testing.assert_close(
            gradients[matrix], gradient, rtol=1e-4, atol=1e-6 * gradient.abs().max().item()
        )


def test_batches_cover_all_windows_in_order(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    long = tiny_windows.repeat(40, 1)[:, :32]
    chunks = list(batches(long, model, label=None))
    assert len(chunks) > 1 and torch.equal(torch.cat(chunks), long)
    assert max(chunk.numel() for chunk in chunks) <= 2048
    one = torch.randint(0, 256, (2, 4000))
    assert [tuple(chunk.shape) for chunk in batches(one, model, label=None)] == [(1, 4000), (1, 4000)]


def test_losses(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        expected = plain_loss(model, tiny_windows).item()
        assert summed_loss(model, tiny_windows).item() == pytest.approx(
            expected * scored_tokens(tiny_windows)
        )
    assert scored_tokens(tiny_windows) == 4 * 31
    assert mean_loss(model, tiny_windows) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_rows_of_logits_at_a_time_have_the_same_gradients(monkeypatch, dtype: torch.dtype) -> None:
    """As on a GPU, where the rest of their copies in float32 never exists."""
    logits = torch.randn(25, 40, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    tokens = torch.arange(25)
    expected = functional.cross_entropy(logits.float(), tokens, reduction="sum")
    (gradient,) = torch.autograd.grad(expected / 7, [logits])
    monkeypatch.setattr(passes, "rows_at_once", lambda _logits: 8)
    widths, copied = list[int](), functional.cross_entropy

    def noted(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        widths.append(len(rows))
        return copied(rows, *args, **kwargs)

    monkeypatch.setattr(functional, "cross_entropy", noted)
    found = passes.cross_entropy(logits, tokens)
    (found_gradient,) = torch.autograd.grad(found / 7, [logits])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=0)
    assert widths[:4] == [8, 8, 8, 1] and sorted(widths) == sorted(
        2 * widths[:4]
    )  # once more each, for gradients


def test_a_batch_draws_the_same_tokens_whoever_ran_those_before(
    tiny_model, tiny_windows, monkeypatch
) -> None:
    model, losses = tiny_model("llama"), list[list[float]]()
    monkeypatch.setattr(passes, "rows_at_once", lambda _logits: 5)  # noise in parts too
    for numbers in ([0, 1, 2], [1], [2]):
        loss = SampledLoss(0, 2 * (tiny_windows.shape[1] - 1), torch.device("cpu"))
        losses.append([loss(model, tiny_windows[number : number + 2], number).item() for number in numbers])
    assert losses[1] + losses[2] == losses[0][1:]
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(tiny_model, tiny_windows, recomputing, recompute: bool, fails: bool) -> None:
    recomputing(recompute)
    model = tiny_model("llama")
    blocks = find_blocks(model)[1]
    before = model(input_ids=tiny_windows).logits

    def accumulate(target, gradient: torch.Tensor) -> None:
        if fails:
            raise KeyboardInterrupt

    try:
        gradient_pass(model, tiny_windows, find_linears(model), accumulate)
    except KeyboardInterrupt:
        assert fails
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert not any("forward" in block.__dict__ for block in blocks)
    after = model(input_ids=tiny_windows).logits
    assert torch.equal(after, before) and not after.requires_grad


def test_a_forward_that_was_replaced_before_comes_back(tiny_model, tiny_windows, recomputing) -> None:
    """As accelerate does where it spreads a model over devices."""
    recomputing(True)
    model = tiny_model("llama")
    block = find_blocks(model)[1][0]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    replaced = block.forward
    gradient_pass(model, tiny_windows, find_linears(model), lambda *_: None)
    assert block.__dict__.get("forward") is replaced


def test_recompute_is_on_for_large_models(tiny_model, monkeypatch) -> None:
    model = tiny_model("llama")
    block = find_blocks(model)[1][0]
    with passes.recomputed_blocks(model, None):
        assert "forward" not in block.__dict__
    monkeypatch.setattr(passes, "RECOMPUTE_ABOVE", 1000)
    with passes.recomputed_blocks(model, None):
        assert "forward" in block.__dict__


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_for_the_last_block_goes_back_no_further(
    tiny_model, tiny_windows, small_batches, recomputing, name: str, recompute: bool
) -> None:
    """Its gradients are those of a pass through all blocks, bit for bit."""
    recomputing(recompute)
    model = tiny_model(name)
    _, expected, _ = gathered(model, tiny_windows)
    last = max(target.block for target in find_linears(model))
    members = [target for target in find_linears(model) if target.block == last]
    found = {target.name: torch.zeros(target.shape) for target in members}
    graphs: list[bool] = []
    first = find_linears(model)[0].module
    handle = first.register_forward_hook(lambda *call: graphs.append(call[-1].requires_grad))
    gradient_pass(model, tiny_windows, members, lambda target, g: found[target.name].add_(g))
    handle.remove()
    assert last > 0 and all(torch.equal(found[key], expected[key]) for key in found)
    assert graphs == [False] * len(tiny_windows)  # computed once a batch, without a graph


def test_a_graph_begins_at_hidden_states_that_are_given_by_name(tiny_model) -> None:
    model = tiny_model("llama")
    block, hidden = find_blocks(model)[1][1], torch.randn(1, 3, model.config.hidden_size)
    angles = model.model.rotary_emb(hidden, torch.arange(3)[None])
    expected = block(hidden, position_embeddings=angles)
    with in_graph_from(model, 1):
        found = block(hidden_states=hidden, position_embeddings=angles)
    assert found.requires_grad and torch.equal(found, expected)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-per-layer"])
def test_blocks_that_read_the_embedding_are_not_recomputed(
    tiny_model, tiny_windows, small_batches, recomputing, name: str
) -> None:
    """The large ones of these ended in an error of autograd."""
    model = tiny_model(name)
    recomputing(False)
    _, expected, _ = gathered(model, tiny_windows)
    recomputing(True)
    _, found, _ = gathered(model, tiny_windows)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.skipif("zaya" not in CONFIG_MAPPING, reason="is not in this transformers")
def test_blocks_that_read_what_earlier_routers_computed_are_not_recomputed(
    tiny_windows, small_batches, recomputing
) -> None:
    """The first block of ZAYA reads hidden states alone, later ones do not; training block by block passes on the rest."""
    torch.manual_seed(0)
    config = tiny_config("zaya", 512)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    unfuse_experts(model)
    assert why_not_block_by_block(model, gradients=False) is None
    assert "read more of earlier ones" in str(why_not_block_by_block(model, gradients=True))
    assert why_not_block_by_block(model, gradients=True, carried=True) is None
    recomputing(False)
    _, expected, _ = gathered(model, tiny_windows)
    recomputing(True)
    _, found, _ = gathered(model, tiny_windows)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_overflow_is_an_error(tiny_model, tiny_windows) -> None:
    model = tiny_model("llama")
    model.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(NumericalError, match=r"the loss is nan: the model overflows .* use --dtype float32"):
        mean_loss(model, tiny_windows)
    with pytest.raises(NumericalError, match="the loss is nan"):
        gathered(model, tiny_windows)
