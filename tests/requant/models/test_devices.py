"""What a process took at most is its own, and a GPU may be lent in part."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import requant
from requant.errors import InputError, ModelError
from requant.models import devices

CHILD = """
import torch
from requant.models.devices import peak_memory, used_memory

used, peak = used_memory(torch.device("cpu")), peak_memory(torch.device("cpu"))
larger = bytearray(100 << 20)
print(used, peak, peak_memory(torch.device("cpu")))
"""
PARENT = f"""
import subprocess, sys

larger = bytearray(1 << 30)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is what getrusage says")
def test_the_peak_is_not_that_of_a_larger_parent() -> None:
    found = subprocess.run([sys.executable, "-c", PARENT], check=True, capture_output=True, text=True).stdout
    used, peak, later = map(int, found.split())
    assert used <= peak < used + (200 << 20)
    assert (90 << 20) < later - peak < (110 << 20)


@pytest.fixture
def gpu(monkeypatch) -> dict[str, float]:
    """A GPU of 80 bytes: others have 20, torch 60, 10 of them in tensors; what fraction of it torch was given."""
    given: dict[str, float] = {}
    reserved = [60]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 - reserved[0], 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved[0])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.__setitem__(0, 10))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, index: given.update({str(index): part})
    )
    monkeypatch.setattr(devices, "_most_of_a_gpu", sys.maxsize)
    return given


@pytest.mark.parametrize(("name", "index"), [("cuda", "None"), ("cuda:1", "1")])
def test_a_run_takes_no_more_of_a_gpu_than_it_may(gpu, name: str, index: str) -> None:
    device = torch.device(name)
    assert (devices.total_memory(device), devices.free_memory(device)) == (80, 50)
    assert devices.available_memory(device) == 60
    devices.limit_gpu_memory(24, name)
    assert gpu == {index: 24 / 80}
    assert (devices.total_memory(device), devices.free_memory(device)) == (24, 14)
    assert devices.available_memory(device) == 24
    devices.limit_gpu_memory(70, name)  # 60 of them are not in tensors, but others have 20 of the GPU
    assert (devices.total_memory(device), devices.free_memory(device)) == (70, 50)


def test_a_plan_for_a_gpu_that_is_not_here(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "_most_of_a_gpu", sys.maxsize)
    assert devices.total_memory(torch.device("cuda")) == devices.H200_MEMORY
    devices.limit_gpu_memory(24 << 30, "cuda")
    assert devices.total_memory(torch.device("cuda")) == 24 << 30


def test_a_limit_that_is_none_is_refused(gpu) -> None:
    with pytest.raises(InputError, match="limits a GPU, and this run is on cpu; leave it out"):
        devices.limit_gpu_memory(24, "cpu")
    with pytest.raises(InputError, match="is more than the GPU has"):
        devices.limit_gpu_memory(81, "cuda")
    assert not gpu


def current_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that contexts make current, as long as these last."""
    seen: list[int] = []

    @contextmanager
    def made_current(index: int) -> Iterator[None]:
        seen.append(index)
        yield
        seen.remove(index)

    monkeypatch.setattr(torch.cuda, "device", made_current)
    return seen


@pytest.mark.parametrize(("name", "entered"), [("cpu", []), ("cuda", []), ("cuda:1", [1])])
def test_a_gpu_named_by_its_number_is_the_current_one(monkeypatch, name: str, entered: list[int]) -> None:
    """While the context lasts: whatever asks `cuda` for its memory asks that one."""
    seen = current_gpus(monkeypatch)
    with devices.current_gpu(name):
        assert seen == entered
    assert not seen


@pytest.mark.parametrize("call", ["quantize", "score"])
def test_a_run_makes_its_gpu_the_current_one(monkeypatch, call: str) -> None:
    """Before it loads anything."""
    seen, loading = current_gpus(monkeypatch), []

    def prepare(*_: object, **__: object) -> None:
        loading.extend(seen)
        raise ModelError("enough")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    module = {"quantize": "pipeline.quantize", "score": "report.score"}[call]
    monkeypatch.setattr(f"requant.{module}.prepare", prepare)
    with pytest.raises(ModelError, match="enough"):
        getattr(requant, call)("demo", bits=3, device="cuda:1")
    assert loading == [1]


@pytest.mark.gpu
def test_what_torch_keeps_for_later_is_free() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    before = devices.free_memory(device)
    torch.empty(4 << 30, dtype=torch.uint8, device=device)  # freed at once, and kept by torch
    assert torch.cuda.memory_reserved(device) >= 4 << 30
    assert devices.free_memory(device) > before - (1 << 30)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (
            "inference.generate.generate_text",
            {"prompt": "a", "max_new_tokens": 1, "temperature": 0.0, "seed": 0, "dtype": "auto"},
        ),
        ("evaluation.bench.bench", {}),
        ("evaluation.compare.evaluate_all", {}),
        ("evaluation.tasks.evaluate_tasks", {"tasks": ["lambada"]}),
        (
            "server.run.serve_checkpoint",
            dict.fromkeys(("name", "api_key", "context", "max_tokens", "batch"))
            | {"host": "127.0.0.1", "port": 0, "waiting": 1, "dtype": "auto"},
        ),
    ],
)  # fmt: skip
def test_what_runs_kernels_makes_its_gpu_the_current_one(monkeypatch, call: str, given: dict) -> None:
    """Triton launches on the current GPU, wherever the tensors are."""
    seen, opening = current_gpus(monkeypatch), []
    name, _, function = call.rpartition(".")
    module = importlib.import_module(f"requant.{name}")

    def resolve(*_: object) -> None:
        opening.extend(seen)
        raise ModelError("enough")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(module, "resolve_source", resolve)
    monkeypatch.setattr(module, "_check_installed", lambda: None, raising=False)
    source = ["demo"] if "evaluate" in function else "demo"
    with pytest.raises(ModelError, match="enough"):
        getattr(module, function)(source, device="cuda:1", **given)
    assert opening == [1]
    with pytest.raises(InputError, match="sees 2 GPUs"):
        getattr(module, function)(source, device="cuda:2", **given)
