"""Which tokens may follow: the nucleus."""

import pytest
import torch

from requant.errors import NumericalError
from requant.text.sampling import sample_next


def test_nucleus_holds_no_token_beyond_its_mass():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(2000, 4)
    drawn = sample_next(logits, top_p=0.75, generator=torch.Generator().manual_seed(0)).flatten()
    assert set(drawn.tolist()) == {0, 1}
    assert drawn.float().mean().item() == pytest.approx(0.3 / 0.8, abs=0.04)
    greedy = sample_next(logits, temperature=0.0, generator=torch.Generator())
    assert greedy.unique().tolist() == [0]
    with pytest.raises(NumericalError, match="NaN"):
        sample_next(logits * float("nan"), generator=torch.Generator())


@pytest.mark.parametrize(("top_p", "cut"), [(1.0, False), (0.9999, True)])
def test_a_whole_nucleus_leaves_out_no_token(monkeypatch, top_p: float, cut: bool) -> None:
    """Of 128,256 tokens the last 14,000 begin where the sum of those before them, rounded, is 1."""
    logits = 3.0 * torch.randn(1, 128_256, generator=torch.Generator().manual_seed(0))
    drawn_from: list[torch.Tensor] = []
    draw = torch.multinomial
    monkeypatch.setattr(
        torch, "multinomial", lambda p, *args, **kw: drawn_from.append(p) or draw(p, *args, **kw)
    )
    sample_next(logits, top_p=top_p, generator=torch.Generator().manual_seed(0))
    assert bool((drawn_from[0] == 0).any()) == cut
