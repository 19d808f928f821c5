"""Numbers and tables for people: plain text tables, bytes, seconds."""

from collections.abc import Mapping, Sequence

from requant.errors import printable


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of equal keys as aligned text: a header, then one line a row; numbers right, None as a dash."""
    if not rows:
        return ""
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    numeric = [all(not isinstance(row[column], str) for row in rows) for column in columns]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = []
    for line in cells:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value: object) -> str:
    """A value as text; control characters, which a hostile name may hold, become question marks."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 100_000:
        return f"{value:.3e}"
    return f"{value:.{4 if abs(value) < 10 else 2}f}"


def format_bytes(count: int | float) -> str:
    """Bytes in binary units: 8397312 -> 8.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: int | float) -> str:
    """3.21 -> 3.2 s; 92 -> 1 min 32 s; 7380 -> 2 h 03 min; 360000 -> 4 d 04 h."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 72:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days:,} d {hours:02d} h"
