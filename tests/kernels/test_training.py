"""The kernels of training: interpreted, compiled for Hopper, and on a GPU."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

import triton.language as tl
from requant_kernels.training import adam, divergence, scaled_rows

from .compile_offline import compile_kernel


def test_interpreted_kernels_agree_with_torch(interpreted) -> None:
    interpreted("training_interpreted.py")


@pytest.mark.parametrize("name", ["divergence", "gradient"])
def test_the_divergence_compiled_for_hopper_spills_nothing(name: str) -> None:
    forward = name == "divergence"
    kernel = divergence.divergence_kernel if forward else divergence.gradient_kernel
    size = divergence.FORWARD_BLOCK if forward else divergence.BACKWARD_BLOCK
    machine = compile_kernel(
        kernel, {"BLOCK_SIZE": size}, capability=90, dtype="bf16", warps=divergence.FORWARD_WARPS if forward else 4,
        pointers={"found_ptr": "*bf16", "expected_ptr": "*bf16", "divergences_ptr": "*fp32", "log_sums_ptr": "*fp32",
                  "upstream_ptr": "*fp32", "gradient_ptr": "*bf16", "v": "i32"}, aligned=("v",),
    )  # fmt: skip
    assert machine.stack == 0 and machine.registers <= 80  # three CTAs of eight warps per SM
    assert machine.opcodes["LDG"] <= (2 if forward else 5)  # 16 bytes each, and the numbers of a row


def test_adam_compiled_for_hopper_spills_nothing() -> None:
    machine = compile_kernel(
        adam.adam_kernel, {"BLOCK_SIZE": adam.BLOCK_SIZE, "ALIGNMENT": adam.ALIGNMENT, "MOMENTS": tl.bfloat16},
        capability=90, dtype="bf16", warps=4,
        pointers={"addresses_ptr": "*i64", "rates_ptr": "*fp32", "numel": "i32",
                  **dict.fromkeys(("beta1", "beta2", "eps"), "fp32")}, aligned=("numel",),
    )  # fmt: skip
    assert machine.stack == 0 and machine.registers <= 64
    assert machine.opcodes["LDG"] <= 14  # of 16 or 8 bytes; four addresses and two rates


@pytest.mark.parametrize("name", ["scale_rows", "row_products"])
def test_scaled_rows_compiled_for_hopper_spill_nothing(name: str) -> None:
    ends = {"scale_rows": {"out_ptr": "*fp32", "scales_ptr": "*fp32", "unscaled_ptr": "*fp32"},
            "row_products": {"sums_ptr": "*fp32", "left_ptr": "*fp32", "right_ptr": "*fp32"}}  # fmt: skip
    machine = compile_kernel(
        getattr(scaled_rows, f"{name}_kernel"), {"BLOCK_SIZE": scaled_rows.BLOCK_SIZE}, capability=90, dtype="fp32",
        warps=4, pointers={**ends[name], "k": "i32"}, aligned=("k",),
    )  # fmt: skip
    assert machine.stack == 0 and machine.registers <= 64
    assert machine.opcodes["LDG"] <= 9  # 16 bytes each, and a scale


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_the_divergence_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((3, 5, 700), (2, 50257), (4, 128256)):
        found, expected = (4 * torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
        found.requires_grad_()
        logarithms = (each.double().log_softmax(-1) for each in (found, expected))
        wanted = functional.kl_div(*logarithms, reduction="sum", log_target=True)
        (wanted_gradient,) = torch.autograd.grad(wanted / 7, found)
        value = divergence.kl_divergence(found, expected)
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=0)
        (gradient,) = torch.autograd.grad(value / 7, found)
        limit = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
        assert (gradient - wanted_gradient).abs().max() <= limit * wanted_gradient.abs().max()


@pytest.mark.gpu
def test_on_a_gpu_adam_is_torchs_but_for_what_moments_are_rounded() -> None:
    torch.manual_seed(0)
    torchs = torch.randn(1 << 20, device="cuda").requires_grad_()
    own, gradients = torchs.detach().clone(), torch.randn(8, 1 << 20, device="cuda")
    optimizer = torch.optim.Adam([torchs], lr=0.01, betas=(0.9, 0.95))
    mean, square = torch.zeros(2, 1 << 20, device="cuda", dtype=torch.bfloat16)
    start = own.clone()
    for step, gradient in enumerate(gradients, start=1):
        torchs.grad = gradient.clone()
        optimizer.step()
        adam.adam_step(
            [own], [gradient], [mean], [square], lrs=[0.01], steps=[step], betas=(0.9, 0.95), eps=1e-8
        )
    assert (own - torchs).norm() < 0.01 * (own - start).norm()
