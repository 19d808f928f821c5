"""Runs with folded rotations: what is trained, what is written, and what is said where nothing can be folded."""

import json
from pathlib import Path

import pytest
import torch

import requant
from requant.checkpoint.validate import read_header
from requant.errors import RecipeError
from requant.models.rotations import HEAD_SCALES
from requant.pipeline.planning.plan import make_plan
from requant.pipeline.preparation.prepare import prepare
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe

from ..on_text import on_text

IDS = torch.arange(40)[None] * 7 % 96
RECIPE = Recipe(
    mode="best",
    method="trellis",
    quantizer=METHODS["trellis"].config(bits=2),
    rotations="folded",
    calibration=Calibration(num_samples=4, seq_len=32),
    evaluation=Evaluation(context=32, windows=2, samples=0),
    finetune=Finetune(steps=2, tokens_per_step=64, warmup_steps=1, lr=1e-2),
    budget=Budget(bits=3.5),
    skip=("gate_proj", "up_proj", "q_proj", "*.1.*"),  # most of the time is the Viterbi search
)


@pytest.mark.slow
def test_a_run_trains_the_scales_of_the_rotated_stream(
    tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    result = requant.quantize(str(tiny_folder("llama")), RECIPE, tiny_text_file)
    changed = {
        name
        for name, p in result.model.named_parameters()
        if p.dim() == 1 and "norm" in name and not (p == 1).all()
    }
    assert changed == {
        f"model.layers.{i}.{n}_layernorm.weight" for i in (0, 1) for n in ("input", "post_attention")
    }
    original = requant.models.loading.load_model(str(tiny_folder("llama")), device="cpu", dtype="float32")
    scales = result.model.get_input_embeddings().get_parameter(HEAD_SCALES)
    assert 0 < (scales - original.model.norm.weight).abs().max() < 0.2
    for name, weight in result.weights.items():
        assert (weight.dense.input_scales is not None) == name.endswith("down_proj")
        assert not weight.dense.rotates_output
    path = requant.save(result, tmp_path / "out")
    assert read_header(path).quantization["format_version"] == 5
    with torch.no_grad():
        torch.testing.assert_close(
            requant.load(path, dequantize=True)(IDS).logits, result.model(IDS).logits, rtol=1e-3, atol=1e-3
        )


def test_a_dry_run_says_what_is_folded(tiny_folder, tiny_text_file: Path) -> None:
    recipe = requant.load_recipe("demo-3bit")
    recipe = requant.recipe.yaml_files.from_dict(
        {"method": "trellis", "mode": "dense", "rotations": "folded", "quantizer": {"bits": 2},
         "calibration": {"num_samples": 2, "seq_len": 32}, "evaluation": {"context": 32}}
    )  # fmt: skip
    for name, expected in (
        ("llama", "folded into the model"),
        ("gpt2", "per matrix: GPT2LMHeadModel has no `norm`"),
    ):
        prepared = prepare(str(tiny_folder(name)), on_text(recipe, tiny_text_file))
        assert any(expected in line for line in make_plan(prepared, recipe).lines())


@pytest.mark.slow
def test_the_command_says_where_nothing_can_be_folded(
    cli, tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    code, out, err = cli(
        "quantize", "--model", tiny_folder("gpt2"), "--method", "trellis", "--mode", "dense", "--code-bits", 1,
        "--rotations", "folded", "--calibration", tiny_text_file, "--num-samples", 2, "--seq-len", 32,
        "--output", tmp_path / "out",
        "--skip", "*.h.1.*", "--skip", "c_fc", "--skip", "*.mlp.*", "--device", "cpu", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["rotations"] == "per-matrix"
    assert "Every matrix has its own rotations, not folded ones: GPT2LMHeadModel has no `norm`" in err
    assert read_header(tmp_path / "out").rotation is None


def test_only_a_trellis_has_rotations(cli, tiny_folder) -> None:
    with pytest.raises(RecipeError, match="folded has no meaning for method 'kmeans'"):
        Recipe(rotations="folded")
    code, _, err = cli("quantize", "--bits", 3, "--method", "gptq", "--rotations", "folded")
    assert code == 2 and "rotates nothing" in err
    code, _, err = cli("quantize", "--bits", 3, "--method", "trellis", "--rotations", "fold")
    assert code == 2 and "rotations" in err and "folded" in err
