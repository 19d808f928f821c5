"""A step of training: Adam as torch has it, over the parts of a batch; captured, the same step."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from requant.finetune.step import ReparametrizedWeight, TrainableTensor, TrainingStep
from requant.models.mixed_precision import PRODUCTS

from ..inference.fake_cuda_graphs import FakeGraph, install


def problem(device: str = "cpu"):
    torch.manual_seed(0)
    trainables = [torch.randn(8, 4, device=device), torch.randn(4, device=device)]
    parts = [torch.randint(0, 8, (3, 5), device=device) for _ in range(2)]

    def loss(tokens):
        return (trainables[0][tokens] * trainables[1] - 1).square().mean()

    return trainables, parts, loss


def test_is_adam_over_the_sum_of_the_parts() -> None:
    trainables, parts, loss = problem()
    twins = [nn.Parameter(leaf.clone()) for leaf in trainables]
    rates = [0.1, 0.3]
    optimizer = torch.optim.Adam(
        [
            {"params": [twin], "lr": rate * twin.detach().square().mean().sqrt().item()}
            for twin, rate in zip(twins, rates, strict=True)
        ],
        betas=(0.9, 0.95),
    )
    full = [group["lr"] for group in optimizer.param_groups]
    step = TrainingStep(
        loss, [TrainableTensor(tensor=t, lr=r) for t, r in zip(trainables, rates, strict=True)]
    )
    for share in (0.5, 1.0, 0.25, 0.0):
        step([(p,) for p in parts], share)
        sum((twins[0][p] * twins[1] - 1).square().mean() for p in parts).backward()
        for group, rate in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = rate * share
        optimizer.step()
        optimizer.zero_grad()
    for leaf, twin in zip(trainables, twins, strict=True):
        torch.testing.assert_close(leaf.detach(), twin.detach())
    step.close()
    assert not any(leaf.requires_grad or leaf.grad is not None for leaf in trainables)


def test_memory_that_runs_out_halves_the_parts_once(caplog) -> None:
    """The step is that of the whole parts; when memory runs out again the run ends."""
    ends = []
    for fits in (99, 2, 1):
        trainables, parts, loss = problem()

        def limited(tokens, loss=loss, fits=fits, trainables=trainables):
            if len(tokens) > fits:
                trainables[0].sum().backward()  # gradients of a part that was not finished
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return loss(tokens) * len(tokens)

        step = TrainingStep(limited, [TrainableTensor(tensor=t, lr=0.1) for t in trainables])
        if fits == 1:
            with pytest.raises(torch.OutOfMemoryError):
                step([(p,) for p in parts], 1.0)
            continue
        for _ in range(3):
            step([(p,) for p in parts], 1.0)
        ends.append([leaf.detach().clone() for leaf in trainables])
    assert [record.message for record in caplog.records] == [
        "memory ran out in training: from now on half as many windows go through the model at once"
    ] * 2
    for whole, halved in zip(*ends, strict=True):
        torch.testing.assert_close(whole, halved)


def derived_problem(device: str = "cpu"):
    """The same problem with `parameter = leaves[0] * leaves[1]`, a matrix that the loss reads in its place."""
    trainables, parts, _ = problem(device)
    parameter = nn.Parameter(torch.zeros(8, 4, device=device))
    matrix = ReparametrizedWeight(parameter=parameter, value=lambda: trainables[0] * trainables[1])
    return trainables, parts, matrix, lambda tokens: (parameter[tokens] - 1).square().mean()


def test_gradients_go_through_a_derived_parameter_as_through_its_formula() -> None:
    direct, parts, loss = problem()
    trainables, _, matrix, derived_loss = derived_problem()
    steps = [
        TrainingStep(loss, [TrainableTensor(tensor=t, lr=0.2) for t in direct]),
        TrainingStep(derived_loss, [TrainableTensor(tensor=t, lr=0.2) for t in trainables], [matrix]),
    ]
    for share in (1.0, 0.5, 0.25):
        for step in steps:
            step([(p,) for p in parts], share)
        torch.testing.assert_close(matrix.parameter.detach(), (trainables[0] * trainables[1]).detach())
    for leaf, twin in zip(trainables, direct, strict=True):
        torch.testing.assert_close(leaf.detach(), twin.detach())
    steps[1].close()
    assert not matrix.parameter.requires_grad and matrix.parameter.grad is None


class Descent:
    """Plain gradient descent of tensors' operations alone, which `FakeGraph` can note; Adam's captured form needs a GPU."""

    def __init__(self, groups: list[dict[str, Any]], captures: bool) -> None:
        self.param_groups, self.state = groups, {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["params"][0].sub_(group["params"][0].grad * group["lr"])


def without_effect(step: TrainingStep, capture: Callable[[Any], None]) -> Callable[[Any], None]:
    """A GPU computes nothing while it captures, `FakeGraph` does: what that changed is put back."""

    def captured(micro_batches: Any) -> None:
        changed = [*step.tensors, *(weight.parameter for weight in step.derived)]
        before = [each.detach().clone() for each in changed]
        capture(micro_batches)
        with torch.no_grad():
            for each, value in zip(changed, before, strict=True):
                each.copy_(value)

    return captured


@pytest.mark.parametrize("processes", [1, 2])
def test_captured_gradients_are_summed_over_ranks_before_the_update(
    monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """As in an eager step, with the chain rule and the updates in graphs; the other rank has the same gradients."""
    sums: list[int] = []

    def doubled(gradients: list[torch.Tensor], large_in: torch.dtype | None) -> Callable[[], None]:
        assert large_in is None  # on a CPU

        def finish() -> None:
            sums.append(len(gradients))
            for gradient in gradients:
                gradient.mul_(2)

        return finish

    monkeypatch.setattr("requant.finetune.step.ranks.world_size", lambda: processes)
    monkeypatch.setattr("requant.finetune.step.started_sum", doubled)
    found = []
    for captures in (False, True):
        trainables, parts, matrix, loss = derived_problem()
        with monkeypatch.context() as patch:
            install(patch)
            step = TrainingStep(
                loss, [TrainableTensor(tensor=t, lr=0.1) for t in trainables], [matrix], Descent
            )
            step.captures = captures
            monkeypatch.setattr(step, "_capture", without_effect(step, step._capture))
            groups = [group for each in step.optimizers for group in each.param_groups]
            for index, group in enumerate(groups):
                group["lr"] = step.lrs[index]
            for index in range(6):
                torch.mul(step.full_lrs, 1 - index / 10, out=step.lrs)
                monkeypatch.setattr(step, "_set_lrs", lambda _: None)
                # at the end a rank without windows, or shapes without a graph: nothing is left of the step before
                given = [(part.roll(index, 0),) for part in parts]
                if index == 5:
                    given = [] if processes > 1 else [(part[:2],) for (part,) in given]
                step(given, 1.0)
            # the first micro-batch, the second, the chain rule, and parts, which are tensors here
            replays = [2, 2, 3] + [3] * processes
            assert [graph.replays for graph in FakeGraph.made] == (replays if captures else [])
            step.close()
        found.append([leaf.detach().clone() for leaf in trainables])
    assert sums == [1] * (24 if processes > 1 else 0)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_sums_of_two_parts_are_under_way_and_rounded_to_the_dtype_of_products(monkeypatch) -> None:
    """Each begins when the part two before it is summed, so that their copies take the memory of two, and in one order."""
    events: list[str] = []
    live: list[weakref.ref[torch.Tensor]] = []

    def started(gradients: list[torch.Tensor], large_in: torch.dtype | None) -> Callable[[], None]:
        (gradient,) = gradients
        copy = gradient.to(large_in)
        assert copy.dtype == torch.bfloat16
        live.append(weakref.ref(copy))
        assert sum(each() is not None for each in live) <= 2
        events.append(f"start {gradient.numel()}")

        def finish() -> None:
            gradient.copy_(copy)
            events.append(f"finish {gradient.numel()}")

        return finish

    monkeypatch.setitem(PRODUCTS, "cpu", torch.bfloat16)
    monkeypatch.setattr("requant.finetune.step.ranks.world_size", lambda: 2)
    monkeypatch.setattr("requant.finetune.step.started_sum", started)
    tensors = [torch.full((2**index,), 1.0 + index / 7) for index in range(4)]
    step = TrainingStep(
        lambda tokens: sum((tensor.square().sum() for tensor in tensors), start=torch.zeros(())),
        [TrainableTensor(tensor=tensor, lr=0.1) for tensor in tensors],
        optimizer=Descent,
    )
    step.parts = [slice(index, index + 1) for index in range(4)]
    step.optimizers = [Descent([{"params": [tensor], "lr": 0.1}], False) for tensor in tensors]
    before = [tensor.detach().clone() for tensor in tensors]
    for index, optimizer in enumerate(step.optimizers):
        plain = optimizer.step
        optimizer.step = lambda plain=plain, index=index: (events.append(f"update {2**index}"), plain())
    step([(torch.zeros(1),)], 1.0)
    assert events == [
        "start 1",
        "start 2",
        "finish 1",
        "start 4",
        "update 1",
        "finish 2",
        "start 8",
        "update 2",
        "finish 4",
        "update 4",
        "finish 8",
        "update 8",
    ]
    rates = [group["lr"] for each in step.optimizers for group in each.param_groups]
    for tensor, start, rate in zip(tensors, before, rates, strict=True):
        gradient = (2 * start).to(torch.bfloat16).float()
        torch.testing.assert_close(tensor.detach(), start - rate * gradient, rtol=0, atol=0)


@pytest.mark.gpu
def test_captured_it_does_the_same() -> None:
    found = []
    for captures in (True, False):
        trainables, parts, matrix, loss = derived_problem("cuda")
        parts.append(parts[0][:2])  # another shape: three graphs, with the first of a step and a further one
        step = TrainingStep(loss, [TrainableTensor(tensor=t, lr=0.1) for t in trainables], [matrix])
        step.captures = captures and step.captures
        if not captures:
            step.optimizers = [
                torch.optim.Adam(
                    [
                        {"params": [t], "lr": rate}
                        for t, rate in zip(step.tensors, step.full_lrs.tolist(), strict=True)
                    ],
                    betas=(0.9, 0.95),
                )
            ]
        for index in range(8):
            step([(part.roll(index, 0),) for part in parts], 1 - index / 10)
        assert (step.updates is not None) == captures and len(step.graphs) == 3 * captures
        step.close()
        found.append([leaf.detach().clone() for leaf in trainables])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
