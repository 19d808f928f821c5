"""Reading calibration and evaluation text.

`read_text` turns a source into one `Text`: files (.txt, .raw, .jsonl, .parquet), a named set, a data set of
the Hugging Face hub (`NAME[:CONFIG[:SPLIT]]`), or several of these; documents are joined by a blank line. The
hash is the SHA-256 of the text in UTF-8, which for one plain file is the hash of the file.
"""

import difflib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path

from requant.errors import TextError, first_line
from requant.extras import requirement

# Files in requant/data/demo-text, which bench-32m wrote (eval/make_demo_text.py).
NAMED_SETS = {"demo": "calibration.txt", "demo-eval": "evaluation.txt"}
SELF = "self"
FILE_SUFFIXES = (".txt", ".raw", ".jsonl", ".parquet")
# of files that are not read: such a name is a missing file's, and no data set's on the hub
UNREAD_SUFFIXES = (".csv", ".tsv", ".json", ".gz", ".zip", ".md", ".html", ".pdf", ".docx", ".yaml")
LONGEST_NAME = 4096  # a path on Linux
MAX_HUB_CHARACTERS = 64_000_000  # of a hub data set: C4 alone is 800 GB, and a calibration reads a few MB
HUB_ANSWERS_WITHIN = 10.0  # seconds
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and what identifies it in a protocol: where it came from (no folder) and its hash."""

    name: str
    text: str
    sha256: str

    @classmethod
    def from_documents(cls, name: str, documents: Iterable[str]) -> "Text":
        text = "\n\n".join(documents)
        if not text.strip():
            raise TextError(f"{name} holds no text: give a file with words in it.")
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TextError(
                f"{name} holds half a surrogate pair at character {error.start}: repair it."
            ) from error
        return cls(name=name, text=text, sha256=hashlib.sha256(data).hexdigest())


def read_text(source: str | Path | Sequence[str | Path], *, field: str = "text") -> Text:
    """The text of one source or of several, in order.

    `field` names the column of .jsonl, .parquet and hub data sets.

    Raises:
        TextError: no such source (with the nearest name), empty, unreadable, or without `field`.
    """
    if isinstance(source, str | Path):
        name, documents = _documents(source, field)
        return Text.from_documents(name, documents)
    if source is not None and not isinstance(source, list | tuple):
        raise TextError(f"a text must be a path or a name, or a list of them, not {type(source).__name__}.")
    if not source:
        raise TextError(f"no text was given: name a file, a data set or one of {', '.join(NAMED_SETS)}.")
    parts = [read_text(part, field=field) for part in source]
    if len(parts) == 1:
        return parts[0]
    return Text.from_documents(" + ".join(part.name for part in parts), (part.text for part in parts))


def _documents(source: str | Path, field: str) -> tuple[str, Iterator[str]]:
    """The name of a source and an iterator over its documents."""
    key, path = str(source), Path(os.path.expanduser(source))
    if key in NAMED_SETS:
        packaged = resources.files("requant") / "data" / "demo-text" / NAMED_SETS[key]
        return f"{key} (written by a model)", iter([packaged.read_text(encoding="utf-8")])
    if key == SELF:
        raise TextError(
            "`self` is text that the model writes: it calibrates alone, and cannot be read as a file; give a text file."
        )
    if not key:
        raise TextError("a text has an empty name: give a file.")
    if len(key) > LONGEST_NAME or "\n" in key:
        raise TextError(
            f"a text of {len(key):,} characters ({key[:40]!r}...) is neither a file nor the name of one: write it to a .txt "
            "file and give that."
        )
    if os.path.isdir(path):  # unlike Path.is_dir, false for a name too long to be one
        raise TextError(f"{key} is a folder: name the files in it, such as {path / '*.txt'}.")
    if os.path.isfile(path):
        if path.suffix.lower() not in _READERS:
            raise TextError(
                f"{key} ends in {path.suffix or 'nothing'}: use one of {', '.join(FILE_SUFFIXES)}."
            )
        return path.name, _READERS[path.suffix.lower()](path, field)
    if os.path.exists(path):
        raise TextError(f"there is no file {key}, but a pipe or a device: name a file.")
    if (
        path.suffix.lower() in (*_READERS, *UNREAD_SUFFIXES)
        or path.is_absolute()
        or key.startswith((".", "~"))
    ):
        raise TextError(f"there is no file {key}{_did_you_mean(path)}")
    return key, _read_hub(key, field)


def _did_you_mean(path: Path) -> str:
    """The end of the sentence that begins with the missing file."""
    if path.is_symlink():
        return f": the link leads to {os.readlink(path)}, which is not there."
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1) or difflib.get_close_matches(
        str(path), NAMED_SETS, n=1
    )
    return f": did you mean {near[0]}?" if near else f": the named sets are {', '.join(NAMED_SETS)}."


def _read_plain(path: Path, field: str) -> Iterator[str]:
    try:
        content = path.read_bytes()
        # UTF-8 allows it, but no text has one; ASCII in UTF-16 without a mark of its byte order is full of them
        if (nul := content.find(0)) >= 0:
            raise TextError(
                f"{path} holds a NUL byte at byte {nul}, as binary files and UTF-16 do: give a text in UTF-8."
            )
        yield content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 at byte {error.start}: convert it, as with iconv -t UTF-8."
        ) from error
    except OSError as error:
        raise TextError(f"{path} cannot be read ({error.strerror}): check its permissions.") from error


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate("".join(_read_plain(path, field)).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TextError(
                f"{path} line {number} is not JSON: one object a line, such as {{{field!r}: ...}}."
            ) from error
        if not isinstance(record, dict):
            raise TextError(
                f"{path} line {number} holds a {type(record).__name__}, not an object with a {field!r}."
            )
        yield _text_field(record, field, f"{path} line {number}")


def _text_field(record: dict, field: str, where: str) -> str:
    if field not in record:
        raise TextError(f"{where} has no field {field!r}: choose one of {_listed(record)} as the text field.")
    if not isinstance(record[field], str):
        raise TextError(
            f"{where}: field {field!r} holds a value of type {type(record[field]).__name__}, not text."
        )
    return record[field]


def _listed(names: Iterable[object]) -> str:
    """The first names of an untrusted list, which may be long."""
    shown = [repr(str(name)[:40]) for name in islice(names, 12)]
    return ", ".join(shown) or "(none)"


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise TextError(f"reading {path} needs pyarrow: `pip install {requirement('data')}`.") from error
    try:
        columns = parquet.read_schema(path).names
        if field not in columns:
            raise TextError(
                f"{path} has no column {field!r}: choose one of {_listed(columns)} as the text field."
            )
        values = parquet.read_table(path, columns=[field]).column(field)
    except (arrow.ArrowException, OSError) as error:
        raise TextError(f"{path} is not a readable parquet file: write it again, or give .jsonl.") from error
    for number, value in enumerate(values.to_pylist()):
        yield _text_field({field: value}, field, f"{path} row {number}")


_READERS = {".txt": _read_plain, ".raw": _read_plain, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _read_hub(key: str, field: str) -> Iterator[str]:
    """Documents of `NAME[:CONFIG[:SPLIT]]`, streamed; the split is `train` unless named."""
    try:
        import datasets
    except ImportError as error:
        raise TextError(
            f"{key} is neither a file nor one of {', '.join(NAMED_SETS)}; to read it from the hub: "
            f"`pip install {requirement('data')}`."
        ) from error
    name, _, rest = key.partition(":")
    config, _, split = rest.partition(":")
    read, unreachable = 0, None
    try:
        with _cached_unless_reachable(name) as unreachable:
            rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for number, record in enumerate(rows):
            yield (document := _text_field(record, field, f"{key} row {number}"))
            read += len(document)
            if read >= MAX_HUB_CHARACTERS:
                logger.warning("%s: read the first %d characters only; give a file to use more", key, read)
                return
    except TextError:
        raise
    except Exception as error:  # `datasets` passes on any exception of its network and file layers
        raise TextError(
            f"{key} is neither a file nor one of {', '.join(NAMED_SETS)}, and the hub did not give it "
            f"({first_line(unreachable or error)}): check the name and the network, or give a file."
        ) from error


@contextmanager
def _cached_unless_reachable(name: str) -> Iterator[Exception | None]:
    """While the context lasts, `datasets` looks only into its cache if the hub does not answer one question about `name`,
    and why it did not is what the context gives.

    `datasets` itself would ask six times, for half a minute.
    """
    from datasets import config
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    before, unreachable = config.HF_HUB_OFFLINE, None
    try:
        HfApi().dataset_info(name, timeout=HUB_ANSWERS_WITHIN)
    except (HfHubHTTPError, HFValidationError):  # it answers, or need not: `datasets` says what is wrong
        pass
    # no route, no such host, no time: versions of the library have different classes
    except Exception as error:
        unreachable = error
        config.HF_HUB_OFFLINE = True
    try:
        yield unreachable
    finally:
        config.HF_HUB_OFFLINE = before


# what the paper calibrates on, where nothing else is named
WIKITEXT = "Salesforce/wikitext:wikitext-2-raw-v1"
