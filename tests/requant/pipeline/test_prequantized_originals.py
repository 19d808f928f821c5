"""Runs whose original is stored in FP8 or MXFP4: its floats are what is quantized, scored, saved and exported."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import requant
from requant.models.loading import load_model
from requant.models.weight_files import folder_bytes
from requant.pipeline.planning.plan import make_plan
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.prepare import prepare
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Recipe
from requant.report.summary import result_numbers, result_rows

from ..on_text import on_text
from ..prequantized_folders import fp4_folder, fp8_folder, mxfp4_folder, rewrite


def recipe_of(method: str = "rtn", *skip: str) -> Recipe:
    return Recipe(
        method=method,
        mode="dense",
        quantizer=METHODS[method].config(bits=4),
        calibration=Calibration(num_samples=2, seq_len=16),
        evaluation=Evaluation(context=16, windows=2, samples=0),
        skip=skip,
    )


@pytest.fixture
def folder(tiny_folder, tmp_path: Path):
    def made(name: str) -> Path:
        if name == "gpt-oss":
            return mxfp4_folder(tiny_folder(name), tmp_path / "mxfp4")
        if name == "deepseek-v4":
            return fp4_folder(tiny_folder(name), tmp_path / "fp4")
        return fp8_folder(tiny_folder(name), tmp_path / "fp8", block=24)

    return made


def stored(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("name", "method", "skipped"),
    [
        ("llama", "gptq", "model.layers.1.mlp.down_proj"),
        ("deepseek-v3", "rtn", "model.layers.1.mlp.experts.3.down_proj"),
        ("qwen3-moe", "rtn", "model.layers.0.self_attn.q_proj"),
        ("gpt-oss", "rtn", "model.layers.0.self_attn.q_proj"),
        pytest.param("deepseek-v4", "rtn", "model.layers.1.self_attn.q_a_proj", marks=pytest.mark.slow),
    ],
)
def test_a_run_end_to_end(
    folder, tiny_text_file: Path, tmp_path: Path, name: str, method: str, skipped: str
) -> None:
    if name == "deepseek-v4" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("5.17 loads its indexer in the dtype of the file, also where another one is asked for")
    source = folder(name)
    result = requant.quantize(str(source), recipe_of(method, f"*{skipped}"), tiny_text_file)
    assert skipped not in result.weights and len(result.weights) > 8
    path = requant.save(result, tmp_path / "out")
    tensors, original = stored(path), load_model(str(source), device="cpu", dtype="bfloat16")
    assert {t.dtype for t in tensors.values()}.isdisjoint({torch.float8_e4m3fn, torch.float8_e8m0fnu})
    assert not any(key.endswith(("scale_inv", "_blocks")) for key in tensors)
    kept = tensors[f"{skipped}.weight".replace("self_attn.q_a_proj", "attn.wq_a")]  # DeepSeek-V4's files
    assert kept.dtype == torch.bfloat16
    if "experts" not in skipped:
        assert torch.equal(kept, original.state_dict()[f"{skipped}.weight"])
    config = json.loads((path / "config.json").read_text())
    entry = config["quantization_config"]
    assert "expert_dtype" not in config
    assert entry["quant_method"] == "requant" and "weight_block_size" not in entry
    ids = torch.arange(40)[None]
    assert torch.equal(requant.load(path, dtype="float32")(ids).logits, result.model(ids).logits)
    dense = requant.export(path, "dense", tmp_path / "dense", dtype="float32")
    again = load_model(str(dense.output), device="cpu", dtype="float32")
    assert torch.equal(again(ids).logits, result.model(ids).logits)


@pytest.mark.parametrize(("name", "matrices"), [("llama", 8 + 32 / 24**2), ("gpt-oss", None)])
def test_sizes_before_are_those_of_the_files(
    folder, tiny_folder, tiny_text_file: Path, tmp_path: Path, name: str, matrices: float | None
) -> None:
    """The bits of codes and scales, counted in the file; the plan's bytes are those that are written."""
    source = folder(name)
    recipe = recipe_of("rtn")
    planned = make_plan(outline(str(source), recipe), recipe, device="cpu")
    exact = make_plan(prepare(str(source), on_text(recipe, tiny_text_file)), recipe, device="cpu")
    result = requant.quantize(str(source), recipe, tiny_text_file)
    numbers = result_numbers(result, requant.save(result, tmp_path / "out"))
    files, bits = stored(source), numbers["bits_per_weight"]["before"]
    if name == "llama":
        mine = {key: each for key, each in files.items() if "_proj.weight" in key}
        weights = sum(each.numel() for key, each in mine.items() if not key.endswith("_scale_inv"))
        assert bits == pytest.approx(8 * sum(each.nbytes for each in mine.values()) / weights)
        assert bits > matrices
    else:  # experts in 4.25 bits, attention in 16
        mine = {key: each for key, each in files.items() if "experts" in key or "_proj.weight" in key}
        experts = sum(2 * each.numel() for key, each in mine.items() if key.endswith("_blocks"))
        rest = sum(each.numel() for key, each in mine.items() if key.endswith("_proj.weight"))
        assert bits == pytest.approx((4.25 * experts + 16 * rest) / (experts + rest))
    assert numbers["bytes"] == {"before": folder_bytes(source), "after": numbers["bytes"]["after"]}
    assert planned.bytes_before == exact.bytes_before == folder_bytes(source)
    floats = rewrite(
        tiny_folder(name), tmp_path / "floats", load_file(tiny_folder(name) / "model.safetensors"), None
    )
    twin = make_plan(outline(str(floats), recipe), recipe, device="cpu")
    for plan in (planned, exact):  # but for what the headers of the files differ by
        assert plan.bytes_after == pytest.approx(twin.bytes_after, rel=0.03)
    whole = numbers["whole_bits_per_weight"]["before"]
    elements = sum(parameter.numel() for parameter in result.model.parameters())
    assert whole == pytest.approx(8 * folder_bytes(source) / elements, rel=1e-3)
    row = next(row for row in result_rows(numbers) if row[""] == "bits per weight, matrices")
    assert row["before"] == f"{bits:.3f}"


@pytest.mark.slow
def test_matrices_on_the_host_give_the_same_bytes(
    folder, tiny_text_file: Path, tmp_path: Path, hosted
) -> None:
    """Where the model is larger than the GPU: floats in the host's memory, in the place of views of the files."""
    source, files = folder("qwen3-moe"), []
    for on in (False, True):
        hosted(on)
        result = requant.quantize(str(source), recipe_of("gptq"), tiny_text_file, dtype="bfloat16")
        files.append((requant.save(result, tmp_path / f"out-{on}") / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_model_that_transformers_dequantized_is_taken(
    tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    """Given loaded, with the folder of its FP8 files as its origin: the same codes as of the folder."""
    source = fp8_folder(tiny_folder("qwen3-moe"), tmp_path / "fp8", block=16)  # which divides
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=FineGrainedFP8Config(dequantize=True), dtype="bfloat16"
    ).to(torch.bfloat16)  # transformers 5.8 leaves the dtype of the scales
    recipe = recipe_of("rtn")
    results = [
        requant.quantize(given, recipe, tiny_text_file, **options)
        for given, options in ((model, {}), (str(source), {"dtype": "bfloat16"}))
    ]
    files = [stored(requant.save(result, tmp_path / f"out{i}")) for i, result in enumerate(results)]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        assert torch.equal(tensor, files[1][name]) and tensor.dtype == files[1][name].dtype, name
