"""Every error a user can meet, with the remedy in the message.

    RequantError                 exit code 1: the run failed
    ├── InputError               exit code 2: the request cannot be carried out; detected before any long work
    │   ├── RecipeError          an unknown key, a value out of range
    │   ├── TextError            no text, too little text, a wrong field
    │   ├── ModelError           a model that cannot be read, or holds what requant does not quantize
    │   ├── FileError            a pipe, a device, a file that would take too much memory
    │   ├── CheckpointError      a damaged, foreign or hostile checkpoint
    │   └── OutputError          the output folder exists, or cannot be written
    │       └── WriteError       exit code 1: a disk that fills up, or fails, in the middle of a run
    └── NumericalError           NaN or infinity that a run meets: in gradients, statistics, logits

A message is one sentence (two at most) that says what, where (layer, file, key), both values, and what to do.
"""

import difflib
from collections.abc import Iterable


class RequantError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class InputError(RequantError):
    exit_code = 2


class RecipeError(InputError):
    pass


class TextError(InputError):
    pass


class ModelError(InputError):
    pass


class FileError(InputError):
    pass


class CheckpointError(InputError):
    pass


class OutputError(InputError):
    pass


class WriteError(OutputError):
    """Nothing that was asked for is at fault: the same command is right once there is space."""

    exit_code = 1


class NumericalError(RequantError):
    pass


def printable(text: str) -> str:
    """`text` with question marks for control characters, which a hostile name may hold and a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def first_line(error: BaseException, limit: int = 200) -> str:
    """What a library's error says, short enough to stand inside a sentence.

    A line that ends in a colon takes the next one along, and a bare key the name of its error.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if isinstance(error, KeyError):
        said = f"KeyError: {said}"
    return said.rstrip(".:")[:limit]


def class_and_first_line(error: BaseException) -> str:
    """`first_line` after the class of the error, which is named once."""
    kind, said = type(error).__name__, first_line(error)
    return said if said.partition(":")[0] == kind else f"{kind}: {said}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch raises a plain RuntimeError on the CPU and a class of its own on a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?`-clause, or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
