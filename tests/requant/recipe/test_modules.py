"""`--module` and `modules`: different settings for some matrices."""

import pytest

from requant.errors import RecipeError
from requant.recipe.options import recipe_from_options
from requant.recipe.schema import Recipe


def test_modules_as_words_or_as_data() -> None:
    words = ["*.down_proj:bits=4,group_size=64", "*.down_proj:symmetric=true", "model.*.o_proj:bits=8"]
    found = recipe_from_options(code_bits=3, method="gptq", modules=words)
    assert found.modules == {
        "*.down_proj": {"bits": 4, "group_size": 64, "symmetric": True},
        "model.*.o_proj": {"bits": 8},
    }
    assert recipe_from_options(code_bits=3, method="gptq", modules=found.modules) == found
    assert Recipe(modules={"a": {"bits": 3}}) != Recipe()
    with pytest.raises(RecipeError, match="method 'kmeans' has no option 'bit'"):
        Recipe(modules={"a": {"bit": 3}})


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a:",
        ":bits=4",
        "a:bits",
        "a:=4",
        "a:b=4,",
        "a:bits=[1",
        "*:bits=2 a:bits=4 *:bits=3",
        "a:bits=4,bits=5",
    ],
)
def test_what_is_no_module(text: str) -> None:
    with pytest.raises(RecipeError, match="--module"):
        recipe_from_options(code_bits=3, method="gptq", modules=text.split())


def test_programs_that_read_one_kind_of_grid_refuse_modules() -> None:
    with pytest.raises(RecipeError, match="--for vllm takes the same bits for all matrices"):
        recipe_from_options(code_bits=4, target="vllm", modules=["*.down_proj:bits=8"])
