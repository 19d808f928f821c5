"""Tensors of weight files by name: each file is opened once, whatever the number of its tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from requant.errors import CheckpointError
from requant.inference.load import load
from requant.models import safetensors_reader
from requant.models.safetensors_header import read_tensors
from requant.models.safetensors_reader import TensorReader


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files in the order in which they are opened."""
    found: list[Path] = []
    really = safetensors_reader.safe_open

    def note(file: Path, **options: Any) -> Any:
        found.append(file)
        return really(file, **options)

    monkeypatch.setattr(safetensors_reader, "safe_open", note)
    return found


def test_each_file_is_opened_once(tmp_path: Path, opened: list[Path]) -> None:
    wanted = {f"layer.{i}.{suffix}": torch.rand(3, i + 1) for i in range(4) for suffix in ("codes", "scales")}
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    save_file({name: wanted[name] for name in wanted if name < "layer.2"}, files[0])
    save_file({name: wanted[name] for name in wanted if name >= "layer.2"}, files[1])
    read = TensorReader(read_tensors(files))
    for i in range(4):
        found = read.matrix(f"layer.{i}", ("scales", "codes"))
        assert list(found) == ["scales", "codes"]
        for suffix, tensor in found.items():
            assert torch.equal(tensor, wanted[f"layer.{i}.{suffix}"])
    assert opened == files


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    tensors = read_tensors([file])
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read \(.*\); download it again"):
        TensorReader(tensors)("a")


def test_a_tensor_of_another_file(tmp_path: Path) -> None:
    """As when a file was replaced after its header had been read."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    tensors = read_tensors([file])
    save_file({"b": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorReader(tensors)("a")


def test_loading_a_checkpoint(checkpoint: Path, opened: list[Path]) -> None:
    """All values are checked, those of many matrices, and the file is not opened again for each."""
    load(checkpoint)
    assert sorted(opened) == sorted(checkpoint.glob("*.safetensors"))
