"""Damaged and hostile folders: one sentence, no model, no large allocation."""

import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from requant.checkpoint.inspect import inspection
from requant.checkpoint.read import verify_checksums
from requant.checkpoint.validate import read_header
from requant.errors import CheckpointError, FileError
from requant.exporters.export import export
from requant.inference.load import load

from .hostile import DOWN, UP, edit_config, edit_module, edit_tensors, refuse, refuse_load


def test_a_path_may_begin_at_home(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it may where a checkpoint is saved."""
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    load(f"~/{checkpoint.name}")


def test_the_copy_itself_loads(checkpoint: Path) -> None:
    assert load(checkpoint) is not None
    assert len(verify_checksums(checkpoint, read_header(checkpoint).files)) == 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"bits": 20}, "bits = 20, not a whole number from 1 to 8"),  # a codebook of a million levels
        ({"bits": 2.5}, r"bits = 2\.5"),
        ({"bits": True}, "bits = True"),
        ({"shape": [172]}, r"where \[n, k\] belongs"),
        ({"shape": [172, -64]}, "shape = -64"),
        ({"shape": [10**12, 10**12]}, "shape = 1000000000000, not a whole number from 1 to 2147483648"),
        ({"shape": [2**30, 2**30]}, "but config.json asks for"),
        ({"shape": [64, 172]}, "but config.json asks for"),
        ({"group_size": 0}, "group_size = 0"),
        ({"group_size": 16}, "but config.json asks for"),
        (
            {"format": "pickle"},
            "format = 'pickle', not one of 'grid', 'codebook', 'trellis', 'semi_structured'",
        ),
        ({"format": "codebook"}, "unknown key 'column_scales'"),
        ({"zero_points": False}, "has no such tensor"),
        ({"zero_points": 1}, "zero_points = 1, not one of False, True"),
        ({"column_scales": True}, "column_scales is missing"),
        ({"sparse": 10**9}, "sparse = 1000000000, not a whole number from 0 to 11008"),
        ({"sparse": 7}, "but config.json asks for"),
        ({"sparse": 0}, "unknown key 'sparse_counts'"),
        ({"sparse_values": "float64"}, "sparse_values = 'float64'"),
        ({"surprise": "x" * 10**6}, "unknown key 'surprise'"),
    ],
)
def test_wrong_entries(checkpoint: Path, values: dict[str, Any], sentence: str) -> None:
    edit_module(checkpoint, **values)
    refuse(checkpoint, sentence)


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (8, "format version 8, newer than the 7 .*pip install --upgrade requant"),
        (0, "format version 0, older than the 1 that .*requant quantize --recipe .*/copy/recipe.yaml"),
        ("1", "names no format_version"),
        (None, "names no format_version"),
    ],
)
def test_versions(checkpoint: Path, version: object, sentence: str) -> None:
    edit_config(checkpoint, lambda config: config["quantization_config"].update(format_version=version))
    refuse(checkpoint, sentence)


def test_other_methods_and_plain_models_are_told_apart(checkpoint: Path) -> None:
    edit_config(checkpoint, lambda config: config["quantization_config"].update(quant_method="gptq"))
    refuse(checkpoint, "written by another tool .quant_method 'gptq'")
    edit_config(checkpoint, lambda config: config.pop("quantization_config"))
    refuse(checkpoint, "is not quantized .*run `requant quantize`")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "[" * 100_000])
def test_unreadable_config(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    refuse(checkpoint, "config.json (cannot be read as JSON|holds a JSON list)")


def test_missing_folder_and_config(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "is not a folder")
    refuse(tmp_path, "holds no checkpoint; give the folder that")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refuse(tmp_path, "config.json is missing")


def test_remote_code_is_refused_unless_asked(checkpoint: Path) -> None:
    edit_config(
        checkpoint, lambda config: config.update(text={"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    )
    refuse_load(checkpoint, "auto_map asks to run Python code .*trust_remote_code=True")
    assert read_header(checkpoint, trust_remote_code=True).modules


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"hidden_size": 128}, "but .* by the rest of config.json"),
        ({"vocab_size": 10**9}, "model.embed_tokens.weight has shape .* by config.json"),
        ({"num_hidden_layers": 10**9}, "asks for 1000000000 blocks, but the weight files hold"),
        ({"num_hidden_layers": 0}, "asks for 0 blocks, but the weight files hold"),
        ({"num_hidden_layers": -1}, "asks for -1 blocks, but the weight files hold"),
        ({"num_hidden_layers": 3}, "model.layers.2.* is missing from the weight files"),
        ({"num_hidden_layers": 1}, "but LlamaForCausalLM has no such layer"),
        ({"num_hidden_layers": "two"}, "cannot build the model of config.json"),
        ({"model_type": "no-such-model"}, "cannot build the model of config.json"),
        ({"attention_bias": True}, "q_proj.bias is missing from the weight files"),
    ],
)
def test_an_architecture_that_does_not_fit(checkpoint: Path, values: dict[str, Any], sentence: str) -> None:
    edit_config(checkpoint, lambda config: config.update(values))
    refuse_load(checkpoint, sentence)


def test_tuples_that_a_config_asks_for_are_not_made(checkpoint: Path) -> None:
    """transformers' models fail on them."""
    edit_config(checkpoint, lambda config: config.update(return_dict=False))
    model = load(checkpoint)
    assert model(torch.ones(1, 2, dtype=torch.int64)).logits.shape[:2] == (1, 2)


def test_truncated_shard(checkpoint: Path) -> None:
    shard = checkpoint / "model-00002-of-00002.safetensors"
    for size in (shard.stat().st_size - 1, 1000, 9, 3, 0):
        with open(shard, "r+b") as file:
            file.truncate(size)
        refuse(checkpoint, "00002-of-00002.safetensors .*(truncated|no safetensors file)")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1000000000000, 1000000], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": "04"}}',
        b"{" * 50_000,
    ],
)
def test_hostile_safetensors_headers(checkpoint: Path, header: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refuse(checkpoint, "model.safetensors has an unreadable safetensors header")


def test_header_that_claims_to_be_huge(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    refuse(checkpoint, "truncated or no safetensors file")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..safetensors", "x.bin"]
)
def test_shard_names_cannot_leave_the_folder(checkpoint: Path, name: str) -> None:
    index = checkpoint / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(table))
    refuse(checkpoint, "which is not a plain file name")


def test_missing_shard_and_wrong_index(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(table))
    refuse(checkpoint, "says that model.norm.weight is in no shard, but it is in model-0000")
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    refuse(
        checkpoint, "model-00002-of-00002.safetensors is missing, but model.safetensors.index.json names it"
    )


def test_pickles_are_never_opened(checkpoint: Path) -> None:
    for file in checkpoint.glob("model*"):
        file.unlink()
    refuse(checkpoint, "has neither model.safetensors nor")
    (checkpoint / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    refuse(checkpoint, "pickled weights only .pytorch_model.bin.*ask its author for safetensors")


@pytest.mark.parametrize("name", [f"{UP}.codes", f"{UP}.sparse_counts", f"{DOWN}.scales"])
def test_missing_tensor_of_a_matrix(checkpoint: Path, name: str) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.pop(name))
    refuse(checkpoint, f"{name} is missing from the weight files")


def test_tensors_the_model_does_not_have_or_lacks(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    refuse_load(checkpoint, "holds model.extra.weight, which LlamaForCausalLM does not have")
    edit_tensors(
        checkpoint, lambda tensors: [tensors.pop("model.extra.weight"), tensors.pop("model.norm.weight")]
    )
    refuse_load(checkpoint, "model.norm.weight is missing")


def test_a_plain_weight_beside_the_codes(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({f"{UP}.weight": torch.zeros(172, 64)}))
    refuse(checkpoint, f"{UP}.weight is in model.safetensors, but the entry of {UP} .* has no such tensor")


@pytest.mark.parametrize("suffix", ["codes", "scales", "zero_points", "sparse_indices", "sparse_values"])
def test_wrong_shapes_and_dtypes(checkpoint: Path, suffix: str) -> None:
    name = f"{UP}.{suffix}"
    edit_tensors(checkpoint, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    refuse(checkpoint, f"{name} is .* but config.json asks for")
    edit_tensors(checkpoint, lambda tensors: tensors.update({name: tensors[name].double()}))
    refuse(checkpoint, f"{name} is torch.float64")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_pipes_devices_and_sparse_files(checkpoint: Path, name: str, kind: str) -> None:
    """Refused before they are read: this test would hang, or take 8 GB."""
    file = checkpoint / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 8 << 30)
    says = "not a plain file" if kind != "sparse" else "at most|unreadable safetensors header"
    refuse(checkpoint, f"{name} (is|has) .*({says})")
    with pytest.raises((CheckpointError, FileError), match=says):
        inspection(checkpoint)


def test_json_that_grows_in_memory(checkpoint: Path) -> None:
    """60 MB of empty lists would be 1.5 GB of objects."""
    (checkpoint / "config.json").write_bytes(b'{"a":[' + b"[]," * (20 << 20) + b"[]]}")
    refuse(checkpoint, "config.json (cannot be read as JSON|holds .* more than any model needs)")


@pytest.mark.parametrize("entry", [2, "requant", [], {"quant_method": 2}])
def test_a_quantization_config_of_another_kind(checkpoint: Path, entry: object) -> None:
    edit_config(checkpoint, lambda config: config.update(quantization_config=entry))
    refuse(checkpoint, "is not quantized|was written by another tool")
    edit_config(checkpoint, lambda config: config.update(quantization_config=entry))


def test_a_foreign_calibration_entry_is_inspected(checkpoint: Path) -> None:
    edit_config(
        checkpoint, lambda c: c["quantization_config"].update(calibration=2, requant_version="\x1b[2J")
    )
    assert "requant ?[2J" in inspection(checkpoint).text()


def test_a_message_has_no_control_characters(checkpoint: Path) -> None:
    edit_config(checkpoint, lambda c: c["quantization_config"]["modules"].update({"a\nb\x1b[2J": {}}))
    with pytest.raises(CheckpointError, match=r"a\?b\?\[2J has format"):
        read_header(checkpoint)


def test_from_pretrained_verifies_checksums(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Codes of any bits are valid, so only the checksums know that one has changed."""
    name = f"{UP}.codes"
    header = read_header(checkpoint).tensors[name].file
    with safe_open(header, "pt") as opened:
        codes = opened.get_tensor(name).numpy().tobytes()
    content = header.read_bytes()
    header.write_bytes(content.replace(codes, bytes([codes[0] ^ 1]) + codes[1:]))
    for way in (load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=r"has sha256 .* but checksums.json says"):
            way(checkpoint)
    with caplog.at_level("INFO"):
        load(checkpoint, verify_checksums=False)
    assert "unverified" in caplog.text
    config = AutoConfig.from_pretrained(checkpoint)
    config.quantization_config["verify_checksums"] = False
    model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config)
    assert "verify_checksums" not in model.config.to_json_string()


def test_checksums(checkpoint: Path) -> None:
    shard = checkpoint / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"00001-of-00002.safetensors has sha256 .* but checksums.json says"
    ):
        verify_checksums(checkpoint, read_header(checkpoint).files)
    (checkpoint / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match=r"checksums\.json is missing"):
        verify_checksums(checkpoint, read_header(checkpoint).files)


def test_weights_that_the_disk_does_not_give_are_the_checkpoints_fault(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the folder that an export writes."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("hashlib.file_digest", fail)
    with pytest.raises(
        CheckpointError, match=r"00001-of-00002.safetensors cannot be read .*Input/output error"
    ):
        export(checkpoint, "dense", tmp_path / "dense")
