"""A kernel that is wrong on this machine is found while the model loads."""

import logging

import pytest
import torch
from requant_kernels import pack_trellis
from requant_kernels.launch_config import m_bucket
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from torch import nn

from requant.inference.convert import convert_to_kernels, kernel_layout
from requant.inference.kernel_check import TOKENS, KernelCheck, TritonError, kind_of
from requant.inference.kernel_layers import KernelLinear
from requant.inference.quant_linear import QuantLinear


def test_every_bucket_of_tokens_is_checked() -> None:
    assert {m_bucket(tokens) for tokens in TOKENS} == {m_bucket(tokens) for tokens in range(1, 2049)}


@pytest.mark.parametrize("rotates_output", [True, False])
@pytest.mark.parametrize("bits", [2, 3.25, 4, 4.5])
@pytest.mark.parametrize("code", CODES)
def test_every_program_of_a_trellis_for_few_tokens_is_checked(
    code: str, bits: float, rotates_output: bool
) -> None:
    """A launch follows from the bucket; the columns of its MMAs, and how activations are read, from the tokens."""
    pytest.importorskip("triton")
    from requant_kernels.trellis.gemv import activation_form
    from requant_kernels.trellis.gemv_kernel import gemv_constants

    codes, ones = torch.zeros(32, 4096, dtype=torch.uint8), torch.ones(4096).half()
    layout = pack_trellis(codes, ones, ones[:32], bits=bits, code=code, rotates_output=rotates_output)
    config = TrellisGemvConfig(num_warps=8, tiles_per_cta=1, units_per_step=1)

    def program(tokens: int) -> tuple[int, str]:
        units, vector = layout.packed_codes.shape[1], layout.packed_codes.shape[-1]
        constants = gemv_constants(
            code, layout.quad_bits, vector, config, tokens, units, int8=activation_form(layout, tokens).int8
        )
        return m_bucket(tokens), repr(constants)

    all_tokens = range(1, 17)
    assert {program(tokens) for tokens in TOKENS if tokens in all_tokens} == set(map(program, all_tokens))


def test_right_ones_pass_once(random_weight) -> None:
    check, calls = KernelCheck(torch.float32), []
    for seed_rows in (48, 48, 64):
        weight = random_weight(seed_rows, 64, kind="codebook")
        layout = kernel_layout(weight)
        matrix = KernelLinear(layout)
        check(lambda x, matrix=matrix: (calls.append(len(x)), matrix(x))[1], layout, weight)
    assert calls == [*TOKENS, *TOKENS]  # the second matrix is of the kind of the first


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: y.roll(1, dims=-1),
        lambda y: y * 1.03,
        lambda y: torch.full_like(y, torch.nan),
        lambda y: torch.cat([y[:1], torch.zeros_like(y[1:])]),  # right for one token only
    ],
)
def test_wrong_ones_do_not(random_weight, wrong) -> None:
    weight = random_weight(48, 64, kind="codebook")
    layout = kernel_layout(weight)
    matrix = KernelLinear(layout)
    check = KernelCheck(torch.float32)
    with pytest.raises(ValueError, match="is wrong on this machine"):
        check(lambda x: wrong(matrix(x)), layout, weight)
    check(matrix, layout, weight)  # nothing was remembered


@pytest.mark.parametrize(
    "problem", [TritonError("registers"), RuntimeError("Triton Error [CUDA]: invalid argument")]
)
def test_one_that_does_not_run_is_refused(random_weight, problem: Exception) -> None:
    weight = random_weight(48, 64, kind="codebook")

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise problem

    with pytest.raises(ValueError, match="3-bit codebook codes does not compile or start") as found:
        KernelCheck(torch.float32)(fails, kernel_layout(weight), weight)
    assert found.value.__cause__ is problem


def test_running_out_of_memory_is_no_fault_of_a_kernel(random_weight) -> None:
    weight = random_weight(48, 64, kind="codebook")

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        KernelCheck(torch.float32)(fails, kernel_layout(weight), weight)


def test_what_runs_another_program_is_another_kind(random_weight) -> None:
    kinds = [
        kind_of(kernel_layout(weight))
        for kind in ("codebook", "trellis")
        for bits in (2, 3)
        for density in (0.0, 0.05)
        for weight in (random_weight(48, 64, kind=kind, bits=bits, density=density),)
    ]
    assert len(set(kinds)) == len(kinds)


def test_a_matrix_of_zeros_passes(random_weight) -> None:
    weight = random_weight(32, 64, kind="codebook")
    weight.dense.levels.zero_()
    layout = kernel_layout(weight)
    KernelCheck(torch.float32)(KernelLinear(layout), layout, weight)


def test_a_model_is_served_all_the_same(
    make_checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import requant

    folder, _plain = make_checkpoint("llama", kind="codebook")
    forward = KernelLinear.forward
    monkeypatch.setattr(KernelLinear, "forward", lambda self, x: 2 * forward(self, x))
    model = requant.load(folder, device="cpu")
    tokens = torch.randint(0, 50, (1, 9))
    want = model(tokens).logits
    with caplog.at_level(logging.WARNING):
        convert_to_kernels(model, device="cpu")
    linears = [m for m in model.modules() if isinstance(m, (QuantLinear, KernelLinear, nn.Linear))]
    assert any(isinstance(m, QuantLinear) for m in linears) and not any(
        isinstance(m, KernelLinear) for m in linears
    )
    assert torch.equal(model(tokens).logits, want)
    assert "are dequantized at every call" in caplog.text and "please report it" in caplog.text
