"""Matrices quantized side by side get the codes that each gets alone, in the order in which they were given."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from requant.calibration.stats import LinearStats
from requant.errors import NumericalError
from requant.formats.quantized_weight import QuantizedWeight, pack
from requant.models.targets import QuantTarget
from requant.quantizers.trellis import TrellisConfig, quantize
from requant.run import side_by_side
from requant.run.side_by_side import MOST, quantized, workers_for


def targets_of(count: int, size: int, device: str) -> list[QuantTarget]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        linear = nn.Linear(size, size, bias=False)
        linear.weight.data = torch.randn(size, size, generator=generator)
        found.append(
            QuantTarget(
                name=f"m{index}",
                kind="m",
                block=index,
                module=linear.to(device).requires_grad_(False),
                transposed=False,
            )
        )
    return found


def codes(target: QuantTarget) -> QuantizedWeight:
    x = torch.randn(256, target.shape[1], generator=torch.Generator().manual_seed(target.block))
    hessian = (x.T @ x / len(x)).to(target.parameter.device)
    bits = 2 + target.block % 2 / 2  # two programs
    return quantize(
        target.weight(),
        LinearStats(hessian=hessian, output_hessian=hessian),
        TrellisConfig(bits=bits, code="mul1"),
    )


def test_a_cpu_has_one_after_the_other() -> None:
    targets, calls = targets_of(5, 32, "cpu"), []
    found = quantized(targets, lambda target: calls.append(target.name) or target, work=1)  # type: ignore
    assert next(found)[0] is targets[0] and calls == ["m0"]
    assert [target.name for target, _ in found] == calls[1:] == ["m1", "m2", "m3", "m4"]


@pytest.mark.parametrize(
    ("size", "free", "workers"),
    [(512, 99, MOST), (2048, 99, 2), (4096, 99, 2), (8, 99, MOST), (512, 70, 3), (4096, 39, 1), (512, 9, 1)],
)
def test_as_many_as_fill_a_gpu_and_fit_it(monkeypatch, size: int, free: int, workers: int) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(side_by_side, "free_memory", lambda _: free)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
    module = nn.Linear(4 * size, size, device="meta")
    target = QuantTarget(name="m", kind="m", block=0, module=module, transposed=False)
    assert workers_for([target] * 3, work=10) == workers
    assert workers_for([target] * 2, work=10) == 1


@pytest.mark.gpu
def test_streams_give_the_codes_of_one() -> None:
    targets = targets_of(9, 256, "cuda")
    alone, together = (
        dict((target.name, weight) for target, weight in quantized(targets, codes, work=work))
        for work in (None, 1 << 20)
    )
    assert list(together) == [target.name for target in targets]
    for name, weight in together.items():
        spec, tensors = pack(alone[name])
        assert pack(weight)[0] == spec
        assert all(torch.equal(tensors[key], found) for key, found in pack(weight)[1].items())


@pytest.mark.gpu
def test_an_error_in_a_stream_ends_the_run() -> None:
    targets = targets_of(6, 64, "cuda")

    def fails(target: QuantTarget) -> QuantizedWeight:
        if target.block == 3:
            raise NumericalError("no codes")
        return codes(target)

    with pytest.raises(NumericalError, match="no codes"):
        list(quantized(targets, fails, work=1 << 20))
