"""What a run refuses, in one sentence and before any long work."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
from filelock import FileLock

import requant
from requant.errors import InputError, ModelError, NumericalError, OutputError, RecipeError, TextError
from requant.models.devices import pick_device
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.prepare import prepare
from requant.recipe.schema import Calibration, Evaluation
from requant.recipe.yaml_files import dump_recipe
from requant.run.workspace import Workspace

from ...on_text import on_text
from ..recipes import RECIPE, changed


def test_a_recipe_in_the_place_of_the_model_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "own.yaml").write_text(dump_recipe(RECIPE))
    monkeypatch.chdir(tmp_path)
    for given in ("demo-3bit", "own.yaml", tmp_path / "own.yaml"):
        with pytest.raises(RecipeError, match=rf"'{given}' is a recipe and no model; .*recipe='{given}'"):
            requant.quantize(given, bits=3)
    for given in (RECIPE, {"method": "rtn"}):
        with pytest.raises(
            ModelError, match=r"what was given as model is a recipe; give it as recipe=\.\.\."
        ):
            requant.quantize(given)  # type: ignore[arg-type]
    (tmp_path / "demo-3bit").mkdir()  # a checkpoint may have the recipe's name
    with pytest.raises(ModelError, match=r"demo-3bit has no config\.json"):
        requant.quantize("demo-3bit", bits=3)


def test_texts_are_read_before_the_weights(tiny_folder, tmp_path: Path, monkeypatch) -> None:
    def opened(*_, **__):
        raise AssertionError("the weights were read")

    monkeypatch.setattr("requant.pipeline.preparation.open_model.load_model", opened)
    nowhere = (str(tmp_path / "nowhere.txt"),)
    for missing in (
        {"calibration": {"text": nowhere}},
        {"calibration": {"text": ("self",)}, "evaluation": {"text": nowhere}},
    ):
        with pytest.raises(TextError, match=r"nowhere\.txt"):
            prepare(str(tiny_folder("llama")), changed(**missing))


def test_no_network_is_one_sentence(tiny_folder, monkeypatch) -> None:
    def fail(*args, **kwargs):
        raise ConnectionError("no route")

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr("requant.text.sources._cached_unless_reachable", lambda _name: nullcontext())
    with pytest.raises(TextError, match=r"Salesforce/wikitext.*no route.*give a file"):
        prepare(str(tiny_folder("llama")), RECIPE)


def test_what_cannot_work_is_refused_before_work(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    folder = str(tiny_folder("llama"))
    with pytest.raises(
        TextError, match="--seq-len 4096 is longer than the model's 128 positions; use --seq-len 128"
    ):
        prepare(folder, on_text(changed(calibration={"seq_len": 4096}), tiny_text_file))
    with pytest.raises(TextError, match=r"evaluation.context 129 is longer than the model's 128 positions"):
        prepare(folder, on_text(changed(evaluation={"context": 129}), tiny_text_file))
    defaults = dataclasses.replace(RECIPE, calibration=Calibration(num_samples=2), evaluation=Evaluation())
    prepared = prepare(folder, on_text(defaults, tiny_text_file))
    assert prepared.windows.shape == (2, 128) and prepared.eval_windows.shape[1] == 128
    assert outline(folder, defaults).windows.shape == (2, 128)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(TextError, match=r"short.txt holds 8 tokens and one window needs 32"):
        prepare(folder, on_text(RECIPE, tmp_path / "short.txt"))


def test_another_run_is_found_before_the_model_is_loaded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("requant.pipeline.quantize.prepare", lambda *_, **__: pytest.fail("loaded"))
    with (
        FileLock(tmp_path / "w.lock"),
        pytest.raises(OutputError, match=r"another run is writing to .*w; wait until"),
    ):
        requant.quantize("demo", RECIPE, workspace=Workspace(tmp_path / "w"))


def test_what_a_program_cannot_read_is_refused_before_work(
    tiny_folder, tiny_model, tokenizer, tiny_text_file: Path, monkeypatch
) -> None:
    monkeypatch.setattr("requant.pipeline.quantize.prepare", lambda *_, **__: pytest.fail("worked"))
    for model in (str(tiny_folder("llama")), tiny_model("llama")):
        with pytest.raises(InputError, match=r"--for vllm: model\.layers\.0\.mlp\.down_proj has 172 columns"):
            requant.quantize(model, text=tiny_text_file, target="vllm", code_bits=4)
    with pytest.raises(InputError, match="GGUF export knows llama, mistral, qwen2, qwen3, not gpt2"):
        requant.quantize(tiny_model("gpt2"), text=tiny_text_file, target="llama.cpp", code_bits=4)


def test_nan_in_gradients_is_found(tiny_model, tokenizer, tiny_text_file: Path) -> None:
    model = tiny_model("llama")
    model.model.norm.register_forward_hook(  # the same output, with a gradient that overflows
        lambda _module, _inputs, output: output + (output - output.detach()) * 1e38 * 1e38
    )
    with pytest.raises(NumericalError, match=r"use --dtype float32 or bfloat16"):
        requant.quantize(model, RECIPE, tiny_text_file, tokenizer=tokenizer)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tiny_model, tokenizer, tiny_text_file: Path) -> None:
    model = tiny_model("llama")
    model.resize_token_embeddings(20)
    for mode in ("dense", "best"):
        with pytest.raises(
            TextError, match=r"the text holds token \d+, and the model's embedding has 20 rows: use the tok"
        ):
            requant.quantize(model, changed(mode=mode), tiny_text_file, tokenizer=tokenizer)


def test_save_refuses_a_folder_that_exists(run, tmp_path: Path) -> None:
    result = run(changed(mode="dense", method="rtn"))
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists already; remove it, or choose another --output"):
        requant.save(result, tmp_path / "out")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "mps", "cuda:-1", ""])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(InputError, match=f"--device {name}"):
        pick_device(name)
