"""Small files from strangers: plain files of bounded size, and JSON and YAML that cannot blow up in memory.

A pipe or a device with a file's name would be read forever, a sparse file of a gigabyte costs its author nothing, and
`[[],[],...]` takes twenty times its size as Python objects. So kind and size are checked before the first byte is read, and
brackets and commas are counted before parsing.
"""

import fnmatch
import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from requant.errors import FileError, InputError, first_line

logger = logging.getLogger(__name__)

MAX_SMALL_FILE = 1 << 26  # bytes; the largest tokenizers and indices of shards have 40 million
# objects and lists in a JSON file; tokenizers have up to 600,000 (merges as pairs)
MAX_CONTAINERS = 1_000_000
MAX_ITEMS = 4_000_000  # commas
# In a configuration, which transformers copies in Python several times, 40 us a container and 2 us an item: 45,000 experts'
# matrices have 90,000 and 500,000
MAX_CONFIG_CONTAINERS = 100_000
MAX_CONFIG_ITEMS = 1_000_000
MAX_YAML = 1 << 16  # bytes; the parser is slow
MAX_YAML_DEPTH = 16
FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)(?<=\n)---[ \t]*(?:\r?\n|$)", re.DOTALL)
INT, FLOAT, TIMESTAMP = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
INT_PATTERN = re.compile(r"[-+]?(?:0|[1-9](?:_?[0-9])*|0x[0-9a-fA-F]+|0b[01]+)$")
FLOAT_PATTERN = re.compile(
    r"[-+]?(?:(?:[0-9](?:_?[0-9])*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)
SMALL = (  # names of the files that transformers reads whole
    "*config.json", "*.index.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "*.jinja", "chat_template.*",
)  # fmt: skip


def path_of(value: object, what: str) -> Path:
    """An argument of a public function as a path, with `~` expanded; raises InputError, which names the argument, for
    anything else. The `~` of an unknown user stays, where pathlib would raise an error."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{what} must be a path, not {type(value).__name__}; give a text or a Path.")
    return Path(os.path.expanduser(value))


def check_plain_file(path: Path) -> int:
    """Size of a regular file, or of the one that a link leads to; raises FileError for a pipe, a socket, a device.

    Raises FileNotFoundError where there is none.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise FileError(f"{path} is not a plain file but a folder, a pipe or a device; do not use it.")
    return size


def read_small_file(path: Path) -> bytes:
    """The content of a plain file of at most MAX_SMALL_FILE bytes; raises FileError, or OSError."""
    size = check_plain_file(path)
    if size > MAX_SMALL_FILE:
        raise FileError(
            f"{path} has {size:,} bytes where at most {MAX_SMALL_FILE:,} are read; do not use it."
        )
    with open(path, "rb") as file:
        return file.read(MAX_SMALL_FILE)


def parse_json(data: bytes) -> Any:
    """`json.loads` of a value of bounded memory; raises ValueError or RecursionError."""
    check_json_size(data)
    return json.loads(data)


def check_json_size(data: bytes, *, config: bool = False) -> None:
    """Raise ValueError for JSON whose objects would take hundreds of megabytes, or, in a `config`, many seconds."""
    containers, items = data.count(b"[") + data.count(b"{"), data.count(b",")
    most = (MAX_CONFIG_CONTAINERS, MAX_CONFIG_ITEMS) if config else (MAX_CONTAINERS, MAX_ITEMS)
    if containers > most[0] or items > most[1]:
        raise ValueError(f"{containers} objects and lists of {items} values")


def check_model_folder(folder: Path) -> None:
    """Refuse a folder with a file that libraries would choke on: they read weights, JSON and templates without a look."""
    for path in sorted(folder.iterdir()):
        if not path.exists():  # a link that leads nowhere is a missing file
            continue
        if path.suffix == ".safetensors":
            check_plain_file(path)
        elif any(fnmatch.fnmatchcase(path.name, pattern) for pattern in SMALL):
            _check_small_file(path)


def _check_small_file(path: Path) -> None:
    """Raise FileError for a file that is too long to be read whole, or JSON with too many values."""
    data = read_small_file(path)
    if path.suffix != ".json":
        return
    try:
        check_json_size(data, config=path.name.endswith("config.json"))
    except ValueError as error:
        raise FileError(f"{path} holds {error}, more than any model needs; do not use it.") from error


def but_in_it(folder: Path) -> str:
    """`, but 3bit, 4bit in it do`: of the folders in one that has no config.json those that have, as in a sweep's."""
    having = sorted(file.parent.name for file in folder.glob("*/config.json"))
    named = ", ".join(having[:3]) + (", ..." if len(having) > 3 else "")
    return f", but {named} in it do{'es' if len(having) == 1 else ''}" if having else ""


def parse_yaml(text: str) -> Any:
    """Plain data from YAML without aliases, which can name one list a billion times; raises yaml.YAMLError or ValueError."""
    if len(text) > MAX_YAML:
        raise ValueError(f"{len(text):,} characters, more than {MAX_YAML:,}")
    _check_events(yaml.parse(text, Loader=yaml.SafeLoader))
    loader = PlainLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class PlainLoader(yaml.SafeLoader):
    """Reads scalars as people mean them, and refuses a mapping with a key given twice, of which the last one would win.

    YAML 1.1, which PyYAML follows, reads `1:30` as 90, `010` as 8, `2026-11-28` as a date and `1e-3` as a text. Here the
    last is a number, and the others are texts, which is what a number's key then complains of. `1_000` is 1000, and `yes`,
    `no`, `on` and `off` are true and false, as in YAML 1.1.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own is a class attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (INT, FLOAT, TIMESTAMP)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep=deep)
        if len(found) < len(node.value):
            names = [str(key.value) for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), "")
            raise ValueError(f"the key {twice[:40]} twice in one place; leave one of them out")
        return found


class PlainDumper(yaml.SafeDumper):
    """Quotes what any other reader of YAML, and PlainLoader, would take for something else than a text."""


PlainLoader.add_implicit_resolver(INT, INT_PATTERN, list("-+0123456789"))
PlainLoader.add_implicit_resolver(FLOAT, FLOAT_PATTERN, list("-+.0123456789"))
PlainDumper.add_implicit_resolver(FLOAT, FLOAT_PATTERN, list("-+.0123456789"))


def front_matter(folder: Path) -> dict[str, Any]:
    """The metadata at the head of a model card, README.md in `folder`; empty where there is none.

    Of one that cannot be read a warning says why: licence and languages stand there.
    """
    card = folder / "README.md"
    try:
        text = read_small_file(card).decode("utf-8-sig")
        head = FRONT_MATTER.match(text)
        found = {} if head is None else parse_yaml(head[1])
        if not isinstance(found, dict | None):
            raise ValueError("no mapping of keys to values")
    except FileNotFoundError:
        return {}
    except (FileError, OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        logger.warning(
            "%s: its metadata cannot be read (%s), so licence and languages are not taken over; correct it, or name them "
            "in the new card.",
            card,
            first_line(error),
        )
        return {}
    return found or {}


def _check_events(events: Iterable[yaml.Event]) -> None:
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"an alias, *{event.anchor[:40]}; write the value out")
        if depth > MAX_YAML_DEPTH:
            raise ValueError(f"lists within lists, more than {MAX_YAML_DEPTH} deep")
