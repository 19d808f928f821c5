"""CUDA graphs on a CPU: a capture notes operations and launches, a replay makes the very same ones, on the same tensors.

What differs between calls but is a number of the host, or another tensor, is therefore wrong in a replay here as it is on a
GPU. A capture refuses to tell the host a value, and forgets what it computed.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

TO_THE_HOST = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")
POOL = object()


class FakeGraph:
    """What one capture noted."""

    __class__ = torch.cuda.CUDAGraph  # for `isinstance`, as a mock of a class does
    made: ClassVar["list[FakeGraph]"] = []

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.external: dict[int, Tensor] = {}  # that it reads or writes, and did not make
        self.held: dict[int, Tensor] = {}  # that it made: memory is not used twice
        self.pool: Any = None
        self.replays = 0
        FakeGraph.made.append(self)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call()

    def note(self, call: Callable[[], None], *operands: Any) -> None:
        for tensor in tensors_in(operands):
            if storage(tensor) not in self.held:
                self.external[storage(tensor)] = tensor
        self.calls.append(call)


class Capture(TorchDispatchMode):
    """In place of `torch.cuda.graph`."""

    current: "FakeGraph | None" = None

    def __init__(self, graph: FakeGraph, pool: Any = None) -> None:
        super().__init__()
        self.graph, graph.pool = graph, pool

    def __enter__(self) -> "Capture":
        Capture.current = self.graph
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        Capture.current = None
        for tensor in self.graph.held.values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() in TO_THE_HOST:
            raise RuntimeError(f"{func.name()} is not permitted when stream is capturing")
        given = {storage(tensor) for tensor in tensors_in((args, kwargs))}
        found = func(*args, **kwargs)
        made = [tensor for tensor in tensors_in(found) if storage(tensor) not in given]

        def again() -> None:
            new = [tensor for tensor in tensors_in(func(*args, **kwargs)) if storage(tensor) not in given]
            for old, tensor in zip(made, new, strict=True):
                old.copy_(tensor)

        self.graph.note(again, args, kwargs)
        self.graph.held |= {storage(tensor): tensor for tensor in made}
        return found


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, on a CPU; launches of `requant_kernels` are noted where they are imported by now."""
    FakeGraph.made.clear()
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: len(FakeGraph.made) << 20)
    for name, module in list(sys.modules.items()):
        if name.startswith("requant_kernels.") and hasattr(module, "launch") and callable(module.launch):
            monkeypatch.setattr(module, "launch", noting(module.launch))


class FakeStream:
    def __init__(self, _: Any = None) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass


def noting(launch: Callable[..., object]) -> Callable[..., None]:
    def noted(kernel: Any, grid: Any, args: Any, constants: Any, **options: Any) -> None:
        def start() -> None:
            with _disable_current_modes():
                launch(kernel, grid, args, constants, **options)

        start()
        if Capture.current is not None:
            Capture.current.note(start, args)

    return noted


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
