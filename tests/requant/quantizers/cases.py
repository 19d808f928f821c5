"""One row per registered method: what the contract tests (`test_contract.py`) may expect of it."""

from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Case:
    """The method and its exceptions from what most methods promise.

    options: of its config, in all tests.
    restores_detached: detached weights come back as they were; False where they take up errors of the others.
    constant_within: relative error that a matrix of equal weights may have; None: no bound.
    finer_than: what the relative output error at 4 bits is below.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    restores_detached: bool = True
    constant_within: float | None = 1e-3  # float16 scales err by 2^-11
    finer_than: float = 0.02


CASES = (
    Case(method="rtn"),
    Case(method="hqq"),
    Case(method="kmeans"),
    Case(method="lut", restores_detached=False, options={"rounds": 2}),
    Case(method="gptq", restores_detached=False, constant_within=1e-2),  # passes on the error of the scale
    Case(method="awq", constant_within=1e-2),  # column scales are float16 too
    Case(method="trellis", constant_within=None),  # codes a rotated matrix
)
PARAMS = [
    pytest.param(case, id=case.method, marks=pytest.mark.slow if case.method == "trellis" else ())
    for case in CASES
]
