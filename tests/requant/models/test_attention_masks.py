"""Without the look for packed texts logits are the same, and the look is back afterwards."""

import pytest
import torch
from transformers import AutoModelForCausalLM, masking_utils

from requant.models.attention_masks import LOOKS, one_text_a_row


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2", "gpt2"])
def test_nobody_looks_for_packed_texts(tiny_folder, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    looked: list[tuple[int, ...]] = []
    plain = getattr(masking_utils, LOOKS)

    def look(position_ids: torch.Tensor) -> torch.Tensor | None:
        looked.append(tuple(position_ids.shape))
        return plain(position_ids)

    monkeypatch.setattr(masking_utils, LOOKS, look)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(name))
    tokens = torch.randint(model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    before = model(input_ids=tokens, use_cache=False).logits
    assert looked
    del looked[:]
    with one_text_a_row():
        assert torch.equal(model(input_ids=tokens, use_cache=False).logits, before)
        assert not looked
    assert getattr(masking_utils, LOOKS) is look
