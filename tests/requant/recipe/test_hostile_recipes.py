"""Recipes of strangers: YAML that is short in the file and endless in memory, numbers without end, lists for names."""

import time
from pathlib import Path

import pytest

from requant.errors import FileError, RecipeError
from requant.recipe.options import recipe_from_options
from requant.recipe.sizes import parse_bits
from requant.recipe.yaml_files import from_dict, load_recipe

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(20)
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (BOMB, r"an alias, \*a; write the value out"),
        ("calibration: &x {text: *x}", "an alias"),
        ("a: " + "[" * 60_000, "lists within lists, more than 16 deep"),
        ("a: " + "{a: " * 60, "lists within lists"),
        ("a: [" + "x," * 100_000 + "]", "204,805? characters, more than 65,536|is not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
    ids=["bomb", "cycle", "deep", "deep-mappings", "long", "nul"],
)
def test_refused_at_once(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    before = time.process_time()
    with pytest.raises(RecipeError, match=sentence):
        load_recipe(str(file))
    assert time.process_time() - before < 5


def test_a_folder_or_a_large_file_is_no_recipe(tmp_path: Path) -> None:
    import os

    file = tmp_path / "recipe.yaml"
    file.touch()
    os.truncate(file, 1 << 33)
    with pytest.raises(FileError, match="bytes where at most"):
        load_recipe(str(file))


def test_numbers_that_no_float_holds_are_out_of_range() -> None:
    with pytest.raises(RecipeError, match=r"--bits 1000.* is out of range"):
        parse_bits(10**400)
    with pytest.raises(RecipeError, match=r"budget\.size is 1000.*; it takes a number of bytes"):
        from_dict({"budget": {"size": 10**400}})


@pytest.mark.parametrize(
    ("name", "value"), [("method", []), ("method", 3), ("mode", ["best"]), ("mode", {1: 2})]
)
def test_a_method_and_a_mode_are_names(name: str, value: object) -> None:
    with pytest.raises(RecipeError, match=f"{name} is .*, but takes a name"):
        recipe_from_options(bits=3, **{name: value})
