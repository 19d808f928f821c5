from pathlib import Path

import pytest

import requant

from .embeddings import recipe_of


@pytest.fixture(scope="module")
def make(any_trellis_codes, tiny_folder, tiny_text_file: Path, tmp_path_factory: pytest.TempPathFactory):
    """`make(architecture, method="rtn", **budget)`: the result of a run and its folder, made once."""
    made: dict = {}

    def of(name: str, **budget):
        key = (name, *sorted(budget.items()))
        if key not in made:
            result = requant.quantize(str(tiny_folder(name)), recipe_of(**budget), tiny_text_file)
            made[key] = result, requant.save(result, tmp_path_factory.mktemp("embedding") / "out")
        return made[key]

    return of


@pytest.fixture(scope="module")
def make_banded(
    any_trellis_codes, tiny_folder, tiny_text_file: Path, tmp_path_factory: pytest.TempPathFactory
):
    """As `make`, with bands of 32, 32, 64 and 136 rows, which no table of this size would get by itself."""
    made: dict = {}

    def of(name: str):
        if name not in made:
            recipe = recipe_of(method="trellis", head_bits=4, embedding_bits=4)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("requant.quantizers.table_trellis.FEWEST_ROWS", 128)
                patch.setattr("requant.quantizers.table_trellis.TILTS", (1.0,))
                result = requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file)
            made[name] = result, requant.save(result, tmp_path_factory.mktemp("bands") / name)
        return made[name]

    return of
