"""Windows that a model writes."""

import torch

from eval import own_text
from eval.own_text import PREFIX, own_windows


def test_windows_begin_with_real_text_and_go_on_as_the_model_does(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(own_text, "BATCH", 4)
    model = tiny_model("llama")
    real = torch.randint(model.config.vocab_size, (3, PREFIX + 6), generator=torch.Generator().manual_seed(0))
    written = own_windows(model, real, 10)
    assert written.shape == (10, PREFIX + 6)
    assert (written[:, :PREFIX] == real[torch.arange(10) % 3, :PREFIX]).all()
    assert (written == own_windows(model, real, 10)).all()
    assert (written != own_windows(model, real, 10, seed=1)).any()
    with torch.no_grad():  # a model that is nearly certain writes what it is certain of
        model.get_output_embeddings().weight.mul_(1e4)
    for row in own_windows(model, real, 6):
        logits = model(row[None], use_cache=False).logits[0]
        assert (logits[PREFIX - 1 : -1].argmax(-1) == row[PREFIX:]).all()
