"""The files that are counted are those that transformers reads."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from requant.models.loading import load_model
from requant.models.weight_files import INDEX_FILE, folder_bytes, weight_files


@pytest.fixture
def sharded(tiny_folder, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def test_shards_that_the_index_names(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert weight_files(sharded) == shards
    assert folder_bytes(sharded) == sum(file.stat().st_size for file in shards)
    (sharded / "model-00001-of-00099.safetensors").write_bytes(shards[0].read_bytes())  # of another division
    assert weight_files(sharded) == shards


def test_one_file_goes_before_the_shards(sharded: Path, tiny_folder) -> None:
    """What transformers loads tells which."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
    model.lm_head.weight.data.fill_(0.5)
    model.save_pretrained(sharded.with_name("whole"))
    whole = (sharded.with_name("whole") / "model.safetensors").read_bytes()
    (sharded / "model.safetensors").write_bytes(whole)
    assert weight_files(sharded) == [sharded / "model.safetensors"] and folder_bytes(sharded) == len(whole)
    loaded = load_model(str(sharded), device="cpu", dtype="auto")
    assert torch.equal(loaded.lm_head.weight, torch.full_like(loaded.lm_head.weight, 0.5))


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", json.dumps({"weight_map": []}), json.dumps({"weight_map": {"a": []}})]
)
def test_without_an_index_that_can_be_read_all_shards_count(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    assert weight_files(sharded) == sorted(sharded.glob("model-*.safetensors"))
    assert folder_bytes(sharded.parent) == 0


def test_a_link_that_leads_nowhere_is_no_weight_file(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()
    (sharded / "model.safetensors").symlink_to("moved-away")
    (sharded / "model-loop.safetensors").symlink_to("model-loop.safetensors")
    assert weight_files(sharded) == sorted(sharded.glob("model-0*.safetensors"))
    assert folder_bytes(sharded) > 0
