"""How to install one of requant's extras, from the same place that requant itself came from."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

SOURCES = Path(__file__).parents[1]


def requirement(extra: str) -> str:
    """What follows `pip install `: `'requant[serve]'`, or the folder that requant lies in or came from (PEP 610)."""
    folder, editable = _origin()
    name = "requant" if folder is None else str(folder)
    return f"{'-e ' if editable else ''}{shlex.quote(f'{name}[{extra}]')}"


def _origin() -> tuple[Path | None, bool]:
    """The folder, and whether the package is used where it lies; None: it came from an index."""
    if (SOURCES / "pyproject.toml").is_file():
        return SOURCES, True
    try:
        said = json.loads(metadata.distribution("requant").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None, False
    url = urlparse(said.get("url", ""))
    return (Path(url2pathname(url.path)) if url.scheme == "file" and "dir_info" in said else None), False
