"""`requant doctor` says what is here, and finds a kernel that is wrong."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

from requant.inference import machine
from requant.inference.kernel_layers import KernelLinear
from requant.inference.machine import EXTRAS, MATRICES, Cache, caches, examine


@pytest.fixture(autouse=True)
def no_caches_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may hold millions of files."""
    monkeypatch.setattr(machine, "caches", lambda: [])


def test_it_says_what_is_here(cli) -> None:
    code, out, error = cli("doctor", "--device", "cpu", "-q")
    assert (code, error) == (0, "")
    assert ["torch", torch.__version__] in [line.split() for line in out.splitlines()]
    assert all(f"{name}  " in out for name in MATRICES) and "WRONG" not in out
    code, out, _ = cli("doctor", "--device", "cpu", "--json", "-q")
    found = json.loads(out)
    assert code == 0 and found["problems"] == [] and found["device"] == "cpu"
    assert [each["matrix"] for each in found["kernels"]] == list(MATRICES)
    assert all(each["kernels"] == ["torch_fallback"] and each["problem"] is None for each in found["kernels"])
    assert found["packages"]["torch"] == torch.__version__


def test_a_wrong_kernel_is_found(cli, monkeypatch) -> None:
    multiply = KernelLinear.forward

    def wrong(self, x):
        return multiply(self, x) * (1.1 if self.bits == 3 else 1.0)

    monkeypatch.setattr(KernelLinear, "forward", wrong)
    code, out, _ = cli("doctor", "--device", "cpu", "-q")
    wrong_ones = [line.split("  ")[0] for line in out.splitlines() if line.endswith("WRONG")]
    assert code == 1 and wrong_ones == [name for name in MATRICES if name.startswith("3-bit")]
    assert (
        "problem: The kernels for 3-bit trellis matrices: the kernel for 3-bit trellis codes is wrong" in out
    )


def test_a_gpu_that_torch_does_not_see(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "MATRICES", {})
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [each for each in examine("cpu").problems if "sees no GPU" in each]


def test_caches_are_measured(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    (tmp_path / "triton" / "a").mkdir(parents=True)
    (tmp_path / "triton" / "a" / "kernel").write_bytes(b"x" * 1000)
    (tmp_path / "triton" / "other").write_bytes(b"x" * 24)
    (tmp_path / "triton" / "link").symlink_to("/")  # not followed
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
        patch.setattr(machine, "cache_file", lambda: tmp_path / "none")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "none"))
        assert caches() == [Cache(name="kernels compiled by Triton", path=tmp_path / "triton", bytes=1024)]


def test_extras_are_those_of_the_package() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    names = {
        extra: tuple(each.partition(">=")[0] for each in declared[extra])
        for extra in declared
        if extra != "dev"
    }
    assert names == EXTRAS
