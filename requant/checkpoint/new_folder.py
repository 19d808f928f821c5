"""An output folder that appears completely or not at all.

Its files are written to a hidden sibling, `.NAME.partial-xxxxxxxx`, which is renamed at the end. The sibling is locked as
long as its process lives (`flock`, which the kernel releases however the process ends), so that the next run with the same
output can recognize what a killed run left behind, and removes it.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from requant.errors import OutputError
from requant.files import path_of

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is locked, and nothing of other runs is removed
    fcntl = None


def check_output(output: str | Path) -> Path:
    """Raise OutputError unless `output` can be created; called before any long work."""
    output = path_of(output, "output").absolute()
    if os.path.lexists(output):
        here = Path.cwd().is_relative_to(os.path.realpath(output))  # of `.` too, and of an empty name
        remedy = "give --output the name of a new folder" if here else "remove it, or choose another --output"
        raise OutputError(f"{output} exists already; {remedy}.")
    ancestor = next(parent for parent in output.parents if os.path.exists(parent))
    try:  # to make a folder there: root passes every look at permissions, also of /proc and of what is mounted read-only
        probe = tempfile.mkdtemp(prefix=_prefix(output.name), dir=ancestor)
        with suppress(FileNotFoundError):  # another run took it for a dead one's
            os.rmdir(probe)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # whoever writes says how a run goes on
            return output
        raise OutputError(
            f"{ancestor} cannot be written to ({error.strerror}); choose another --output."
        ) from error
    return output


def _prefix(name: str) -> str:
    """How the name of the hidden folder beside an output of that name begins."""
    return f".{name}.partial-"


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `output` when the body ends, durably; removed when the body fails,
    with the folders above it that were made for it.

    `output` comes from `check_output`. Raises OSError.
    """
    made = [parent for parent in output.parents if not parent.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = _prefix(output.name)
    for left in output.parent.iterdir():
        if left.name.startswith(prefix):
            _remove_if_dead(left)
    partial, handle = _locked_folder(output.parent, prefix)
    try:
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)  # mkdtemp made it private
        os.fsync(handle)
        partial.rename(output)
        _sync(output.parent)
    finally:
        os.close(handle)
        shutil.rmtree(partial, ignore_errors=True)  # already renamed if all went well
        with suppress(OSError):  # of the first that is not empty, such as the output's
            for parent in made:
                parent.rmdir()


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and the handle that locks it; another one if another run removed it, as a dead one's, before that."""
    while True:
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            handle = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if fcntl is not None:
            with suppress(OSError):  # where files cannot be locked, which `_remove_if_dead` leaves alone
                fcntl.flock(handle, fcntl.LOCK_EX)
        if partial.exists():
            return partial, handle
        os.close(handle)


def _remove_if_dead(partial: Path) -> None:
    """Remove a folder whose process has ended; one that cannot be opened or locked is left alone."""
    if fcntl is None:
        return
    try:
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(partial, ignore_errors=True)
    except OSError:
        return
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
