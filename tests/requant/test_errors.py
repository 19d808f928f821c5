"""What libraries say, made part of a sentence."""

import pytest

from requant.errors import class_and_first_line, first_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("too wide.\nSee the manual"), "too wide"),
        (
            ValueError("\n  no field 'x':\n    TypeError: int, not str.\n"),
            "no field 'x': TypeError: int, not str",
        ),
        (ValueError("ends here:"), "ends here"),
        (KeyError("yarm"), "KeyError: 'yarm'"),
        (OSError(), "OSError"),
        (ValueError("x" * 300), "x" * 200),
    ],
)
def test_first_line(error: Exception, said: str) -> None:
    assert first_line(error) == said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("too wide."), "ValueError: too wide"),
        (KeyError("foo"), "KeyError: 'foo'"),
        (OSError(), "OSError"),
    ],
)
def test_the_class_is_named_once(error: Exception, said: str) -> None:
    assert class_and_first_line(error) == said
