import math

import torch

from requant.finetune.best_values import BestValues


def test_tensors_end_at_the_values_of_the_lowest_kl() -> None:
    tensor = torch.zeros(2)
    best = BestValues([tensor], validated=True)
    for kl in (0.3, 0.1, 0.2, math.nan):
        tensor.fill_(kl)
        best.offer(kl)
    assert best.kl == 0.1
    best.apply()
    assert torch.equal(tensor, torch.full((2,), 0.1))


def test_the_initial_values_may_be_the_best() -> None:
    tensor = torch.ones(2)
    best = BestValues([tensor], validated=True)
    best.kl = 0.1
    tensor.add_(1)
    best.offer(0.2)
    best.apply()
    assert torch.equal(tensor, torch.ones(2))


def test_without_windows_to_measure_on_the_last_values_stay() -> None:
    tensor = torch.ones(2)
    best = BestValues([tensor], validated=False)
    tensor.add_(1)
    best.apply()
    assert torch.equal(tensor, torch.full((2,), 2.0)) and best.state() == {}


def test_a_resumed_run_goes_on_with_the_best_values() -> None:
    first, tensor = torch.ones(2), torch.zeros(2)
    stopped = BestValues([first], validated=True)
    stopped.offer(0.1)
    first.fill_(5)
    resumed = BestValues([tensor], validated=True)
    resumed.restore(stopped.kl, stopped.state())
    resumed.offer(0.2)
    resumed.apply()
    assert torch.equal(tensor, torch.ones(2))
    tensor.fill_(7)
    resumed.restore(0.05, {})  # saved after the last step: the tensors are the best
    resumed.apply()
    assert torch.equal(tensor, torch.full((2,), 7.0))
