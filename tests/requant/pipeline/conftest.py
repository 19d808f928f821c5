from pathlib import Path

import pytest

import requant
from requant.recipe.schema import Recipe

from .recipes import RECIPE


@pytest.fixture
def run(tiny_folder, tiny_text_file: Path):
    def quantize(recipe: Recipe = RECIPE, name: str = "llama", **options):
        return requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file, **options)

    return quantize
