"""Which part of a checkpoint a tensor belongs to, by its name alone."""

import pytest
import torch

from requant.checkpoint.sizes import part_of_table, part_of_tensor
from requant.models.rotations import HEAD_SCALES
from requant.models.targets import embedding_and_head_modules

from ...architectures import ARCHITECTURES, EMBEDDINGS, MORE_EXPERTS, TOKEN_TABLES, build_model

TABLE = "model.embed_tokens_per_layer"


@pytest.mark.parametrize("name", [*ARCHITECTURES, *EMBEDDINGS, *MORE_EXPERTS])
def test_embedding_and_head_are_known_by_the_names_that_models_give_them(name: str) -> None:
    with torch.device("meta"):
        (embedding, _), (head, _) = embedding_and_head_modules(build_model(name))
    assert part_of_tensor(f"{embedding}.weight") == "embedding" and part_of_tensor(f"{head}.weight") == "head"
    assert part_of_table(embedding, 2) == "embedding" and part_of_table(head, 2) == "head"


def test_what_lies_beside_them_is_none() -> None:
    assert part_of_tensor(f"model.embed_tokens.{HEAD_SCALES}") == "other"
    assert part_of_tensor("model.vision_tower.embeddings.patch_embedding.weight") == "other"
    assert part_of_tensor("model.norm.weight") == part_of_tensor("weight") == "other"


@pytest.mark.parametrize("name", TOKEN_TABLES)
def test_token_tables_are_neither(name: str) -> None:
    """In codes whatever their name is, from the version on that allows them."""
    assert isinstance(build_model(name).get_submodule(TABLE), torch.nn.Embedding)
    assert part_of_tensor(f"{TABLE}.weight") == part_of_table(TABLE, 7) == "token_tables"
    assert (
        part_of_table("model.by_pairs", 7) == "token_tables" and part_of_table("model.by_pairs", 6) == "other"
    )
