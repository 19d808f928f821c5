"""Which run a workspace belongs to, and how that run was started: `run.json` in its folder.

A lock keeps two runs on one machine apart, but that is not always enough: some file systems have no locks, and a machine
that was suspended and comes back has lost its own. So a run claims the folder when it opens it, and any run that finds a
claim other than its own stops: the newest owner continues. The arguments are stored for `--resume OUTPUT`.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from requant.errors import FileError, OutputError, RequantError
from requant.files import parse_json, read_small_file

FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A run: `arguments` of the command line, None for one from Python, and the folder that it was started in."""

    token: str
    process: int
    host: str
    since: str
    arguments: list[str] | None
    started_in: str


def claim(folder: Path, arguments: Sequence[str] | None) -> Owner:
    """Make this run the owner of an existing folder. Raises OSError."""
    owner = Owner(
        token=uuid.uuid4().hex,
        process=os.getpid(),
        host=socket.gethostname(),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        arguments=None if arguments is None else list(arguments),
        started_in=os.getcwd(),
    )
    aside = folder / f"{FILE}.writing"
    aside.write_text(json.dumps(asdict(owner)), encoding="utf-8")
    os.replace(aside, folder / FILE)
    return owner


def check_owner(folder: Path, owner: Owner) -> None:
    """Raise RequantError unless the folder is still this run's."""
    try:
        found = owner_of(folder)
    except OutputError:  # another version of requant, or a disk that failed: not ours in any case
        found = None
    if found is None:
        raise RequantError(
            f"{folder} is not this run's any more: another run has finished it, or it was deleted; this one stops."
        )
    if found.token != owner.token:
        raise RequantError(
            f"another run has taken over {folder} (process {found.process} on {found.host}, {found.since}); "
            "this one stops and leaves it alone."
        )


def owner_of(folder: Path) -> Owner | None:
    """The run that a folder belongs to, None where no run claimed it. Raises OutputError for a file of something else."""
    try:
        found = parse_json(read_small_file(folder / FILE))
        owner = Owner(**found)
        arguments = owner.arguments or []
        texts = (owner.token, owner.host, owner.since, owner.started_in, *arguments)
        if not isinstance(arguments, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError, FileError) as error:
        raise OutputError(
            f"{folder / FILE} is damaged; repeat that run's arguments with --output and --resume."
        ) from error
    return owner
