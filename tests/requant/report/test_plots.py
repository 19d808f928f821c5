"""Plots are stable SVG of the right width, with ticks in plain decimals and bars of error."""

import re
from xml.etree import ElementTree

import pytest

from requant.report.plots import plot_width, quality_plot, sensitivity_plot


def test_a_wide_range_is_logarithmic_with_ticks_in_plain_decimals():
    """One damaged checkpoint must not press the others into one line; 10⁻² is not a tick."""
    points = {"a": (2_000_000, 0.18, 0.003), "b": (1_500_000, 5.6, 0.05), "c": (1_700_000, 0.4, None)}
    wide = ElementTree.fromstring(quality_plot(points, measure="mean KL, nats per token"))
    ticks = {float(text): y for text, y in labelled(wide) if "." in text or text.isdigit()}
    assert {0.2, 0.5, 1, 2, 5} <= ticks.keys()
    assert ticks[0.5] - ticks[1] == pytest.approx(ticks[1] - ticks[2], abs=0.01)
    near = ElementTree.fromstring(
        quality_plot({"a": (1, 0.2, None), "b": (2, 0.3, None)}, measure="mean KL, nats per token")
    )
    assert "0.00" in dict(labelled(near))  # linear, from zero


def test_error_bars_of_kl():
    points = {"a": (2_000_000, 0.2, None), "b": (1_500_000, 0.3, None)}
    plain = quality_plot(points, measure="mean KL, nats per token")
    barred = quality_plot({**points, "b": (1_500_000, 0.3, 0.05)}, measure="mean KL, nats per token")
    assert b"LineCollection_1" in barred and b"LineCollection" not in plain


def labelled(svg: ElementTree.Element) -> list[tuple[str, float]]:
    """The texts of the tick labels of the y axis, with their height."""
    found = []
    for group in svg.iter("{http://www.w3.org/2000/svg}g"):
        if group.get("id", "").startswith("ytick_"):
            for text in group.iter("{http://www.w3.org/2000/svg}text"):
                at = re.search(r"translate\(\S+ (\S+)\)", text.get("transform", ""))
                y = float(at.group(1)) if at else float(text.get("y", "nan"))
                found.append(("".join(text.itertext()).strip(), y))
    return found


@pytest.mark.parametrize("blocks", [1, 4, 80])
def test_plot_is_deterministic_svg_of_its_width(blocks):
    predicted = {"pqi": dict.fromkeys(range(blocks), 0.01), "gradient": dict.fromkeys(range(blocks), -0.02)}
    svg = sensitivity_plot(predicted, dict.fromkeys(range(blocks), 0.011))
    assert svg == sensitivity_plot(predicted, dict.fromkeys(range(blocks), 0.011))
    root = ElementTree.fromstring(svg)
    assert float(root.attrib["width"].removesuffix("pt")) == pytest.approx(plot_width(blocks) * 0.75)
    assert b"currentColor" in svg and b"PQI" in svg


def test_every_checkpoint_is_named_in_the_legend() -> None:
    """Matplotlib takes a label that begins with an underscore for one that is not to be shown, and $ for a formula."""
    svg = quality_plot(
        {"_first": (1 << 20, 0.1, None), "$x$": (2 << 20, 0.05, 0.01)}, measure="mean KL"
    ).decode()
    assert ">_first<" in svg and ">$x$<" in svg
