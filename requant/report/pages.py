"""What the HTML pages and the model card share: templates with escaping, and the formatting of numbers."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from requant.display import format_bytes, format_seconds
from requant.errors import printable

TEMPLATES = Path(__file__).parents[1] / "templates"
SCORE_NAMES = {"pqi": "PQI", "hessian": "Hessian diagonal", "gradient": "gradient", "marginal": "marginal"}
# What the bytes of a checkpoint are spent on: name -> its parts as `checkpoint.sizes` names them, and a colour
BUDGET: dict[str, tuple[tuple[str, ...], str]] = {
    "codes": (("codes", "padding"), "#0a84d0"),
    "scales and levels": (("scales", "zero_points", "column_scales", "levels"), "#56b4e9"),
    "2:4 metadata": (("metadata",), "#e69f00"),
    "sparse part": (("sparse_values", "sparse_indices", "sparse_counts", "sparse_scales"), "#d55e00"),
    "embedding": (("embedding",), "#009e73"),
    "head": (("head",), "#cc79a7"),
    "token tables": (("token_tables",), "#f0e442"),
    "norms and other": ((), "#9aa4ae"),  # everything that no line above names
}
# the parts that count as bits per weight
QUANTIZED = ("codes", "scales and levels", "2:4 metadata", "sparse part")


@cache
def environment(*, escape: bool) -> Environment:
    """Templates of this package, compiled once a process; an undefined name is an error, not an empty string."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "size": format_bytes,
        "duration": format_seconds,
        "signed": signed,
        "code": code_span,
        "fence": fence,
        "percent": percent,
        "prose": prose,
        "python": lambda text: ascii(printable(text)),
    }
    made.globals |= {
        "signed": signed,
        "percent": percent,
        "score_names": SCORE_NAMES,
        "colours": {name: colour for name, (_, colour) in BUDGET.items()},
    }
    return made


def budget_parts(sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes by what they are spent on; parts without bytes are left out, and the sum is that of `sizes`."""
    left = dict(sizes)
    spent = {name: sum(left.pop(part, 0) for part in parts) for name, (parts, _) in BUDGET.items()}
    spent["norms and other"] += sum(left.values())
    return {name: count for name, count in spent.items() if count}


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def signed(value: int | float) -> str:
    """A difference of losses: a sign, and enough digits to see it."""
    text = f"{value:+.4f}" if abs(value) >= 0.00005 or value == 0 else f"{value:+.0e}"
    return text.replace("-", "−")


def prose(text: str) -> Markup:
    """A sentence for a page: what stands between backticks as code, and no line break inside an --option."""
    coded = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"(?<![\w-])--[a-z][a-z-]{1,30}", r'<span class="nowrap">\g<0></span>', coded))


def code_span(text: str) -> str:
    """A code span of Markdown that nothing in the text can leave, inside a table too."""
    return "`" + printable(text).replace("`", "'").replace("|", "¦") + "`"


def fence(text: str) -> str:
    """A fence of Markdown longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
