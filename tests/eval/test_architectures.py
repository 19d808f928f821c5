"""Architectures that many models have, as the study builds them, through quantize, save and load."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import requant
from eval.architectures import COVERED, SPECIAL, logits, of_model, steps_and_whole, tiny_folder
from eval.markdown import RESULTS, ROOT
from eval.tiny_configs import tiny_config
from requant.calibration.experts import share_of_experts
from requant.checkpoint.validate import read_header
from requant.errors import ModelError
from requant.inference.own_text import cache_bytes
from requant.inference.quant_embedding import QuantEmbedding
from requant.models.attention_sizes import attention_sizes
from requant.models.experts import Experts, unfuse_experts
from requant.models.loading import DEMO, auto_class
from requant.models.targets import find_blocks, find_linears
from requant.pipeline.preparation.whole_model_only import with_whole_training
from requant.quantizers.gptq import GptqConfig
from requant.quantizers.rtn import RtnConfig
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe

RECIPE = Recipe(
    mode="dense",
    method="rtn",
    quantizer=RtnConfig(bits=4, group_size=32),
    calibration=Calibration(num_samples=2, seq_len=32),
    evaluation=Evaluation(context=32, windows=1, samples=0),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text((DEMO.with_name("demo-text") / "calibration.txt").read_text(encoding="utf-8")[:4000])
    return file


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gemma4", marks=pytest.mark.slow),  # beside an encoder of images
        *("nemotron_h dense", "mamba2"),
        # attention beside a state space or convolutions as above; the last one beside an encoder too
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("qwen3_5", "granitemoehybrid", "falcon_h1", "lfm2", "mistral3")
        ),
    ],
)
def test_a_checkpoint_computes_what_the_run_computed(kind: str, text: Path, tmp_path: Path) -> None:
    result = requant.quantize(str(tiny_folder(kind, tmp_path / "source")), RECIPE, text)
    assert of_model(result)["covered"] > COVERED
    path = requant.save(result, tmp_path / "out")
    expected = logits(result.model)
    for dequantize in (False, True):
        assert torch.equal(logits(requant.load(path, dequantize=dequantize)), expected)
    loaded_by = "AutoModelForImageTextToText" if kind == "mistral3" else "AutoModelForCausalLM"
    assert f"model = {loaded_by}.from_pretrained(" in (path / "README.md").read_text(encoding="utf-8")
    assert cache_bytes(result.model, 32) > 0


@pytest.mark.slow
def test_rows_of_an_embedding_in_codes_are_read_beside_encoders(text: Path, tmp_path: Path) -> None:
    """Gemma 4 reads its embedding's row of the padding by itself; its per-layer embeddings are coded too."""
    recipe = dataclasses.replace(RECIPE, budget=Budget(head_bits=8, embedding_bits=8))
    result = requant.quantize(str(tiny_folder("gemma4", tmp_path / "source")), recipe, text)
    path = requant.save(result, tmp_path / "out")
    tables = [f"model.language_model.embed_tokens{suffix}" for suffix in ("", "_per_layer")]
    assert list(read_header(path).embedding_and_head) == tables
    assert torch.equal(logits(requant.load(path)), logits(result.model))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gemma4", marks=pytest.mark.slow),  # takes a row of `embedding.weight`
        "olmo",  # norms without weights: no float is left
        pytest.param("modernbert-decoder", marks=pytest.mark.slow),  # its tied head has a bias
        "nemotron_h",  # files have other names for the embedding and for all blocks
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mistral3", "qwen3_5_moe")),  # so here
    ],
)
def test_embedding_and_head_in_codes(kind: str, text: Path, tmp_path: Path) -> None:
    result = requant.quantize(
        str(tiny_folder(kind, tmp_path / "source")),
        dataclasses.replace(RECIPE, budget=Budget(head_bits=4, embedding_bits=4)),
        text,
    )
    path = requant.save(result, tmp_path / "out")
    expected = logits(result.model)
    for dequantize in (False, True):
        model = requant.load(path, dequantize=dequantize)
        assert isinstance(model.get_input_embeddings(), nn.Embedding if dequantize else QuantEmbedding)
        assert model.dtype == torch.float32 and model.to(torch.bfloat16).dtype == torch.bfloat16
        assert torch.equal(logits(requant.load(path, dequantize=dequantize)), expected)
    model = requant.load(path)
    model.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(requant.load(tmp_path / "again")), expected)
    found, whole = steps_and_whole(model)
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-4)


def build(kind: str, **of_vision: int) -> nn.Module:
    config = tiny_config(kind, 4096, **SPECIAL)
    for key, value in of_vision.items():
        setattr(config.vision_config, key, value)
    with torch.device("meta"):
        return auto_class(config).from_config(config)


def test_an_encoder_with_more_layers_than_the_decoder_is_not_quantized() -> None:
    model = build("mistral3", num_hidden_layers=12)
    assert find_blocks(model)[0] == "model.language_model.layers"
    assert all(target.name.startswith("model.language_model.layers.") for target in find_linears(model))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("hrm_text", r"transformer blocks in model\.L_module\.layers and in model\.H_module\.layers"),
        (
            "zamba2",
            r"layers\.1\.\S+ and model\.layers\.3\.\S+ are one matrix; models whose blocks share matrices",
        ),
    ],
)
def test_what_would_be_quantized_in_part_or_twice_is_refused(kind: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        find_linears(build(kind))


def test_a_model_that_takes_more_than_tokens_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"AssistantForCausalLM does not run on tokens alone \(ValueError: inputs_embeds"
    ):
        requant.quantize(str(tiny_folder("gemma4_unified_assistant", tmp_path)), RECIPE, text)


@pytest.mark.parametrize(
    ("kind", "alone", "in_turn"),
    [("llama", True, True), ("gemma4_text", False, True), ("gemma3n_text", False, False)],
)
def test_what_cannot_run_block_by_block_is_trained_as_a_whole(kind: str, alone: bool, in_turn: bool) -> None:
    """On the GPU, blocks may read the embedding with gradients, if that is all that they read beside hidden states."""
    model = (
        auto_class(config := tiny_config(kind, 4096, **SPECIAL))
        .from_config(config)
        .eval()
        .requires_grad_(False)
    )
    trained = dataclasses.replace(RECIPE, finetune=Finetune(steps=2))
    assert with_whole_training(model, trained, hosted=False).finetune.blockwise is (
        None if in_turn else False
    )
    sequential = Recipe(
        method="gptq", quantizer=GptqConfig(bits=4), calibration=Calibration(inputs="quantized"), mode="dense"
    )
    by_block = dataclasses.replace(trained, finetune=Finetune(steps=2, blockwise=True))
    for recipe, hosted, works, sentence in (
        (
            RECIPE,
            True,
            alone,
            "is larger than the GPU and cannot run block by block: every block reads the embedding",
        ),
        (by_block, False, in_turn, "cannot be trained block by block: .* leave finetune.blockwise out"),
        (sequential, False, in_turn, "cannot run block by block: blocks read more of earlier ones"),
    ):
        with nullcontext() if works else pytest.raises(ModelError, match=sentence):
            assert with_whole_training(model, recipe, hosted=hosted) == recipe


def planned_and_routed(kind: str, **changes: Any) -> tuple[float, float] | None:
    """Of a layer's experts, the share that a token is planned to see, and on average does; None without experts."""
    config = tiny_config(kind, 4096, **SPECIAL)
    for key, value in changes.items():
        setattr(config, key, value)
    model = auto_class(config).from_config(config).eval().requires_grad_(False)
    unfuse_experts(model)
    layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
    if not layers:
        return None
    planned = share_of_experts(model, find_linears(model))
    routed: list[int] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _layer, inputs: routed.append(inputs[1].numel()))
    model(input_ids=torch.arange(48)[None], use_cache=False)
    return planned, sum(routed) / 48 / sum(map(len, layers))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {}),
        ("gemma4_text experts", {}),
        ("zaya", {}),
        ("aria_text", {"moe_topk": 3}),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}),  # one a layer, as in Hunyuan-A13B
    ],
)
def test_a_token_sees_as_many_experts_as_planned(kind: str, changes: dict[str, Any]) -> None:
    found = planned_and_routed(kind, **changes)
    assert found is not None and found[0] == found[1]


@pytest.mark.slow
def test_a_token_sees_as_many_experts_as_planned_in_every_mixture() -> None:
    rows = json.loads((RESULTS / "architectures.json").read_text(encoding="utf-8"))["rows"]
    kinds = [row["type"] for row in rows if row["outcome"] in ("works", "partly") and row["type"] != "llama4"]
    found = {kind: planned_and_routed(kind) for kind in kinds}  # without llama4, which expects images
    mixtures = {kind: shares for kind, shares in found.items() if shares is not None}
    assert len(mixtures) > 40
    assert {kind: shares for kind, shares in mixtures.items() if shares[0] != shares[1]} == {}


def test_attention_has_the_sizes_of_every_block() -> None:
    sizes = attention_sizes(tiny_config("gemma4", 4096, **SPECIAL))
    assert len(sizes) == 4 and sizes[0].head_dim != sizes[-1].head_dim  # full attention comes last
    assert attention_sizes(tiny_config("mamba", 4096, **SPECIAL)) == []
    assert set(attention_sizes(tiny_config("llama", 4096, **SPECIAL))) == {(4, 2, 16)}


def test_the_readme_counts_as_the_results_do() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for file, sentence in (
        ("architectures.json", "of {0} types tried as tiny random models, {1} work"),
        ("architectures-h100.json", "on an H100 [{1} of {0}]"),
    ):
        rows = json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]
        outcomes = [row["outcome"] for row in rows if row["outcome"] != "no decoder"]
        assert sentence.format(len(outcomes), outcomes.count("works")) in page
