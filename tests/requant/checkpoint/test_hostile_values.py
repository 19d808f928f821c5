"""Damaged and hostile values of matrices: one sentence, by every way in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from requant.checkpoint import validate
from requant.checkpoint.validate import read_header
from requant.errors import CheckpointError
from requant.inference.load import load
from requant.models.safetensors_reader import TensorReader

from .hostile import DOWN, UP, edit_config, edit_module, edit_tensors, refuse, refuse_load


def change_values(path: Path, name: str, change: Callable[[torch.Tensor], Any]) -> None:
    edit_tensors(path, lambda tensors: change(tensors[name]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("suffix", ["scales", "sparse_values"])
def test_values_must_be_finite(checkpoint: Path, suffix: str, value: float) -> None:
    change_values(checkpoint, f"{UP}.{suffix}", lambda tensor: tensor.view(-1)[3:4].fill_(value))
    refuse(checkpoint, f"{UP}: {suffix} holds NaN or infinity")


def test_sparse_counts_must_sum_to_the_entries(checkpoint: Path) -> None:
    change_values(checkpoint, f"{UP}.sparse_counts", lambda counts: counts[0].add_(1))
    refuse(checkpoint, "sparse_counts sums to .* but .* sparse entries are stored")


def test_sparse_counts_must_fit_their_tile(checkpoint: Path) -> None:
    def move_to_one_row(counts: torch.Tensor) -> None:
        total = int(counts.long().sum())
        counts.zero_()
        counts[0, 0] = min(total, 255)
        counts[1, 0] = total - min(total, 255)

    change_values(checkpoint, f"{UP}.sparse_counts", move_to_one_row)
    refuse(checkpoint, "more entries in a 256-column tile than the tile has columns")


def test_sparse_indices_must_be_columns(checkpoint: Path) -> None:
    change_values(checkpoint, f"{UP}.sparse_indices", lambda indices: indices[-1:].fill_(64))
    refuse(checkpoint, "points past the last of 64 columns")


def test_sparse_indices_must_ascend(checkpoint: Path) -> None:
    def duplicate(tensors: dict[str, torch.Tensor]) -> None:
        row = int((tensors[f"{UP}.sparse_counts"][:, 0] >= 2).nonzero()[0])
        start = int(tensors[f"{UP}.sparse_counts"][:row].long().sum())
        indices = tensors[f"{UP}.sparse_indices"]
        indices[start + 1] = indices[start]

    edit_tensors(checkpoint, duplicate)
    refuse(checkpoint, "not strictly ascending")


def test_column_scales_must_not_be_zero(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama", kind="awq")
    change_values(path, f"{UP}.column_scales", lambda scales: scales[0:1].zero_())
    refuse(path, "column_scales holds a zero")


def test_a_codebook_with_too_few_levels(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama", kind="codebook")
    name = f"{UP}.levels"
    edit_tensors(path, lambda tensors: tensors.update({name: tensors[name][:, :7].contiguous()}))
    refuse(
        path,
        r"levels is torch.float16 \[172, 7\] .* asks for torch.float16 \[172, 8\]",
    )


@pytest.mark.parametrize(("kind", "vector"), [("codebook", "levels"), ("trellis", "output_scales")])
def test_vectors_of_8_bits(make_checkpoint, kind: str, vector: str) -> None:
    path, _ = make_checkpoint("llama", kind=f"{kind}-int8")

    def entry(config: dict[str, Any]) -> dict[str, Any]:
        return config["quantization_config"]["modules"][UP]

    load(path)
    assert read_header(path).quantization["format_version"] == 3
    change_values(path, f"{UP}.{vector}", lambda numbers: numbers.view(-1)[3:4].fill_(-128))
    refuse(path, f"{vector} holds -128, but numbers go from -127 to 127")
    edit_config(path, lambda config: config["quantization_config"].update(format_version=2))
    refuse(path, "the entry of .* needs format version 3, but version 2 is given")
    edit_config(path, lambda config: config["quantization_config"].update(format_version=3))
    edit_config(path, lambda config: entry(config).update({vector: "int4"}))
    refuse(path, f"{UP} has {vector} = 'int4', not one of 'int8'")
    edit_config(path, lambda config: entry(config).pop(vector))
    refuse(path, f"{UP}.{vector} is torch.int8 .* asks for torch.float16")


def test_one_scale_of_all_residuals(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama", int8=True, one_scale=True)
    load(path)
    assert read_header(path).quantization["format_version"] == 3
    edit_config(path, lambda c: c["quantization_config"]["modules"][UP].pop("sparse_scales"))
    refuse(path, r"sparse_scales is torch.float16 \[1\] .* asks for torch.float16 \[172\]")


def test_output_scales_have_one_form(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama", kind="trellis-int8")
    edit_config(path, lambda c: c["quantization_config"]["modules"][UP].update(output_signs=True))
    refuse(path, "stores its output scales as signs and as int8")


@pytest.mark.parametrize("kind", ["semi_structured", "semi_structured-hardware"])
def test_metadata_must_name_two_columns(make_checkpoint, kind: str) -> None:
    path, _ = make_checkpoint("llama", kind=kind)
    load(path)
    assert read_header(path).quantization["format_version"] == 4
    change_values(path, f"{UP}.metadata", lambda metadata: metadata[3, 2:3].fill_(255))
    refuse(path, f"{UP}: metadata names no two different columns")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"bits": 9}, "cannot be a 2:4 matrix .* of 9-bit values"),
        ({"bits": 17}, "bits = 17, not a whole number from 1 to 16"),
        ({"bits": 16}, "codes is torch.int32 .* asks for torch.float16"),
        ({"group_size": 6}, "in groups of 6; the checkpoint is damaged"),
        ({"shape": [172, 62]}, r"cannot be a 2:4 matrix \[172, 62\]"),
        ({"metadata": "none"}, "metadata = 'none', not one of 'packed', 'hardware'"),
    ],
)
def test_wrong_entries_of_2_4_matrices(make_checkpoint, values: dict[str, Any], sentence: str) -> None:
    path, _ = make_checkpoint("llama", kind="semi_structured")
    edit_module(path, **values)
    refuse(path, sentence)


def test_the_other_form_of_metadata_has_another_size(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama", kind="semi_structured")
    edit_module(path, DOWN, metadata="hardware")
    refuse(path, r"metadata is torch.uint8 \[64, 20\] .* asks for torch.uint8 \[64, 24\]")


def test_an_unknown_vector_of_a_grid(checkpoint: Path) -> None:
    edit_config(checkpoint, lambda c: c["quantization_config"]["modules"][UP].update(levels="int8"))
    refuse(checkpoint, "unknown key 'levels'")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_are_not_quantized(checkpoint: Path, value: float) -> None:
    change_values(checkpoint, "model.norm.weight", lambda tensor: tensor[3:4].fill_(value))
    refuse_load(
        checkpoint, "model.norm.weight in model.safetensors holds (NaN or infinity|1e\\+30, beyond float16)"
    )


def test_values_are_checked_in_every_part(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor is read in parts, and a NaN may be in any of them."""
    monkeypatch.setattr(validate, "CHUNK_BYTES", 64)
    change_values(checkpoint, "model.norm.weight", lambda tensor: tensor[-1:].fill_(float("nan")))
    read = TensorReader(read_header(checkpoint).tensors)
    with pytest.raises(
        CheckpointError, match=r"model.norm.weight in model.safetensors holds NaN or infinity"
    ):
        validate.check_plain_values(["model.norm.weight"], read)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("asymmetric", {"scales": 60000.0}),
        ("awq", {"scales": 1.0, "column_scales": 6e-8}),
        ("trellis", {"output_scales": 60000.0, "input_magnitude": 2.0}),
    ],
)
def test_absurd_scales(make_checkpoint, kind: str, change: dict[str, float]) -> None:
    path, _ = make_checkpoint("llama", kind=kind)
    for suffix, value in change.items():
        change_values(path, f"{UP}.{suffix}", lambda tensor, value=value: tensor.view(-1)[:1].fill_(value))
    refuse(path, f"{UP}: (output_)?scales makes weights of up to .*, beyond float16's 65504")


def test_an_absurd_scale_of_residuals(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama", int8=True)
    change_values(path, f"{UP}.sparse_scales", lambda scales: scales[:1].fill_(60000.0))
    refuse(path, f"{UP}: sparse_scales makes weights of up to")
