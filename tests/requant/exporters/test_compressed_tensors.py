"""What we write is what compressed-tensors writes, and transformers computes with the same floats."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from requant.checkpoint.read import load_weights
from requant.errors import InputError
from requant.exporters.export import export
from requant.inference.load import load

TOKENS = torch.arange(60)[None]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_layout(grid_checkpoint, tmp_path: Path, bits: int, symmetric: bool) -> None:
    checkpoint = grid_checkpoint(bits=bits, symmetric=symmetric)
    written = export(checkpoint, "compressed-tensors", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in load_weights(checkpoint):
        grid = weight.dense
        n, k = grid.shape
        assert stored[f"{name}.weight_shape"].tolist() == [n, k]
        assert torch.equal(stored[f"{name}.weight_scale"], grid.scales)
        words = stored[f"{name}.weight_packed"]
        assert words.shape == (n, -(-k * bits // 32)) and words.dtype == torch.int32
        assert _bits(words[3], k, bits) == grid.codes[3].tolist()
        if not symmetric:
            words = stored[f"{name}.weight_zero_point"]
            assert words.shape == (-(-n * bits // 32), k // 32)
            assert _bits(words[:, 1], n, bits) == grid.zero_points[:, 1].tolist()
        assert f"{name}.weight" not in stored and (f"{name}.weight_zero_point" in stored) is not symmetric
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"] and config["ignore"] == ["lm_head"]
    assert group["weights"] | {"num_bits": bits, "symmetric": symmetric, "group_size": 32} == group["weights"]
    assert [note.split(":")[0] for note in written.notes] == ([] if symmetric else ["zero points"])


def _bits(words: torch.Tensor, count: int, bits: int) -> list[int]:
    """A little-endian bitstream, read bit by bit."""
    stream = sum((int(word) & 0xFFFFFFFF) << 32 * index for index, word in enumerate(words.tolist()))
    return [stream >> index * bits & (1 << bits) - 1 for index in range(count)]


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"),
    [(4, 32, True), (3, 64, True), (8, -1, True), (4, 32, False), (2, 16, False), (7, 64, False)],
)
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_it(grid_checkpoint, tmp_path: Path, bits, group_size, symmetric, dtype) -> None:
    """Bit for bit in float16; readers multiply in the scales' dtype, so in float32 they may round to float16 first."""
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    checkpoint = grid_checkpoint(bits=bits, group_size=group_size, symmetric=symmetric, dtype=dtype)
    export(checkpoint, "compressed-tensors", tmp_path / "out")
    ours = load(checkpoint, dtype=dtype, dequantize=True)
    # compressed-tensors 0.20 cannot put packed zero points into a model that stays compressed
    for dequantize in (False, True) if symmetric else (True,):
        config = CompressedTensorsConfig(dequantize=dequantize)
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", quantization_config=config, dtype=dtype
        ).eval()
        logits = theirs(TOKENS).logits  # decompresses
        for name, weight in load_weights(checkpoint):
            found = theirs.get_submodule(name).weight
            exact = weight.dequantize()
            assert torch.equal(
                found, exact if dtype == torch.float32 and not dequantize else exact.half().to(dtype)
            )
        if dtype == torch.float16 or not dequantize:
            assert torch.equal(logits, ours(TOKENS).logits)


@pytest.mark.parametrize("symmetric", [True, False])
def test_their_own_packing_is_ours(grid_checkpoint, tmp_path: Path, symmetric: bool) -> None:
    package = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    checkpoint = grid_checkpoint(bits=3, symmetric=symmetric)
    export(checkpoint, "compressed-tensors", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    arguments = quantization.QuantizationArgs(
        num_bits=3, symmetric=symmetric, strategy="group", group_size=32
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    for name, weight in load_weights(checkpoint):
        state = {"weight": weight.dequantize(), "weight_scale": weight.dense.scales.float()}
        if not symmetric:
            state["weight_zero_point"] = (weight.dense.zero_points.int() - 4).to(torch.int8)
        theirs = package.PackedQuantizationCompressor.compress(state, scheme)
        for suffix in theirs.keys() - {"weight_scale"}:
            assert torch.equal(
                stored[f"{name}.{suffix}"], theirs[suffix].to(stored[f"{name}.{suffix}"].dtype)
            )


@pytest.mark.filterwarnings("ignore")
def test_mixed_widths_are_groups_by_name(grid_checkpoint, tmp_path: Path) -> None:
    checkpoint = grid_checkpoint(bits=lambda name: 8 if "down_proj" in name else 4)
    written = export(checkpoint, "compressed-tensors", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = {group["weights"]["num_bits"]: group["targets"] for group in config["config_groups"].values()}
    assert (
        groups[8] == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"] and len(groups[4]) == 12
    )
    assert "2 kinds of grids" in written.notes[0] and "transformers reads these." in written.notes[0]
    assert "transformers reads it with the package" in (tmp_path / "out" / "README.md").read_text()
    pytest.importorskip("compressed_tensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float16).eval()
    assert torch.equal(theirs(TOKENS).logits, load(checkpoint, dequantize=True)(TOKENS).logits)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_mixed_widths_with_zero_points_are_not_said_to_be_for_transformers(
    grid_checkpoint, tmp_path: Path
) -> None:
    """The call by which it reads zero points decodes all widths as the first, often without an error."""
    checkpoint = grid_checkpoint(bits=lambda name: 8 if "down_proj" in name else 4, symmetric=False)
    written = export(checkpoint, "compressed-tensors", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Do not load it in transformers" in card and "dequantize=True" not in card
    assert len(written.notes) == 1 and "transformers misreads these" in written.notes[0]
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.float16
    ).eval()
    found, expected = (model(TOKENS).logits for model in (theirs, load(checkpoint, dequantize=True)))
    assert (found - expected).norm() > 0.05 * expected.norm()


@pytest.mark.parametrize("widths", [1, 2])
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_layers_that_transformers_renames_have_both_names(
    grid_checkpoint, tmp_path: Path, widths: int
) -> None:
    """Were they named as in the files alone, transformers would take each for one that is not quantized."""
    if "exaone" not in CONFIG_MAPPING:
        pytest.skip("EXAONE is not in this transformers")
    checkpoint = grid_checkpoint(
        "exaone", bits=lambda name: 8 if widths == 2 and "down_proj" in name else 4, num_hidden_layers=1
    )
    export(checkpoint, "compressed-tensors", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]
    targets = [group["targets"] for group in config["config_groups"].values()]
    if widths == 1:
        assert targets == [["Linear"]]
    else:
        assert targets[1] == ["transformer.h.0.mlp.c_proj", "model.layers.0.mlp.down_proj"]
    pytest.importorskip("compressed_tensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float16).eval()
    assert torch.equal(theirs(TOKENS).logits, load(checkpoint, dequantize=True)(TOKENS).logits)


def test_bfloat16_is_said_to_round(grid_checkpoint, tmp_path: Path) -> None:
    written = export(grid_checkpoint(dtype=torch.bfloat16), "compressed-tensors", tmp_path / "out")
    assert "--dtype float16 keeps them exact" in written.notes[0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("codebook", "has codebook codes"),
        ("trellis", "has trellis codes"),
        ("symmetric", r"has a sparse part \(\d+ entries\)"),
    ],
)
def test_what_the_format_cannot_say(make_checkpoint, tmp_path: Path, kind: str, reason: str) -> None:
    checkpoint, _ = make_checkpoint("llama", kind=kind)
    where = r"model\.layers\.0\.self_attn\.q_proj"
    with pytest.raises(
        InputError, match=f"{where} {reason}, which compressed-tensors cannot express; export --to dense"
    ):
        export(checkpoint, "compressed-tensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_groups_that_do_not_divide_the_columns(grid_checkpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="64 columns in groups of 48, the last one shorter"):
        export(grid_checkpoint(group_size=48), "compressed-tensors", tmp_path / "out")
