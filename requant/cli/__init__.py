"""The command line: parse, call the same functions that Python users call, print.

A command is a function in one of the files here and a line of COMMANDS.
Exit codes: 0 done, 1 the run failed, 2 the request cannot be carried out, 130 interrupted.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import requant
from requant.cli.common import log_failure, noted_interrupts
from requant.cli.comparing import compare
from requant.cli.doctor import doctor
from requant.cli.exporting import export
from requant.cli.generating import generate
from requant.cli.listing import methods, recipes
from requant.cli.measuring import bench, evaluate, inspect
from requant.cli.options import PanelledCommand, spelled_out
from requant.cli.quantizing import quantize
from requant.cli.resuming import restored_arguments
from requant.cli.scoring import sensitivity
from requant.cli.serving import serve
from requant.cli.sparsifying import sparsify
from requant.cli.sweeping import sweep
from requant.errors import InputError, RequantError, is_out_of_memory

INTERRUPTED = "interrupted"
CONTINUES = "; the same command with --resume continues where it stopped."
COMMANDS: dict[str, Callable[..., None]] = {
    "quantize": quantize,
    "sweep": sweep,
    "sparsify": sparsify,
    "sensitivity": sensitivity,
    "eval": evaluate,
    "inspect": inspect,
    "compare": compare,
    "export": export,
    "generate": generate,
    "bench": bench,
    "serve": serve,
    "recipes": recipes,
    "methods": methods,
    "doctor": doctor,
}
RESUMABLE = ("quantize", "sweep", "sparsify")
# torch's settings of GPU memory; it reads either
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# command -> the options by which it needs less memory, of those that run a model
MEMORY_OPTIONS = {
    **dict.fromkeys(("quantize", "sweep", "sparsify", "sensitivity"), "--seq-len or --num-samples"),
    "eval": "--context",
    "compare": "--context",
    "bench": "--batch or --prompt-tokens",
    "generate": "--max-new-tokens",
    "serve": "--batch or --context",
}
RENAMED_OPTIONS = {
    ("quantize", "--tune"): "--finetune-steps",
    ("bench", "--tune"): "--autotune",
    ("bench", "--against"): "--reference",
    ("compare", "--against"): "--reference",
    ("eval", "--against"): "--reference",
}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Post-training quantization with sensitivity metrics.",
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"requant {requant.__version__}")
        raise typer.Exit


for _name, _command in COMMANDS.items():
    app.command(name=_name, cls=PanelledCommand)(spelled_out(_command))


def main() -> None:
    """Entry point: every failure that a user can fix becomes one sentence and an exit code."""
    # read when it is imported: five retries would be fifteen lines before the sentence that says what failed
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without ± or é must not end a run that is done
        sys.stdout.reconfigure(errors="backslashreplace")
    with noted_interrupts() as interrupts:
        _run(interrupts)


def _run(interrupts: Sequence[int]) -> None:
    try:
        _refuse_renamed_options(sys.argv[1:])
        sys.argv[1:] = restored_arguments(sys.argv[1:])
        _leave_fewer_gaps(sys.argv[1:])
        app()
    except RequantError as error:
        if interrupts:  # an import that it ended may count as a model that cannot be loaded
            _fail(_interrupted(), 130)
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:  # outside a command
        _fail(_interrupted(), 130)
    except SystemExit as exit:
        if exit.code == 130:  # typer's answer to Ctrl-C, which says nothing
            _fail(_interrupted(), 130)
        raise
    except Exception as error:
        if interrupts:  # whatever it met on its way out
            _fail(_interrupted(), 130)
        if is_out_of_memory(error):
            _fail(_out_of_memory(sys.argv[1:]), 1)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            again = " and run again with --resume" if _can_be_resumed(sys.argv[1:]) else ""
            _fail(f"the disk is full ({error.filename or 'a temporary file'}); free some space{again}.", 1)
        raise


def _leave_fewer_gaps(arguments: Sequence[str]) -> None:
    """Let torch's allocator of GPU memory extend its segments, in the commands that fill a GPU with tensors of many sizes.

    One run wasted 1.4 of 14.4 GB in gaps, and 1.6 more did not fit 16 (`eval/LOG.md`). Set before torch is imported, and
    inherited by the processes of `--gpus`; torch 2.9 does not read it. Not for vLLM: processes cannot share such memory.
    """
    if arguments and arguments[0] in RESUMABLE and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def _out_of_memory(arguments: Sequence[str]) -> str:
    lowered = MEMORY_OPTIONS.get(arguments[0] if arguments else "")
    if lowered is None:
        return "memory is exhausted; run this where there is more of it."
    return f"memory is exhausted; lower {lowered}, use --dtype bfloat16, or --device cpu where the GPU is too small."


def _interrupted() -> str:
    return INTERRUPTED + (CONTINUES if _can_be_resumed(sys.argv[1:]) else ".")


def _can_be_resumed(arguments: Sequence[str]) -> bool:
    """Whether the command has kept what it finished."""
    return bool(arguments) and arguments[0] in RESUMABLE and "--dry-run" not in arguments


def _refuse_renamed_options(arguments: Sequence[str]) -> None:
    for word in arguments[1:]:
        option = word.partition("=")[0]
        renamed = RENAMED_OPTIONS.get((arguments[0], option))
        if renamed is not None:
            raise InputError(f"{option} of `requant {arguments[0]}` is called {renamed} now.")


def _fail(message: str, code: int) -> None:
    print(f"requant: {message}", file=sys.stderr)
    log_failure(message)
    sys.exit(code)
