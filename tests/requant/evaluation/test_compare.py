import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import requant
from requant.checkpoint.inspect import inspection
from requant.display import format_table
from requant.errors import CheckpointError, InputError, ModelError, RequantError, TextError
from requant.evaluation.compare import evaluate_all
from requant.evaluation.perplexity import Quality, perplexity_and_kl
from requant.inference.generate import generate_text
from requant.inference.load import is_checkpoint, open_model
from requant.quantizers.registry import METHODS
from requant.recipe.defaults import default_recipe
from requant.recipe.schema import Calibration, Evaluation, Recipe


@pytest.fixture(scope="module")
def result(tiny_folder, tiny_text_file: Path) -> requant.QuantizedModel:
    recipe = Recipe(
        mode="dense",
        method="rtn",
        quantizer=METHODS["rtn"].config(bits=3),
        calibration=Calibration(num_samples=2, seq_len=32),
        evaluation=Evaluation(text=(str(tiny_text_file),), context=32, windows=5),
    )
    return requant.quantize(str(tiny_folder("llama")), recipe, tiny_text_file)


@pytest.fixture(scope="module")
def checkpoint(result, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(requant.save(result, tmp_path_factory.mktemp("checkpoint") / "out"))


def test_a_checkpoint_scores_as_the_run_said(
    result, checkpoint: str, tiny_folder, tiny_text_file: Path
) -> None:
    source = str(tiny_folder("llama"))
    original, quantized = evaluate_all(
        [source, checkpoint], text=[str(tiny_text_file)], context=32, windows=5, reference=source
    )
    assert quantized.quality == result.after
    assert original.quality.perplexity == result.before.perplexity and original.quality.mean_kl == 0
    assert original.quality.top1_agreement == 1 and original.bits_per_weight is None
    assert 3 < quantized.bits_per_weight < 4 and quantized.size_bytes < original.size_bytes
    assert (original.name, quantized.name) == (source, checkpoint)
    alone = evaluate_all([checkpoint], text=[str(tiny_text_file)], context=32, windows=5)
    assert alone[0].quality.perplexity == quantized.quality.perplexity and alone[0].quality.mean_kl is None


def test_the_context_is_what_the_model_has(checkpoint: str, tiny_text_file: Path) -> None:
    (row,) = evaluate_all([checkpoint], text=[str(tiny_text_file)], windows=1)
    assert row.quality.protocol.context == 128
    with pytest.raises(TextError, match="longer than the model's 128 positions"):
        evaluate_all([checkpoint], text=[str(tiny_text_file)], context=129)


def test_ids_that_mean_other_tokens_are_refused(
    checkpoint: str, tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    """The vocabularies are equally large, so that nothing else would tell."""
    source = tiny_folder("llama")
    other = Path(shutil.copytree(source, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    few = {"text": [str(tiny_text_file)], "context": 32, "windows": 2}
    with pytest.raises(ModelError, match=r"has another vocabulary than .* in a run of its own"):
        evaluate_all([checkpoint, str(other)], **few)
    with pytest.raises(ModelError, match=r"has another vocabulary than .* give the model that"):
        evaluate_all([checkpoint], reference=str(other), **few)
    for file in other.glob("tokenizer*"):  # of the weights alone nothing is known
        file.unlink()
    assert len(evaluate_all([checkpoint, str(other)], **few)) == 2


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("weights", "bytes where its header describes"),
        ("positions", "longer than the model's 16 positions: set --context 16"),
    ],
)
def test_no_model_is_scored_before_all_are_checked(
    checkpoint: str, tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch, broken: str, said: str
) -> None:
    other = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "other"))
    if broken == "weights":
        file = other / "model.safetensors"
        os.truncate(file, file.stat().st_size - 1000)
    else:
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    monkeypatch.setattr(
        "requant.evaluation.compare.perplexity_and_kl", lambda *_, **__: pytest.fail("scored")
    )
    with pytest.raises(RequantError, match=said):
        evaluate_all([checkpoint, str(other)], text=[str(tiny_text_file)], context=32, windows=1)


@pytest.mark.parametrize("compared", [True, False])
def test_windows_that_are_too_long_are_said_before(
    checkpoint: str, tiny_folder, tiny_text_file: Path, monkeypatch, caplog, compared: bool
) -> None:
    """By the original where there is one, which no checkpoint's codes spoil."""
    for name in ("RISE", "CERTAIN"):  # whatever the loss of a model without training
        monkeypatch.setattr(f"requant.evaluation.perplexity.{name}", -100.0)
    said_before = []

    def score(*args: object, **options: object) -> Quality:
        said_before.append(caplog.text.count("windows of 32 tokens are probably longer"))
        return perplexity_and_kl(*args, **options)

    monkeypatch.setattr("requant.evaluation.compare.perplexity_and_kl", score)
    reference = str(tiny_folder("llama")) if compared else None
    evaluate_all(
        [checkpoint, str(tiny_folder("llama"))],
        text=[str(tiny_text_file)],
        context=32,
        windows=5,
        reference=reference,
    )
    assert said_before == ([1, 1] if compared else [1, 2])
    assert caplog.text.count("probably longer") == said_before[-1]


def test_another_vocabulary_is_refused(checkpoint: str, tiny_text_file: Path) -> None:
    with pytest.raises((ModelError, TextError)):
        evaluate_all(["demo", checkpoint], text=[str(tiny_text_file)], context=32, windows=1)


def test_rows_make_one_table_and_json(checkpoint: str, tiny_folder, tiny_text_file: Path) -> None:
    source = str(tiny_folder("llama"))
    rows = evaluate_all(
        [source, checkpoint], text=[str(tiny_text_file)], context=32, windows=2, reference=source
    )
    rows[1] = dataclasses.replace(rows[1], name="other\x1b[31m")
    table = format_table([row.cells() for row in rows]).split("\n")
    columns = [column.strip() for column in table[0].split("  ") if column.strip()]
    assert columns == ["model", "bits/weight", "MiB", "perplexity", "mean KL", "± KL", "p99 KL", "top-1"]
    assert "\x1b" not in "".join(table) and len({len(line) for line in table}) == 1
    loaded = json.loads(json.dumps([row.to_dict() for row in rows]))
    assert loaded[0]["quality"]["mean_kl"] == 0.0 and loaded[1]["quality"]["protocol"]["context"] == 32


def test_open_model(checkpoint: str, tiny_folder) -> None:
    assert is_checkpoint(checkpoint) and not is_checkpoint(str(tiny_folder("llama")))
    model = open_model(checkpoint, device="cpu", dtype="auto")
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear and model.dtype == torch.float32


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_broken_config_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        evaluate_all([str(tmp_path)], text=["demo-eval"])
    with pytest.raises(ModelError, match=r"config\.json"):
        is_checkpoint(str(tmp_path))


def test_the_usual_text_is_that_of_the_original(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of the demo needs no hub either; where the hub fails, the message names --text."""
    asked: list[str] = []

    def fail(name: str) -> None:
        asked.append(name)
        raise TextError(f"{name} did not come.")

    monkeypatch.setattr("requant.evaluation.compare.read_text", fail)
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    for report in ('{"model": "demo"}', '{"model": "another"}', '{"model": ["demo"]}', "{", "[]"):
        (folder / "report.json").write_text(report)
        with pytest.raises(TextError, match=r"did not come\. It is read because no --text was given\."):
            evaluate_all([str(folder)])
    assert asked[0] == "demo-eval" and {name.split(":")[-1] for name in asked[1:]} == {"test"}
    for models in (["demo"], [str(folder)]):
        with pytest.raises(TextError):
            evaluate_all(models, reference="demo")
    assert asked[-2:] == ["demo-eval"] * 2


def test_the_demo_is_scored_as_its_runs_are() -> None:
    """Its positions are 2048, more than it was trained on."""
    (row,) = evaluate_all(["demo"], windows=1)
    assert row.quality.protocol.context == default_recipe("demo", None).evaluation.context == 512


def test_generate(checkpoint: str) -> None:
    def write(**options):
        settings = {
            "max_new_tokens": 12,
            "temperature": 0.0,
            "seed": 0,
            "device": "cpu",
            "dtype": "auto",
        } | options
        return generate_text(checkpoint, "The river", **settings)

    greedy = write()
    assert greedy.startswith("The river") and greedy == write(seed=1)
    state = torch.random.get_rng_state()
    sampled = write(temperature=1.0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sampled == write(temperature=1.0) != write(temperature=1.0, seed=1)


def test_prompts_that_cannot_be(checkpoint: str) -> None:
    settings = {"temperature": 0.0, "seed": 0, "device": "cpu", "dtype": "auto"}
    with pytest.raises(TextError, match="--prompt holds no token"):
        generate_text(checkpoint, "", max_new_tokens=1, **settings)
    with pytest.raises(
        TextError, match="the prompt's 3 tokens and --max-new-tokens 126 exceed the model's 128"
    ):
        generate_text(checkpoint, "abc", max_new_tokens=126, **settings)
    with pytest.raises(InputError, match="--seed 9223372036854775808 has more than 64 bits"):
        generate_text(checkpoint, "abc", max_new_tokens=1, **(settings | {"seed": 1 << 63}))


def test_a_prompt_beyond_the_vocabulary(tiny_folder, tiny_model, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    model = tiny_model("llama")
    model.resize_token_embeddings(5)
    model.save_pretrained(folder)
    with pytest.raises(TextError, match="and the model's embedding has 5 rows: use the tokenizer"):
        generate_text(
            str(folder), "abc", max_new_tokens=1, temperature=0.0, seed=0, device="cpu", dtype="auto"
        )


def test_inspection(result, checkpoint: str) -> None:
    found = inspection(checkpoint)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["bytes"] == sum(file.stat().st_size for file in Path(checkpoint).glob("model*.safetensors"))
    assert [row["matrix"] for row in data["matrices"]] == list(result.weights)
    assert data["quantization_config"]["calibration"]["sha256"] == result.prepared.calibration.sha256
    assert list(data["sha256"]) == ["model.safetensors"]
    text = found.text()
    assert "checksums verified: model.safetensors" in text and "model.layers.1.mlp.down_proj" in text
    assert all(part in text for part in ("codes", "scales", "embedding", "head", "file headers"))


def test_inspection_of_what_is_no_checkpoint(tiny_folder, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent", tiny_folder("llama")):
        with pytest.raises(CheckpointError) as caught:
            inspection(folder)
        assert "\n" not in str(caught.value)
