"""Run under TRITON_INTERPRET=1 by `test_training.py`: the kernels of training against torch."""

import interpreter_fixes  # noqa: F401
import torch
from requant_kernels.training.adam import adam_step
from requant_kernels.training.divergence import FORWARD_BLOCK, kl_divergence
from requant_kernels.training.scaled_rows import BLOCK_SIZE, row_products, scale_rows
from torch.nn import functional


def check_divergence(*shape: int) -> None:
    """Rows that fill no whole number of lanes, or one exactly; a logit that is ruled out has no part in anything."""
    found, expected = 4 * torch.randn(shape), 4 * torch.randn(shape)
    found[..., 1] = expected[..., 1] = -1e4
    found.requires_grad_()
    logarithms = found.log_softmax(-1), expected.log_softmax(-1)
    wanted = functional.kl_div(*logarithms, reduction="sum", log_target=True)
    (wanted_gradient,) = torch.autograd.grad(wanted / 7, found)
    value = kl_divergence(found, expected)
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(value / 7, found)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-7)
    assert not kl_divergence(found.detach(), expected).requires_grad
    ruled_out = expected.masked_fill(expected < -5, -torch.inf)
    assert kl_divergence(ruled_out, ruled_out + 3).abs() < 1e-3  # whatever is added to all of a row


def check_adam(dtype: torch.dtype, tolerance: float, numel: int) -> None:
    """Of two tensors at once, each with its own rate and number of steps."""
    torchs = [torch.randn(numel).requires_grad_() for _ in range(2)]
    owns = [each.detach().clone() for each in torchs]
    gradients = torch.randn(5, 2, numel).sign() * (
        0.1 + torch.rand(5, 2, numel)
    )  # whose squares float16 resolves
    lrs, starts = [0.01, 0.03], [1, 2]  # the second has made a step before
    optimizer = torch.optim.Adam(
        [{"params": [each], "lr": lr} for each, lr in zip(torchs, lrs, strict=True)], betas=(0.9, 0.95)
    )
    means, squares = torch.zeros(2, 2, numel, dtype=dtype)
    settings = {"betas": (0.9, 0.95), "eps": 1e-8}
    torchs[1].grad = gradients[0, 1].clone()
    optimizer.step()
    adam_step(owns[1:], [gradients[0, 1]], [means[1]], [squares[1]], lrs=lrs[1:], steps=[1], **settings)
    for done, both in enumerate(gradients):
        for each, gradient in zip(torchs, both, strict=True):
            each.grad = gradient.clone()
        optimizer.step()
        adam_step(
            owns,
            list(both),
            list(means),
            list(squares),
            lrs=lrs,
            steps=[done + start for start in starts],
            **settings,
        )
    for own, each in zip(owns, torchs, strict=True):
        torch.testing.assert_close(own, each.detach(), rtol=0, atol=tolerance)


def check_scaled_rows(n: int, k: int, dtype: torch.dtype) -> None:
    scales, (unscaled, gradient) = torch.randn(n), torch.randn(2, n, k).to(dtype)
    found = torch.empty_like(unscaled)
    scale_rows(found, scales, unscaled)
    assert torch.equal(found, (scales[:, None] * unscaled).to(dtype))
    expected = (gradient.double() * unscaled).sum(1)
    torch.testing.assert_close(row_products(gradient, unscaled).double(), expected, rtol=1e-4, atol=1e-4)


torch.manual_seed(0)
torch.set_num_threads(1)
check_divergence(3, 5, 700)
check_divergence(2, 2 * FORWARD_BLOCK + 3)
check_divergence(1, FORWARD_BLOCK)
check_adam(torch.float32, 1e-6, 3001)  # the second gradient lies at no multiple of 16 bytes
check_adam(torch.float16, 1e-4, 1200)
check_scaled_rows(3, 70, torch.float16)
check_scaled_rows(2, BLOCK_SIZE, torch.float32)
check_scaled_rows(2, BLOCK_SIZE + 5, torch.float32)
