"""Originals that are stored in FP8 or MXFP4: the floats they stand for, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from requant.checkpoint.save import disk_dtype
from requant.errors import ModelError
from requant.models.loading import empty_model, load_model
from requant.models.prequantized import float_state, float_view

from ..prequantized_folders import E2M1, e2m1, fp4_folder, fp8, fp8_folder, mxfp4_folder, rewrite


@pytest.fixture
def stored(tiny_folder, tmp_path: Path) -> Callable[..., Path]:
    """`stored(tensors, block=16)`: a folder whose weight file holds these tensors, in FP8 by its config.json."""

    def folder(tensors: dict[str, Tensor], *, method: str = "fp8", block: object = None) -> Path:
        entry = {"quant_method": method, "weight_block_size": block}
        return rewrite(tiny_folder("llama"), Path(mkdtemp(dir=tmp_path)) / "stored", tensors, entry)

    return folder


def values(folder: Path, name: str, dtype: str = "float32") -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    return float_state(str(folder))[0][name][...]


@pytest.mark.parametrize("shape", [(40, 72), (16, 16), (5, 7), (33, 32)])
def test_partial_blocks_have_scales_of_their_own(stored, shape: tuple[int, int]) -> None:
    """40 rows in blocks of 16 are 16 + 16 + 8, as the 576 of DeepSeek's kv_a_proj_with_mqa are 4 x 128 + 64."""
    codes, scales = fp8(torch.randn(shape), 16, 16)
    folder = stored({"a.weight": codes, "a.weight_scale_inv": scales}, block=[16, 16])
    expected = torch.tensor(
        [[codes[i, j].float() * scales[i // 16, j // 16] for j in range(shape[1])] for i in range(shape[0])]
    )
    assert torch.equal(values(folder, "a.weight"), expected)
    assert torch.equal(values(folder, "a.weight", "bfloat16"), expected.bfloat16())
    view = float_view(folder)
    assert {name: (each.dtype, each.shape) for name, each in view.items()} == {
        "a.weight": (torch.bfloat16, shape)
    }
    assert view["a.weight"].bytes == codes.numel() + 4 * scales.numel()


def test_transformers_divides_other_blocks() -> None:
    """Why the files are read here: it divides rows by scales. Once it no longer does, this module can shrink."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scales = torch.ones(192, 128).to(torch.float8_e4m3fn), torch.tensor([[1.0], [2.0]])
    found = Fp8Dequantize(None)._dequantize_one(codes, scales)
    assert (found[:, 0] == 1).sum() == 96  # and not 128
    with pytest.raises(ValueError, match="not divisible"):
        Fp8Dequantize(None)._dequantize_one(torch.ones(576, 128).to(codes.dtype), torch.ones(5, 1))


EXPONENTS = torch.tensor([[120, 127], [130, 0]], dtype=torch.uint8)
HALVES = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
LAYOUTS = {  # shape of the codes, block, scales, and the same for every weight
    "scalar": ((4, 6), None, torch.tensor(0.5), 0.5),
    "one number": ((4, 6), None, torch.tensor([0.5]), 0.5),
    "one block": ((4, 6), [128, 128], torch.tensor([[0.5]]), 0.5),
    "rows": ((4, 6), None, torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.arange(1.0, 5)[:, None]),
    "bfloat16": ((4, 6), None, torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "exponents": ((4, 4), [2, 2], EXPONENTS, torch.exp2(EXPONENTS.double() - 127)),
    "e8m0": ((4, 4), [2, 2], EXPONENTS.view(torch.float8_e8m0fnu), torch.exp2(EXPONENTS.double() - 127)),
    "experts": ((2, 4, 6), None, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])[:, None, None]),
    "gate and up": ((2, 4, 6), None, HALVES, HALVES),
    "experts in blocks": ((2, 3, 4), [2, 2], torch.arange(1.0, 9).view(2, 2, 2), torch.arange(1.0, 9).view(2, 2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["a.weight", "experts.gate_up_proj"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_scales(stored, layout: str, name: str) -> None:
    shape, block, scales, factors = LAYOUTS[layout]
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    found = values(stored({name: codes, f"{name}_scale_inv": scales}, block=block), name)
    factors = torch.as_tensor(factors, dtype=torch.float64)
    if factors.dim() and layout != "rows":
        if factors.shape[-2:] == (2, 2):
            factors = factors.repeat_interleave(2, -1)
        if factors.shape[-2] == 2:
            factors = factors.repeat_interleave(2, -2)[..., : shape[-2], :]
    assert torch.equal(found, (codes.double() * factors).float())


@pytest.mark.parametrize("scale", ["a.scale", "a.weight_scale", "a.qscale_weight"])
def test_other_names_of_scales_and_those_of_activations(stored, scale: str) -> None:
    codes = torch.randn(4, 6).to(torch.float8_e4m3fn)
    other = {
        "a.activation_scale": torch.tensor(2.0),
        "a.input_scale": torch.tensor(2.0),
        "norm.scale": torch.ones(3),
    }
    folder = stored({"a.weight": codes, scale: torch.tensor(0.5), **other})
    assert float_view(folder).keys() == {"a.weight", "norm.scale"}
    assert torch.equal(values(folder, "a.weight"), codes.float() / 2)


def test_four_bits_two_a_byte(stored) -> None:
    """The experts of DeepSeek-V4: every byte is two numbers, the low half first."""
    packed = torch.arange(256).to(torch.uint8).view(4, 64)
    scales = torch.tensor([[127, 128, 126, 129]] * 4, dtype=torch.uint8)
    folder = stored(
        {"w1.weight": packed.view(torch.int8), "w1.scale": scales.view(torch.float8_e8m0fnu)},
        block=[128, 128],
    )
    assert float_view(folder)["w1.weight"].shape == (4, 128)
    expected = torch.stack((E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]), -1).flatten(1)
    factors = torch.tensor([1.0, 2.0, 0.5, 4.0]).repeat_interleave(32)
    assert torch.equal(values(folder, "w1.weight"), expected * factors)


def test_large_matrices_go_in_chunks(stored, monkeypatch) -> None:
    """Chunks of rows that are not a multiple of the block, of fused experts and of transposed ones."""
    codes = torch.randn(2, 40, 72).to(torch.float8_e4m3fn)
    fp8_file = {"e.down_proj": codes, "e.down_proj_scale_inv": torch.rand(2, 3, 5)}
    blocks, scales = e2m1(torch.randn(2, 40, 64))
    whole = values(stored(fp8_file, block=[16, 16]), "e.down_proj")
    monkeypatch.setattr("requant.models.prequantized._CHUNK", 500)
    assert torch.equal(values(stored(fp8_file, block=[16, 16]), "e.down_proj"), whole)
    folder = stored({"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, method="mxfp4")
    found = values(folder, "e.down_proj")
    assert found.shape == (2, 64, 40) and found.is_contiguous()
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    expected = E2M1[codes] * torch.exp2(scales.float() - 127)[..., None]
    assert torch.equal(found, expected.flatten(-2).mT)


def test_a_model_is_the_one_transformers_dequantizes(tiny_folder, tmp_path: Path) -> None:
    """In blocks that divide, tensor for tensor; and what stands beside the weights is what a folder of floats gives."""
    pytest.importorskip("accelerate")
    source = tiny_folder("qwen3-moe")
    folder = fp8_folder(source, tmp_path / "fp8", block=16)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    model = load_model(str(folder), device="cpu", dtype="bfloat16")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype="bfloat16"
    )
    assert model.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16())
    assert model.generation_config.max_new_tokens == 7
    assert model.name_or_path == model.config._name_or_path == str(folder)
    assert not hasattr(model.config, "quantization_config")
    assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training
    (folder / "generation_config.json").unlink()
    plain = load_model(str(source), device="cpu", dtype="bfloat16")
    again = load_model(str(folder), device="cpu", dtype="bfloat16")
    assert again.generation_config.to_dict() == plain.generation_config.to_dict()
    ours, own = again.config.to_dict(), plain.config.to_dict()
    assert {key for key in ours | own if ours.get(key) != own.get(key)} == {"_name_or_path"}


def test_experts_in_mxfp4_are_those_transformers_dequantizes(tiny_folder, tmp_path: Path) -> None:
    folder = mxfp4_folder(tiny_folder("gpt-oss"), tmp_path / "mxfp4")
    model = load_model(str(folder), device="cpu", dtype="bfloat16")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype="bfloat16"
    )
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "deepseek-v32"])
def test_models_in_blocks_that_do_not_divide(tiny_folder, tmp_path: Path, name: str) -> None:
    """Close to the model in floats, by the three bits of E4M3; in float32 it is the same as in bfloat16."""
    source = tiny_folder(name)
    model = load_model(str(fp8_folder(source, tmp_path / "fp8", block=24)), device="cpu", dtype="auto")
    assert model.dtype == torch.float32
    rounded = load_model(str(tmp_path / "fp8"), device="cpu", dtype="bfloat16").state_dict()
    assert all(torch.equal(tensor, rounded[key].float()) for key, tensor in model.state_dict().items())
    original = load_model(str(source), device="cpu", dtype="auto").state_dict()
    errors = {
        key: float((tensor - original[key]).norm() / original[key].norm())
        for key, tensor in model.state_dict().items()
        if tensor.dim() >= 2
    }
    assert max(errors.values()) < 0.04
    assert min(error for key, error in errors.items() if "down_proj" in key) > 0.01


def test_experts_of_deepseek_v4_in_four_bits(tiny_folder, tmp_path: Path) -> None:
    """Experts as pairs in bytes, the rest in FP8 blocks, with exponents as scales that are called `.scale`."""
    folder = fp4_folder(tiny_folder("deepseek-v4"), tmp_path / "v4")
    assert (
        sum(stored.dtype == torch.int8 for stored in load_file(folder / "model.safetensors").values())
        == 2 * 16 * 3
    )
    model = load_model(str(folder), device="cpu", dtype="auto").state_dict()
    for name, tensor in (
        load_model(str(tiny_folder("deepseek-v4")), device="cpu", dtype="auto").state_dict().items()
    ):
        error = float((model[name].float() - tensor.float()).norm())
        assert error <= (0.2 if "experts" in name else 0.04) * float(tensor.float().norm()), name


def test_shapes_need_no_weights(tiny_folder, tmp_path: Path) -> None:
    folder = mxfp4_folder(tiny_folder("gpt-oss"), tmp_path / "mxfp4")
    (folder / "model.safetensors").unlink()
    empty = empty_model(str(folder), dtype="auto")
    assert empty.dtype == torch.bfloat16 and not hasattr(empty.config, "quantization_config")


GOOD = {"a.weight": torch.ones(40, 32).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(3, 2)}
BYTES = torch.zeros(2, 8, 2, 16, dtype=torch.uint8)
BLOCKS = {"a_blocks": BYTES, "a_scales": BYTES[..., 0].clone()}
HOSTILE = {
    "a grid of another size": (GOOD | {"a.weight_scale_inv": torch.ones(2, 2)}, [16, 16], r"scales of shape \[2, 2\]"),
    "one scale for blocks": (GOOD | {"a.weight_scale_inv": torch.ones(1)}, [16, 16], r"scales of shape \[1\]"),
    "blocks for one scale": (GOOD, None, r"with one scale, has scales of shape \[3, 2\]"),
    "no scales": ({"a.weight": GOOD["a.weight"]}, [16, 16], "without scales"),
    "scales alone": ({"a.weight": torch.ones(2, 2), "a.weight_scale_inv": torch.ones(1)}, None, "without weights"),
    "scales in float8": (GOOD | {"a.weight_scale_inv": torch.ones(3, 2).to(torch.float8_e5m2)}, [16, 16], "of dtype"),
    "a vector": ({"a.weight": torch.ones(4).to(torch.float8_e4m3fn), "a.scale": torch.tensor(1.0)}, None, "has shape"),
    "no block": (GOOD, [16, 0], "weight_block_size in config.json is"),
    "a block of text": (GOOD, "16", "weight_block_size in config.json is"),
    "half a block of bytes": (
        {"a.weight": torch.ones(4, 8, dtype=torch.int8), "a.scale": torch.ones(4, 2)}, None, "scales of",
    ),
    "blocks without scales": ({"a_blocks": BYTES}, "mxfp4", "has no scales"),
    "scales without blocks": ({"a_scales": BYTES}, "mxfp4", "without blocks"),
    "odd blocks": (BLOCKS | {"a_blocks": BYTES[..., :15].clone()}, "mxfp4", "are not blocks of 32"),
    "blocks of floats": (BLOCKS | {"a_blocks": BYTES.half()}, "mxfp4", "are not blocks of 32"),
    "scales of other blocks": (BLOCKS | {"a_scales": BYTES[:, :4, :, 0].clone()}, "mxfp4", "are not blocks of 32"),
    "floats too": (BLOCKS | {"a": torch.ones(1)}, "mxfp4", "is there as floats, too"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_files_that_contradict_themselves_are_refused(stored, case: str) -> None:
    tensors, block, said = HOSTILE[case]
    method = "mxfp4" if block == "mxfp4" else "fp8"
    folder = stored(tensors, method=method, block=None if method == "mxfp4" else block)
    with pytest.raises(ModelError, match=said) as caught:
        load_model(str(folder), device="cpu", dtype="auto")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_extreme_sizes_of_blocks_are_harmless(stored) -> None:
    folder = stored({"a.weight": GOOD["a.weight"], "a.scale": torch.ones(1, 1)}, block=[10**30, 10**30])
    assert torch.equal(values(folder, "a.weight"), torch.ones(40, 32))
    empty = {"a.weight": torch.empty(0, 32).to(torch.float8_e4m3fn), "a.scale": torch.empty(0, 1)}
    assert values(stored(empty, block=[16, 32]), "a.weight").shape == (0, 32)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize(
    "scale", [torch.tensor(torch.nan), torch.tensor(torch.inf), torch.tensor(255, dtype=torch.uint8)]
)
def test_scales_that_are_no_numbers(tiny_folder, tmp_path: Path, name: str, scale: Tensor) -> None:
    """Also of one expert, which transformers merges with others."""
    folder = fp8_folder(tiny_folder(name), tmp_path / "fp8", block=None)
    tensors = load_file(folder / "model.safetensors")
    tensors[next(key for key in tensors if key.endswith("up_proj.weight_scale_inv"))] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.weight_scale_inv holds a scale that is NaN or infinite"):
        load_model(str(folder), device="cpu", dtype="auto")


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
def test_codes_are_not_taken_for_weights(tiny_folder, tmp_path: Path, scale: str) -> None:
    """FP8 files beside a config.json that does not say so: transformers would load them without their scales."""
    stored = load_file(fp8_folder(tiny_folder("llama"), tmp_path / "fp8", block=16) / "model.safetensors")
    tensors = {name.replace("weight_scale_inv", scale): tensor for name, tensor in stored.items()}
    folder = rewrite(tiny_folder("llama"), tmp_path / "other", tensors, None)
    with pytest.raises(
        ModelError, match=rf"hold scales \(model\.layers\.0\..*\.{scale}\), but config\.json has no"
    ):
        load_model(str(folder), device="cpu", dtype="auto")


def test_a_matrix_whose_scales_are_missing_is_named(tiny_folder, tmp_path: Path) -> None:
    folder = fp8_folder(tiny_folder("llama"), tmp_path / "fp8", block=16)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = r"cannot be read as FP8 \(model\.layers\.1\.mlp\.up_proj\.weight is stored as float8 without scales\); download"
    for load in (load_model, lambda path, device, dtype: empty_model(path, dtype=dtype)):
        with pytest.raises(ModelError, match=said):
            load(str(folder), device="cpu", dtype="auto")


def float8_folder(source: Path, target: Path) -> Path:
    """Matrices, and the embedding, rounded to float8 without scales, and no quantization_config."""
    tensors = load_file(source / "model.safetensors")
    rounded = {
        name: each.to(torch.float8_e4m3fn) if each.dim() == 2 else each for name, each in tensors.items()
    }
    return rewrite(source, target, rounded, None)


def test_float8_without_scales_is_weights(tiny_folder, tmp_path: Path) -> None:
    folder = float8_folder(tiny_folder("llama"), tmp_path / "float8")
    stored = load_file(folder / "model.safetensors")
    model = load_model(str(folder), device="cpu", dtype="auto")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name].float()), name
    embedding = model.get_input_embeddings().weight
    assert disk_dtype(model, folder, embedding) == torch.bfloat16


def test_a_dtype_in_which_no_model_computes_is_refused(tiny_folder, tmp_path: Path) -> None:
    folder = float8_folder(tiny_folder("llama"), tmp_path / "float8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float8_e4m3fn"}))
    for load in (load_model, lambda path, device, dtype: empty_model(path, dtype=dtype)):
        with pytest.raises(
            ModelError, match=r"is float8_e4m3fn, in which no model computes\); .* write bfloat16"
        ):
            load(str(folder), device="cpu", dtype="auto")


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "modelopt", "fbgemm_fp8", None, ["fp8"]]
)
def test_other_formats_are_refused(tiny_folder, tmp_path: Path, method: object) -> None:
    folder = rewrite(tiny_folder("llama"), tmp_path / "other", {}, {"quant_method": method, "bits": 4})
    said = re.escape(f"is quantized already (quant_method {method}); give the original")
    for load in (load_model, lambda path, device, dtype: empty_model(path, dtype=dtype)):
        with pytest.raises(ModelError, match=said) as caught:
            load(str(folder), device="cpu", dtype="auto")
        assert "FP8 (fp8) or MXFP4 (mxfp4)" in str(caught.value)


def test_damaged_files(tiny_folder, tmp_path: Path) -> None:
    folder = fp8_folder(tiny_folder("llama"), tmp_path / "fp8", block=16)
    file = folder / "model.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    file.write_bytes(whole[:-9])
    with pytest.raises(ModelError, match="is truncated or damaged") as caught:
        load_model(str(folder), device="cpu", dtype="auto")
    assert "\n" not in str(caught.value)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight_scale_inv"):
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the weight files lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(folder), device="cpu", dtype="auto")
    file.unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load_model(str(folder), device="cpu", dtype="auto")
