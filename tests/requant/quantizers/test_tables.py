"""Codes of tables: what they lose and how many bytes they take, in a grid, in a trellis, and in bands by frequency."""

import dataclasses

import pytest
import torch

from requant.formats.bands import Bands
from requant.formats.quantized_weight import QuantizedWeight, spec_of
from requant.formats.trellis import Trellis
from requant.quantizers import block_ldlq, table_trellis, trellis
from requant.quantizers.rtn import encode, fit_grid
from requant.quantizers.table_grid import GRID
from requant.quantizers.table_trellis import TRELLIS
from requant.quantizers.tables import TableMethod

from ..greedy_search import greedy_states
from .tables import by_frequency, loss_of, table


def test_trellis_codes_lose_less_than_a_grid_of_more_bytes() -> None:
    """At 4 bits half as much, and they take 0.34 bits per weight less."""
    weight, use = table()
    grid, trellis = GRID.quantize(weight, [use], 4), TRELLIS.quantize(weight, [use], 4)
    assert loss_of(weight, trellis, [use]) < 0.6 * loss_of(weight, grid, [use])
    assert spec_of(trellis).bytes < 0.96 * spec_of(grid).bytes


def test_feedback_of_a_trellis_follows_the_covariance() -> None:
    """Codes made under C lose less by it than codes that take columns for independent."""
    weight, use = table()
    flat = dataclasses.replace(use, covariance=torch.eye(96))
    informed, blind = TRELLIS.quantize(weight, [use], 3), TRELLIS.quantize(weight, [flat], 3)
    assert loss_of(weight, informed, [use]) < 0.9 * loss_of(weight, blind, [use])


@pytest.mark.slow
def test_common_tokens_get_more_bits_where_tokens_are_in_that_order() -> None:
    weight, use = by_frequency(2100)
    found = TRELLIS.quantize(weight, [use], 3.5)
    assert isinstance(found.dense, Bands)
    bits = [part.bits for part in found.dense.parts]
    assert bits == sorted(bits, reverse=True) and bits[0] >= 5 and bits[-1] >= 2
    assert [part.shape[0] for part in found.dense.parts] == [256, 256, 512, 2100 - 1024]
    assert 3.45 < found.dense.bits <= 3.5
    assert spec_of(found).bytes <= TRELLIS.packed_spec((2100, 16), 3.5).bytes
    flat = table_trellis._coded(weight, [use], 3.5, table_trellis.column_scales(weight))
    assert loss_of(weight, found, [use]) < 0.6 * loss_of(
        weight, QuantizedWeight(dense=flat, sparse=None), [use]
    )
    foretold = TRELLIS.predicted_losses(weight, [use], [3.5])[3.5]
    assert foretold == pytest.approx(loss_of(weight, found, [use]), rel=0.15)


def test_bands_share_a_rotation_at_any_width(monkeypatch) -> None:
    """96 columns are three Hadamard blocks, each with a spread of its own, which is that of all rows."""
    monkeypatch.setattr(table_trellis, "FEWEST_ROWS", 128)
    weight, use = by_frequency(128, 96)
    weight[:16, :32] *= 5
    found = TRELLIS.quantize(weight, [use], 3.5)
    assert isinstance(found.dense, Bands)
    first, *others = (part.input_scales for part in found.dense.parts)
    assert len(first.abs().unique()) > 1 and all(torch.equal(first, other) for other in others)


def test_rows_of_zeros_stay() -> None:
    """Of tokens that nobody has; their neighbours keep their scales."""
    weight, use = by_frequency(64)
    weight[[3, 40]] = 0
    found = TRELLIS.quantize(weight, [use], 4).dequantize()
    assert not found[[3, 40]].any() and found[[2, 4, 39, 41]].any(1).all()


def test_tokens_in_no_order_share_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_ldlq, "tail_biting_states", greedy_states)  # widths are chosen before codes
    weight, use = by_frequency(2100)
    assert isinstance(TRELLIS.quantize(weight, [use], 4).dense, Bands)  # in this order
    assert isinstance(TRELLIS.quantize(weight, [use], 2).dense, Trellis)  # none may have fewer
    even = dataclasses.replace(use, rows=torch.ones(2100) / 2100)
    assert isinstance(TRELLIS.quantize(weight, [even], 4).dense, Trellis)
    backwards = dataclasses.replace(use, rows=by_frequency(2100)[1].rows.flip(0))
    assert isinstance(TRELLIS.quantize(weight, [backwards], 4).dense, Trellis)


@pytest.mark.parametrize("bits", [2, 2.25, 3, 4.75, 6.5, 8])
@pytest.mark.parametrize("rows", [2048, 4096, 50257])
def test_bands_take_no_more_than_one_width(rows: int, bits: float) -> None:
    """But for a magnitude and the signs of the columns of each."""
    one = trellis.packed_spec(table_trellis.config_of(bits), (rows, 256)).bytes
    # beyond 6 bits scales take 16 bits in place of 8
    assert one <= TRELLIS.packed_spec((rows, 256), bits).bytes <= one + 3 * (32 + 4) + rows // 4


@pytest.mark.parametrize("v", [44, 48])
def test_rows_of_a_trellis_are_looked_up_as_stored(v: int) -> None:
    """The scale of every row is its own, and what was planned is what is stored."""
    weight, use = table(v)
    weight[5] *= 10
    weight[7] = 0
    found = TRELLIS.quantize(weight, [use], 4.5)
    assert isinstance(found.dense, Trellis) and not found.dense.rotates_output
    assert spec_of(found) == TRELLIS.packed_spec((v, 96), 4.5)
    errors = (found.dequantize() - weight).norm(dim=1) / weight.norm(dim=1).clamp(min=1e-9)
    assert errors[[4, 5, 6, v - 1]].max() < 0.1


def test_shrunk_ranges_lose_less_than_the_full_ones() -> None:
    _, use = table(300)
    weight = torch.distributions.Laplace(0.0, 0.02).sample((300, 96))
    importance = use.rows[:, None] * use.columns
    fit = fit_grid(weight, bits=4, group_size=64, symmetric=False)
    plain = ((encode(weight, fit, bits=4, group_size=64).dequantize() - weight).square() * importance).sum()
    found = ((GRID.quantize(weight, [use], 4).dequantize() - weight).square() * importance).sum()
    assert found < 0.95 * plain


@pytest.mark.parametrize("method", [GRID, TRELLIS])
def test_rows_are_quantized_in_chunks_alike(monkeypatch: pytest.MonkeyPatch, method: TableMethod) -> None:
    monkeypatch.setattr(block_ldlq, "tail_biting_states", greedy_states)
    weight, use = table()
    whole = method.quantize(weight, [use], 5)
    monkeypatch.setattr("requant.quantizers.table_grid.ELEMENTS", 96 * 7)
    monkeypatch.setattr("requant.quantizers.table_trellis.WEIGHTS_AT_ONCE", 96 * 50)
    parts = method.quantize(weight, [use], 5)
    assert torch.equal(whole.dequantize(), parts.dequantize())
    assert method.predicted_losses(weight, [use], [5])[5] > 0


@pytest.mark.parametrize("method", [GRID, TRELLIS])
def test_tokens_that_the_text_lacks_are_quantized_all_the_same(method: TableMethod) -> None:
    weight, use = table(64)
    use = dataclasses.replace(use, rows=use.rows * (torch.arange(64) < 32))
    found = method.quantize(weight, [use], 8)
    assert (found.dequantize() - weight)[32:].abs().max() < 0.01
