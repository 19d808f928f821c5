"""Memory that runs out in training block by block: half as much at once, or the end of the run."""

import pytest
import torch

from requant.calibration.passes import recomputed_blocks
from requant.finetune import blockwise
from requant.finetune.blockwise import BlockwiseStep
from requant.finetune.recomputed_block import LearningBlock
from requant.finetune.teacher import HeadTeacher

from .coded_model import Problem


class Exhausted:
    """Memory that runs out for more than `windows` windows at once, once in `times`."""

    def __init__(self, monkeypatch, *, windows: int, times: int) -> None:
        self.left, plain = times, LearningBlock._result

        def result(block, call):
            if call.windows > windows and self.left:
                self.left -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return plain(block, call)

        monkeypatch.setattr(LearningBlock, "_result", result)


def learned(
    tiny_model, random_weight, windows, graphs_kept: int = 0
) -> tuple[dict[str, torch.Tensor], BlockwiseStep]:
    teacher = HeadTeacher(tiny_model("llama"), windows)
    problem = Problem(tiny_model("llama"), random_weight)
    with recomputed_blocks(problem.model, False):
        step = problem.step(teacher, graphs_kept=graphs_kept)
        for _ in range(2):
            step(teacher.micro_batches(torch.arange(6), None), 1.0)
            assert not step.chunks.graphs
        step.close()
    return {name: tensor.detach().clone() for name, tensor in problem.learning.items()}, step


def test_where_memory_runs_out_half_as_much_goes_at_once(
    tiny_model, random_weight, windows, monkeypatch, caplog
) -> None:
    """The step is not lost, nothing is counted twice, and the log says so once."""
    expected, step = learned(tiny_model, random_weight, windows)
    before = step.chunks.positions
    Exhausted(monkeypatch, windows=3, times=1)
    monkeypatch.setattr(blockwise, "TOKENS_AT_ONCE", 6 * 16)
    found, step = learned(tiny_model, random_weight, windows)
    assert (step.chunks.windows, step.chunks.positions) == (3, before // 2)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    (record,) = caplog.records
    assert "memory ran out in training: from now on 3 windows" in record.message


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("_result", 1),  # the first block's forward pass
        ("_result", 2),  # the second's, beside a graph
        ("_result", 3),  # the forward pass of a second step
        ("_build", 3),  # weights of the second block, beside a graph
        ("_result", "backward"),  # the second block's backward pass, of its own graph
    ],
)
def test_where_memory_runs_out_no_more_graphs_are_kept(
    tiny_model, random_weight, windows, monkeypatch, caplog, where: str, calls: int | str
) -> None:
    """As many windows go at once as before; nothing is lost or counted twice."""
    monkeypatch.setattr(blockwise, "TOKENS_AT_ONCE", 6 * 16)
    expected, _ = learned(tiny_model, random_weight, windows)
    plain, seen = getattr(LearningBlock, where), 0
    exhausted = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def called(block, *rest):
        nonlocal seen
        seen += 1
        if seen == calls:
            raise exhausted
        found = plain(block, *rest)
        if calls == "backward" and seen == 2:
            found.carried[0].register_hook(runs_out)
        return found

    def runs_out(_gradient: torch.Tensor) -> None:
        if not caplog.records:
            raise exhausted

    monkeypatch.setattr(LearningBlock, where, called)
    found, step = learned(tiny_model, random_weight, windows, graphs_kept=2)
    assert not step.chunks.keeps_graphs and not step.chunks.lowered and not step.chunks.graphs
    assert not any(block.built for block in step.blocks)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
    assert [record.message for record in caplog.records] == [
        "memory ran out in training: from now on every block is computed twice"
    ]


def test_memory_that_runs_out_twice_ends_the_run(tiny_model, random_weight, windows, monkeypatch) -> None:
    Exhausted(monkeypatch, windows=1, times=2)
    with pytest.raises(torch.OutOfMemoryError):
        learned(tiny_model, random_weight, windows)
