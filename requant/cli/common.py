"""What the commands share besides their options: printing, logging, and how a run ends."""

import atexit
import dataclasses
import gc
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from requant.errors import InputError, OutputError
from requant.processes import is_first, started

IMPORTED_AT_ONCE = 100_000  # objects, between two collections of garbage


@contextmanager
def importing() -> Iterator[None]:
    """Collect less garbage during the imports of a command, and never look at what they made again.

    torch and transformers create half a million objects that stay; every collection would go through them, in the imports
    and in the run that follows.
    """
    if "transformers.modeling_utils" in sys.modules:  # they are here; and a freeze would keep a run's garbage
        yield
        return
    before = gc.get_threshold()
    gc.set_threshold(IMPORTED_AT_ONCE, *before[1:])
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(unfreeze_for_nanobind)
        gc.set_threshold(*before)


def unfreeze_for_nanobind() -> None:
    """Let the interpreter's end free what `importing` froze, which takes half a second, if it would be reported otherwise.

    nanobind, which Triton 3.9 is built with, prints 27 lines about what is left at the end, as leaks.
    """
    library = sys.modules.get("triton._C.libtriton")
    if library is not None and type(getattr(library.ir, "module", None)).__module__ == "nanobind":
        gc.unfreeze()


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """A list to which every Ctrl-C adds before it raises KeyboardInterrupt.

    In the middle of an import, a compiled module turns that into an ImportError of its own.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    # ignored, as in the background of a shell, or of another program
    if before is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """While the context lasts, SIGTERM (a preempted machine, a scheduler) ends a run as Ctrl-C does: cleanly, to resume."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def table(rows: Any) -> str:
    """Rows as a table of text; what formats it is imported only when there is something to show."""
    from requant.display import format_table

    return format_table(rows)


def comma_separated(text: str, option: str) -> list[str]:
    """What an option lists, without the blanks around it; nothing where there are only commas. Raises InputError."""
    found = [each.strip() for each in text.split(",")]
    if any(found) and not all(found):
        raise InputError(
            f"{option} {text} has a comma with nothing before or after it; leave that comma out."
        )
    return [each for each in found if each]


def print_plan(plan: Any, folder: Path, *, as_json: bool) -> None:
    """What --dry-run says of a run that would write `folder`."""
    if as_json:
        print(json.dumps({**dataclasses.asdict(plan), "output": str(folder)}, indent=2))
    else:
        print(*plan.lines(), f"output          {folder}", sep="\n")


def print_result(numbers: Mapping[str, Any], *tables: str, as_json: bool) -> None:
    """What a run ends with: the numbers, or the tables of them; warnings go to standard error."""
    print(json.dumps(numbers, indent=2) if as_json else "\n\n".join(tables))
    for warning in numbers["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)


def next_commands(folder: Path, target: str | None = None) -> str:
    """Two commands that a user may want next."""
    checkpoint = shlex.quote(str(folder))
    first = f"requant inspect {checkpoint}"
    if target is not None:
        first = f"requant export {checkpoint} --to {target} --output {shlex.quote(f'{folder}-{target}')}"
    return f"{first}\n      requant generate {checkpoint} --prompt 'The history of'"


class FirstOfItsKind(logging.Filter):
    """Lets a warning through once: the runs of a sweep read the same texts, and find the same to say of them.

    So do the processes of a run, of which only the first says what is no warning.
    """

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return is_first()
        message = record.getMessage()
        new = message not in self.said
        self.said.add(message)
        if new and started() > 1:
            from requant import ranks  # imports torch

            return ranks.first_to_say(message)
        return new


def log_to_stderr(verbose: bool) -> None:
    """Warnings to stderr, each once, and with `verbose` what a run does; libraries only say what fails."""
    # transformers, if it is imported later, sets its own level by this
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format="requant: %(message)s", level=logging.INFO if verbose else logging.WARNING)
        root.handlers[0].addFilter(FirstOfItsKind())
    for noisy in ("transformers", "datasets", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


class LogFile(logging.FileHandler):
    """A file of log lines; where it cannot be written to any more that is said once, and the run goes on."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed:  # in place of logging's traceback for every line
            self.failed = True
            print(f"warning: --log-file {self.baseFilename} misses lines: {sys.exception()}", file=sys.stderr)


def log_to_file(file: Path | None) -> None:
    """Append what the package reports to a file, with the time; what is printed stays the same. Raises OutputError."""
    if file is None:
        return
    try:
        handler = LogFile(os.path.expanduser(file), encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"--log-file {file} cannot be written ({error.strerror}); choose another."
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root, package = logging.getLogger(), logging.getLogger("requant")
    for printing in root.handlers:
        printing.setLevel(max(printing.level, root.level))
    package.setLevel(logging.INFO)
    package.addHandler(handler)


def log_failure(message: str) -> None:
    """Add to the log file, if there is one, why the run ended; whoever prints it calls this too."""
    record = logging.makeLogRecord({"name": "requant", "levelno": logging.ERROR, "msg": message})
    for handler in logging.getLogger("requant").handlers:
        handler.handle(record)


def say_what_is_loaded(quiet: bool = False) -> None:
    """Log what is loaded, with its checksum, to standard error."""
    log_to_stderr(verbose=False)
    logging.getLogger("requant.inference").setLevel(logging.WARNING if quiet else logging.INFO)
