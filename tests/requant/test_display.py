"""Bytes and seconds as people read them."""

import pytest

from requant.display import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (8_397_312, "8.0 MiB"), (5 * 2**30, "5.0 GiB"), (2**50, "1024.0 TiB")],
)
def test_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (59.99, "1 min 00 s"), (92, "1 min 32 s"), (7380, "2 h 03 min"), (360_000, "4 d 04 h")],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text
