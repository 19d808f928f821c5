"""Scripts in processes of their own, without the seconds that each would spend on imports.

`ScriptForks` starts this file, a process that imports the modules named by its arguments, and then forks for every script. A
line of its input is what to run, in JSON; a line of its output is the exit codes, and what was printed.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has ended."""

    code: int
    output: str
    error: str


class ScriptForks:
    """The process that forks. It reads `environment` before it imports anything, as Triton needs it."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), str(ROOT)]),
                **environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        script: Path | str,
        arguments: Sequence[str] = (),
        environments: Sequence[Mapping[str, str]] = ({},),
        seconds: int = 1800,
    ) -> list[Ended]:
        """The script, a file or a text, in a process for each of `environments`, side by side."""
        given, told = self.process.stdin, self.process.stdout
        assert given is not None and told is not None
        kind = "file" if isinstance(script, Path) else "text"
        given.write(json.dumps([kind, str(script), arguments, environments, seconds]) + "\n")
        given.flush()
        line = told.readline()
        assert line, "the process that forks has ended"
        return [Ended(code=code, output=output, error=error) for code, output, error in json.loads(line)]

    def close(self) -> None:
        self.process.communicate()


def run_in_fork(
    kind: str, script: str, arguments: Sequence[str], output: IO[bytes], error: IO[bytes]
) -> NoReturn:
    code = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(error.fileno(), 2)
        if kind == "file":
            sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
        else:
            sys.argv, sys.path[0] = ["-c", *arguments], ""
            exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        kind, script, arguments, environments, seconds = json.loads(line)
        children: list[tuple[int, IO[bytes], IO[bytes]]] = []
        for environment in environments:
            output, error = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
            child = os.fork()
            if child == 0:
                signal.alarm(seconds)  # which ends it
                os.environ.update(environment)
                run_in_fork(kind, script, arguments, output, error)
            children.append((child, output, error))
        ended = []
        for child, *files in children:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for file in files:
                file.seek(0)
            ended.append([code, *(file.read().decode(errors="replace") for file in files)])
            for file in files:
                file.close()
        sys.stdout.write(json.dumps(ended) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
