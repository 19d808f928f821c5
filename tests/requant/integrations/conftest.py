"""Fixtures of the tests of the vLLM plugin: the plugin over doubles of vLLM or vLLM itself, and matrices."""

import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from requant.formats.quantized_weight import QuantizedWeight

from . import vllm_double
from .vllm_layers import LAYERS

PLUGIN = ("requant.integrations.vllm", "requant.integrations.vllm_methods")  # what imports vLLM


@pytest.fixture(params=["double", pytest.param("vllm", marks=pytest.mark.peers)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin, vLLM's layers, and `ranks(r, of)`, which makes the process rank r."""
    for name in PLUGIN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    if request.param == "double":
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in vllm_double.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        pytest.importorskip(f"{LAYERS}.linear", exc_type=ImportError)
    linear = importlib.import_module(f"{LAYERS}.linear")
    embedding = importlib.import_module(f"{LAYERS}.vocab_parallel_embedding")
    plugin, methods = map(importlib.import_module, PLUGIN)

    def ranks(rank: int, of: int) -> None:
        for module in (linear, embedding):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: of)
        monkeypatch.setattr(methods, "get_tensor_model_parallel_world_size", lambda: of)

    ranks(0, 1)
    gather = Gathering()
    monkeypatch.setattr(methods, "tensor_model_parallel_all_gather", gather)
    yield SimpleNamespace(
        plugin=plugin, layers=linear, embedding=embedding, ranks=ranks, at_once=gather.at_once
    )
    for name in PLUGIN:
        sys.modules.pop(name, None)


class Gathering:
    """vLLM's all-gather among threads, one a rank."""

    def __init__(self) -> None:
        self.rank = threading.local()

    def __call__(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.given[self.rank.number] = x
        self.barrier.wait(timeout=60)
        whole = torch.cat(self.given, dim)
        self.barrier.wait(timeout=60)
        return whole

    def at_once(self, calls: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """What every rank returns."""
        self.given: list[Any] = [None] * len(calls)
        self.barrier = threading.Barrier(len(calls))

        def run(rank: int) -> torch.Tensor:
            self.rank.number = rank
            return calls[rank]()

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(run, range(len(calls))))


@pytest.fixture
def matrix(random_weight):
    """A random matrix whose groups the kernels take."""

    def make(
        n: int, k: int, kind: str = "codebook", bits: int = 3, seed: int = 0, **options
    ) -> QuantizedWeight:
        weight = random_weight(n, k, kind=kind, bits=bits, seed=seed, **options)
        if kind.startswith(("codebook", "trellis", "bands")):
            return weight
        g = torch.Generator().manual_seed(seed)
        scales = (torch.rand(n, -(-k // 32), generator=g) * 0.02).half()
        zeros = torch.randint(0, 1 << bits, scales.shape, generator=g, dtype=torch.uint8)
        zero_points = None if weight.dense.zero_points is None else zeros
        dense = replace(weight.dense, scales=scales, zero_points=zero_points, group_size=32)
        return QuantizedWeight(dense=dense, sparse=weight.sparse)

    return make
