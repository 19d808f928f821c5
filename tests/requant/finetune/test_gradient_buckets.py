"""Gradients are summed over ranks bucket by bucket, from when each is complete, in the same order on all ranks."""

import json
from collections.abc import Callable

import pytest
import torch

from requant.finetune import gradient_buckets
from requant.finetune.gradient_buckets import GradientBuckets
from requant.finetune.step import EAGER_STEPS

from ..inference.fake_cuda_graphs import FakeEvent, FakeGraph, install
from .trained_on_ranks import CASES, ORDER, SCRIPT, STEPS, Model, batches, factor, training_step


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first of two ranks."""
    monkeypatch.setattr("requant.ranks.world_size", lambda: 2)
    monkeypatch.setattr("requant.ranks.shared", lambda value, tensors: (value, tensors))
    install(monkeypatch)


def test_a_bucket_is_complete_when_all_its_gradients_are_there_for_good(of_two, monkeypatch) -> None:
    one, two, three, four = (torch.ones(2, requires_grad=True) for _ in range(4))
    buckets = GradientBuckets([[one, two], [three], [four]])
    with torch.cuda.graph(FakeGraph()), buckets.events_of_backward() as events:
        three.sum().backward()
        two.sum().backward()
        assert list(events) == [1]
        one.sum().backward()
        assert list(events) == [1, 0]
        two.sum().backward()  # once more
        four.sum().backward()
        two.sum().backward()
    assert list(events) == [1, 2]
    with buckets.noted_in_chain_rule():
        three.sum().backward()
    assert buckets.in_chain_rule == {1}
    buckets.agree_on_order(events)
    assert buckets.order == [2, 0, 1]
    monkeypatch.setattr(gradient_buckets, "started_sum", lambda gradients: gradients)
    for index in buckets.order:
        assert buckets.started_sum(index, events)[0] is buckets.buckets[index][0].grad
    assert [len(events[index].waits_after) for index in (1, 2)] == [0, 1]
    four.sum().backward()
    assert list(events) == [1, 2], "hooks outlive the capture"


def test_sums_have_the_gradients_that_were_there_at_the_event(of_two, monkeypatch) -> None:
    """All that is added to a bucket's gradients in a step was there when its event was recorded for the last time."""
    model = Model("cpu")
    step = training_step(model, "cpu", patch=monkeypatch)
    current: list[FakeEvent] = []
    seen: list[tuple[int, bool]] = []

    def recorded(event: FakeEvent) -> None:
        event.records += 1
        event.gradients = [tensor.grad.clone() for tensor in step.tensors]

    def wait_event(_, event: FakeEvent) -> None:
        current.append(event)

    def started_sum(gradients: list[torch.Tensor]) -> Callable[[], None]:
        (bucket,) = (
            index
            for index, tensors in enumerate(step.buckets.buckets)
            if tensors[0].grad is gradients[0] and len(tensors) == len(gradients)
        )
        if current:
            event = current.pop()
            there = event.gradients[step.parts[bucket]]
            for gradient, early in zip(gradients, there, strict=True):
                assert torch.equal(gradient, early)
        else:
            event = None
        seen.append((bucket, event is not None))
        return lambda: None

    monkeypatch.setattr(FakeEvent, "recorded", recorded)
    monkeypatch.setattr("tests.requant.inference.fake_cuda_graphs.FakeStream.wait_event", wait_event)
    monkeypatch.setattr(gradient_buckets, "started_sum", started_sum)
    for index, micro_batches in enumerate(batches("two shapes", 0, "cpu")):
        step([(tokens,) for tokens in micro_batches], factor(index))
        eager = index < EAGER_STEPS
        order = range(len(ORDER)) if eager else ORDER
        # the scales of coded matrices get their gradients from the chain rule
        assert seen == [(bucket, not eager and bucket != 0) for bucket in order]
        seen.clear()
    assert step.buckets.in_chain_rule == {0}
    step([(torch.zeros(3, 8, dtype=torch.int64),)], 1.0)  # of no graph's shape, after those of a graph
    assert seen == [(bucket, False) for bucket in ORDER]
    step.close()


def check(outputs: list[str], *, tolerance: float) -> None:
    """What two ranks printed."""
    found = [json.loads(output) for output in outputs]
    for case, windows in CASES.items():
        of_case = [each[case] for each in found]
        told = f"{case}: {json.dumps(of_case, indent=1)}"
        assert all(each["captured"] for each in of_case), told
        assert [each["order"] for each in of_case] == [ORDER] * 2, told
        # in all graphs of a rank, one for each shape of micro-batch; the first bucket waits for the chain rule
        events = [[ORDER[:-1]] * len(set(of_rank)) for of_rank in windows]
        assert [each["events"] for each in of_case] == events, told
        errors = [error for each in of_case for error in each["errors"].values()]
        assert all(error < tolerance for error in errors), told
        assert len({each["digest"] for each in of_case}) == 1, told


def test_two_ranks_take_the_steps_of_one(in_processes) -> None:
    """Whatever each has of the micro-batches; a sum waits for the graph of the last."""
    outputs = in_processes(SCRIPT, 2, "cpu")
    check(outputs, tolerance=1e-4)
    first, second = map(json.loads, outputs)
    captured = STEPS - EAGER_STEPS
    # by graph and bucket, how often its event had been recorded at each wait
    alone, twice, four_times = ([[count * (i + 1) for i in range(captured)]] * 7 for count in (1, 2, 4))
    never = [[]] * 7
    assert first["one micro-batch"]["waits"] == second["one micro-batch"]["waits"] == [alone]
    assert first["two shapes"]["waits"] == second["two shapes"]["waits"] == [never, alone]
    assert first["two alike"]["waits"] == second["two alike"]["waits"] == [twice]
    assert (first["no window"]["waits"], second["no window"]["waits"]) == ([twice], [])
    assert first["memory ran out"]["waits"] == [twice]
    assert second["memory ran out"]["waits"] == [four_times]


@pytest.mark.gpu
def test_two_gpus_take_the_steps_of_one(in_processes) -> None:
    """Sums that start before a bucket is complete, or updates before a sum is done, would change the weights."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(in_processes(SCRIPT, 2, "cuda"), tolerance=1e-3)
