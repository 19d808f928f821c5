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
        self.left, plain = times, LearningBlock._output

        def output(block, hidden, *rest):
            if len(hidden) > windows and self.left:
                self.left -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return plain(block, hidden, *rest)

        monkeypatch.setattr(LearningBlock, "_output", output)


def learned(tiny_model, random_weight, windows) -> tuple[dict[str, torch.Tensor], BlockwiseStep]:
    teacher = HeadTeacher(tiny_model("llama"), windows)
    problem = Problem(tiny_model("llama"), random_weight)
    with recomputed_blocks(problem.model, False):
        step = problem.step(teacher)
        for _ in range(2):
            step(teacher.micro_batches(torch.arange(6), None), 1.0)
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


def test_memory_that_runs_out_twice_ends_the_run(tiny_model, random_weight, windows, monkeypatch) -> None:
    Exhausted(monkeypatch, windows=1, times=2)
    with pytest.raises(torch.OutOfMemoryError):
        learned(tiny_model, random_weight, windows)
