"""The factor of an embedding's rows is applied as the model's own class applies it."""

import pytest
import torch
from torch import nn
from transformers.models.biogpt.modeling_biogpt import BioGptScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.xglm.modeling_xglm import XGLMScaledWordEmbedding

from requant.models.row_scale import restore_buffer, row_scale

KINDS = [Gemma3TextScaledWordEmbedding, XGLMScaledWordEmbedding, BioGptScaledWordEmbedding]
FACTOR = 6**0.5  # which bfloat16 rounds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_class(kind: type, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    embedding, tokens = kind(64, 6, 0, embed_scale=FACTOR).to(dtype), torch.arange(64)
    scale = row_scale(embedding)
    assert scale is not None and scale.factor == FACTOR
    assert torch.equal(scale(nn.functional.embedding(tokens, embedding.weight)), embedding(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_without_memory_is_restored(kind: type) -> None:
    with torch.device("meta"):
        embedding = kind(64, 6, 0, embed_scale=FACTOR)
    embedding.weight = nn.Parameter(torch.ones(64, 6))
    restore_buffer(embedding, torch.device("cpu"))
    torch.testing.assert_close(embedding(torch.zeros(1, dtype=torch.long)), torch.full((1, 6), FACTOR))


def test_most_have_none() -> None:
    assert row_scale(nn.Embedding(4, 2)) is None
