"""Every key of a recipe is explained, and the reference says what the classes do."""

import dataclasses

import pytest

from requant.quantizers.registry import METHODS, PRUNING_METHODS
from requant.recipe.reference import field_docs, recipe_keys
from requant.recipe.schema import (
    Budget,
    Calibration,
    Detach,
    Evaluation,
    Finetune,
    Recipe,
    Recovery,
    Sensitivity,
)
from requant.recipe.yaml_files import from_dict

SECTIONS = [Recipe, Calibration, Sensitivity, Detach, Finetune, Recovery, Budget, Evaluation]
EVERY = METHODS | PRUNING_METHODS


@pytest.mark.parametrize("cls", [*SECTIONS, *(method.config for method in EVERY.values())])
def test_every_field_is_explained(cls: type) -> None:
    assert field_docs(cls).keys() == {field.name for field in dataclasses.fields(cls)}
    assert all(text.endswith(".") for text in field_docs(cls).values())


def test_the_reference_holds_every_key_of_every_method() -> None:
    keys = recipe_keys()
    assert {key.method for key in keys} == {None, *EVERY}
    found = {key.key: key for key in keys if key.method is None}
    assert {name.split(".")[0] for name in found} == set(Recipe.__dataclass_fields__) - {"quantizer"}
    assert found["budget.bits"].takes == "number or none" and found["budget.bits"].default == "none"
    assert found["mode"].takes == "best, paper, dense, sparse"
    gptq = {key.key: key.default for key in keys if key.method == "gptq"}
    assert gptq["quantizer.group_size"] == "128" and gptq["quantizer.symmetric"] == "false"


def test_a_key_of_the_reference_is_a_key_of_a_recipe() -> None:
    for key in recipe_keys():
        section, _, name = key.key.rpartition(".")
        if key.method is not None:
            mode = "sparse" if key.method in PRUNING_METHODS else "dense"
            recipe = from_dict({"method": key.method, "mode": mode, "quantizer": {}})
            assert hasattr(recipe.quantizer, name)
        else:
            assert hasattr(getattr(Recipe(), section) if section else Recipe(), name)
