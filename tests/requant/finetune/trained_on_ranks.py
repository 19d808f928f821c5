"""A model with a tied embedding and coded matrices that two ranks train, captured, beside a plain computation of the steps.

A script of each rank: `in_processes(SCRIPT, 2, device)`. On a CPU its graphs are those of `fake_cuda_graphs.py`.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from requant import ranks
from requant.finetune.divided import gradient_of
from requant.finetune.step import EAGER_STEPS, ReparametrizedWeight, TrainableTensor, TrainingStep

from ..inference.fake_cuda_graphs import install
from .test_step import Descent, without_effect

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from {__name__} import main
main(*sys.argv[1:])
"""
# of buckets: scales and matrix 1; matrix 2; matrices 4 and 5; the embedding; gains 0, 1, 2; gains 3 to 5
ORDER = [2, 7, 1, 6, 5, 4, 3, 0]
CODED, UNCODED = (0, 3), (1, 2, 4, 5)
STEPS = EAGER_STEPS + 4
TOKENS = {"cpu": 8, "cuda": 256}  # of a window
SIZE = {"cpu": 16, "cuda": 2048}  # with matrices that are summed alone and, on a GPU, take a while
# case -> windows of each micro-batch of each rank
CASES = {
    "one micro-batch": [[4], [4]],
    "two shapes": [[2, 1], [1, 2]],
    "two alike": [[2, 2], [2, 2]],
    "no window": [[2, 2], []],
    "memory ran out": [[2, 2], [1, 1, 1, 1]],  # on the second rank, which had [2, 2]
}


class Model:
    """Six residual blocks of a gain and a matrix each, of which two are coded: scales times codes."""

    def __init__(self, device: str) -> None:
        generator, d = torch.Generator().manual_seed(0), SIZE[device]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.codes = {i: normal(d, d).sign() for i in CODED}
        self.scales = {i: (1 + normal(d, 1) / 8) / d**0.5 for i in CODED}
        self.matrices = {i: normal(d, d) / d**0.5 for i in UNCODED}
        self.embedding = normal(4 * d, d)
        self.gains = [1 + normal(d) / 8 for _ in range(6)]

    def trainables(self) -> dict[str, Tensor]:
        """In the order of `trainables.py`."""
        return (
            {f"scales {i}": each for i, each in self.scales.items()}
            | {f"matrix {i}": each for i, each in self.matrices.items()}
            | {"embedding": self.embedding}
            | {f"gain {i}": each for i, each in enumerate(self.gains)}
        )

    def value(self, index: int) -> Tensor:
        return self.scales[index] * self.codes[index]

    def loss(self, tokens: Tensor, coded: Sequence[Tensor]) -> Tensor:
        """Summed over the tokens of a step."""
        matrices = self.matrices | dict(zip(CODED, coded, strict=True))
        hidden = self.embedding[tokens]
        for index, gain in enumerate(self.gains):
            hidden = hidden + torch.tanh((hidden * gain) @ matrices[index].mT)
        logits = hidden @ self.embedding.mT / hidden.shape[-1] ** 0.5
        return functional.cross_entropy(
            logits.flatten(0, 1), tokens.roll(1, 1).flatten(), reduction="sum"
        ) / (8 * tokens.shape[1])


def batches(case: str, rank: int, device: str) -> list[list[Tensor]]:
    """The micro-batches of a rank's steps."""
    generator = torch.Generator().manual_seed(1 + rank)
    return [
        [
            torch.randint(0, 4 * SIZE[device], (windows, TOKENS[device]), generator=generator).to(device)
            for windows in CASES[case][rank]
        ]
        for _ in range(STEPS)
    ]


def training_step(model: Model, device: str, *, patch: pytest.MonkeyPatch) -> TrainingStep:
    """Of gradient descent, whose weights differ in rounding where gradients do."""
    coded = [torch.zeros_like(codes).requires_grad_() for codes in model.codes.values()]
    if device == "cpu":
        install(patch)
    step = TrainingStep(
        lambda tokens: model.loss(tokens, coded),
        [TrainableTensor(tensor=each, lr=0.02) for each in model.trainables().values()],
        [
            ReparametrizedWeight(parameter=parameter, value=lambda i=i: model.value(i))
            for i, parameter in zip(CODED, coded, strict=True)
        ],
        Descent,
    )
    if device == "cpu":
        step.captures = True
        step._capture = without_effect(step, step._capture)
        for index, group in enumerate(group for each in step.optimizers for group in each.param_groups):
            group["lr"] = step.lrs[index]
    return step


def factor(step: int) -> float:
    return 1 - step / 10


def plain(model: Model, case: str, device: str, full_lrs: Tensor) -> None:
    """The same steps of all ranks' micro-batches, by autograd alone."""
    tensors = [each.requires_grad_() for each in model.trainables().values()]
    of_ranks = [batches(case, rank, device) for rank in range(len(CASES[case]))]
    for index in range(STEPS):
        for of_rank in of_ranks:
            for tokens in of_rank[index]:
                model.loss(tokens, [model.value(i) for i in CODED]).backward()
        with torch.no_grad():
            for tensor, lr in zip(tensors, full_lrs.tolist(), strict=True):
                tensor -= lr * factor(index) * gradient_of(tensor)
                tensor.grad = None


def trained(device: str, case: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What this rank found; `errors`: of each tensor, by the way that it went."""
    start, model, expected = (Model(device) for _ in range(3))
    step = training_step(model, device, patch=patch)
    for index, micro_batches in enumerate(batches(case, ranks.rank(), device)):
        if case == "memory ran out" and ranks.rank() == 1:
            step.halves = True
            micro_batches = [torch.cat(micro_batches[i : i + 2]) for i in (0, 2)]
        step([(tokens,) for tokens in micro_batches], factor(index))
    plain(expected, case, device, step.full_lrs)
    digest, errors = hashlib.sha256(), {}
    with torch.no_grad():
        for (name, tensor), exact, first in zip(
            model.trainables().items(),
            expected.trainables().values(),
            start.trainables().values(),
            strict=True,
        ):
            errors[name] = ((tensor - exact).abs().max() / (exact - first).abs().max()).item()
            digest.update(tensor.cpu().numpy().tobytes())
    captured, events = step.updates is not None, [graph.events for graph in step.graphs.values()]
    step.close()
    return {
        "captured": captured,
        "order": step.buckets.order,
        "in chain rule": sorted(step.buckets.in_chain_rule),
        "events": [list(each) for each in events],
        "waits": [[event.waits_after for event in each.values()] for each in events]
        if device == "cpu"
        else [],
        "errors": errors,
        "digest": digest.hexdigest(),
    }


def main(device: str) -> None:
    with ranks.joined(device), pytest.MonkeyPatch.context() as patch:
        found = {case: trained(device, case, patch) for case in CASES}
        print(json.dumps(found), file=sys.__stdout__)
