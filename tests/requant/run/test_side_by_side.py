"""Matrices quantized side by side, in batches or on streams, get the codes that each gets alone."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from requant.calibration.stats import LinearStats
from requant.errors import NumericalError
from requant.formats.quantized_weight import QuantizedWeight, pack
from requant.models.targets import QuantTarget
from requant.quantizers.trellis import TrellisConfig, quantize, quantize_batch
from requant.run import side_by_side
from requant.run.side_by_side import (
    BATCH_BYTES,
    MOST,
    at_once,
    batched,
    batches_for,
    bytes_of_largest,
    quantized,
    workers_for,
)


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


def settings(target: QuantTarget) -> TrellisConfig:
    return TrellisConfig(bits=2 + target.block % 3 / 2, code="mul1")  # three programs


def codes(batch: Sequence[QuantTarget]) -> list[QuantizedWeight]:
    hessians = []
    for target in batch:
        x = torch.randn(256, target.shape[1], generator=torch.Generator().manual_seed(target.block))
        hessians.append((x.T @ x / len(x)).to(target.parameter.device))
    stats = [LinearStats(hessian=hessian, output_hessian=hessian) for hessian in hessians]
    return quantize_batch([target.weight() for target in batch], stats, settings(batch[0]))


def same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    (spec, tensors), (other_spec, others) = pack(one), pack(other)
    return spec == other_spec and all(torch.equal(tensors[key], found) for key, found in others.items())


def one_each(targets: Sequence[QuantTarget]) -> list[list[QuantTarget]]:
    return [[target] for target in targets]


def test_a_cpu_has_one_after_the_other() -> None:
    targets, calls = targets_of(5, 32, "cpu"), []
    batches = batches_for(targets, lambda _: 1, lambda _: 1)
    assert batches == one_each(targets) and workers_for(batches, lambda _: 1) == 1
    found = quantized(batches, lambda batch: calls.append(batch[0].name) or batch, workers=1)  # type: ignore
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
    assert workers_for(one_each([target] * 3), lambda _: 10) == workers
    assert workers_for(one_each([target] * 2), lambda _: 10) == 1


def test_batches_are_of_one_shape_and_setting_and_fill_a_gpu() -> None:
    """Qwen3-30B-A3B's experts, 768 x 2048, have 48 tiles on an anti-diagonal: eight fill 132 SMs three times, almost."""
    experts, queries = [
        [QuantTarget(name=f"{kind}{i}", kind=kind, block=0, module=nn.Linear(2048, n, device="meta"), transposed=False)
         for i in range(20)]
        for kind, n in (("e", 768), ("q", 4096))
    ]  # fmt: skip

    def sizes(targets: Sequence[QuantTarget], free: int) -> list[int]:
        found = batched(targets, lambda target: int(target.name[1:]) >= 15, lambda _: 10, free)
        assert [target for batch in found for target in batch] == list(targets)
        assert len({(target.shape, int(target.name[1:]) >= 15) for batch in found for target in batch}) >= 2
        return [len(batch) for batch in found]

    assert sizes(experts, 10**6) == [8, 7, 5]
    assert sizes(experts, 80) == [2] * 7 + [1] + [2, 2, 1]  # of which two fit half of 80 bytes
    assert sizes(experts, 1) == [1] * 20
    large = [len(batch) for batch in batched(experts, lambda _: 1, lambda _: BATCH_BYTES // 3, 10**12)]
    assert large == [3] * 6 + [2]  # whatever else is free
    assert sizes([*experts, *queries], 10**6) == [8, 7, 5] + [3] * 5 + [3, 2]
    several = batched(experts, lambda _: 1, lambda _: 10, 10**6)
    assert at_once(several, lambda _: 10, 10**6) == 2 and bytes_of_largest(several, lambda _: 10) == 80
    assert at_once(several, lambda _: 10, 200) == 1


@pytest.mark.parametrize("two_sided", [True, False])
def test_a_batch_has_the_codes_of_each_alone(two_sided: bool) -> None:
    """And residuals of detached weights; one of the matrices is zero."""
    generator = torch.Generator().manual_seed(0)
    weights = [scale * torch.randn(48, 32, generator=generator) for scale in (1.0, 0.0, 3.0)]
    stats = [
        LinearStats(hessian=x.T @ x / 64, output_hessian=y.T @ y / 64)
        for x, y in ((torch.randn(64, k, generator=generator) for k in (32, 48)) for _ in weights)
    ]
    masks = [torch.rand(48, 32, generator=generator) < share for share in (0.1, 0.0, 0.2)]
    config = TrellisConfig(bits=2, two_sided=two_sided)
    together = quantize_batch(weights, stats, config, detached=masks)
    for own, weight, stat, mask in zip(together, weights, stats, masks, strict=True):
        assert same(own, quantize(weight, stat, config, detached=mask))
    plain = quantize_batch(weights, stats, config)
    for own, other, weight, stat in zip(plain, together, weights, stats, strict=True):
        assert same(own, quantize(weight, stat, config))
        assert weight.any() == (not same(own, other))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [256, 768])
def test_streams_and_batches_give_the_codes_of_one(size: int) -> None:
    targets = targets_of(27, size, "cuda")
    alone = dict((target.name, weight) for target, weight in quantized(one_each(targets), codes, workers=1))
    work = {"work": lambda _: 1 << 20}
    batches = batches_for(targets, settings, **work)
    assert max(map(len, batches)) > 4 and len(batches) > 2
    for divided in (one_each(targets), batches):
        workers = workers_for(divided, **work)
        assert workers > 1
        together = dict(
            (target.name, weight) for target, weight in quantized(divided, codes, workers=workers)
        )
        assert list(together) == [target.name for batch in divided for target in batch]
        assert all(same(weight, alone[name]) for name, weight in together.items())


@pytest.mark.gpu
def test_an_error_in_a_stream_ends_the_run() -> None:
    targets = targets_of(6, 64, "cuda")

    def fails(batch: Sequence[QuantTarget]) -> list[QuantizedWeight]:
        if batch[0].block == 3:
            raise NumericalError("no codes")
        return codes(batch)

    with pytest.raises(NumericalError, match="no codes"):
        list(quantized(one_each(targets), fails, workers=2))
