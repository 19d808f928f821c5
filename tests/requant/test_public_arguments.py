"""Arguments of public functions that are of another kind: a sentence that names the argument, never Python's own error."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import requant
from requant.errors import InputError, ModelError, RecipeError
from requant.models.devices import pick_device
from requant.recipe.schema import Budget

NO_PATHS = (None, 3, [], {}, b"x", True)


@pytest.mark.parametrize("value", NO_PATHS, ids=repr)
@pytest.mark.parametrize(
    "call",
    [
        requant.load,
        requant.load_recipe,
        lambda value: requant.export(value, "dense", "output"),
        lambda value: requant.sweep("demo", [2, 3], output=value),
        lambda value: requant.score("demo", bits=3, output=value),
    ],
    ids=["load", "load_recipe", "export", "sweep", "score"],
)
def test_what_is_no_path_is_refused(
    call: Callable[[Any], Any], value: Any, request: pytest.FixtureRequest
) -> None:
    if value is None and request.node.callspec.id.startswith(("sweep", "score")):
        pytest.skip("None is their default")
    with pytest.raises(InputError, match=f"must be a path, not {type(value).__name__}; give"):
        call(value)


@pytest.mark.parametrize("value", NO_PATHS, ids=repr)
def test_what_is_no_model_is_refused(value: Any) -> None:
    said = "is a recipe; give it as recipe=" if value == {} else f"a loaded model, not {type(value).__name__}"
    for call in (requant.quantize, requant.score):
        if value is not None:  # the recipe's
            with pytest.raises(ModelError, match=said):
                call(value, bits=3)
    if value is not None:
        said = (
            "is a recipe" if value == {} else f"so it takes a text, not {type(value).__name__}; give a folder"
        )
        with pytest.raises(ModelError, match=said):
            requant.sweep(value, [2, 3])
    with pytest.raises(InputError, match=f"returned, not {type(value).__name__}"):
        requant.save(value, "output")


def test_a_model_may_be_a_path(tmp_path: Path) -> None:
    for call in (
        lambda: requant.quantize(tmp_path / "nothing", bits=3),
        lambda: requant.score(tmp_path / "nothing", bits=3),
        lambda: requant.sweep(tmp_path / "nothing", [2, 3], output=tmp_path / "sweep"),
    ):
        with pytest.raises(ModelError, match="nothing is not a folder"):
            call()


def test_a_dtype_of_torch_is_a_dtype_and_the_result_is_said_in_a_line() -> None:
    made = requant.quantize(
        "demo",
        {"method": "rtn", "mode": "dense", "evaluation": {"windows": 1, "samples": 0}},
        device="cpu",
        dtype=torch.bfloat16,
        num_samples=1,
        seq_len=32,
    )
    assert made.model.dtype == torch.bfloat16
    assert repr(made) == f"QuantizedModel(demo: 28 matrices by rtn, mode dense, KL {made.after.mean_kl:.4f})"
    with pytest.raises(ModelError, match="--dtype int8 is unknown"):
        requant.quantize("demo", bits=3, dtype=torch.int8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bits": []}, r"--bits \[\] is not a number"),
        ({"bits": 3, "modules": 3}, "modules must be a list of texts"),
        ({"bits": 3, "modules": "*.down_proj:bits=4"}, "modules must be a list of texts"),
        ({"bits": 3, "target": []}, r"--for \[\] is unknown"),
        ({"bits": 3, "device": None}, "--device None is unknown"),
        ({"bits": True}, "--bits True is not a number"),
        ({"bits": 3, "statistics": 3}, "statistics must be a dict, not int; give {}, the same one"),
        (
            {"bits": 3, "workspace": "folder"},
            "workspace must be a Workspace of .*, not str; give one of a folder",
        ),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        requant.quantize("demo", **options)


@pytest.mark.parametrize("key", ["bits", "size", "head_bits", "embedding_bits", "first_round_weight"])
@pytest.mark.parametrize("value", [True, "3", [3]])
def test_budgets_of_another_kind_are_refused(key: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"budget.{key} is {value!r}; it takes a number")):
        Budget(**{key: value})


def test_other_arguments_of_another_kind() -> None:
    with pytest.raises(RecipeError, match="bits must be a list of budgets, not int"):
        requant.sweep("demo", 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="dtype None is unknown"):
        requant.load("demo", dtype=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--to None is unknown"):
        requant.export("demo", None, "output")  # type: ignore[arg-type]


def test_a_device_of_torch_is_a_device() -> None:
    assert pick_device(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("call", "mode"),
    [
        pytest.param(requant.quantize, torch.no_grad, marks=pytest.mark.slow),
        (requant.score, torch.inference_mode),
    ],
    ids=lambda given: given.__name__,
)
def test_gradients_that_the_caller_turned_off_are_there(
    call: Callable[..., Any], mode: Callable[[], Any], tiny_folder, tiny_text_file: Path
) -> None:
    options: dict[str, Any] = {"bits": 5, "method": "lut", "num_samples": 2, "seq_len": 32, "quiet": True}
    options |= {"mode": "dense"} if call is requant.quantize else {}
    with mode():
        call(str(tiny_folder("llama")), None, tiny_text_file, **options)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
