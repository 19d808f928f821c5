"""The divergence of the loss: the number of its definition, and on a GPU the kernel's, or torch's where that is wrong."""

import pytest
import torch

from requant.finetune import divergence
from requant.finetune.divergence import kl


def test_the_divergence_is_that_of_its_definition() -> None:
    torch.manual_seed(0)
    found, expected = torch.randn(2, 3, 50), torch.randn(2, 3, 50)
    p, q = expected.double().softmax(-1), found.double().softmax(-1)
    torch.testing.assert_close(kl(found, expected).double(), (p * (p / q).log()).sum(), rtol=1e-5, atol=0)


def test_in_parts_it_has_the_same_gradient_in_less_memory(monkeypatch) -> None:
    """Seven positions, three at a time; each is computed again in the backward pass, and nothing is kept for it."""
    monkeypatch.setattr(divergence, "LOGITS_AT_ONCE", 3 * 50)
    computed: list[int] = []
    plain = divergence._formula

    def formula(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        computed.append(len(found))
        return plain(found, expected)

    monkeypatch.setattr(divergence, "_formula", formula)
    found, expected = torch.randn(7, 50, requires_grad=True), torch.randn(7, 50)
    value = divergence._in_parts(found, expected)
    (gradient,) = torch.autograd.grad(value / 7, found)
    wanted = plain(found, expected)
    (wanted_gradient,) = torch.autograd.grad(wanted / 7, found)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(gradient, wanted_gradient)
    assert sorted(computed) == [1, 1, 3, 3, 3, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True])
def test_a_gpu_uses_the_kernel_unless_it_is_wrong(wrong: bool, monkeypatch, caplog) -> None:
    from requant_kernels.training import divergence as kernels

    calls, plain = [], kernels.kl_divergence

    def counted(*logits: torch.Tensor) -> torch.Tensor:
        calls.append(logits)
        return plain(*logits) * (2 if wrong else 1)

    monkeypatch.setattr(kernels, "kl_divergence", counted)
    divergence._chosen.cache_clear()
    torch.manual_seed(0)
    logits = 5 * torch.randn(2, 7, 1234)
    expected = kl(*logits)
    torch.testing.assert_close(kl(*logits.cuda()).cpu(), expected, rtol=1e-5, atol=0)
    assert len(calls) == 2 - wrong  # one to check
    assert ("`divergence` is not used on this machine" in caplog.text) == wrong
    divergence._chosen.cache_clear()
