"""`--resume OUTPUT`: the arguments of the interrupted run come from its workspace (`requant/run/ownership.py`)."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from requant.errors import InputError, OutputError
from requant.files import path_of

if TYPE_CHECKING:
    from requant.run.workspace import Workspace

COMMANDS = ("quantize", "sweep", "sparsify")
BESIDE = {  # options that may be given beside, for they change nothing of the result; whether they take a value
    "-q": False,
    "--quiet": False,
    "-v": False,
    "--verbose": False,
    "--json": False,
    "--log-file": True,
    "--save-every": True,
    "--gpus": True,
}


def restored_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of the run that `COMMAND --resume OUTPUT` names, into whose folder the process changes.

    Others come back as they are. Raises InputError where anything else is given beside, OutputError where there is nothing
    to resume, SystemExit where nothing is left to do.
    """
    command, *words = arguments or [""]
    if command not in COMMANDS or "--resume" not in words:
        return list(arguments)
    index = words.index("--resume")
    given = words[index + 1 : index + 2]
    if not given or given[0].startswith("-"):
        return list(arguments)
    beside = words[:index] + words[index + 2 :]
    _refuse_others(command, given[0], beside)
    # absolute paths, for the folder changes
    beside = _with_absolute_log_file(beside)
    output = path_of(given[0], "output").absolute()
    restored = _arguments_of(command, output)
    ends = ["--resume", "--output", str(output)]
    return [*restored, *([] if restored[-3:] == ends else ends), *beside]


def _with_absolute_log_file(words: Sequence[str]) -> list[str]:
    found = list(words)
    for index, word in enumerate(found):
        option, equals, value = word.partition("=")
        if option == "--log-file" and equals:
            found[index] = f"{option}={os.path.abspath(os.path.expanduser(value))}"
        elif index and found[index - 1] == "--log-file":
            found[index] = os.path.abspath(os.path.expanduser(word))
    return found


def _refuse_others(command: str, output: str, beside: Sequence[str]) -> None:
    words = iter(beside)
    for word in words:
        option, _, value = word.partition("=")
        if option not in BESIDE:
            raise InputError(
                f"`requant {command} --resume {output}` takes all arguments from that run: leave out {word}, or repeat them "
                f"all, with --output {output} --resume."
            )
        if BESIDE[option] and not value:
            next(words, None)


def _arguments_of(command: str, output: Path) -> list[str]:
    from requant.run.ownership import owner_of

    of_sweep = (output, *sorted(output.glob("*.partial")))
    if os.path.lexists(output) and not (output.is_dir() and any(map(owner_of, of_sweep))):
        made_by = _finished_by(output)
        if made_by != command:
            other = "" if made_by is None else f" but a finished one of `requant {made_by}`"
            raise OutputError(
                f"{output} is not the output of `requant {command}`{other}; name the one to resume."
            )
        remove_leftover(output)
        print(f"{output} is finished; nothing is left to do.")
        raise SystemExit(0)
    owner = next(filter(None, map(owner_of, (output.with_name(f"{output.name}.partial"), *of_sweep))), None)
    if owner is None:
        raise OutputError(f"there is no interrupted run of {output}; start it, with --output {output}.")
    if not owner.arguments:
        raise OutputError(f"the run of {output} was started from Python: go on there, with its workspace.")
    if owner.arguments[0] != command:
        raise InputError(
            f"that run is a {owner.arguments[0]}: `requant {owner.arguments[0]} --resume {output}`."
        )
    try:
        os.chdir(owner.started_in)
    except OSError as error:
        raise OutputError(
            f"the run of {output} was started in {owner.started_in}, which is not here ({error.strerror}); repeat its "
            f"arguments, with --output {output} --resume."
        ) from error
    return owner.arguments


def _finished_by(output: Path) -> str | None:
    """The command that a complete output is of; None where it is of none."""
    import yaml

    from requant.errors import FileError
    from requant.files import parse_yaml, read_small_file

    if (output / "sweep.json").is_file():
        return "sweep"
    try:
        recipe = parse_yaml(read_small_file(output / "recipe.yaml").decode())
    except (OSError, FileError, ValueError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(recipe, dict):
        return None
    return "sparsify" if recipe.get("mode") == "sparse" else "quantize"


def remove_leftover(output: Path) -> None:
    """Delete the workspace of a run that was killed when its output was complete, just before it would have done so."""
    from requant.run.workspace import Workspace

    Workspace(output.with_name(f"{output.name}.partial"), resume=True).remove_leftover()


def workspace_of(output: Path, *, resume: bool, save_every: float) -> "Workspace":
    """The workspace beside the output of a command, with the arguments for `--resume OUTPUT`. `save_every` is in minutes."""
    from requant.run.workspace import Workspace

    return Workspace(
        output.with_name(f"{output.name}.partial"),
        resume=resume,
        save_every=60 * save_every,
        arguments=sys.argv[1:],
    )


def check_new_output(output: Path, *, resume: bool) -> None:
    """Raise OutputError unless the output can be created. Of one that is complete nothing else is left then; what an
    interrupted run has made stays beside anything else of that name."""
    from requant.checkpoint.new_folder import check_output

    output = path_of(output, "output").absolute()
    if resume and _finished_by(output) is not None:
        remove_leftover(output)
    check_output(output)
