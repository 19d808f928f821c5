import pytest
import torch

from requant.calibration import gram
from requant.calibration.gram import PANEL, add_gram, fill_lower_half, products


@pytest.mark.parametrize(("panels", "more"), [(0, 1), (1, 0), (2, 0), (2, 30)])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_is_the_sum_over_batches(
    monkeypatch, panels: int, more: int, device: str, dtype: torch.dtype
) -> None:
    """Of a slice of another tensor too, as the inputs of a recomputed block may be; exactly symmetric."""
    if device == "cpu":
        monkeypatch.setattr(gram, "PANEL", 200)
    n = panels * gram.PANEL + more
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(3, 20, n + 8, generator=generator).to(device, dtype)[:, :, 8:]
    total = torch.zeros(n, n, device=device)
    for batch in batches:
        add_gram(total, batch, 0.5)
    fill_lower_half(total)
    x = batches.flatten(0, 1).double()
    torch.testing.assert_close(total.double(), x.T @ x / 2, rtol=1e-5, atol=1e-4)
    assert torch.equal(total, total.T)
    again = total.clone()
    fill_lower_half(again)
    assert torch.equal(again, total)


def test_a_panel_is_multiplied_from_its_own_first_column_on(monkeypatch) -> None:
    """Of p panels (p + 1) / 2p of all products remain, and no others are made."""
    made: list[int] = []

    def count(total: torch.Tensor, *_: object) -> None:
        made.append(total.numel())

    monkeypatch.setattr("requant.calibration.gram.add_product", count)
    n = 4 * PANEL
    add_gram(torch.zeros(n, n), torch.zeros(1, n), 1.0)
    assert sum(made) == products(n) == n * n * 5 // 8
    assert products(PANEL) == PANEL**2
